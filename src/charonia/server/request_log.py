"""The request log: sampled requests with their answers, a JSON object a line, in a folder or an object store.

It is off by default and then costs nothing: a front end holds None instead of a `RequestRecorder`. Tensors are copied
when a request begins and when an answer is sent; a thread does the rest. Nothing ever waits for the log: with a full
queue or disk, records are dropped and counted.

Headers are written only if they are named. Values of named inputs, outputs and parameters are left out, and a function
of the operator may change or discard each record before it is written.
"""

import logging
import os
import re
import runpy
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import random
from typing import Any, cast

import numpy as np

from charonia.config.parameters import RECEIVED
from charonia.core.errors import ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue
from charonia.core.response import InferResponse, Outcome, Reply
from charonia.core.tensor import Array, Tensor, array_bytes
from charonia.server.access.options import HeaderForward
from charonia.server.log_file import LogFile
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.options import RequestLogOptions
from charonia.server.writer_thread import WriterThread
from charonia.stores.location import is_store, parse_address
from charonia.stores.remote import ObjectStore
from charonia.wire.json_text import dump
from charonia.wire.tensors import encode_tensor
from charonia.wire.v2_data import encode_data

_log = logging.getLogger(__name__)

RECORD_BYTES_MAX = 1024 * 1024
"""Tensors of a record, in bytes; the values of those beyond it are left out."""

