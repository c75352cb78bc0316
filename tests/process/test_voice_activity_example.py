"""The voice activity example says what the package's own streaming pipeline says, for one stream and for many."""

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.support.process import ServeProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "voice_activity"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    pytest.importorskip("onnx", reason="make_repository.py needs it")
    repository = tmp_path_factory.mktemp("voice")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(repository)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "pip install silero-vad" in made.stderr:
        pytest.skip("silero-vad is not installed")
    assert made.returncode == 0, made.stderr
    with ServeProcess(repository) as running:
        yield running


@pytest.fixture(scope="module")
def package() -> Any:
    pytest.importorskip("torch", reason="the package needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("silero_vad.utils_vad")


def own_network(package: Any) -> Any:
    (network,) = (file for file in files("silero-vad") or () if file.name == "silero_vad_16k_op15.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return package.OnnxWrapper(str(network.locate()), force_onnx_cpu=True)


def probabilities(package: Any, samples: Any) -> Any:
    import torch

    network = own_network(package)
    return [network(torch.from_numpy(piece), 16_000).item() for piece in script("listen").pieces(samples)]


def test_a_stream_has_the_probabilities_of_the_packages_own_pipeline(server: ServeProcess, package: Any) -> None:
    samples = script("voice").recording()
    listen = script("listen")

    found = list(listen.speech(server.grpc, listen.pieces(samples)))

    np.testing.assert_allclose(found, probabilities(package, samples), atol=1e-5)
    assert min(found) < 0.01
    assert max(found) > 0.99


def test_many_streams_at_once_have_theirs(server: ServeProcess, package: Any) -> None:
    listen, voice = script("listen"), script("voice")
    recordings = [voice.recording(pitch=90 + 7 * number, seed=number) for number in range(12)]

    def heard(number: int) -> list[float]:
        return list(listen.speech(server.grpc, listen.pieces(recordings[number]), stream_id=number + 1))

    with ThreadPoolExecutor(len(recordings)) as pool:
        found = list(pool.map(heard, range(len(recordings))))

    for samples, stream in zip(recordings, found, strict=True):
        np.testing.assert_allclose(stream, probabilities(package, samples), atol=1e-4)
    (statistics,) = server.ask("/v2/models/voice_activity/stats")["model_stats"]
    assert statistics["execution_count"] < statistics["inference_count"], "no two streams ever shared a batch"


def test_the_moments_of_speech_are_those_of_the_packages_own_iterator(server: ServeProcess, package: Any) -> None:
    listen, samples = script("listen"), script("voice").recording()
    pieces = listen.pieces(samples)
    served = iter(listen.speech(server.grpc, pieces))

    class Served:
        def reset_states(self) -> None:
            """Nothing: the server does."""

        def __call__(self, piece: Any, rate: int) -> Any:
            import torch

            return torch.tensor(next(served))

    ours, own = package.VADIterator(Served()), package.VADIterator(own_network(package))
    events = [(ours(piece), own(piece)) for piece in pieces]

    assert [event for event, _ in events] == [event for _, event in events]
    kinds = [kind for event, _ in events if event for kind in event]
    assert kinds == ["start", "end"]


def test_the_scripts_say_when_there_is_speech(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "voice.wav"
    subprocess.run([sys.executable, str(EXAMPLE / "voice.py"), str(file)], check=True, timeout=200)

    command = [sys.executable, str(EXAMPLE / "listen.py"), str(file), server.grpc]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()

    assert [line.split()[2] for line in lines] == ["speech", "silence"]
    assert 0.8 < float(lines[0].split()[0]) < 1.2
