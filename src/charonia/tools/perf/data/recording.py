"""The requests of a request log, to be sent again at their times."""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from charonia.core.errors import ServingError, invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import RunSettings
from charonia.tools.perf.options import PerfOptions, replayed
from charonia.tools.perf.schedule import gaps_between
from charonia.wire.v2_request import InferDecoder

LINES_MAX = 1_000_000
"""Limit of the records of a replay."""

TENSOR_BYTES_MAX = 2**31

_BEGINNING = b'{"time"'

Record = Mapping[str, Any]


class Recording:
    """An `InputSource` of recorded requests, in the order of their times.

    Args:
        requests: Time in seconds, and request.
        left_out_count: Requests that cannot be sent, because values were left out of their records.
    """

    def __init__(self, requests: list[tuple[float, InferRequest]], left_out_count: int) -> None:
        requests.sort(key=lambda each: each[0])
        self.batch_size = self.stream_count = 1
        self.left_out_count = left_out_count
        self._times_s = [time_s for time_s, _ in requests]
        self._requests = [request for _, request in requests]

    def step_count(self, stream: int) -> int:
        return len(self._requests)

    def request(self, stream: int, step: int) -> InferRequest:
        return self._requests[step]

    def expected(self, stream: int, step: int) -> Mapping[str, Tensor] | None:
        """Return None: another model, or other weights, may answer."""

    def settings(self, settings: RunSettings, speed: float) -> RunSettings:
        """Return the settings of a run that sends the requests at their times, this much faster."""
        gaps_ns = gaps_between([time_s / speed for time_s in self._times_s], "--replay")
        return replace(replayed(settings, gaps_ns), sequences=None)  # the requests say their sequences


def with_model(options: PerfOptions) -> PerfOptions:
    """Return the options with the model of a replay, where none is named.

    Raises:
        ServingError: INVALID_ARG if the log has requests to several models.
    """
    if not options.data.replay or options.target.model:
        return options
    models = sorted({str(record.get("model")) for _, record in _records(Path(options.data.replay))})
    if len(models) != 1:
        raise invalid(
            f"{options.data.replay}: expected requests to one model, got {', '.join(models) or 'none'}",
            hint="-m names the model whose requests are sent",
        )
    return replace(options, target=replace(options.target, model=models[0]))


def read_recording(options: PerfOptions) -> Recording:
    """Return the requests to the model that the options name.

    Raises:
        ServingError: INVALID_ARG with file and line of a record that cannot be read, or where there is no request.
    """
    target, decoder = options.target, InferDecoder(TENSOR_BYTES_MAX)
    requests: list[tuple[float, InferRequest]] = []
    left_out_count = 0
    for where, record in _records(Path(options.data.replay)):
        if record.get("model") != target.model:
            continue
        try:
            time_s = datetime.fromisoformat(record["time"]).timestamp()
            body, json_size = _body(record["request"])
        except (KeyError, TypeError, ValueError) as error:
            raise invalid(f"{where}: expected a record of a request log: {error!r}") from None
        if not json_size:
            left_out_count += 1
            continue
        try:
            request = decoder.decode(target.model, target.version, body, json_size).request
        except ServingError as error:
            raise invalid(f"{where}: {error.message}") from None
        request.parameters |= dict(target.parameters)
        requests.append((time_s, request))
    if not requests:
        what = f"all {left_out_count} have values left out" if left_out_count else "got none"
        raise invalid(f"{options.data.replay}: expected requests to model '{target.model}', {what}")
    return Recording(requests, left_out_count)


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file, or of the files of a folder, each with its place."""
    count = 0
    try:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    count += 1
                    if count > LINES_MAX:
                        raise invalid(f"{path}: expected at most {LINES_MAX} records")
                    try:
                        record = orjson.loads(line)
                    except orjson.JSONDecodeError as error:
                        if line.startswith(_BEGINNING):  # cut off, by a full disk or the end of the server
                            continue
                        raise invalid(f"{file}: line {number}: expected a JSON object: {error}") from None
                    if not isinstance(record, dict):
                        raise invalid(f"{file}: line {number}: expected a JSON object")
                    yield f"{file}: line {number}", record
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror}") from None


def _body(request: dict[str, Any]) -> tuple[bytes, int]:
    """Return a request as a body of `infer`, and the size of its JSON; 0 where values were left out."""
    blobs: list[bytes] = []
    for entry in request["inputs"]:
        if "b64" in entry:
            blobs.append(b64decode(entry.pop("b64")))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        elif not isinstance(entry.get("data"), list):
            return b"", 0
    document = orjson.dumps(request)
    return b"".join((document, *blobs)), len(document)
