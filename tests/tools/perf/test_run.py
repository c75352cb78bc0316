"""Whole runs, against a server that behaves as each test wants it to.

They run in real time on a machine that may be slow or busy: what they say of times is what the server's own delays make
sure of, and all else is counted. Verdicts, windows and rates are looked at in `test_level.py`, in simulated time.
"""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import httptools
import numpy as np
import pytest

from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.tools.perf import schedule
from charonia.tools.perf.api import (
    Distribution,
    Event,
    InputSource,
    LevelDone,
    LevelStarted,
    LevelTick,
    LoadPlan,
    MeasuredTarget,
    MeasurementMode,
    MeasurePlan,
    Progress,
    RunSettings,
    SequencePlan,
    ServiceObjective,
    SharedMemory,
    WindowDone,
    silent,
)
from charonia.tools.perf.data.load import InputBatches
from charonia.tools.perf.data.spec import InputStep, ModelSpec, TensorSpec
from charonia.tools.perf.run import ask, run
from charonia.tools.results.json_form import from_json, to_json
from charonia.tools.results.records import LevelResult, LoadMode, PerfRun, Verdict
from charonia.wire.transport import WireOptions

SECOND = 1_000_000_000
MS = 1_000_000
SETTLING = MeasurePlan(interval_ms=200, stability=math.inf, trials_max=1000)
"""Settled as soon as three windows one after the other have answers, however much they differ."""
ANSWERED = MeasurePlan(MeasurementMode.COUNT_WINDOWS, window_request_count=1, stability=0.0)
"""Every window has an answer, and no three agree."""
FASTEST = MeasurePlan(
    MeasurementMode.COUNT_WINDOWS, window_request_count=10, trials_max=1, percentile=1, latency_limit_ns=200 * MS
)
"""A limit for the fastest of a window's requests: those that a busy machine holds up do not count."""
INPUT = TensorSpec("X", DataType.INT32, (1,))
OUTPUT = TensorSpec("Y", DataType.INT32, (1,))
ANSWER = {"model_name": "m", "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1], "data": [7]}]}


@dataclass(frozen=True)
class Reply:
    delay_s: float = 0.0
    status: int = 200
    held: bool = False  # until `FakeServer.release`


Behaviour = Callable[[int, dict[str, Any]], Reply]


class FakeServer:
    """A model server in a thread: it answers when and how the behaviour says, given the time and the request."""

    def __init__(self, behaviour: Behaviour, config: dict[str, Any] | None = None) -> None:
        self.behaviour = behaviour
        self.config = config or {}
        self.requests: list[dict[str, Any]] = []
        self.regions: list[tuple[str, str]] = []
        self.answered = 0
        self.waiting = 0
        self.most_waiting = 0
        self.held: list[Callable[[], None]] = []
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

    def release(self) -> None:
        for answer in self.held:
            answer()
        self.held = []

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
        if not self.server.server.is_serving():  # it was accepted just before the end
            transport.abort()

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
        server = self.server
        server.requests.append(request)
        server.waiting += 1
        server.most_waiting = max(server.most_waiting, server.waiting)
        reply = server.behaviour(time.monotonic_ns(), request)
        if reply.held:
            server.held.append(partial(self._infer, reply.status))
        elif reply.delay_s:
            server.loop.call_later(reply.delay_s, self._infer, reply.status)
        else:
            self._infer(reply.status)

    def _infer(self, status: int) -> None:
        self.server.waiting -= 1
        self.server.answered += status == 200
        self._answer(status, ANSWER if status == 200 else {"error": "no luck today"})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
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
        InputStep({"X": np.array([number], np.int32)}, {"Y": np.array([value], np.int32)})
        for number, value in enumerate(expected)
    ]
    return InputBatches(
        ModelSpec("m", "", 0, (INPUT,), (OUTPUT,)), [steps or [InputStep({"X": np.array([1], np.int32)})]]
    )


