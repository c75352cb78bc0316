"""The compiled form of the request path, used in place of its source.

`make wheel` and `make install-fast` compile the modules that `hatch_build.py` lists, into a folder for each kind of
interpreter, and add the hashes of their sources. The compiled form is used if every source still has its hash.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from types import ModuleType

PURE = "CHARONIA_PURE"
"""Environment variable that forces the pure form, unless it is empty or 0."""

HASHES = "sources"
"""Name of the list of hashes: the name of a module and the hash of its source in each line."""

LIBRARY = "charonia__mypyc"
"""The extension that has the code of all compiled modules; their own extensions only refer to it."""

SUFFIX = EXTENSION_SUFFIXES[0]
"""Suffix of extensions: implementation and version of the interpreter, and the platform."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))

FOLDER = os.path.join(_PACKAGE, "_compiled", SUFFIX.strip("."))
"""Where the compiled form for this interpreter lies, if there is one."""

form = "pure"
"""The form that runs: "compiled" or "pure"."""

problem = ""
"""Why an existing compiled form does not run although nobody forbids it, "" for no problem."""


HINT = "make install-fast compiles it again; until then, the slower pure form runs"
"""What to do about a problem."""


def hash_of(source: str) -> str:
    """Return the hash of a source file."""
    with open(source, "rb") as file:
        return source_hash(file.read()).hex()


def module_path(folder: str, module: str, suffix: str) -> str:
    """Return the file of a module in a folder that has its top-level package."""
    return os.path.join(folder, *module.split(".")) + suffix


class _Finder:
    """Finds the extensions of compiled modules."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file)) if file else None


def install() -> None:
    """Have the compiled form imported from now on, if it exists, fits the sources and is not switched off."""
    global form, problem
    try:
        with open(os.path.join(FOLDER, HASHES)) as file:
            hashes = dict(line.split() for line in file)
    except FileNotFoundError:
        return
    if os.environ.get(PURE, "0") not in ("", "0"):
        return
    sources = {name: module_path(os.path.dirname(_PACKAGE), name, ".py") for name in hashes}
    changed = [name for name, file in sources.items() if not os.path.exists(file) or hash_of(file) != hashes[name]]
    if changed:
        problem = (
            f"the compiled form is not used: the source of {', '.join(changed[:3])} has changed since it was built"
        )
        return
    sys.meta_path.insert(0, _Finder({name: module_path(FOLDER, name, SUFFIX) for name in (LIBRARY, *hashes)}))
    form = "compiled"
