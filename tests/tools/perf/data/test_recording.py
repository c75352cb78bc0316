"""The requests of a request log, as a source of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.cli.perf import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.server.options import RequestLogOptions
from charonia.server.request_log import RequestRecorder
from charonia.tools.perf.api import RunSettings
from charonia.tools.perf.data.recording import Recording, read_recording, with_model
from charonia.tools.perf.options import run_settings
from charonia.tools.results.records import LoadMode

NUMBERS = {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def record(second: float, model: str = "m", **tensor: object) -> dict[str, Any]:
    time = f"2026-01-01T00:00:{second:09.6f}Z"
    return {"time": time, "model": model, "request": {"inputs": [NUMBERS | tensor]}}


def recording(path: Path, *records: object, arguments: tuple[str, ...] = ()) -> tuple[Recording, RunSettings]:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    options = with_model(parse(["--replay", str(path), *arguments]).options)
    made = read_recording(options)
    return made, made.settings(run_settings(options, {}, {}, ""), options.data.replay_speed)


def test_requests_are_sent_in_the_order_and_at_the_gaps_of_their_times(tmp_path: Path) -> None:
    made, settings = recording(tmp_path / "r.jsonl", record(3, data=[5, 6]), record(1), record(1.5))

    assert [made.request(0, step).inputs["A"].array.tolist() for step in (0, 2)] == [[[1, 2]], [[5, 6]]]
    assert settings.load.mode is LoadMode.INTERVALS
    assert settings.load.intervals_ns == (0, 500_000_000, 1_500_000_000)
    assert settings.measure.request_count == made.step_count(0) == 3


def test_a_factor_makes_them_follow_faster(tmp_path: Path) -> None:
    _, settings = recording(tmp_path / "r.jsonl", record(1), record(3), arguments=("--replay-speed", "4"))

    assert settings.load.intervals_ns == (0, 500_000_000)


def test_a_log_with_one_request_is_a_replay_too(tmp_path: Path) -> None:
    _, settings = recording(tmp_path / "r.jsonl", record(1))

    assert (settings.load.intervals_ns, settings.measure.request_count) == ((1_000_000_000,), 1)


@pytest.mark.parametrize(
    ("array", "datatype"),
    [
        (np.array([[np.nan, 1]], np.float32), DataType.FP32),
        (np.array([1.5], np.float16), DataType.FP16),
        (np.array([b"\xff", b""], object), DataType.BYTES),
        (np.array(["é".encode()], object), DataType.BYTES),
        (np.array([2**63], np.uint64), DataType.UINT64),
    ],
)
def test_what_the_server_writes_is_sent_again(tmp_path: Path, array: Array, datatype: DataType) -> None:
    log = RequestRecorder(RequestLogOptions(str(tmp_path)))
    request = InferRequest("m", {"A": Tensor("A", datatype, array)}, parameters={"k": "v"}, correlation_id=5, flags=1)
    for _ in range(2):
        log.begin("http", request, lambda *_: None, _no_header, None)(InferResponse("m", "1", "", []), True)
    log.close()

    sent = read_recording(with_model(parse(["--replay", str(tmp_path)]).options)).request(0, 0)

    np.testing.assert_array_equal(sent.inputs["A"].array, array)
    assert (sent.inputs["A"].datatype, sent.parameters, sent.correlation_id, sent.flags) == (datatype, {"k": "v"}, 5, 1)


def test_requests_with_values_left_out_are_counted(tmp_path: Path) -> None:
    redacted = record(2, data="[redacted]")
    large = record(4)
    del large["request"]["inputs"][0]["data"]

    made, _ = recording(tmp_path / "r.jsonl", record(1), redacted, large, record(5))

    assert (made.step_count(0), made.left_out_count) == (2, 2)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f'{json.dumps(record(1))}\n{{"time":"20\n{json.dumps(record(2))}\n')

    assert read_recording(with_model(parse(["--replay", str(path)]).options)).step_count(0) == 2


def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    records = record(1), record(2, "other"), record(3)

    with pytest.raises(ServingError, match="expected requests to one model, got m, other"):
        recording(tmp_path / "r.jsonl", *records)
    assert recording(tmp_path / "r.jsonl", *records, arguments=("-m", "m"))[0].step_count(0) == 2


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ((), "expected requests to one model, got none"),
        ((record(1, data="[redacted]"),), "all 1 have values left out"),
        (({"model": "m"},), "line 1: expected a record of a request log"),
        ((record(1, shape=[3]),), "line 1: Unable to parse 'data'"),
        ((record(1), record(1)), "expected requests at different times"),
        (([1],), "line 1: expected a JSON object"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, records: tuple[object, ...], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        recording(tmp_path / "r.jsonl", *records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replay-speed", "2", "-m", "m"], "--replay-speed: expected --replay with it"),
        (["--replay", "{}", "--request-count", "3"], "--replay: expected neither another load nor"),
        (["--replay", "{}", "--input-data", "zero"], "--replay: expected no other input data"),
        (["--replay", "{}", "-b", "2"], "--replay: expected no -b with it"),
    ],
)
def test_options_that_contradict_a_replay_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        parse([argument.format(tmp_path) for argument in arguments])


def _no_header(name: bytes) -> bytes | None:
    return None
