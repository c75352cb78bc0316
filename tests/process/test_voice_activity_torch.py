"""silero-vad's TorchScript network: with its state kept by the server, and as it lies in the package."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

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


@pytest.fixture(scope="module")
def server(network: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server of both: importing PyTorch and optimising the networks takes seconds."""
    repository = tmp_path_factory.mktemp("models")
    for name in ("make_repository", "torch_network"):
        command = [sys.executable, str(EXAMPLE / f"{name}.py"), str(repository)]
        subprocess.run(command, check=True, timeout=200, capture_output=True)
    version = repository / "vad" / "1"
    version.mkdir(parents=True)
    shutil.copy(network, version / "model.pt")
    (repository / "vad" / "config.pbtxt").write_text(
        "backend: 'pytorch' "
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 1, 512 ] } "
        "input { name: 'sr' data_type: TYPE_INT64 dims: [ 1 ] } "
        "output { name: 'speech' data_type: TYPE_FP32 dims: [ 1, 1 ] }",
        encoding="utf-8",
    )
    with ServeProcess(repository) as running:
        yield running


@pytest.fixture(scope="module")
def spoken() -> list[Any]:
    """The pieces of a recording, one after the other."""
    return list(script("listen").pieces(script("voice").recording()))


@pytest.fixture(scope="module")
def probabilities(network: Path, spoken: list[Any]) -> list[float]:
    """The probabilities that PyTorch itself computes."""
    import torch

    model = torch.jit.load(network)  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        return [model(torch.from_numpy(piece)[None], SAMPLE_RATE).item() for piece in spoken]


def test_the_server_keeps_the_state_of_each_stream(
    server: ServeProcess, spoken: list[Any], probabilities: list[float]
) -> None:
    found = list(script("listen").speech(server.grpc, spoken))

    np.testing.assert_allclose(found, probabilities, atol=1e-4)
    assert max(found) > 0.9


def test_the_file_is_served_as_it_is_with_its_state_inside(
    server: ServeProcess, spoken: list[Any], probabilities: list[float]
) -> None:
    def ask(client: http.InferenceServerClient, piece: Any) -> float:
        x = infer_input(http, "x", piece.reshape(1, 512).astype(np.float32))
        rate = infer_input(http, "sr", np.array([SAMPLE_RATE]))
        return float(client.infer("vad", [x, rate]).as_numpy("speech")[0, 0])

    with http.InferenceServerClient(server.http) as client:
        found = [ask(client, piece) for piece in spoken[:40]]

    np.testing.assert_allclose(found, probabilities[:40], atol=1e-4)