def settings(url: str, load: LoadPlan, measure: MeasurePlan = SETTLING, **more: Any) -> RunSettings:
    transport = WireOptions(timeout_s=more.pop("timeout_s", 0.0))
    return RunSettings(
        MeasuredTarget(url, "m", transport=transport, json_inputs=True, json_outputs=True), load, measure, **more
    )


def measured(
    wanted: RunSettings,
    source: InputSource | None = None,
    progress: Progress = silent,
    stop: threading.Event | None = None,
) -> PerfRun:
    with Client(wanted.target.url) as client:
        return run(wanted, source or data(), client, ask(client, wanted.target), progress, stop)


def level(wanted: RunSettings, source: InputSource | None = None) -> LevelResult:
    (found,) = measured(wanted, source).levels
    return found


def after(seconds: float) -> Behaviour:
    return lambda now_ns, request: Reply(seconds)


def noting(levels: list[float]) -> Progress:
    """Write down the levels as they begin."""

    def note(event: Event) -> None:
        if isinstance(event, LevelStarted):
            levels.append(event.level.value)

    return note


def rate(value: float) -> LoadPlan:
    return LoadPlan(LoadMode.REQUEST_RATE, start=value, end=value)


def concurrency(value: float, end: float | None = None, **more: Any) -> LoadPlan:
    return LoadPlan(start=value, end=value if end is None else end, **more)


def intended_ns(found: LevelResult) -> float:
    """Mean time from a level's begin at which its requests were to be sent, of one whose requests are kept."""
    sent = mean(record.begin_ns - found.epoch_ns for record in found.requests)
    return sent - (found.response_times.mean - found.service_times.mean)


def planned_ns(offsets: Sequence[int]) -> Any:
    return pytest.approx(mean(offsets), abs=1)


def test_a_sweep_over_concurrency_has_a_result_for_every_level() -> None:
    events: list[Event] = []
    most_waiting: list[int] = []

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, LevelStarted):
            server.most_waiting = 0
        if isinstance(event, LevelDone):
            most_waiting.append(server.most_waiting)

    with serving(after(0.01)) as server:
        found = measured(settings(server.url, concurrency(1, 2)), progress=note)

    assert [result.verdict for result in found.levels] == [Verdict.STABLE, Verdict.STABLE]
    assert most_waiting == [1, 2]
    one, two = found.levels
    for callers, result in ((1, one), (2, two)):
        assert 0 < result.request_count <= callers * (result.duration_ns / (10 * MS) + 1)
        assert result.throughput.value * result.duration_ns / SECOND == pytest.approx(result.request_count)
        assert result.latency.value >= 10 * MS
        assert result.latency.low <= result.latency.value <= result.latency.high
        assert result.response_times == result.service_times
    assert from_json(to_json(found)).levels[1].request_count == two.request_count
    assert [type(event) for event in events if not isinstance(event, LevelTick | WindowDone)] == [
        *(LevelStarted, LevelDone),
        *(LevelStarted, LevelDone),
    ]
    assert sum(isinstance(event, WindowDone) for event in events) == len(one.windows) + len(two.windows)


def test_the_server_s_own_count_is_that_of_the_client() -> None:
    with serving(after(0.005)) as server:
        found = level(settings(server.url, concurrency(2), MeasurePlan(request_count=100)))

    model = found.server.model
    assert model is not None
    assert (model.success_count, found.request_count) == (100, 100)
    assert (found.server.other_traffic, found.server.notes) == (False, ())
    assert found.resources is not None
    assert found.resources.rss_bytes > 0


