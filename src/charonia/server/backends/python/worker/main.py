"""The worker process: imports one model, runs batches, ends when the server does."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from .connection import Disconnected, WorkerConnection
from .errors import describe
from .runner import runner_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0


class Worker:
    """One instance of a model, and the connection to the server that it works for."""

    def __init__(self, receiving: socket.socket, sending: socket.socket) -> None:
        self.connection = WorkerConnection(receiving, sending)
        self._runner = runner_for(self.connection)

    def run(self) -> None:
        """Do what the server says until it says to finalize, or is gone."""
        connection, tasks = self.connection, self.connection.tasks
        reader, writer = connection.reader, connection.writer
        execute = self._runner.execute
        while True:
            if not tasks.items:
                reader.spin_wait()
                self._runner.wait(tasks)
            kind, *content = tasks.items.popleft()
            if kind == "execute":
                batch, requests = content
                del content
                input_end = time.monotonic_ns()
                results, output_start = execute(batch, requests)
                # Later batches may overwrite inputs that the model has kept, as the API allows.
                connection.done(batch, results, input_end, output_start)
                del batch, requests, results
            elif kind == "initialize":
                self._initialize(*content)
            elif kind == "complete":
                self._complete(self._runner.complete, *content)
            elif kind == "describe":
                self._complete(self._runner.describe, *content)
            elif kind == "is_ready":
                writer.send(("answer_ready", *content, self._runner.readiness()))
            elif kind == "finalize":
                self._runner.finalize()
                return
            elif kind == "end":
                return

    def _initialize(
        self,
        path: str,
        version_dir: str,
        model_dir: str,
        arguments: dict[str, str],
        name: str,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.connection.name = name
        options = options or {}
        is_decoupled = bool(options.get("decoupled"))
        if options.get("gpu"):
            self.connection.writer.export_tensors()
        try:
            capabilities = self._runner.initialize(path, version_dir, model_dir, arguments, is_decoupled)
        except BaseException as error:
            self.connection.writer.send(("failed", describe(error)))
            raise SystemExit(1) from error
        # Objects of the loaded model are permanent: without them, a full collection is too short to delay a request.
        gc.collect()
        gc.freeze()
        self.connection.writer.send(("ready", capabilities))

    def _complete(self, ask: Callable[..., str], *content: str) -> None:
        try:
            completed = ask(*content)
        except BaseException as error:
            self.connection.writer.send(("failed", describe(error)))
            raise SystemExit(1) from error
        self.connection.writer.send(("completed", completed))


def _watch(sock: socket.socket) -> None:
    """End the process when the server is gone, also while the model computes."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    while True:
        if any(event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)) for _, event in poll.poll()):
            # The main thread may be in finalize, after which it ends by itself.
            time.sleep(_GRACE_S)
            os._exit(0)


def main() -> None:
    is_shared = sys.argv[1] == "shared"
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1 + is_shared : 3]]
    server = int(sys.argv[3])
    sys.argv[:] = [""]  # as in an embedded interpreter: models parse it with argparse or unittest
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            return
    if is_shared:
        _share(sockets[0])
    else:
        work(*sockets)


def work(receiving: socket.socket, sending: socket.socket) -> None:
    """Be a worker, until the server says to finalize, or is gone."""
    _prepare()
    worker = _made(receiving, sending)
    threading.Thread(target=_watch, args=(receiving,), daemon=True).start()
    with contextlib.suppress(Disconnected):
        worker.run()


def _share(control: socket.socket) -> None:
    """Be a worker in a thread for each connection that arrives, until the server closes its end."""
    _prepare()
    control.set_inheritable(False)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            os._exit(0)
        sockets = [socket.socket(fileno=number) for number in descriptors]
        threading.Thread(target=_work_in_thread, args=sockets, daemon=True).start()


def _work_in_thread(receiving: socket.socket, sending: socket.socket) -> None:
    worker = _made(receiving, sending)
    with contextlib.suppress(Disconnected):
        try:
            worker.run()
        finally:
            worker.connection.writer.send(("left",))


def _prepare() -> None:
    faulthandler.enable()  # a crash in a library says which line of the model was in it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the server's to handle


def _made(receiving: socket.socket, sending: socket.socket) -> Worker:
    for sock in (receiving, sending):
        sock.set_inheritable(False)
    worker = Worker(receiving, sending)
    for leave in (worker.connection.reader.close, worker.connection.writer.become_child):
        os.register_at_fork(after_in_child=leave)
    return worker
