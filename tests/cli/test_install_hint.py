"""Commands that install what is missing."""

import sys
from pathlib import Path

from charonia.install_hint import command, requirement

PYTHON = sys.executable


def test_the_package_is_named_as_it_was_installed(tmp_path: Path) -> None:
    checkout, nowhere = tmp_path / "a checkout", tmp_path / "site-packages"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    wheel = tmp_path / "charonia-1.whl"
    wheel.touch()
    url = checkout.as_uri()

    assert requirement("torch", {}, nowhere) == "'charonia[torch]'"
    assert requirement("torch", {}, checkout) == f"-e '{checkout}[torch]'"
    assert requirement("torch", {"url": url, "dir_info": {"editable": True}}, nowhere) == f"-e '{checkout}[torch]'"
    assert requirement("torch", {"url": url, "dir_info": {}}, nowhere) == f"'{checkout}[torch]'"
    assert requirement("torch", {"url": wheel.as_uri()}, nowhere) == f"'charonia[torch] @ {wheel.as_uri()}'"
    assert requirement("torch", {"url": "https://example.org/c.whl"}, nowhere) == "'charonia[torch]'"
    assert requirement("torch", {"url": (tmp_path / "gone").as_uri()}, nowhere) == "'charonia[torch]'"


def test_pip_is_used_where_it_is_there() -> None:
    own = str(Path(PYTHON).parent / "pip")

    assert command("x", has=lambda name: True, which=lambda name: own) == "pip install x"
    assert command("x", has=lambda name: True, which=lambda name: "/other/pip") == f"{PYTHON} -m pip install x"
    assert command("x", has=lambda name: True, which=lambda name: None) == f"{PYTHON} -m pip install x"


def test_uv_is_used_where_pip_is_not_there() -> None:
    active = {"VIRTUAL_ENV": sys.prefix}

    assert command("x", has=lambda name: None, environment=active) == "uv pip install x"
    assert command("x", has=lambda name: None, environment={}) == f"uv pip install --python {PYTHON} x"