def test_an_open_loop_sends_on_while_the_server_stalls() -> None:
    """The server answers nothing before it has the fiftieth request, which a closed loop would never send."""

    def stalling(now_ns: int, request: dict[str, Any]) -> Reply:
        if len(server.requests) < 50:
            return Reply(held=True)
        server.release()
        return Reply()

    with serving(stalling) as server:
        found = level(settings(server.url, rate(100), MeasurePlan(request_count=80), keep_requests=True))

    assert found.request_count == 80
    assert intended_ns(found) == planned_ns(range(0, 800 * MS, 10 * MS))
    # Each of the first waits for the fiftieth, which is not sent before its time.
    assert found.response_times.maximum >= 490 * MS
    assert found.response_times.mean * 80 >= sum(range(0, 500 * MS, 10 * MS))
    assert found.offered is not None
    assert found.offered.sent_rate * found.duration_ns / SECOND == pytest.approx(80)
    assert found.offered.sent_rate <= 80 / 0.79


def test_a_lone_stalled_place_delays_what_was_to_be_sent_later() -> None:
    """Requests of one sequence wait for each other: the wait is response time and not service time."""
    plan = SequencePlan(concurrent=1, length=5, serial=True)
    with serving(after(0.03), {"sequence_batching": {}}) as server:
        found = level(settings(server.url, rate(100), MeasurePlan(request_count=20), sequences=plan))

    assert server.most_waiting == 1
    # Every 10 ms one is to be sent, and every 30 ms at most one is.
    assert found.response_times.mean - found.service_times.mean >= mean(range(0, 20 * 20 * MS, 20 * MS))
    assert found.percentile(99) > 300 * MS


def test_an_overloaded_server_is_called_so_and_its_queue_is_not_waited_for() -> None:
    free_ns = 0

    def one_by_one(now_ns: int, request: dict[str, Any]) -> Reply:
        nonlocal free_ns
        free_ns = max(free_ns, now_ns) + 100 * MS
        return Reply((free_ns - now_ns) / SECOND)

    with serving(one_by_one) as server:
        plan = MeasurePlan(interval_ms=800, stability=0.0, trials_max=1000)
        found = level(settings(server.url, rate(100), plan))

    assert found.verdict is Verdict.OVERLOADED
    assert sum(one.sent_count for one in found.timeline) > sum(one.completed_count for one in found.timeline)


def test_arrivals_are_the_same_in_every_run_with_the_seed() -> None:
    def sent(server: FakeServer, seed: int) -> float:
        load = LoadPlan(LoadMode.REQUEST_RATE, 30, 30, distribution=Distribution.POISSON, seed=seed)
        return intended_ns(level(settings(server.url, load, MeasurePlan(request_count=30), keep_requests=True)))

    with serving(after(0.0)) as server:
        first, again, other = sent(server, 5), sent(server, 5), sent(server, 6)

    assert [first, again] == [planned_ns(list(islice(schedule.poisson(30, seed=5), 30)))] * 2
    assert other == planned_ns(list(islice(schedule.poisson(30, seed=6), 30)))


def test_custom_intervals_have_their_exact_rate() -> None:
    load = LoadPlan(LoadMode.INTERVALS, intervals_ns=(20 * MS, 40 * MS, 20 * MS))
    with serving(after(0.0)) as server:
        found = level(settings(server.url, load, MeasurePlan(request_count=60), keep_requests=True))

    assert found.level.value == 37.5
    assert intended_ns(found) == planned_ns([at * MS for n in range(0, 1600, 80) for at in (n + 20, n + 60, n + 80)])
    assert found.throughput.value <= 60 / 1.58  # the last is sent 1.58 s after the first, or later


def test_so_many_requests_are_sent_and_the_window_ends_with_the_last() -> None:
    with serving(after(0.01)) as server:
        found = level(settings(server.url, concurrency(3), MeasurePlan(request_count=60), keep_requests=True))

    assert (found.verdict, found.request_count, len(server.requests)) == (Verdict.COMPLETE, 60, 60)
    begin_ns = min(record.begin_ns for record in found.requests)
    end_ns = max(record.response_ns[-1] for record in found.requests)
    assert end_ns - begin_ns >= 20 * 10 * MS
    assert found.duration_ns == end_ns - begin_ns + 1
    assert found.throughput.value == pytest.approx(60 * SECOND / found.duration_ns)


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
    for window in found.windows:  # at most 20 requests a second
        assert window.end_ns - window.begin_ns in range(2 * SECOND, 61 * SECOND, SECOND)


