"""silero-vad's TorchScript network: with its state kept by the server, and as it lies in the package."""

import shutil
import subprocess
import sys
from importlib.metadata import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http
from tests.support.process import ServeProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "voice_activity"
SAMPLE_RATE = 16_000


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def network() -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("onnx")
    try:
        found = [file for file in files("silero-vad") or () if file.name == "silero_vad.jit"]
    except ModuleNotFoundError:
        pytest.skip("silero-vad is not installed")
    return Path(str(found[0].locate()))


def own_probabilities(network: Path, pieces: list[Any]) -> list[float]:
    import torch

    model = torch.jit.load(network)  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        return [model(torch.from_numpy(piece)[None], SAMPLE_RATE).item() for piece in pieces]


def test_the_server_keeps_the_state_of_each_stream(network: Path, tmp_path: Path) -> None:
    for name in ("make_repository", "torch_network"):
        command = [sys.executable, str(EXAMPLE / f"{name}.py"), str(tmp_path)]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    listen = script("listen")
    pieces = list(listen.pieces(script("voice").recording()))

    with ServeProcess(tmp_path) as server:
        found = list(listen.speech(server.grpc, pieces))

    np.testing.assert_allclose(found, own_probabilities(network, pieces), atol=1e-4)
    assert max(found) > 0.9


def test_the_file_is_served_as_it_is_with_its_state_inside(network: Path, tmp_path: Path) -> None:
    version = tmp_path / "vad" / "1"
    version.mkdir(parents=True)
    shutil.copy(network, version / "model.pt")
    (tmp_path / "vad" / "config.pbtxt").write_text(
        "backend: 'pytorch' "
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 1, 512 ] } "
        "input { name: 'sr' data_type: TYPE_INT64 dims: [ 1 ] } "
        "output { name: 'speech' data_type: TYPE_FP32 dims: [ 1, 1 ] }",
        encoding="utf-8",
    )
    pieces = list(script("listen").pieces(script("voice").recording()))[:40]

    def ask(client: http.InferenceServerClient, piece: Any) -> float:
        x = http.InferInput("x", [1, 512], "FP32")
        x.set_data_from_numpy(piece.reshape(1, 512).astype(np.float32))
        rate = http.InferInput("sr", [1], "INT64")
        rate.set_data_from_numpy(np.array([SAMPLE_RATE]))
        return float(client.infer("vad", [x, rate]).as_numpy("speech")[0, 0])

    with ServeProcess(tmp_path) as server, http.InferenceServerClient(server.http) as client:
        found = [ask(client, piece) for piece in pieces]

    np.testing.assert_allclose(found, own_probabilities(network, pieces), atol=1e-4)
