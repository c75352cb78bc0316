"""What a Python model may import, and that models of one process do not see each other's."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from charonia.server.backends.python.worker import triton_python_backend_utils as unbound
from charonia.server.backends.python.worker.host import Binding
from charonia.server.backends.python.worker.imports import PB_UTILS, ModelImports

MODEL = """
import triton_python_backend_utils as pb_utils
import helper_of_the_model
from beside_the_versions import NAME
from .helper_of_the_model import WHO as RELATIVE

class TritonPythonModel:
    pb_utils = pb_utils
    who = (helper_of_the_model.WHO, NAME, RELATIVE)

    def late(self):
        import another_helper_of_the_model
        import helper_of_the_model
        return another_helper_of_the_model.WHO, helper_of_the_model.WHO
"""


@pytest.fixture(autouse=True)
def _same_modules() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str) -> Path:
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version / "helper_of_the_model.py").write_text(f"WHO = {name!r}\n")
    (version / "another_helper_of_the_model.py").write_text(f"WHO = {name!r}\n")
    (folder / name / "beside_the_versions.py").write_text(f"NAME = {name!r}\n")
    return version


def imports(version: Path, *, shared: bool) -> ModelImports:
    return ModelImports(str(version), str(version.parent), unbound.bound_to(Binding(None, str(version))), shared)


def load(own: ModelImports, version: Path) -> Any:
    return own.load(str(version / "model.py"))


def test_a_file_that_changes_within_a_second_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "model.py"
    found = []
    for number in (1, 2):
        file.write_text(f"class TritonPythonModel:\n    number = {number}\n", encoding="utf-8")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        found.append(load(imports(tmp_path, shared=True), tmp_path).number)

    assert found == [1, 2]


def test_models_of_one_process_have_their_own_modules_of_the_same_names(tmp_path: Path) -> None:
    versions = [write(tmp_path, "first"), write(tmp_path, "second")]
    path, before = list(sys.path), set(sys.modules)
    owns = [imports(version, shared=True) for version in versions]

    models = [load(own, version) for own, version in zip(owns, versions, strict=True)]

    assert [model.who for model in models] == [("first",) * 3, ("second",) * 3]
    assert [model.pb_utils.get_model_dir() for model in models] == [str(version) for version in versions]
    assert sys.path == path
    assert not {PB_UTILS, "helper_of_the_model", "beside_the_versions"} & set(sys.modules)
    for own, model, name in zip(owns, models, ["first", "second"], strict=True):
        with own.visible():
            assert model().late() == (name, name)
            assert [sys.modules[name] for name in PB_UTILS] == [model.pb_utils, model.pb_utils]
    with pytest.raises(ImportError):
        models[0]().late()
    for own in owns:
        own.close()
    assert set(sys.modules) == before


def test_models_come_and_go_while_other_threads_import(tmp_path: Path) -> None:
    version = write(tmp_path, "first")
    is_over = threading.Event()

    def import_others() -> None:
        while not is_over.is_set():
            for number in range(100):
                sys.modules[f"imported_by_another_thread_{number}"] = ModuleType("other")
            for number in range(100):
                del sys.modules[f"imported_by_another_thread_{number}"]

    other = threading.Thread(target=import_others)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other.start()
        for _ in range(30):
            own = imports(version, shared=True)
            assert load(own, version).who == ("first", "first", "first")
            own.close()
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(interval)


def test_a_model_with_a_process_of_its_own_imports_at_any_time(tmp_path: Path) -> None:
    version = write(tmp_path, "only")

    model = load(imports(version, shared=False), version)

    assert model.who == ("only",) * 3
    assert model().late() == ("only", "only")
    assert [sys.modules[name] for name in PB_UTILS] == [model.pb_utils, model.pb_utils]


def test_a_file_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="is not a Python file"):
        imports(tmp_path, shared=True).load(str(tmp_path / "model.txt"))


def test_copies_of_the_module_share_what_belongs_to_no_model() -> None:
    one, two = (unbound.bound_to(Binding(None, folder)) for folder in ("one", "two"))

    assert (one.get_model_dir(), two.get_model_dir()) == ("one", "two")
    assert one.Tensor is two.Tensor is unbound.Tensor
    assert one.InferenceRequest is not two.InferenceRequest
    assert issubclass(one.InferenceRequest, unbound.InferenceRequest)
    assert set(unbound.__all__) <= set(vars(one))
    assert one.__name__ == PB_UTILS[0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_without_the_class_is_named(tmp_path: Path, shared: bool) -> None:
    version = write(tmp_path, "a")
    (version / "model.py").write_text("class Model: ...")

    with pytest.raises(AttributeError, match=r"a/1/model\.py has no class TritonPythonModel"):
        load(imports(version, shared=shared), version)