def test_adaptive_measuring_settles_a_steady_model() -> None:
    # How soon, and how precisely, is seen in `test_adaptive.py`: here it depends on what else the machine does.
    plan = MeasurePlan(MeasurementMode.ADAPTIVE, precision=0.5, percentile=50, time_max_s=300.0)
    with serving(after(0.005)) as server:
        found = level(settings(server.url, concurrency(2), plan))

    assert found.verdict is Verdict.STABLE
    assert found.throughput.relative_half_width <= 0.5
    assert found.latency.relative_half_width <= 0.5
    assert found.latency.value >= 5 * MS


def test_a_sweep_goes_on_after_an_unstable_level_and_says_so() -> None:
    with serving(after(0.005)) as server:
        found = measured(settings(server.url, concurrency(1, 2), replace(ANSWERED, trials_max=1)))

    assert [result.verdict for result in found.levels] == [Verdict.UNSTABLE] * 2
    for result in found.levels:
        assert result.request_count > 0
        assert result.reasons == ("3 windows are needed to compare them, and there were 1.",)


def test_errors_are_counted_by_kind_and_do_not_end_the_run() -> None:
    def moody(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.002, status=503 if len(server.requests) % 4 == 0 else 200)

    with serving(moody) as server:
        found = measured(settings(server.url, concurrency(2, 3), MeasurePlan(request_count=100)))

    assert len(server.requests) == 200
    for result in found.levels:
        (kind,) = result.errors
        assert (kind.kind, kind.count, kind.samples) == ("UNAVAILABLE", 25, ("no luck today",))
        assert (result.request_count, result.error_share) == (75, 0.25)
    assert [result.verdict for result in found.levels] == [Verdict.COMPLETE] * 2


def test_a_level_where_everything_fails_has_no_requests() -> None:
    with serving(lambda now_ns, request: Reply(0.001, status=400)) as server:
        found = level(settings(server.url, concurrency(1), MeasurePlan(request_count=20)))

    assert (found.verdict, found.request_count, found.throughput.value) == (Verdict.NO_REQUESTS, 0, 0.0)
    assert (found.error_count, found.error_share) == (20, 1.0)
    assert found.reasons[-1] == "No request was answered successfully."


