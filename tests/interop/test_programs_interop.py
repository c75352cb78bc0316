"""Programs made for Triton, against Charonia alone: Model Analyzer, and what public examples of model control do."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tests.support.models import identity, identity_pbtxt, write_model
from tests.support.peers import MODEL_ANALYZER, PEERS
from tests.support.process import SHAPES, ServeProcess, Shape
from tritonclient.utils import InferenceServerException

CONFIG = identity_pbtxt("onnxruntime", max_batch_size=8)
FAILED_TO_POLL = "failed to load 'simple', failed to poll from model repository"
SEARCH = """\
profile_models: {simple: {cpu_only: true}}
perf_analyzer_flags: {measurement-mode: time_windows, measurement-interval: 200, stability-percentage: 999}
run_config_search_max_instance_count: 1
run_config_search_max_model_batch_size: 1
run_config_search_max_concurrency: 1
duration_seconds: 1
skip_summary_reports: true
skip_detailed_reports: true
"""


@pytest.fixture(params=SHAPES, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    shape: Shape = request.param
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity(), config=CONFIG)
    with ServeProcess(folder, "--model-control-mode=explicit", *shape) as started:
        yield started


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_models_are_controlled_as_the_public_examples_do_it(server: ServeProcess, protocol: str) -> None:
    package: Any = http_client if protocol == "http" else grpc_client
    status = "500" if protocol == "http" else "StatusCode.INTERNAL"
    with package.InferenceServerClient(getattr(server, protocol)) as client:

        def batch_size() -> int:
            config = client.get_model_config("simple")
            return int(config["max_batch_size"] if protocol == "http" else config.config.max_batch_size)

        def refused(name: str, **override: Any) -> str:
            with pytest.raises(InferenceServerException) as raised:
                client.load_model(name, **override)
            assert raised.value.status() == status
            return str(raised.value.message())

        index = client.get_model_repository_index()
        assert len(index if protocol == "http" else index.models) == 1
        client.load_model("simple")
        assert client.is_model_ready("simple")
        assert batch_size() == 8

        assert refused("simple", config='"max_batch_size": {{16}}').startswith(FAILED_TO_POLL)
        client.load_model("simple", config='{"max_batch_size": "16"}')
        assert batch_size() == 16
        client.unload_model("simple")
        assert not client.is_model_ready("simple")

        too_long = {"file:" + "n" * 256: b"x"}
        assert refused("simple", config="{}", files=too_long).startswith(FAILED_TO_POLL)
        assert client.is_server_live()
        assert refused("unknown").startswith("failed to load 'unknown', ")


@pytest.mark.parametrize("mode", ["brute", "quick", "optuna"])
def test_model_analyzer_searches_a_server_that_it_has_not_started(
    server: ServeProcess, tmp_path: Path, mode: str
) -> None:
    if not MODEL_ANALYZER.exists():
        pytest.skip("Model Analyzer is not installed: bench/peers.sh --tuners installs it")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "search.yaml").write_text(SEARCH)
    write_model(tmp_path / "models", "simple", identity(), config=CONFIG)
    command = [
        *(str(MODEL_ANALYZER), "profile", "--config-file=search.yaml", f"--run-config-search-mode={mode}"),
        *("--triton-launch-mode=remote", "--model-repository=models", "--output-model-repository-path=out"),
        *(f"--triton-http-endpoint={server.http}", f"--triton-grpc-endpoint={server.grpc}"),
        *(f"--triton-metrics-url=http://{server.metrics}/metrics", "--checkpoint-directory=checkpoints"),
    ]
    environment = os.environ | {"PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "Profile complete. Profiled" in output
    assert "load failed" not in output
