import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from tests.support.models import identity_pbtxt, write_model

from charonia import Server
from charonia.config import backends
from charonia.config.backends import BackendRecord
from charonia.core.errors import ServingError
from charonia.server.backends import registry
from charonia.server.options import ServerOptions


@pytest.mark.parametrize("name", ["identity", "image", "onnxruntime", "python"])
def test_a_backend_is_found_by_its_name(name: str) -> None:
    assert registry.installed_backends()[name]().name == name


MIRROR = BackendRecord(name="mirror", factory="charonia.server.backends.identity:IdentityBackend")
HIJACK = BackendRecord(name="hijack", aliases=("identity",), factory="charonia.nothing:Nothing")
LATER = BackendRecord(name="later", factory="charonia.nothing:Nothing")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    values = ("MIRROR", "HIJACK", "LATER", "nothing", "NUMBER")
    entries = [EntryPoint(value.lower(), f"{__name__}:{value}", backends.ENTRY_POINT_GROUP) for value in values]
    monkeypatch.setattr(backends, "entry_points", lambda group: entries)
    backends.records.cache_clear()
    yield
    backends.records.cache_clear()


NUMBER = 5


@pytest.mark.usefixtures("packages")
def test_a_package_can_bring_a_backend() -> None:
    assert registry.installed_backends()["mirror"]().name == "identity"
    assert backends.record_of("mirror") == MIRROR


@pytest.mark.usefixtures("packages")
def test_a_package_cannot_take_the_place_of_a_backend_of_ours() -> None:
    assert registry.installed_backends()["identity"]().name == "identity"
    assert "hijack" not in registry.installed_backends()


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "cannot be loaded: AttributeError"),
        ("number", "cannot be loaded: expected a BackendRecord, got 5"),
        ("later", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_broken_package_is_named_when_a_model_needs_it(name: str, problem: str) -> None:
    with pytest.raises(ServingError, match=rf"backend '{name}'.*{problem}"):
        registry.installed_backends()[name]()


def test_a_library_that_is_looked_for_and_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = registry.installed_backends()["tensorflow"]
    monkeypatch.setattr("charonia.server.backends.tensorflow.backend.find_spec", lambda _: None)

    with pytest.raises(ServingError, match="needs the package 'tensorflow', which is not installed") as caught:
        factory()

    assert "[tensorflow]" in caught.value.hint


def test_nothing_is_imported_before_a_model_needs_it() -> None:
    code = (
        "import sys; from charonia.server.backends.registry import installed_backends as of; b = of(); b['identity']();"
        "print(sorted(m for m in sys.modules if m.startswith(('onnx', 'charonia.server.backends.python'))))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


SCALE = """\
import json

import triton_python_backend_utils as pb_utils

from scaling import scaled


class TritonPythonModel:
    def initialize(self, args):
        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])
        self.version_dir = pb_utils.get_model_dir()

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", scaled(a, self.factor))]) for a in arrays]
"""


def script_backend(folder: Path) -> Path:
    (folder / "scale").mkdir(parents=True)
    (folder / "scale" / "model.py").write_text(SCALE)
    (folder / "scale" / "scaling.py").write_text(
        "def scaled(array, factor):\n    return array * array.dtype.type(factor)\n"
    )
    (folder / "onnxruntime").mkdir()
    (folder / "onnxruntime" / "libtriton_onnxruntime.so").touch()
    (folder / "python").mkdir()
    (folder / "python" / "model.py").write_text("not ours")
    return folder


def test_a_folder_with_a_script_is_a_backend_of_its_name(tmp_path: Path) -> None:
    made = registry.installed_backends(script_backend(tmp_path))

    assert made["scale"]().name == "scale"
    assert made["python"]().name == "python"
    assert made["onnxruntime"]().name == "onnxruntime"


def test_a_backend_directory_that_is_not_there_is_said_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = registry.installed_backends(tmp_path / "none")

    assert "python" in made
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_script_serves_each_model_that_names_its_folder_as_backend(tmp_path: Path, mode: str) -> None:
    script_backend(tmp_path / "backends")
    for name, factor in (("half", "0.5"), ("twice", "2")):
        more = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
            for key, value in (("factor", factor), ("EXECUTION_MODE", mode))
        )
        write_model(tmp_path / "models", name, "", config=identity_pbtxt("scale", dims=(2,), more=more))

    options = ServerOptions(backend_directory=str(tmp_path / "backends"))
    with Server(tmp_path / "models", options=options) as server:
        array = np.array([[1, 3]], np.float32)
        answers = [server.infer(name, {"INPUT0": array})["OUTPUT0"].tolist() for name in ("half", "twice")]

    assert answers == [[[0.5, 1.5]], [[2.0, 6.0]]]
