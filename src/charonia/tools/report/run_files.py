"""JSON files of runs, and the export of every request in the form of perf_analyzer's `--profile-export-file`.

Files are replaced atomically. The export is streamed request by request, so it takes no extra memory. Its times are
nanoseconds since the epoch; `error` of a failed request is an addition to perf_analyzer's form.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from charonia.core.errors import ServingError, invalid, not_found
from charonia.tools.results.json_form import from_json, to_json
from charonia.tools.results.records import LevelResult, PerfRun, RequestRecord

InputsOf = Callable[[int, int], str]
"""Returns the JSON object of a request's inputs for a stream and a step."""


def no_inputs(stream: int, step: int) -> str:
    return "{}"


def write_profile(path: Path, run: PerfRun, inputs_of: InputsOf = no_inputs) -> None:
    """Write the requests of a run atomically.

    Args:
        inputs_of: The inputs of a request, as JSON text.
    """
    with _replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(profile_parts(run, inputs_of))


def profile_parts(run: PerfRun, inputs_of: InputsOf = no_inputs) -> Iterator[str]:
    """Yield the text of the export in pieces."""
    yield '{"experiments":['
    for number, level in enumerate(run.levels):
        yield "," if number else ""
        mode = "request_rate" if level.level.mode.is_rate else "concurrency"
        value = int(level.level.value) if mode == "concurrency" else level.level.value
        yield f'{{"experiment":{{"mode":"{mode}","value":{json.dumps(value)}}},"requests":['
        for index, request in enumerate(level.requests):
            yield ("," if index else "") + _request(request, inputs_of)
        yield f'],"window_boundaries":{json.dumps(_boundaries(level), separators=(",", ":"))}}}'
    version = run.tool.rpartition(" ")[2]
    yield f'],"version":{json.dumps(version)},"service_kind":"triton","endpoint":""}}\n'


def _request(request: RequestRecord, inputs_of: InputsOf) -> str:
    parts = [f'{{"timestamp":{request.begin_ns}']
    if request.sequence_id:
        parts.append(f'"sequence_id":{request.sequence_id}')
    parts.append(f'"request_inputs":{inputs_of(request.stream, request.step)}')
    parts.append(f'"response_timestamps":[{",".join(map(str, request.response_ns))}]')
    if request.error:
        parts.append(f'"error":{json.dumps(request.error)}')
    return ",".join(parts) + "}"


def _boundaries(level: LevelResult) -> list[int]:
    """Return the boundaries of windows, ascending."""
    times = {time for window in level.windows for time in (window.begin_ns, window.end_ns)}
    return [level.epoch_ns + time for time in sorted(times)]


FILE_BYTES_MAX = 1 << 30
"""Largest file that is read."""


def write_run(path: Path, run: PerfRun) -> None:
    """Write a run as JSON."""
    write_whole(path, to_json(run).encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # a pipe or a device: there is nothing to replace
    else:
        _replace(path.resolve(), content)


def read_run(path: Path) -> PerfRun:
    """Return the run of a JSON file.

    Raises:
        ServingError: NOT_FOUND if the file does not exist, INVALID_ARG if it is not a run of this version.
    """
    try:
        if path.is_file() and path.stat().st_size > FILE_BYTES_MAX:
            raise invalid(f"{path}: expected at most {FILE_BYTES_MAX} bytes, got {path.stat().st_size}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise not_found(f"{path}: no such file") from None
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return from_json(content, str(path))
    except ServingError as error:
        raise invalid(error.message, hint="give a file that `charonia perf --json FILE` wrote") from None


def _replace(path: Path, content: bytes) -> None:
    with _replacing(path) as part:
        part.write_bytes(content)
        if path.exists():
            part.chmod(path.stat().st_mode & 0o777)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file that replaces `path` at the end; an error names `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise
