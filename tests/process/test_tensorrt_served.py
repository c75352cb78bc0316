"""A plan behind a real server on the stand-in for TensorRT: over HTTP and gRPC, beside models that cannot be loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.pretended_tensorrt import plan_bytes, pretended

import charonia
from charonia import ServerOptions
from charonia.server import app
from charonia.server.backends.tensorrt import backend


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[charonia.Server]:
    for module in (app, backend):
        monkeypatch.setattr(module, "visible_gpus", lambda: 1)
    for name, content in (("scale", plan_bytes()), ("other", plan_bytes(version="10.3.0.26")), ("cut", b"ftrt")):
        folder = tmp_path / "models" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.plan").write_bytes(content)
    (tmp_path / "gpu").mkdir()
    options = ServerOptions(exit_on_error=False)
    with (
        pretended(tmp_path / "gpu"),
        charonia.Server(tmp_path / "models", http=True, grpc=True, options=options) as started,
    ):
        yield started


def test_a_plan_is_served_and_broken_ones_leave_it_alone(server: charonia.Server) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for module, port in ((httpclient, server.http_port), (grpcclient, server.grpc_port)):
        client: Any = module.InferenceServerClient(f"127.0.0.1:{port}")
        tensor = module.InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(x)
        assert client.infer("scale", [tensor]).as_numpy("y").tolist() == (2 * x + 1).tolist()
        assert not client.is_model_ready("other")
        assert not client.is_model_ready("cut")
        client.close()
    parts = server._parts
    assert parts is not None
    gauges = {
        family.name: family.samples[0].value for family in parts._device_families() if "_gpu_pool_" in family.name
    }
    assert gauges["charonia_gpu_pool_used_bytes"] == 0
    assert 0 < gauges["charonia_gpu_pool_idle_bytes"] < gauges["charonia_gpu_pool_limit_bytes"] == 1 << 30
