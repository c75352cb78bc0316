"""A template of workers that lasts longer than an event loop, so that several tests do with one import."""

import asyncio
import json
import marshal
import os
import socket
import subprocess
import sys

from charonia.server.backends.workers.template import FORK_S_MAX, SCRIPT, THREAD_VARIABLES, WorkerTemplate

_BYTES_MAX = 4096


class StandingTemplate(WorkerTemplate):
    """A template whose process is there until `end`, whichever event loop uses it.

    Args:
        variables: Its environment variables, in addition to those of this process.
    """

    def __init__(self, modules: list[str], variables: dict[str, str]) -> None:
        super().__init__(", ".join(modules), modules, variables)
        self._standing, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            imported = json.dumps([modules, []])
            command = [sys.executable, str(SCRIPT), str(theirs.fileno()), str(os.getpid()), imported]
            environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), **variables}
            self._kept = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
        (kind, *reasons) = marshal.loads(self._standing.recv(_BYTES_MAX) or marshal.dumps(("ended",)))
        assert kind == "ready", reasons
        self._standing.settimeout(FORK_S_MAX)

    def end(self) -> None:
        self._standing.close()
        self._kept.wait()

    def _start(self) -> "asyncio.Future[None]":
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        self._connection, self._ready = self._standing, ready
        return ready

    def _end(self) -> None:
        self._connection = self._ready = None