QUEUE_MAX = 1000
"""Records that wait to be written; more are dropped."""

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Size of the tensors of records that wait to be written."""

FILE_BYTES_MAX = 64 * 1024 * 1024
"""Size at which a file is followed by another one; less where all files together may not have eight times as much."""

UPLOAD_S = 60.0
"""Time after which a file is put into a store."""

CLOSE_S_MAX = 10.0
"""Time limit to write the last records at shutdown."""

REDACTED = "[redacted]"

_FLUSH_S = 1.0
_FILES = re.compile(r"requests-[0-9TZ]+-\d+-\d+\.jsonl")

Document = dict[str, Any]

Hook = Callable[[Document], Document | None]
"""Returns the record to write, None to discard it."""


class _Record:
    """A request and its answers; their tensors are copies."""

    def __init__(self, protocol: str, request: InferRequest, headers: Mapping[str, str]) -> None:
        self.size = 0
        self.time_s = time.time()
        self.begun_ns = time.monotonic_ns()
        self.ended_ns = 0
        self.protocol = protocol
        self.request = request
        self.parameters = dict(request.parameters)
        self.headers = headers
        self.inputs = self._copies(list(request.inputs.values()))
        self.responses: list[tuple[InferResponse, list[Tensor | _Omitted]]] = []
        self.error: ServingError | None = None

    def add(self, outcome: Outcome) -> None:
        if isinstance(outcome, ServingError):
            self.error = outcome
        elif outcome is not None:
            self.responses.append((outcome, self._copies(outcome.outputs)))

    def _copies(self, tensors: list[Tensor]) -> "list[Tensor | _Omitted]":
        return [self._copy(tensor) for tensor in tensors]

    def _copy(self, tensor: Tensor) -> "Tensor | _Omitted":
        size = array_bytes(tensor.array)
        if self.size + size > RECORD_BYTES_MAX:
            return _Omitted(tensor)
        self.size += size
        return Tensor(tensor.name, tensor.datatype, tensor.array.copy())


class _Omitted:
    """A tensor that is too large for a record."""

    def __init__(self, tensor: Tensor) -> None:
        self.name, self.datatype, self.shape = tensor.name, tensor.datatype, tensor.shape


class RequestRecorder:
    """Use `begin` on the event loop's thread.

    Args:
        options: What to write, and where to.

    Raises:
        ServingError: INVALID_ARG when the folder or store cannot be used, or the function cannot be loaded.
    """

    def __init__(self, options: RequestLogOptions) -> None:
        self._share = options.sample
        self._headers = tuple(name.lower() for name in options.headers)
        self._redacted = frozenset(options.redact)
        self._hook = _load_hook(options.hook) if options.hook else None
        self._files = _Files(options)
        self._is_failing = False
        self._writer: WriterThread[_Record] = WriterThread(
            "records of requests",
            self._write,
            self._files.flush,
            self._files.close,
            items_max=QUEUE_MAX,
            bytes_max=QUEUE_BYTES_MAX,
            flush_s=_FLUSH_S,
            close_s_max=CLOSE_S_MAX,
        )

    @property
    def dropped(self) -> int:
        """Records that were lost."""
        return self._writer.dropped

    def begin(
        self,
        protocol: str,
        request: InferRequest,
        reply: Reply,
        header: Callable[[bytes], bytes | None],
        forward: HeaderForward | None,
    ) -> Reply:
        """Begin the record of a request, if it is picked, and return the reply to hand to the engine.

        Args:
            protocol: "http" or "grpc".
            request: The request.
            reply: Sends outcomes to the client.
            header: Returns a header of the request by its lower-case name.
            forward: Headers that are parameters of the request.
        """
        if self._share < 1 and random() >= self._share:
            return reply
        found = {name: header(name.encode()) for name in self._headers}
        record = _Record(protocol, request, {k: v.decode("utf-8", "replace") for k, v in found.items() if v})
        record.parameters.pop(RECEIVED, None)
        if forward is not None:
            for name in list(record.parameters):
                if forward.is_match(name.encode("latin-1", "replace")):
                    del record.parameters[name]

        def logged(outcome: Outcome, final: bool) -> None:
            try:
                reply(outcome, final)
            finally:
                record.add(outcome)
                if final:
                    record.ended_ns = time.monotonic_ns()
                    self._writer.put(record, record.size)

        return logged

    def close(self) -> None:
        """Write the remaining records, for a limited time. It blocks: call it in a thread."""
        self._writer.close()

    def _write(self, record: _Record) -> None:
        document: Document | None = self._document(record)
        if self._hook is not None:
            try:
                document = self._hook(cast(Document, document))
            except Exception as error:  # its text may have values of the request
                self._writer.drop(f"the function of --request-log-hook raised {type(error).__name__}")
                return
        if document is None:
            return
        try:
            self._files.append(dump(document).decode() + "\n")
        except OSError as error:
            self._writer.drop(f"'{self._files.folder}' cannot be written: {error.strerror or error}")

    def _document(self, record: _Record) -> Document:
        request, (last, _) = record.request, record.responses[-1] if record.responses else (None, ())
        execution = last.execution if last is not None else None
        document: Document = {
            "time": datetime.fromtimestamp(record.time_s, UTC).isoformat(timespec="microseconds")[:-6] + "Z",
            "protocol": record.protocol,
            "model": request.model_name,
            "version": last.model_version if last is not None else request.model_version,
            "id": request.id,
            "latency_ms": _ms(record.ended_ns - record.begun_ns),
        }
        if execution is not None:
            document["queue_ms"], document["compute_ms"] = _ms(execution.queue_ns), _ms(execution.compute_ns)
        if record.headers:
            document["headers"] = record.headers
        document["request"] = self._request(record)
        document["responses"] = [
            self._content("outputs", outputs, response.parameters) for response, outputs in record.responses
        ]
        if record.error is not None:
            document["error"] = {"code": record.error.code.name}
            if not self._redacted:  # a message may have values
                document["error"]["message"] = str(record.error)
        return document

    def _request(self, record: _Record) -> Document:
        """Return the request as a body of `infer`."""
        request = record.request
        document = self._content("inputs", record.inputs, record.parameters)
        parameters: Document = document.setdefault("parameters", {})
        if request.correlation_id:
            parameters["sequence_id"] = request.correlation_id
            parameters["sequence_start"] = bool(request.flags & SEQUENCE_START)
            parameters["sequence_end"] = bool(request.flags & SEQUENCE_END)
        if request.priority:
            parameters["priority"] = request.priority
        if request.timeout_us:
            parameters["timeout"] = request.timeout_us
        if not parameters:
            del document["parameters"]
        if request.outputs:
            document["outputs"] = [
                {"name": each.name}
                | ({"parameters": {"classification": each.classification}} if each.classification else {})
                for each in request.outputs
            ]
        return document

    def _content(
        self, key: str, tensors: list[Tensor | _Omitted], parameters: Mapping[str, ParameterValue]
    ) -> Document:
        document: Document = {key: [self._tensor(tensor) for tensor in tensors]}
        if parameters:
            document["parameters"] = {
                name: REDACTED if name in self._redacted else value for name, value in parameters.items()
            }
        return document

    def _tensor(self, tensor: Tensor | _Omitted) -> Document:
        entry: Document = {"name": tensor.name, "datatype": tensor.datatype.wire, "shape": list(tensor.shape)}
        if tensor.name in self._redacted:
            entry["data"] = REDACTED
        elif isinstance(tensor, Tensor):
            data = _json_data(tensor)
            if data is not None:
                entry["data"] = data
            else:
                entry["b64"] = b64encode(encode_tensor(tensor)).decode()
        return entry


def _json_data(tensor: Tensor) -> list[Any] | None:
    """Return the elements, None where JSON cannot carry them."""
    try:
        data: Array | list[str] = encode_data(tensor)
    except ServingError:
        return None
    if isinstance(data, list):
        return data
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        return None
    return cast(list[Any], data.tolist())


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


def _load_hook(text: str) -> Hook:
    path, _, name = text.rpartition(":")
    try:
        found = runpy.run_path(path, run_name="request_log_hook").get(name)
    except Exception as error:
        raise invalid(f"--request-log-hook: '{path}' cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise invalid(f"--request-log-hook: '{path}' has no function '{name}'")
    return cast(Hook, found)


class _Files:
    """The files of this process. All methods but the constructor are called in one thread.

    Args:
        options: Where they are, and how large they may be together.

    Attributes:
        folder: Where they are; for a store, until they are put there.
    """

    def __init__(self, options: RequestLogOptions) -> None:
        self._bytes_max = options.bytes_max
        self._file_bytes_max = min(FILE_BYTES_MAX, options.bytes_max // 8)
        self._store: ObjectStore | None = None
        self._private: PrivateFolder | None = None
        self._file: LogFile | None = None
        self._path = Path()
        self._size = self._count = 0
        self._opened_s = 0.0
        if is_store(options.target):
            self._store = ObjectStore(parse_address(options.target), title="--request-log")
        try:
            if self._store is not None:
                self._private = PrivateFolder()
                self.folder = self._private.path
            else:
                self.folder = Path(options.target)
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self.folder.stat().st_mode & 0o002:
                    raise invalid(
                        f"--request-log: every user can write into '{self.folder}'", hint=f"chmod o-w {self.folder}"
                    )
            self._open()
        except OSError as error:
            raise invalid(f"--request-log: cannot write '{options.target}': {error.strerror}") from error

    def append(self, line: str) -> None:
        """Write a line. Raises OSError if it is lost."""
        if self._file is None or self._size >= self._file_bytes_max:
            self._finish()
            self._open()
        assert self._file is not None
        self._size += len(line)
        self._file.write(line)

    def flush(self) -> None:
        """Put the file into the store if it is old enough."""
        if self._store is not None and self._size and time.monotonic() - self._opened_s >= UPLOAD_S:
            self._finish()

    def close(self) -> None:
        self._finish()
        if self._private is not None:
            self._private.remove()

    def _open(self) -> None:
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%dT%H%M%SZ")
        self._path = self.folder / f"requests-{now}-{os.getpid()}-{self._count}.jsonl"
        self._file = LogFile(str(self._path), mode=0o600)
        self._count += 1
        self._size, self._opened_s = 0, time.monotonic()
        self._remove_oldest()

    def _finish(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if not self._size:
            with suppress(OSError):
                self._path.unlink()
        if self._store is None:
            return
        for path in self._all():
            try:
                self._store.put(path.name, path)
            except ServingError as error:  # the file is kept for the next time
                _log.error("the request log cannot be put into its store: %s", error)
                return
            path.unlink()

    def _all(self) -> list[Path]:
        """Return the files, oldest first."""
        return sorted(path for path in self.folder.iterdir() if _FILES.fullmatch(path.name))

    def _remove_oldest(self) -> None:
        """Remove the oldest files, of any process, until there is room for the new one."""
        sizes: dict[Path, int] = {}
        for path in self._all():
            with suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
        room = self._bytes_max - self._file_bytes_max
        for path in list(sizes):
            if sum(sizes.values()) <= room:
                return
            if path != self._path:
                del sizes[path]
                path.unlink(missing_ok=True)
