import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from charonia.backends import registry
from charonia.core.errors import ServingError


@pytest.mark.parametrize("name", ["identity", "onnxruntime", "python"])
def test_a_backend_is_found_by_its_name(name: str) -> None:
    assert registry.builtin_backends()[name]().name == name


def test_a_package_can_bring_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mirror", "charonia.backends.identity:IdentityBackend", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])

    assert registry.builtin_backends()["mirror"]().name == "identity"


def test_a_package_cannot_take_the_place_of_a_backend_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("identity", "charonia.nothing:Nothing", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])

    assert registry.builtin_backends()["identity"]().name == "identity"


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "charonia.nothing:Nothing", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])

    with pytest.raises(ServingError, match=r"backend 'broken'.*cannot be loaded: ModuleNotFoundError"):
        registry.builtin_backends()["broken"]()


def test_nothing_is_imported_before_a_model_needs_it() -> None:
    code = (
        "import sys; from charonia.backends.registry import builtin_backends; b = builtin_backends(); b['identity']();"
        "print(sorted(m for m in sys.modules if m.startswith(('onnx', 'charonia.backends.python'))))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
