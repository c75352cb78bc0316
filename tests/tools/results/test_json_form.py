import json
from dataclasses import replace

import pytest

from charonia.core.errors import ServingError
from charonia.core.latency import LatencyHistogram
from charonia.core.metadata import ServerMetadata
from charonia.tools.results.json_form import from_json, to_json
from charonia.tools.results.records import (
    ClientTimes,
    ErrorKind,
    Estimate,
    Goodput,
    Gpu,
    LevelResult,
    LoadLevel,
    LoadMode,
    Machine,
    ModelInfo,
    OfferedLoad,
    PerfRun,
    RequestRecord,
    Resources,
    ServerInfo,
    ServerModel,
    ServerSide,
    TimeBucket,
    Verdict,
    Window,
)

PART = ServerModel("part", "1", 8, 4, 8, 0, 800, 100, 100, 500, 100, 8)
MODEL = ServerModel("whole", "3", 8, 4, 8, 1, 2000, 300, 100, 500, 100, 8, 2, 100, 6, 300, composing=(PART,))
LEVEL = LevelResult(
    level=LoadLevel(LoadMode.REQUEST_RATE, 12.5),
    verdict=Verdict.OVERLOADED,
    reasons=("Too much.",),
    duration_ns=2_000_000_000,
    request_count=8,
    throughput=Estimate(4.0, 3.0, 5.0),
    latency=Estimate(10.0, 10.0, 10.0, 0.0),
    response_times=LatencyHistogram.of([1000, 2000, 90_000]),
    service_times=LatencyHistogram.of([900]),
    first_response_times=None,
    response_count=16,
    sequence_count=2,
    errors=(ErrorKind("TIMEOUT", 2, ("late",)),),
    over_latency_limit=True,
    windows=(Window(0, 1_000_000_000, 4, 1, 4.0, 10.0, used=True),),
    timeline=(TimeBucket(0, 100, 3, 2, 1, 10, 20, 30),),
    client=ClientTimes(1.0, 2.0, 0.25, 0.5, 2),
    server=ServerSide(MODEL, other_traffic=True, notes=("Others.",)),
    offered=OfferedLoad(12.5, 12.0, 4.0, 0.01, 1, 9),
    goodput=Goodput(("latency:50ms",), 6, 3.0, 0.6),
    resources=Resources(1.5, 0.75, 2**20, 3),
    gpus=(Gpu("GPU-1", 0.5, None, 1.0, 2.0),),
    metrics={'x{a="b"}': 1.0},
    requests=(RequestRecord(1, (2, 3), 0, 0),),
    epoch_ns=1_700_000_000_000_000_000,
)
RUN = PerfRun(
    tool="charonia 0",
    began_at="2026-01-01T00:00:00+00:00",
    duration_ns=5,
    machine=Machine("host", "Linux 6", "a processor", 2, 2**30, "3.11.0"),
    server=ServerInfo("http://localhost:8000", "http", "charonia", "0", ("statistics",)),
    model=ModelInfo("whole", "", "ensemble", 8, decoupled=False, sequence=False, cached=True),
    options={"-b": "1"},
    batch_size=1,
    stabilising_percentile=95.0,
    levels=(LEVEL,),
    answer=LEVEL.level,
)


def test_a_run_comes_back_from_json_but_for_its_single_requests() -> None:
    found = from_json(to_json(RUN))

    assert found.levels[0].requests == ()
    assert to_json(found) == to_json(RUN)
    assert found.levels[0].response_times == LEVEL.response_times
    assert found.levels[0].server.model == MODEL


def test_the_json_begins_with_format_and_version() -> None:
    assert list(json.loads(to_json(RUN)))[:2] == ["format", "version"]


def test_fields_of_a_newer_writer_are_passed_over() -> None:
    data = json.loads(to_json(RUN)) | {"mood": "good"}

    assert to_json(from_json(json.dumps(data))) == to_json(RUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "expected the JSON of a run"),
        ({"version": 99}, "expected version 1 of the format, got 99"),
        ({"levels": 3}, "Run.levels: unexpected int"),
        ({"batch_size": True}, "Run.batch_size: unexpected bool"),
        ({"levels": [{}]}, "LevelResult.level is missing"),
        ({"machine": []}, "Machine: expected an object, got list"),
        ({"levels": [{"level": {"mode": "speed", "value": 1}}]}, "'speed' is not a valid LoadMode"),
    ],
)
def test_other_json_is_refused_with_the_place(change: dict[str, object], message: str) -> None:
    data = json.loads(to_json(RUN)) | change

    with pytest.raises(ServingError, match=message) as caught:
        from_json(json.dumps(data), "old.json")

    assert caught.value.message.startswith("old.json: ")


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ServingError, match="expected"):
        from_json(text)


def test_rates_and_shares_are_of_the_time_measured() -> None:
    assert (LEVEL.response_rate, LEVEL.sequence_rate, LEVEL.error_count, LEVEL.error_share) == (8.0, 1.0, 2, 0.2)
    assert LEVEL.percentile(100) == 90_000
    assert replace(LEVEL, request_count=0, errors=()).error_share == 0.0
    assert replace(LEVEL, language=None).token_rate.value == 0.0


def test_a_level_says_what_it_is() -> None:
    assert str(LoadLevel(LoadMode.CONCURRENCY, 4)) == "concurrency 4"
    assert str(LEVEL.level) == "request rate 12.5"


def test_the_means_of_a_server_are_a_request_s() -> None:
    assert (MODEL.request_ns, MODEL.mean(MODEL.queue_ns)) == (250.0, 37.5)
    assert MODEL.overhead_ns == 250.0 - 1000 / 8 - 400 / 8


def test_an_interval_without_samples_is_of_no_width() -> None:
    assert Estimate(4.0, 3.0, 5.0).relative_half_width == 0.25
    assert LEVEL.latency.relative_half_width == float("inf")


def test_a_server_of_the_usual_name_that_says_what_it_is_goes_by_its_own_name() -> None:
    def name(of: str, *extensions: str) -> str:
        return ServerInfo.of("url", "http", ServerMetadata(of, "1", extensions)).name

    assert name("triton", "statistics", "charonia") == "charonia"
    assert name("triton", "statistics") == "triton"
    assert name("mine", "charonia") == "mine"
