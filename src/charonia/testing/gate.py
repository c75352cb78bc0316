"""Models that work until they are let go: tests of what happens meanwhile need no model that is slow enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXECUTE = "    def execute(self, requests):\n"
_WAIT = """\
        import pathlib
        import time
        folder = pathlib.Path(__file__).parent
        with open(folder / "runs", "a") as runs:
            runs.write("x")
        while (folder / "closed").exists():
            time.sleep(0.005)
"""


def gated(code: str) -> str:
    """Return the code of a Python model whose `execute` waits as long as its `Gate` is closed."""
    return code.replace(_EXECUTE, _EXECUTE + _WAIT)


class Gate:
    """What a model of `gated` waits at.

    Args:
        folder: The folder of the model's version.
    """

    def __init__(self, folder: Path) -> None:
        self._sign = folder / "closed"
        self._runs = folder / "runs"

    @property
    def runs(self) -> int:
        """Executions that have begun so far."""
        return self._runs.stat().st_size if self._runs.exists() else 0

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hold every execution up."""
        self._sign.touch()
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        """Let go whoever waits."""
        self._sign.unlink(missing_ok=True)
