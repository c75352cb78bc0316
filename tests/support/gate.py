"""Models that work until a test releases them, so that tests of what happens meanwhile need no slow model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

_EXECUTE = "    def execute(self, requests):\n"
_WAIT = """\
        import pathlib
        import time
        folder = pathlib.Path(__file__).parent
        def sign():
            try:
                return (folder / "closed").read_text()
            except FileNotFoundError:
                return ""
        closed = sign()
        with open(folder / "runs", "a") as runs:
            runs.write("x")
        while closed and sign() == closed:
            time.sleep(0.005)
"""


def gated(code: str) -> str:
    """Return the code of a Python model whose `execute` waits as long as its `Gate` is closed."""
    return code.replace(_EXECUTE, _EXECUTE + _WAIT)


class Gate:
    """What a model of `gated` waits at."""

    def __init__(self, folder: Path) -> None:
        self._sign = folder / "closed"
        self._runs = folder / "runs"

    @property
    def runs(self) -> int:
        return self._runs.stat().st_size if self._runs.exists() else 0

    @contextmanager
    def closed(self) -> Iterator[Self]:
        # Another sign each time: who waits at a gate that was open for a moment only is let go too.
        new = self._sign.with_name("closing")
        new.write_text(uuid4().hex)
        new.replace(self._sign)
        try:
            yield self
        finally:
            self.open()

    def open(self) -> None:
        self._sign.unlink(missing_ok=True)
