"""The worker process: imports one model, runs batches, ends when the server does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from charonia.backends.python.worker import charonia_channel as channel
    from charonia.backends.python.worker import charonia_datatypes as datatypes
    from charonia.backends.python.worker import triton_python_backend_utils as pb_utils
else:  # siblings of this script; the package is not there
    import charonia_channel as channel
    import charonia_datatypes as datatypes
    import triton_python_backend_utils as pb_utils

_PR_SET_PDEATHSIG = 1


class Worker:
    """One instance of a model."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pool = channel.RegionPool()
        self._mappings = channel.Mappings()
        self._receiver = channel.Receiver(self._mappings)
        self._send_lock = threading.Lock()
        self._dropped: list[int] = []
        self._model: Any = None
        self._name = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Take messages until the server closes the connection."""
        while True:
            data, fds = channel.receive(self._socket)
            if not data:
                return
            for message in self._receiver.feed(data, fds):
                kind = message.header[0]
                if kind == "execute":
                    self._execute(message)
                elif kind == "initialize":
                    self._initialize(*message.header[1:])
                elif kind == "complete":
                    self._complete(*message.header[1:])
                elif kind == "finalize":
                    self._finalize()
                    return

    def _send(self, header: tuple[object, ...], outgoing: channel.Outgoing | None = None) -> None:
        outgoing = outgoing or channel.Outgoing(self._pool)
        buffers = outgoing.frame(header)
        with self._send_lock:
            channel.send_all(self._socket, buffers, outgoing.fds)

    def _log(self, level: int, message: str, file: str, line: int) -> None:
        self._send(("log", level, message, file, line))

    def _import(self, path: str, version_dir: str, model_dir: str) -> Any:
        pb_utils._MODEL_DIR = version_dir
        sys.path[:0] = [version_dir, model_dir]
        # The package that the folder is for imports like `from .helpers import f` in model.py.
        package = types.ModuleType("charonia_model")
        package.__path__ = [os.path.dirname(path)]
        sys.modules["charonia_model"] = package
        spec = importlib.util.spec_from_file_location("charonia_model.model", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module.TritonPythonModel

    def _initialize(self, path: str, version_dir: str, model_dir: str, arguments: dict[str, str], name: str) -> None:
        self._name = name
        try:
            model = self._import(path, version_dir, model_dir)()
            if not callable(getattr(model, "execute", None)):
                raise AttributeError(f"TritonPythonModel in {path} has no method 'execute'")
            if hasattr(model, "initialize"):
                model.initialize(arguments)
            self._model = model
        except BaseException as error:
            self._send(("failed", _describe(error)))
            raise SystemExit(1) from error
        self._send(("ready",))

    def _complete(self, path: str, version_dir: str, model_dir: str, config_json: str) -> None:
        try:
            model = self._import(path, version_dir, model_dir)
            completed = None
            if hasattr(model, "auto_complete_config"):
                given = pb_utils.ModelConfig(json.loads(config_json))
                completed = model.auto_complete_config(given)
                if not isinstance(completed, pb_utils.ModelConfig):
                    raise pb_utils.TritonModelException(
                        "auto_complete_config function must return a valid pb.ModelConfig object, "
                        f"got {type(completed).__name__}"
                    )
            self._send(("completed", json.dumps(completed.as_dict()) if completed else ""))
        except BaseException as error:
            self._send(("failed", _describe(error)))
            raise SystemExit(1) from error

    def _finalize(self) -> None:
        if self._model is not None and hasattr(self._model, "finalize"):
            self._model.finalize()

    def _execute(self, message: channel.Incoming) -> None:
        _, batch, sent, released, dropped = message.header
        self._dropped = self._pool.release(released)
        self._mappings.drop(dropped)
        requests = []
        for fields, places in sent:
            inputs = [
                pb_utils.Tensor._received(name, datatype, shape, message.find(place))
                for name, datatype, shape, place in places
            ]
            requests.append(pb_utils.InferenceRequest._received(inputs, fields))
        names = [fields[6] for fields, _ in sent]
        input_end = time.monotonic_ns()
        outgoing = channel.Outgoing(self._pool)
        try:
            responses = self._model.execute(list(requests))
            if inspect.iscoroutine(responses):
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                responses = self._loop.run_until_complete(responses)
            output_start = time.monotonic_ns()
            results = self._results(responses, names, outgoing)
        except Exception as error:
            output_start = time.monotonic_ns()
            outgoing.withdraw()
            outgoing = channel.Outgoing(self._pool)
            text = f"Failed to process the request(s) for model '{self._name}', message: {_describe(error)}"
            code = pb_utils.TritonError.INTERNAL
            results = [(code, text)] * len(requests)
        # Inputs that the model keeps would be overwritten by the next batch, as the contract of `execute` allows.
        self._send(("done", batch, results, message.regions, self._dropped, input_end, output_start), outgoing)

    def _results(
        self, responses: object, names: list[tuple[str, ...]], outgoing: channel.Outgoing
    ) -> list[tuple[object, ...]]:
        if not isinstance(responses, (list, tuple)):
            raise pb_utils.TritonModelException(
                f"Expected a list in the execute return, found type '{type(responses).__name__}'."
            )
        if len(responses) != len(names):
            raise pb_utils.TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is: {len(names)}, and InferenceResponse(s) size is: {len(responses)}"
            )
        return [self._result(response, wanted, outgoing) for response, wanted in zip(responses, names)]

    def _result(self, response: object, wanted: tuple[str, ...], outgoing: channel.Outgoing) -> tuple[object, ...]:
        if not isinstance(response, pb_utils.InferenceResponse):
            raise pb_utils.TritonModelException(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response).__name__}'."
            )
        error = response.error()
        if error is not None:
            return (error.code(), error.message())
        missing = [name for name in wanted if pb_utils.get_output_tensor_by_name(response, name) is None]
        if missing:
            return (
                pb_utils.TritonError.INTERNAL,
                "the model did not return the requested output(s) {}".format(", ".join(missing)),
            )
        tensors = [
            (t.name(), t._datatype, t._array.shape, outgoing.place(_bytes_of(t)))
            for t in response.output_tensors()
            if t.name() in wanted
        ]
        return (-1, tensors, response._parameters)


def _bytes_of(tensor: pb_utils.Tensor) -> channel.Data:
    if tensor._datatype == "BYTES":
        return datatypes.serialize(tensor._array)
    return np.ascontiguousarray(tensor._array).reshape(-1).view(np.uint8).data


def _describe(error: BaseException) -> str:
    """Return type and text of an exception, and where the model's own code raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(__file__) not in f.filename]
    frames = [f for f in frames if "importlib" not in f.filename]
    text = f"{type(error).__name__}: {error}"
    if frames:
        text += "\n\nAt:\n" + "\n".join(f"  {f.filename}({f.lineno}): {f.name}" for f in reversed(frames))
    return text


def _watch(sock: socket.socket) -> None:
    """End the process when the server is gone, also while the model computes."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    while True:
        if any(event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)) for _, event in poll.poll()):
            # The main thread may be in finalize, after which it ends by itself.
            time.sleep(_GRACE_S)
            os._exit(0)


_GRACE_S = 5.0


def _log_to_output(_: int, message: str, file: str, line: int) -> None:
    print(f"{message} ({file}:{line})", file=sys.stderr, flush=True)


def _become_a_child(sock: socket.socket) -> None:
    """In a process that the model has forked: leave the connection, which has one worker at its end, alone."""
    sock.close()
    pb_utils.Logger._write = _log_to_output


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: _become_a_child(sock))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the server's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[2]):
            return
    worker = Worker(sock)
    pb_utils.Logger._write = worker._log
    threading.Thread(target=_watch, args=(sock,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.run()


if __name__ == "__main__":
    main()
