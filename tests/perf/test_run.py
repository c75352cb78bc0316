"""Whole runs, against a server that behaves as each test wants it to."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httptools
import numpy as np
import pytest

from charonia.client.sync_client import Client
from charonia.client.wire import WireOptions
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.perf.api import (
    Distribution,
    Event,
    InputSource,
    LevelBegun,
    LevelDone,
    LoadPlan,
    MeasurementMode,
    MeasurePlan,
    Objective,
    Progress,
    RunSettings,
    SequencePlan,
    SharedMemory,
    Stop,
    Target,
    Tick,
    WindowDone,
    silent,
)
from charonia.perf.data.source import Inputs
from charonia.perf.data.spec import ModelSpec, TensorSpec
from charonia.perf.data.steps import Step
from charonia.perf.run import ask, run
from charonia.results.json_form import from_json, to_json
from charonia.results.records import LevelResult, LoadMode, Run, Verdict

SECOND = 1_000_000_000
MS = 1_000_000
QUICK = MeasurePlan(interval_ms=200)
INPUT = TensorSpec("X", DataType.INT32, (1,))
OUTPUT = TensorSpec("Y", DataType.INT32, (1,))
ANSWER = {"model_name": "m", "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1], "data": [7]}]}


@dataclass(frozen=True)
class Reply:
    """What becomes of a request."""

    delay_s: float = 0.0
    status: int = 200


Behaviour = Callable[[int, dict[str, Any]], Reply]


class FakeServer:
    """A model server in a thread: it answers when and how the behaviour says, given the time and the request."""

    def __init__(self, behaviour: Behaviour, config: dict[str, Any] | None = None) -> None:
        self.behaviour = behaviour
        self.config = config or {}
        self.requests: list[dict[str, Any]] = []
        self.regions: list[tuple[str, str]] = []
        self.answered = 0
        self.connections: set[asyncio.Transport] = set()
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(self.loop.create_server(lambda: _Connection(self), "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.thread = threading.Thread(target=self.loop.run_forever)

    def document(self, path: str) -> dict[str, Any]:
        tensor = {"datatype": "INT32", "shape": [1]}
        duration = {"count": self.answered, "ns": self.answered * 1000}
        names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
        documents: dict[str, dict[str, Any]] = {
            "/v2": {"name": "fake", "version": "1", "extensions": ["statistics"]},
            "/v2/models/m": {
                "name": "m",
                "versions": ["1"],
                "platform": "fake",
                "inputs": [{"name": "X", **tensor}],
                "outputs": [{"name": "Y", **tensor}],
            },
            "/v2/models/m/config": {"name": "m", **self.config},
            "/v2/models/m/stats": {
                "model_stats": [{"name": "m", "version": "1", "inference_stats": dict.fromkeys(names, duration)}]
            },
        }
        return documents[path]

    def die(self) -> None:
        """Take no connections any more, and cut those there are."""

        def cut() -> None:
            self.server.close()
            for transport in self.connections:
                transport.abort()

        self.loop.call_soon_threadsafe(cut)


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.body = b""
        self.path = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(transport)
        self.parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path, self.body = url.decode(), b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if "/systemsharedmemory/" in self.path:
            self.server.regions.append((self.path.split("/")[-2], self.path.split("/")[-1]))
            self._answer(200, {})
            return
        if not self.path.endswith("/infer"):
            self._answer(200, self.server.document(self.path))
            return
        request, _ = json.JSONDecoder().raw_decode(self.body.decode("latin-1"))
        self.server.requests.append(request)
        reply = self.server.behaviour(time.monotonic_ns(), request)
        document = ANSWER if reply.status == 200 else {"error": "no luck today"}
        if reply.delay_s:
            self.server.loop.call_later(reply.delay_s, self._answer, reply.status, document)
        else:
            self._answer(reply.status, document)

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        self.server.answered += document is ANSWER
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


@contextmanager
def serving(behaviour: Behaviour, config: dict[str, Any] | None = None) -> Iterator[FakeServer]:
    server = FakeServer(behaviour, config)
    server.thread.start()
    try:
        yield server
    finally:
        server.die()
        server.loop.call_soon_threadsafe(server.loop.call_later, 0.05, server.loop.stop)
        server.thread.join()
        server.loop.run_until_complete(server.server.wait_closed())
        server.loop.close()


def data(*expected: int) -> InputSource:
    """Requests, each with the answer that is expected of it where one is given."""
    steps = [
        Step({"X": np.array([number], np.int32)}, {"Y": np.array([value], np.int32)})
        for number, value in enumerate(expected)
    ]
    return Inputs(ModelSpec("m", "", 0, (INPUT,), (OUTPUT,)), [steps or [Step({"X": np.array([1], np.int32)})]])


def settings(url: str, load: LoadPlan, measure: MeasurePlan = QUICK, **more: Any) -> RunSettings:
    wire = WireOptions(timeout_s=more.pop("timeout_s", 0.0))
    return RunSettings(Target(url, "m", wire=wire, json_inputs=True, json_outputs=True), load, measure, **more)


def measured(
    wanted: RunSettings, source: InputSource | None = None, progress: Progress = silent, stop: Stop | None = None
) -> Run:
    with Client(wanted.target.url) as client:
        return run(wanted, source or data(), client, ask(client, wanted.target), progress, stop)


def level(wanted: RunSettings, source: InputSource | None = None) -> LevelResult:
    (found,) = measured(wanted, source).levels
    return found


def after(seconds: float) -> Behaviour:
    return lambda now_ns, request: Reply(seconds)


def rate(value: float) -> LoadPlan:
    return LoadPlan(LoadMode.REQUEST_RATE, start=value, end=value)


def concurrency(value: float, end: float | None = None, **more: Any) -> LoadPlan:
    return LoadPlan(start=value, end=value if end is None else end, **more)


def test_a_sweep_over_concurrency_has_a_result_for_every_level() -> None:
    events: list[Event] = []
    with serving(after(0.01)) as server:
        found = measured(settings(server.url, concurrency(1, 2)), progress=events.append)

    assert [result.verdict for result in found.levels] == [Verdict.STABLE, Verdict.STABLE]
    one, two = found.levels
    assert two.throughput.value == pytest.approx(2 * one.throughput.value, rel=0.15)
    assert one.latency.value == pytest.approx(11 * MS, rel=0.15)
    assert one.latency.low <= one.latency.value <= one.latency.high
    assert one.response_times == one.service_times
    assert from_json(to_json(found)).levels[1].request_count == two.request_count
    assert [type(event) for event in events if not isinstance(event, Tick | WindowDone)] == [
        *(LevelBegun, LevelDone),
        *(LevelBegun, LevelDone),
    ]
    assert sum(isinstance(event, WindowDone) for event in events) == len(one.windows) + len(two.windows)


def test_the_server_s_own_count_is_that_of_the_client() -> None:
    with serving(after(0.005)) as server:
        found = level(settings(server.url, concurrency(2)))

    model = found.server.model
    assert model is not None
    assert model.success_count == pytest.approx(found.request_count, rel=0.1)
    assert (found.server.other_traffic, found.server.notes) == (False, ())
    assert found.resources is not None
    assert found.resources.cpu_seconds > 0


def test_an_open_loop_counts_latency_from_the_intended_time_through_stalls() -> None:
    """The server stalls for 600 ms in every 2.6 s; the reference is computed from when it did."""
    cycle, stall, service_s = int(2.6 * SECOND), int(0.6 * SECOND), 0.002

    def left_of_stall(now_ns: int) -> int:
        return max(stall - now_ns % cycle, 0)

    def stalling(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(left_of_stall(now_ns) / SECOND + service_s)

    plan = MeasurePlan(interval_ms=2167, percentile=95)
    with serving(stalling) as server:
        found = level(settings(server.url, rate(100), plan))

    first = found.windows[0].begin_ns
    begin_ns = time.monotonic_ns() - time.time_ns() + found.epoch_ns
    intended = begin_ns + first + np.arange(int(found.duration_ns * 100 / SECOND)) * 10 * MS
    reference = sorted(left_of_stall(int(now_ns)) + service_s * SECOND for now_ns in intended)
    assert found.percentile(95) == pytest.approx(reference[int(0.95 * len(reference))], rel=0.05)
    assert found.percentile(50) < 20 * MS
    assert found.offered is not None
    assert found.offered.achieved_rate == pytest.approx(100, rel=0.02)
    assert found.verdict is Verdict.STABLE


def test_a_lone_stalled_place_delays_what_was_to_be_sent_later() -> None:
    """Requests of one sequence wait for each other: the wait is response time and not service time."""
    plan = SequencePlan(concurrent=1, length=5, serial=True)
    with serving(after(0.03), {"sequence_batching": {}}) as server:
        found = level(settings(server.url, rate(100), MeasurePlan(request_count=20), sequences=plan))

    assert found.service_times.percentile(99) < 60 * MS
    assert found.percentile(99) > 300 * MS


def test_an_overloaded_server_is_called_so_and_soon() -> None:
    free_ns = 0

    def one_by_one(now_ns: int, request: dict[str, Any]) -> Reply:
        nonlocal free_ns
        free_ns = max(free_ns, now_ns) + 20 * MS
        return Reply((free_ns - now_ns) / SECOND)

    with serving(one_by_one) as server:
        found = level(settings(server.url, rate(200), MeasurePlan(interval_ms=800)))

    assert found.verdict is Verdict.OVERLOADED
    assert len(found.windows) <= 5  # of ten
    # Not all that were sent are waited for.
    assert sum(one.sent_count for one in found.timeline) > sum(one.completed_count for one in found.timeline) + 100
    assert found.offered is not None
    assert found.offered.sent_rate == pytest.approx(200, rel=0.05)
    assert found.offered.achieved_rate == pytest.approx(50, rel=0.15)
    assert found.offered.backlog_end > found.offered.backlog_begin + 100
    assert found.percentile(50) > 1 * SECOND


def test_arrivals_are_the_same_in_every_run_with_the_seed() -> None:
    def sent(server: FakeServer, seed: int) -> list[int]:
        load = LoadPlan(LoadMode.REQUEST_RATE, 30, 30, distribution=Distribution.POISSON, seed=seed)
        found = level(settings(server.url, load, MeasurePlan(request_count=30), keep_requests=True))
        return [record.begin_ns - found.epoch_ns for record in found.requests]

    def apart(one: list[int], two: list[int]) -> float:
        return median(abs(mine - other) for mine, other in zip(one, two, strict=True))

    with serving(after(0.0)) as server:
        first, again, other = sent(server, 5), sent(server, 5), sent(server, 6)

    assert apart(first, again) < 15 * MS < apart(first, other)


def test_custom_intervals_have_their_exact_rate() -> None:
    load = LoadPlan(LoadMode.INTERVALS, intervals_ns=(20 * MS, 40 * MS, 20 * MS))
    with serving(after(0.0)) as server:
        found = level(settings(server.url, load, MeasurePlan(request_count=60)))

    assert found.level.value == 37.5
    assert found.throughput.value == pytest.approx(37.5, rel=0.06)


def test_so_many_requests_are_sent_and_the_window_ends_with_the_last() -> None:
    with serving(after(0.01)) as server:
        found = level(settings(server.url, concurrency(3), MeasurePlan(request_count=60), keep_requests=True))

    assert (found.verdict, found.request_count, len(server.requests)) == (Verdict.COMPLETE, 60, 60)
    begin_ns = min(record.begin_ns for record in found.requests)
    end_ns = max(record.response_ns[-1] for record in found.requests)
    assert end_ns - begin_ns >= 20 * 10 * MS
    assert found.throughput.value == pytest.approx(60 * SECOND / (end_ns - begin_ns), rel=0.1)


def test_requests_that_warm_up_are_not_measured() -> None:
    with serving(after(0.001)) as server:
        found = level(settings(server.url, concurrency(2), MeasurePlan(request_count=20, warmup_request_count=30)))

    assert (found.request_count, len(server.requests)) == (20, 50)


def test_windows_of_a_count_have_at_least_that_many() -> None:
    plan = MeasurePlan(MeasurementMode.COUNT_WINDOWS, window_request_count=25, trials_max=3)
    with serving(after(0.05)) as server:
        found = level(settings(server.url, concurrency(1), plan))

    assert len(found.windows) == 3
    assert all(window.request_count >= 25 for window in found.windows)
    assert {window.end_ns - window.begin_ns for window in found.windows} == {2 * SECOND}


def test_adaptive_measuring_settles_a_steady_model() -> None:
    # How soon is seen in `test_adaptive.py`, in simulated time: here it depends on what else the machine does.
    with serving(after(0.005)) as server:
        found = level(settings(server.url, concurrency(2), MeasurePlan(MeasurementMode.ADAPTIVE, time_max_s=120.0)))

    assert found.verdict is Verdict.STABLE
    assert found.throughput.relative_half_width <= 0.05
    assert found.latency.relative_half_width <= 0.05


def test_too_few_windows_are_reported_with_their_verdict() -> None:
    with serving(after(0.005)) as server:
        found = level(settings(server.url, concurrency(1), MeasurePlan(interval_ms=200, trials_max=1)))

    assert found.verdict is Verdict.UNSTABLE
    assert found.request_count > 0
    assert found.reasons == ("3 windows are needed to compare them, and there were 1.",)


def test_a_sweep_goes_on_after_an_unstable_level_and_says_so() -> None:
    def erratic(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.001 if now_ns // (300 * MS) % 2 else 0.02)

    with serving(erratic) as server:
        plan = MeasurePlan(interval_ms=250, trials_max=3, stability=0.001)
        found = measured(settings(server.url, concurrency(1, 2), plan))

    assert [result.verdict for result in found.levels] == [Verdict.UNSTABLE] * 2
    assert "still differed by more than 0%" in found.levels[0].reasons[0]


def test_errors_are_counted_by_kind_and_do_not_end_the_run() -> None:
    def moody(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.002, status=503 if len(server.requests) % 4 == 0 else 200)

    with serving(moody) as server:
        found = level(settings(server.url, concurrency(2)))

    (kind,) = found.errors
    assert (kind.kind, kind.samples) == ("UNAVAILABLE", ("no luck today",))
    assert found.error_share == pytest.approx(0.25, abs=0.02)
    assert found.verdict is Verdict.STABLE


def test_a_level_where_everything_fails_has_no_requests() -> None:
    with serving(lambda now_ns, request: Reply(0.001, status=400)) as server:
        found = level(settings(server.url, concurrency(1), MeasurePlan(interval_ms=150, trials_max=3)))

    assert (found.verdict, found.request_count, found.throughput.value) == (Verdict.NO_REQUESTS, 0, 0.0)
    assert found.error_share == 1.0
    assert found.reasons[-1] == "No request was answered successfully."


def test_requests_have_a_time_limit() -> None:
    def sometimes(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(2.0 if len(server.requests) % 10 == 0 else 0.002)

    with serving(sometimes) as server:
        found = level(settings(server.url, concurrency(4), MeasurePlan(request_count=100), timeout_s=0.1))

    assert [(kind.kind, kind.count) for kind in found.errors] == [("TIMEOUT", 10)]


def test_goodput_is_what_met_its_objective() -> None:
    def sometimes(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.06 if len(server.requests) % 5 == 0 else 0.002)

    plan = MeasurePlan(request_count=100, objectives=(Objective("latency:30ms", 30 * MS),))
    with serving(sometimes) as server:
        found = level(settings(server.url, concurrency(2), plan))

    assert found.goodput is not None
    assert (found.goodput.good_count, found.goodput.share) == (80, 0.8)


def test_wrong_answers_are_errors() -> None:
    with serving(after(0.001)) as server:
        found = level(settings(server.url, concurrency(1), MeasurePlan(request_count=20)), data(7, 8))

    (kind,) = found.errors
    assert (kind.kind, kind.count) == ("VALIDATION", 10)
    assert "expected 8, got 7" in kind.samples[0]


def test_a_wish_to_stop_gives_what_was_measured() -> None:
    stop = Stop()
    begin = time.monotonic()

    def stop_at_the_second_window(event: Event) -> None:
        if isinstance(event, WindowDone) and event.number == 2:
            stop.request()

    with serving(after(0.005)) as server:
        wanted = settings(server.url, concurrency(1, 50), MeasurePlan(interval_ms=400, stability=0.0))
        found = measured(wanted, progress=stop_at_the_second_window, stop=stop)

    assert [result.verdict for result in found.levels] == [Verdict.INTERRUPTED]
    assert found.levels[0].request_count > 100
    assert time.monotonic() - begin < 6


def test_a_server_that_dies_leaves_what_was_measured_and_soon() -> None:
    def die_later(event: Event) -> None:
        if isinstance(event, WindowDone) and event.number == 1:
            server.die()

    begin = time.monotonic()
    with serving(after(0.005)) as server:
        found = measured(settings(server.url, concurrency(2, 50), MeasurePlan(interval_ms=500)), progress=die_later)

    assert [result.verdict for result in found.levels] == [Verdict.SERVER_LOST]
    assert found.levels[0].windows[0].request_count > 50
    assert {kind.kind for kind in found.levels[0].errors} <= {"REFUSED", "RESET"}
    assert found.levels[0].error_count > 0
    assert found.levels[0].throughput.value > 200
    assert time.monotonic() - begin < 10


def test_a_server_that_dies_while_requests_come_at_a_rate_is_lost_and_not_overloaded() -> None:
    def die_later(event: Event) -> None:
        if isinstance(event, WindowDone) and event.number == 2:
            server.die()

    with serving(after(0.005)) as server:
        plan = MeasurePlan(interval_ms=800, stability=0.0)
        found = measured(settings(server.url, rate(200), plan), progress=die_later)

    assert [result.verdict for result in found.levels] == [Verdict.SERVER_LOST]
    assert found.levels[0].throughput.value > 150


def test_the_latency_limit_ends_a_sweep_and_is_reported() -> None:
    def crowded(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.01 * len(server.connections))

    with serving(crowded) as server:
        plan = MeasurePlan(interval_ms=200, latency_limit_ns=45 * MS)
        found = measured(settings(server.url, concurrency(1, 20), plan))

    assert [result.over_latency_limit for result in found.levels][-2:] == [False, True]
    assert found.answer == found.levels[-2].level


def test_a_binary_search_finds_the_limit() -> None:
    def by_load(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.005 if levels[-1] <= 5 else 0.06)

    levels: list[float] = [0]

    def note(event: Event) -> None:
        if isinstance(event, LevelBegun):
            levels.append(event.level.value)

    with serving(by_load) as server:
        plan = MeasurePlan(interval_ms=150, latency_limit_ns=30 * MS)
        found = measured(settings(server.url, concurrency(1, 9, binary_search=True), plan), progress=note)

    assert levels[1:] == [1, 9, 5, 7, 6]
    assert found.answer is not None
    assert found.answer.value == 5


def test_sequences_start_end_and_are_all_finished() -> None:
    plan = SequencePlan(length=6, variation=0.5, first_id=100)
    with serving(after(0.002), {"sequence_batching": {}}) as server:
        found = level(settings(server.url, concurrency(3), MeasurePlan(request_count=100), sequences=plan))

    by_id: dict[int, list[tuple[bool, bool]]] = {}
    for request in server.requests:
        flags = request["parameters"]
        by_id.setdefault(flags["sequence_id"], []).append((flags["sequence_start"], flags["sequence_end"]))
    assert min(by_id) == 100
    assert all([flag for flag, _ in flags] == [True] + [False] * (len(flags) - 1) for flags in by_id.values())
    assert all([flag for _, flag in flags] == [False] * (len(flags) - 1) + [True] for flags in by_id.values())
    assert found.request_count == 100
    assert len(by_id) - 3 <= found.sequence_count <= len(by_id)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm")
def test_tensors_in_shared_memory_are_ours_alone_and_gone_afterwards() -> None:
    seen: set[bytes] = set()

    def look(now_ns: int, request: dict[str, Any]) -> Reply:
        place = request["inputs"][0]["parameters"]
        offset, size = place.get("shared_memory_offset", 0), place["shared_memory_byte_size"]
        seen.add((Path("/dev/shm") / place["shared_memory_region"]).read_bytes()[offset : offset + size])
        assert "shared_memory_region" in request["outputs"][0]["parameters"]
        return Reply()

    spec = ModelSpec("m", "", 0, (INPUT,), (OUTPUT,))
    source = Inputs(spec, [[Step({"X": np.array([number], np.int32)}) for number in (5, 6)]])
    with serving(look) as server:
        target = Target(server.url, "m", shared_memory=SharedMemory.SYSTEM)
        found = level(RunSettings(target, concurrency(2), MeasurePlan(request_count=20)), source)

    assert (found.request_count, found.errors) == (20, ())
    assert seen == {np.int32(5).tobytes(), np.int32(6).tobytes()}
    names = [name for name, verb in server.regions if verb == "register"]
    assert [verb for _, verb in server.regions] == ["register", "register", "unregister", "unregister"]
    assert {name for name, _ in server.regions} == set(names)
    assert not any((Path("/dev/shm") / name).exists() for name in names)


def test_validation_and_shared_memory_do_not_go_together() -> None:
    with serving(after(0.0)) as server:
        target = Target(server.url, "m", shared_memory=SharedMemory.SYSTEM)
        with pytest.raises(ServingError, match="not compared"):
            measured(RunSettings(target, concurrency(1), QUICK), data(7))


def test_several_processes_share_the_load() -> None:
    with serving(after(0.002)) as server:
        wanted = settings(server.url, concurrency(5), MeasurePlan(request_count=101))
        found = level(wanted)

    assert found.request_count == 101
    assert found.client.process_count >= 1
    assert found.client.cpu_seconds >= 0


def test_a_server_that_is_not_there_is_an_error() -> None:
    with serving(after(0.0)) as server:
        url = server.url

    with pytest.raises(ServingError, match="connection"), Client(url) as client:
        ask(client, Target(url, "m"))


def test_a_request_that_cannot_be_sent_is_an_error_with_its_reason() -> None:
    source = Inputs(
        ModelSpec("m", "", 0, (TensorSpec("X", DataType.FP16, (1,)),)), [[Step({"X": np.ones(1, np.float16)})]]
    )
    with serving(after(0.0)) as server, pytest.raises(ServingError, match="FP16"):
        measured(settings(server.url, concurrency(1)), source)
