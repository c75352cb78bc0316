"""Command lines of Python interpreters that import nothing from the current folder.

Python searches the current folder first for `-m` and `-c`: a file `redis.py` there would run in place of the package.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WITHOUT_FOLDER = "import sys; sys.path[:] = [path for path in sys.path if path]\n"  # before 3.11, -P does not exist


def python_module(module: str, *arguments: str, python: str | Path = sys.executable) -> list[str]:
    """Return a command that runs a module as a program; its interpreter must be Python 3.11 or newer."""
    return [str(python), "-P", "-m", module, *arguments]


def python_code(code: str, python: str | Path) -> list[str]:
    """Return a command that runs statements. Any version of Python can be its interpreter."""
    return [str(python), "-c", _WITHOUT_FOLDER + code]


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep interpreters that the standard library starts in this context from importing from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