def test_requests_have_a_time_limit() -> None:
    def sometimes(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(held=len(server.requests) % 10 == 0)

    with serving(sometimes) as server:
        found = level(settings(server.url, concurrency(2), MeasurePlan(request_count=40), timeout_s=0.5))

    (kind,) = found.errors
    assert kind.kind == "TIMEOUT"
    # A machine that stands still can keep others from being answered in time too.
    assert kind.count >= len(server.held) > 0
    assert found.request_count == 40 - kind.count > 0


def test_goodput_is_what_met_its_objective() -> None:
    def sometimes(now_ns: int, request: dict[str, Any]) -> Reply:
        return Reply(0.06 if len(server.requests) % 5 == 0 else 0.002)

    plan = MeasurePlan(request_count=100, objectives=(ServiceObjective("latency:30ms", 30 * MS),))
    with serving(sometimes) as server:
        found = level(settings(server.url, concurrency(2), plan, keep_requests=True))

    met = sum(record.response_ns[-1] - record.begin_ns <= 30 * MS for record in found.requests)
    assert met <= 80
    assert found.goodput is not None
    assert (found.goodput.good_count, found.goodput.share) == (met, met / 100)


def test_wrong_answers_are_errors() -> None:
    with serving(after(0.001)) as server:
        found = level(settings(server.url, concurrency(1), MeasurePlan(request_count=20)), data(7, 8))

    (kind,) = found.errors
    assert (kind.kind, kind.count) == ("VALIDATION", 10)
    assert "expected 8, got 7" in kind.samples[0]


def test_a_wish_to_stop_gives_what_was_measured() -> None:
    stop = threading.Event()

    def stop_at_the_second_window(event: Event) -> None:
        if isinstance(event, WindowDone) and event.number == 2:
            stop.set()

    with serving(after(0.005)) as server:
        wanted = settings(server.url, concurrency(1, 50), ANSWERED)
        found = measured(wanted, progress=stop_at_the_second_window, stop=stop)

    assert [result.verdict for result in found.levels] == [Verdict.INTERRUPTED]
    assert found.levels[0].request_count >= 2
    assert len(found.levels[0].windows) in (2, 3)


# That it is not called overloaded at a rate, despite its backlog, is tested in `test_level.py`.
@pytest.mark.parametrize("load", [concurrency(2, 50), rate(4)], ids=["concurrency", "rate"])
def test_a_server_that_dies_leaves_what_was_measured(load: LoadPlan) -> None:
    def die_when_measured(event: Event) -> None:
        if isinstance(event, WindowDone) and event.window.request_count:
            server.die()

    with serving(after(0.005)) as server:
        plan = MeasurePlan(interval_ms=800, stability=0.0, trials_max=1000)
        found = measured(settings(server.url, load, plan), progress=die_when_measured)

    (lost,) = found.levels
    assert lost.verdict is Verdict.SERVER_LOST
    assert lost.request_count > 0
    assert lost.throughput.value * lost.duration_ns / SECOND == pytest.approx(lost.request_count)
    assert {kind.kind for kind in lost.errors} <= {"REFUSED", "RESET"}
    assert lost.error_count > 0


def test_the_latency_limit_ends_a_sweep_and_is_reported() -> None:
    levels: list[float] = [0]

    with serving(lambda now_ns, request: Reply(0.0 if levels[-1] <= 2 else 0.25)) as server:
        found = measured(settings(server.url, concurrency(1, 20), FASTEST), progress=noting(levels))

    assert [result.over_latency_limit for result in found.levels] == [False, False, True]
    assert found.answer == found.levels[1].level


def test_a_binary_search_finds_the_limit() -> None:
    levels: list[float] = [0]

    with serving(lambda now_ns, request: Reply(0.0 if levels[-1] <= 5 else 0.25)) as server:
        found = measured(settings(server.url, concurrency(1, 9, binary_search=True), FASTEST), progress=noting(levels))

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
    source = InputBatches(spec, [[InputStep({"X": np.array([number], np.int32)}) for number in (5, 6)]])
    with serving(look) as server:
        target = MeasuredTarget(server.url, "m", shared_memory=SharedMemory.SYSTEM)
        found = level(RunSettings(target, concurrency(2), MeasurePlan(request_count=20)), source)

    assert (found.request_count, found.errors) == (20, ())
    assert seen == {np.int32(5).tobytes(), np.int32(6).tobytes()}
    names = [name for name, verb in server.regions if verb == "register"]
    assert [verb for _, verb in server.regions] == ["register", "register", "unregister", "unregister"]
    assert {name for name, _ in server.regions} == set(names)
    assert not any((Path("/dev/shm") / name).exists() for name in names)


def test_validation_and_shared_memory_do_not_go_together() -> None:
    with serving(after(0.0)) as server:
        target = MeasuredTarget(server.url, "m", shared_memory=SharedMemory.SYSTEM)
        with pytest.raises(ServingError, match="not compared"):
            measured(RunSettings(target, concurrency(1), SETTLING), data(7))


def test_a_request_that_cannot_be_sent_is_an_error_with_its_reason() -> None:
    source = InputBatches(
        ModelSpec("m", "", 0, (TensorSpec("X", DataType.FP16, (1,)),)), [[InputStep({"X": np.ones(1, np.float16)})]]
    )
    with serving(after(0.0)) as server, pytest.raises(ServingError, match="FP16"):
        measured(settings(server.url, concurrency(1)), source)
