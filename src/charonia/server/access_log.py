"""The access log: one line for each request, as text or JSON.

The log is off by default and then costs nothing: a front end holds None instead of an `AccessLog` and takes no
timestamps for it. When the disk is full, lines are lost, never the answers. Text from clients is quoted unless it
consists of plain characters, so that a request id cannot forge a line.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from charonia.core.response import ExecutionRecord
from charonia.core.statistics import TokenUsage

_log = logging.getLogger(__name__)

VALUE_CHARS_MAX = 256
"""Longer names and ids are truncated in the log."""

_PLAIN = re.compile(r"[\w.:/+@-]+", re.ASCII)


@dataclass(slots=True)
class AccessEntry:
    """One request and its answer.

    Attributes:
        protocol: "http" or "grpc".
        method: The operation, e.g. "POST /v2/models/m/infer" or "ModelInfer".
        status: Status as the protocol spells it: 200, or "OK".
        model: Model name, "" where there is none.
        version: Version that ran, or that was requested.
        request_id: The caller's id.
        bytes_in: Bytes of the request body.
        bytes_out: Bytes of the response body.
        duration_ns: Time from the complete request until the transport has the response.
        execution: The record of its execution, None where no instance ran.
        usage: The tokens of a request to a language model, None where they are not known.
        first_ns: Time from the complete request until the first event of a stream of OpenAI's API, 0 for any other.
    """

    protocol: str
    method: str
    status: int | str
    model: str = ""
    version: str = ""
    request_id: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    duration_ns: int = 0
    execution: ExecutionRecord | None = None
    usage: TokenUsage | None = None
    first_ns: int = 0


class LogStream(Protocol):
    """Takes the lines."""

    def write(self, text: str, /) -> object:
        """Write a line. Raises OSError if it is lost."""


class AccessLog:
    """Writes entries to a stream, which does the buffering and flushing."""

    def __init__(
        self, stream: LogStream, *, as_json: bool = False, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._stream = stream
        self._format = _as_json if as_json else _as_text
        self._wall_clock = wall_clock
        self._is_failing = False

    def write(self, entry: AccessEntry) -> None:
        """Write the line of one request."""
        moment = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds")
        try:
            self._stream.write(self._format({"time": moment.replace("+00:00", "Z"), **_fields(entry)}) + "\n")
        except OSError as error:
            if not self._is_failing:  # report once, until it works again
                self._is_failing = True
                _log.error("access log: lines are lost, they cannot be written: %s", error.strerror or error)
        else:
            self._is_failing = False


def _fields(entry: AccessEntry) -> dict[str, object]:
    fields: dict[str, object] = {"protocol": entry.protocol, "method": entry.method[:VALUE_CHARS_MAX]}
    for key, text in (("model", entry.model), ("version", entry.version), ("id", entry.request_id)):
        if text:
            fields[key] = text[:VALUE_CHARS_MAX]
    fields["status"] = entry.status
    fields["bytes_in"] = entry.bytes_in
    fields["bytes_out"] = entry.bytes_out
    fields["duration_ms"] = round(entry.duration_ns / 1e6, 3)
    if entry.execution is not None:
        fields["queue_ms"] = round(entry.execution.queue_ns / 1e6, 3)
        fields["compute_ms"] = round(entry.execution.compute_ns / 1e6, 3)
        fields["batch_size"] = entry.execution.batch_size
        fields["instance"] = entry.execution.instance
    if entry.usage is not None:
        fields["prompt_tokens"] = entry.usage.prompt
        fields["completion_tokens"] = entry.usage.completion
    if entry.first_ns:
        fields["first_token_ms"] = round(entry.first_ns / 1e6, 3)
    return fields


def _as_json(fields: dict[str, object]) -> str:
    return json.dumps(fields)


def _as_text(fields: dict[str, object]) -> str:
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in fields.items())


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
