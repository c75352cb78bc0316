"""A `charonia platform` process for tests."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/login/link\?token=\S+")
_START_S_MAX = 200.0
"""Less than the time limit of a test. On a quiet machine it takes 2 s, on two cores with a load of 10 it took 16 s."""

_STOP_S_MAX = 200.0


class PlatformProcess:
    """A platform as a user starts it. Use it as a context manager; entering waits until it answers.

    Args:
        arguments: Further arguments of `charonia platform`.
        folder: The folder that it is started in, by default the one of this process.
    """

    def __init__(self, data: Path, *arguments: str, folder: Path | None = None) -> None:
        self.data = data
        self._folder = folder
        self.link = self.url = ""
        self._arguments: Sequence[str] = ("platform", f"--data={data}", "--port=0", "--isolation=available", *arguments)
        self._lines: list[str] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            RuntimeError: It ended, or did not start in time; the message has what it wrote.
        """
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("charonia")), *self._arguments],
            cwd=self._folder,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with self._changed:
            self._changed.wait_for(lambda: self.link or self.process.poll() is not None, _START_S_MAX)
        if not self.link:
            status = self.process.poll()
            self.kill()
            how = f"did not start within {_START_S_MAX:.0f} s" if status is None else f"exited with status {status}"
            raise RuntimeError(f"the platform {how}:\n{self.output}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()

    @property
    def key(self) -> str:
        return (self.data / "owner.key").read_text().strip()

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it in order, and return its exit status."""
        self.process.send_signal(number)
        return self._wait()

    def kill(self) -> None:
        self.process.kill()
        self._wait()

    def _wait(self) -> int:
        try:
            status = self.process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join()
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    found = _LINK.search(line)
                    if found is not None:
                        self.link, self.url = found[0], found[1]
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
