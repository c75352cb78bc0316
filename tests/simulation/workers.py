"""Simulated worker processes behind the server's own channel and supervision: they exit, hang, and send garbage."""

import asyncio
import contextlib
import contextvars
import os
import random
import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulation.machine import MACHINE, PROCESS, may_fail

from charonia.core.errors import ServingError
from charonia.server.backends.workers import process as process_module
from charonia.server.backends.workers.codec import _CODES
from charonia.server.channel.channel import Incoming
from charonia.server.channel.end import ChannelEnd, TensorLink
from charonia.server.channel.tensors import found, placed

Compute = Callable[[Sequence[Any]], tuple[float, list[Any]]]
"""Returns how long a batch takes, and its results: outputs or errors."""

WORKERS: dict[int, "Worker"] = {}
FIRST_PID = 1 << 30
"""No process of the real machine has this number."""


class Worker:
    """A worker process, with what is used of `subprocess.Popen`.

    Attributes:
        parent: The simulated process that has started it.
    """

    def __init__(
        self, receiving: socket.socket, sending: socket.socket, compute: Compute, chance: random.Random
    ) -> None:
        self.pid = FIRST_PID + len(WORKERS)
        self.parent = PROCESS.get()
        self.returncode: int | None = None
        self._compute, self._chance = compute, chance
        self._loop: Any = asyncio.get_running_loop()
        output, self._output = os.pipe()
        self.pidfd, self._exit = os.pipe()
        self.stdout = os.fdopen(output, "rb", 0)
        self._sockets = receiving.dup(), sending.dup()
        self._batches: list[tuple[int, Sequence[Any]]] = []
        self._is_hung = False
        WORKERS[self.pid] = self
        context = contextvars.copy_context()
        context.run(PROCESS.set, f"worker {self.pid}")
        context.run(self._begin)

    def wait(self, timeout: float | None = None) -> int | None:
        return self.returncode

    def exit(self, status: int) -> None:
        """The process ends, with everything that it has."""
        if self.returncode is None:
            self.returncode = status
            self._loop.kill(f"worker {self.pid}")
            self._batches.clear()  # with what they map
            self._end.close()
            os.close(self._output)
            os.close(self._exit)

    def _begin(self) -> None:
        receiving, sending = self._sockets
        receiving.setblocking(False)
        sending.setblocking(False)
        self._end = ChannelEnd(
            "the server", sending, receiving,
            on_message=self._take, on_broken=lambda reason: self.exit(1), on_end=lambda: self.exit(0),
        )  # fmt: skip

        self._tensors = TensorLink(self._end)

    def _take(self, message: Incoming) -> None:
        kind = message.header[0]
        if self._is_hung:
            return
        if kind == "load":
            self._loop.call_later(self._chance.random() * 0.3, self._loaded)
        elif kind == "execute":
            for number, requests in message.header[1]:
                decoded = [
                    SimpleNamespace(
                        inputs={t.name: t for t in [found(e, message, self._tensors.release) for e in tensors]},
                        correlation_id=fields[1],
                        flags=fields[2],
                    )
                    for fields, tensors in requests
                ]
                self._batches.append((number, decoded))
                if len(self._batches) == 1:
                    self._next()
        elif kind == "finalize":
            self._loop.call_later(self._chance.random() * 0.2, self.exit, 0)
        if kind in ("execute", "release"):
            self._tensors.handle_lists(*message.header[-2:])

    def _loaded(self) -> None:
        self._end.send(("ready", {}))

    def _next(self) -> None:
        took_s, results = self._compute(self._batches[0][1])
        self._loop.call_later(took_s, self._done, results, MACHINE.now_ns)

    def _done(self, results: list[Any], start_ns: int) -> None:
        if self._is_hung:
            return
        number, _ = self._batches.pop(0)
        outgoing = self._tensors.outgoing()
        encoded: list[tuple[Any, ...]] = [
            (_CODES.index(each.code), each.message)
            if isinstance(each, ServingError)
            else (-1, [placed(tensor, outgoing) for tensor in each.tensors], {})
            for each in results
        ]
        released, self._tensors._released = self._tensors._released, []
        freed, self._tensors._freed = self._tensors._freed, []
        self._end.send(("done", number, encoded, released, freed, start_ns, MACHINE.now_ns), outgoing)
        if self._batches:
            self._next()

    def harm(self, kind: str) -> None:
        """Commit a fault."""
        if kind == "hang":
            self._is_hung = True
        elif kind == "garbage":
            with contextlib.suppress(OSError):
                self._sockets[1].send(self._chance.randbytes(64))
        else:
            self.exit(-9)


def environment(compute: Compute, chance: random.Random) -> Any:
    """Return what starts workers that compute so."""

    def fork(receiving: socket.socket, sending: socket.socket, *_: object) -> Worker:
        may_fail("fork")
        return Worker(receiving, sending, compute, chance)

    return SimpleNamespace(template=SimpleNamespace(fork=fork), variables=lambda inherited: {})


def kill_workers(parent: str) -> None:
    """The workers of a killed process end with it."""
    for worker in WORKERS.values():
        if worker.parent == parent:
            worker.exit(-9)


def _killpg(pid: int, signal: int) -> None:
    if pid not in WORKERS:
        raise ProcessLookupError
    WORKERS[pid].exit(-signal)


os.killpg = _killpg
vars(process_module)["reaper"] = SimpleNamespace(watch=lambda pid: None, unregister=lambda pid: None)
