"""A folder with a file of the name of every package that is installed and of the standard library: none may run."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

_SENTINEL = "ran"
_CODE = """\
with open({path!r}, "a") as file:
    file.write(__name__ + "\\n")
raise ImportError("this is the file of the current folder")
"""


def write_hostile_files(folder: Path) -> None:
    """Write a file for every name that a program of Python could import."""
    code = _CODE.format(path=str(folder / _SENTINEL))
    for name in {*packages_distributions(), *sys.stdlib_module_names, "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(code)


def hostile_files_that_ran(folder: Path) -> set[str]:
    """Return the names of the modules that a program has imported from the folder."""
    path = folder / _SENTINEL
    return set(path.read_text().split()) if path.exists() else set()
