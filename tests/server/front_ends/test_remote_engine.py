"""Front ends that reach an engine over a socket: both ends in this process, with the engine that the test plays."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.support.closing import InLoop
from tests.support.fake_engine import identity_config
from tests.support.linked_engine import ServedFake

from charonia.busy_poll import AWAKE_NS, SiblingProcesses
from charonia.clock import now_ns
from charonia.config.model import SequenceBatching
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.core.request import SEQUENCE_START, InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.statistics import Duration, ModelStatistics
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel
from charonia.server.channel.end import ChannelEnd
from charonia.server.facade import Services
from charonia.server.front_ends import engine_port, link, reconnect, remote_engine
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.front_end import Engines
from charonia.server.front_ends.link import LOAD_AGE_NS, LOAD_WANTED_NS
from charonia.server.front_ends.messages import plain
from charonia.server.front_ends.remote_engine import RemoteEngine, SharedRegions, services_of, size_of
from charonia.server.lifecycle.front_end_placement import Offer
from charonia.server.metrics.processes import Traffic
from charonia.server.shared_memory.registry import Memory, RegionRegistry
from charonia.server.tracing.requests import EventNames, begin
from charonia.server.tracing.sampling import TraceOptions
from charonia.server.tracing.service import TracingService
from charonia.wire.orca import Load
from charonia.wire.shared_memory import SystemRegion

TRAFFIC = Traffic("front_end_1", "http", 1, 2, 3)
NAMES = EventNames("RECV_START", "RECV_END", "SEND_START", "SEND_END")


class FrontEndInMemory:
    """A front end of the port."""

    def __init__(self, port: EnginePort) -> None:
        self.told: list[tuple[str, list[object]]] = []
        self.ends: list[str] = []
        self.refusal: ServingError | None = None
        self.traffic = [TRAFFIC]
        self.delay_s = 0.0
        self.engine = RemoteEngine(take=self._take, ended=self.ends.append)
        self.regions = SharedRegions(2**20, self.engine)
        self._port = port

    async def connect(self, port: EnginePort) -> frozenset[str]:
        ours, theirs = socket.socketpair()
        port.connect(theirs)
        return await self.engine.connect(ours)

    async def services(self) -> Services:
        return services_of(self.engine, await self.connect(self._port), self.regions, None)

    async def _take(self, change: str, arguments: list[object]) -> object:
        self.told.append((change, arguments))
        if self.refusal is not None:
            raise self.refusal
        if "register" in change or change == "regions":
            await self.regions.take(change, arguments)
        if change == "traffic":
            await asyncio.sleep(self.delay_s)
            return plain(self.traffic)
        return None


class Bench:
    """An engine with front ends. Use it as an asynchronous context manager."""

    def __init__(self, folder: Path, services: Services | None = None, front_ends: int = 1) -> None:
        self.fake = ServedFake()
        self.port = EnginePort(folder)
        self._services = services or Services()
        self._count = front_ends

    async def __aenter__(self) -> "Bench":
        await self.port.start(self.fake, self._services)
        self.front_ends = [FrontEndInMemory(self.port) for _ in range(self._count)]
        self.services = [await front_end.services() for front_end in self.front_ends]
        return self

    async def __aexit__(self, *_: object) -> None:
        for front_end in self.front_ends:
            front_end.engine.close()
        await self.port.close()

    @property
    def engine(self) -> RemoteEngine:
        """The engine as the first front end sees it."""
        return self.front_ends[0].engine

    async def answered(self, sent: InferRequest) -> "Replies":
        replies = Replies()
        self.engine.infer(sent, replies)
        await self.until(lambda: replies)
        return replies

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the event loop run until a condition holds."""
        while not condition():
            await asyncio.sleep(0)


def request(model: str = "identity", size: int = 16) -> InferRequest:
    return InferRequest(model, {"INPUT0": Tensor("INPUT0", DataType.FP32, np.arange(size, dtype="<f4"))}, id="r")


class Replies(list[tuple[Outcome, bool]]):
    def __call__(self, outcome: Outcome, final: bool) -> None:
        self.append((outcome, final))

    @property
    def errors(self) -> list[tuple[Code, str]]:
        return [(outcome.code, outcome.message) for outcome, _ in self if isinstance(outcome, ServingError)]


@pytest.fixture
def bench(tmp_path: Path) -> InLoop:
    return InLoop(lambda: Bench(tmp_path))


@pytest.mark.parametrize("size", [16, 100_000], ids=["inline", "in shared memory"])
async def test_a_request_is_answered_and_its_memory_is_used_again(size: int, bench: Bench) -> None:
    for _ in range(20):
        ((outcome, final),) = await bench.answered(request(size=size))
        assert isinstance(outcome, InferResponse)
        assert final
        assert (outcome.id, outcome.outputs[0].array.tolist()) == ("r", list(range(size)))
        bench.fake.tickets.clear()
        del outcome
    assert await bench.engine.drained(0)


async def test_tensors_in_lent_memory_are_read_there_and_the_memory_is_lent_again(bench: Bench) -> None:
    size = 30_000 * 4

    lend = bench.services[0].lend
    assert lend is not None
    places: set[int] = set()
    for number in range(20):
        body = lend(2 * size)
        assert body is not None
        inputs = {
            name: Tensor(name, DataType.FP32, np.ndarray((30_000,), "<f4", body, at))
            for name, at in (("INPUT0", 0), ("INPUT1", size))
        }
        for value, tensor in enumerate(inputs.values()):
            tensor.array[:] = number + value
        ((outcome, _),) = await bench.answered(InferRequest("identity", inputs))
        assert isinstance(outcome, InferResponse)
        back = [tensor.array for tensor in outcome.outputs]
        assert [(float(array[0]), float(array[-1])) for array in back] == [(number,) * 2, (number + 1,) * 2]
        assert all(np.shares_memory(array, np.frombuffer(body, np.uint8)) for array in back)
        places.add(np.frombuffer(body, np.uint8).ctypes.data)
        bench.fake.tickets.clear()
        del body, inputs, tensor, outcome, back
    assert len(places) < 10


async def test_a_body_that_was_lent_before_the_engine_went_is_sent_to_the_next_one(bench: Bench) -> None:
    body = bench.engine.lend(400_000)
    assert body is not None
    array = np.ndarray((100_000,), "<f4", body)
    array[:] = 3
    bench.engine.close()
    assert bench.engine.lend(10) is None
    await bench.front_ends[0].connect(bench.port)

    ((outcome, _),) = await bench.answered(InferRequest("identity", {"INPUT0": Tensor("INPUT0", DataType.FP32, array)}))

    assert isinstance(outcome, InferResponse)
    assert outcome.outputs[0].array.sum() == 300_000


async def test_other_processes_know_of_a_request_that_the_engine_gets(tmp_path: Path, bench: Bench) -> None:
    own, other = (SiblingProcesses(tmp_path, number, 3, cores=2) for number in (1, 2))
    bench.engine.siblings = own
    begin_ns = now_ns()
    assert other.has_spare_core(begin_ns)

    await bench.answered(request())

    assert not other.has_spare_core(begin_ns)
    assert other.has_spare_core(now_ns() + AWAKE_NS + 1)


async def test_what_comes_together_travels_in_one_message_each_way(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    kinds: list[object] = []
    send = ChannelEnd.send

    def counted(self: ChannelEnd, header: tuple[object, ...], *args: Any, **kwargs: Any) -> None:
        kinds.append(header[0])
        send(self, header, *args, **kwargs)

    monkeypatch.setattr(ChannelEnd, "send", counted)
    replies = Replies()
    for _ in range(16):
        bench.engine.infer(request(), replies)
    await bench.until(lambda: len(replies) == 16)

    assert kinds == ["infers", "outcomes"]
    assert all(isinstance(outcome, InferResponse) and final for outcome, final in replies)
    assert await bench.engine.drained(0)


async def test_requests_that_run_at_once_are_answered_without_a_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def first_two(self: ServedFake, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        asked.append(len(requests))
        return [self.echo(requests[0]), invalid("not this one")] if len(asked) < 3 else []

    monkeypatch.setattr(ServedFake, "infer_together", first_two)

    async with Bench(tmp_path) as bench:
        replies = [Replies() for _ in range(6)]
        for each in replies:
            bench.engine.infer(request(), each)
        await bench.until(lambda: all(replies))

        assert asked == [6, 4, 2]
        assert [each.errors for each in replies] == [[], [(Code.INVALID_ARG, "not this one")]] * 2 + [[], []]
        assert [len(each) for each in replies] == [1] * 6
        assert len(bench.fake.tickets) == 2


async def test_requests_of_all_kinds_arrive_in_their_order(bench: Bench) -> None:
    bench.fake.hold = True
    replies = Replies()
    asked = [request(), request(), request(size=100_000), request(), part("identity", SEQUENCE_START), request()]
    for number, each in enumerate(asked):
        each.id = str(number)
        ticket = bench.engine.infer(each, replies)
    ticket.cancel()
    await bench.until(lambda: len(bench.fake.tickets) == len(asked) and bench.fake.tickets[-1].cancelled)

    assert [ticket.request.id for ticket in bench.fake.tickets] == [each.id for each in asked]


async def test_responses_of_a_stream_come_in_order_and_the_last_may_be_empty(bench: Bench) -> None:
    responses = [InferResponse("identity", "1", str(n), []) for n in range(3)]
    bench.fake.outcomes.append([*((response, False) for response in responses), (None, True)])
    replies = Replies()
    bench.engine.infer(request(), replies)
    await bench.until(lambda: len(replies) == 4)

    assert [outcome.id for outcome, _ in replies if isinstance(outcome, InferResponse)] == ["0", "1", "2"]
    assert replies[-1] == (None, True)


async def test_a_cancelled_request_is_dropped_by_the_engine(bench: Bench) -> None:
    bench.fake.hold = True
    replies = Replies()
    ticket = bench.engine.infer(request(), replies)
    await bench.until(lambda: bench.fake.tickets)

    ticket.cancel()
    await bench.until(lambda: replies)
    ticket.cancel()

    assert replies.errors == [(Code.CANCELLED, "the request was cancelled")]
    assert bench.fake.tickets[0].cancelled
    assert bench.fake.tickets[0].late_cancels == 0


async def test_a_front_end_that_goes_away_cancels_its_requests_and_no_others(tmp_path: Path) -> None:
    async with Bench(tmp_path, front_ends=2) as bench:
        bench.fake.hold = True
        going, staying = Replies(), Replies()
        bench.front_ends[0].engine.infer(request(), going)
        await bench.until(lambda: len(bench.fake.tickets) == 1)
        bench.front_ends[1].engine.infer(request(), staying)
        await bench.until(lambda: len(bench.fake.tickets) == 2)

        bench.front_ends[0].engine.close()
        await bench.until(lambda: bench.fake.tickets[0].cancelled)
        bench.fake.release(1)
        await bench.until(lambda: staying)

        assert not going
        assert isinstance(staying[0][0], InferResponse)


class SecondEngine:
    """The engine that follows one that has gone. Use it as an asynchronous context manager."""

    def __init__(self, folder: Path) -> None:
        self.fake = ServedFake()
        self.port = EnginePort(folder)

    async def __aenter__(self) -> "SecondEngine":
        await self.port.start(self.fake, Services())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.port.close()


async def test_when_the_engine_goes_what_is_in_flight_ends_and_what_comes_waits_for_the_next_one(
    tmp_path: Path, bench: Bench
) -> None:
    bench.fake.hold = True
    running, cancelled, late = Replies(), Replies(), Replies()
    bench.engine.infer(request(), running)
    asked = asyncio.ensure_future(bench.engine.model_statistics())
    await bench.until(lambda: bench.fake.tickets)
    await bench.port.close()
    await bench.until(lambda: running)
    ticket = bench.engine.infer(request(), cancelled)
    bench.engine.infer(request(), late)
    ticket.cancel()

    assert running.errors == [(Code.UNAVAILABLE, "the engine ended before the request was answered")]
    assert len(bench.front_ends[0].ends) == 1
    assert bench.engine.is_live()
    assert not bench.engine.is_ready()
    assert not late
    with pytest.raises(ServingError, match="the engine has gone"):
        await bench.engine.repository_index()
    with pytest.raises(ServingError, match="the engine has gone"):
        await asked
    async with SecondEngine(tmp_path) as second:
        await bench.front_ends[0].connect(second.port)
        await bench.until(lambda: late)
        assert bench.engine.is_ready()
    assert isinstance(late[0][0], InferResponse)
    assert not cancelled
    assert len(second.fake.tickets) == 1


async def test_the_models_are_those_of_the_new_engine_as_soon_as_it_is_known(tmp_path: Path, bench: Bench) -> None:
    await bench.port.close()
    await bench.until(lambda: bench.engine.held.is_disconnected)
    async with SecondEngine(tmp_path) as second:
        second.fake.models = {"other": replace(identity_config(), name="other")}
        assert bench.engine.model_config("identity").name == "identity"
        await bench.front_ends[0].connect(second.port)

        assert bench.engine.model_config("other").name == "other"
        with pytest.raises(ServingError, match="'identity'"):
            bench.engine.model_config("identity")


async def test_what_waits_is_refused_when_the_engine_stays_away_or_the_front_end_leaves(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    await bench.port.close()
    await bench.until(lambda: bench.engine.held.is_disconnected)
    first, second, third = Replies(), Replies(), Replies()
    bench.engine.infer(request(), first)
    monkeypatch.setattr(reconnect, "HOLD_NS_MAX", 0)
    bench.engine.infer(request(), second)
    monkeypatch.undo()
    bench.engine.begin_exit()
    bench.engine.infer(request(), third)

    away = (Code.UNAVAILABLE, "the engine is being started again")
    assert first.errors == second.errors == [away]
    assert "Server is stopping" in third.errors[0][1]
    assert await bench.engine.drained(0.0)


async def test_a_sequence_that_was_open_is_told_that_it_was_lost(tmp_path: Path, bench: Bench) -> None:
    stateful = replace(identity_config(), name="stateful", sequence_batching=SequenceBatching())
    bench.fake.models["stateful"] = stateful
    bench.fake.changed()
    await bench.until(lambda: ("stateful", "") in bench.engine.state.directory.configs)
    for model in ("stateful", "identity"):
        await bench.answered(part(model, SEQUENCE_START))
    await bench.port.close()
    await bench.until(lambda: bench.engine.held.is_disconnected)

    async with SecondEngine(tmp_path) as second:
        second.fake.models["stateful"] = stateful
        await bench.front_ends[0].connect(second.port)
        lost = await bench.answered(part("stateful", 0))
        stateless = await bench.answered(part("identity", 0))
        again = await bench.answered(part("stateful", SEQUENCE_START))

    assert lost.errors[0][1].startswith("sequence 7 of model 'stateful' was lost")
    assert stateless.errors == again.errors == []


def part(model: str, flags: int) -> InferRequest:
    """Return a request of sequence 7."""
    asked = request(model)
    asked.correlation_id, asked.flags = 7, flags
    return asked


def test_the_size_of_a_request_is_that_of_its_elements() -> None:
    text = Tensor("T", DataType.BYTES, np.array([b"abc", b"de"], object))
    asked = InferRequest("m", {"T": text, "X": Tensor("X", DataType.FP32, np.zeros(3, np.float32))})

    assert size_of(asked) == 5 + 12


async def test_more_requests_than_the_limit_are_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "IN_FLIGHT_MAX", 1)

    async with Bench(tmp_path) as bench:
        bench.fake.hold = True
        first, second = Replies(), Replies()
        bench.engine.infer(request(), first)
        bench.engine.infer(request(), second)

        ((error, final),) = second
        assert isinstance(error, ServingError)
        assert final
        assert (error.code, error.hint != "") == (Code.UNAVAILABLE, True)
        assert not first


async def test_what_cannot_be_sent_fails_only_its_own_request(bench: Bench) -> None:
    odd = request()
    odd.parameters["odd"] = object()  # type: ignore[assignment]
    refused, broken, fine = Replies(), Replies(), Replies()
    bench.fake.outcomes.append([(InferResponse("identity", "1", "", [], {"odd": object()}), True)])  # type: ignore[dict-item]
    bench.engine.infer(odd, refused)
    bench.engine.infer(request(), broken)
    bench.engine.infer(request(), fine)
    await bench.until(lambda: fine)

    assert [code for code, _ in (*refused.errors, *broken.errors)] == [Code.INTERNAL, Code.INTERNAL]
    assert isinstance(fine[0][0], InferResponse)


async def test_models_are_known_without_asking_and_changes_before_they_are_answered(tmp_path: Path) -> None:
    async with Bench(tmp_path, front_ends=2) as bench:
        assert bench.engine.model_config("identity") == identity_config()
        assert bench.engine.model_metadata("identity") == bench.fake.model_metadata("identity")
        with pytest.raises(ServingError, match="'new' is not found"):
            bench.engine.model_config("new")

        bench.fake.models["new"] = replace(identity_config(), name="new")
        await bench.front_ends[1].engine.load_model("new", "{}", {"a": b"x" * 100_000, "b": b""})

        assert bench.fake.loads == [("new", "{}", {"a": b"x" * 100_000, "b": b""})]
        assert bench.engine.model_config("new", "1").name == "new"
        del bench.fake.models["new"]
        await bench.front_ends[1].engine.unload_model("new", unload_dependents=True)
        assert bench.fake.unloads == [("new", True)]
        with pytest.raises(ServingError, match="'new' is not found"):
            bench.engine.model_config("new")


async def test_a_load_that_fails_is_refused_with_its_own_error(bench: Bench) -> None:
    bench.fake.control_error = invalid("no such backend", hint="install it")
    with pytest.raises(ServingError, match=r"no such backend \(hint: install it\)") as caught:
        await bench.engine.load_model("m")
    assert caught.value.code is Code.INVALID_ARG


async def test_front_ends_that_come_one_after_the_other_have_the_same_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port, "COLLECT_S", 0.05)

    async with Bench(tmp_path) as bench:
        offers = {("identity", version): Offer(1, 1, "identity") for version in ("", "1")}
        bench.fake.offered = offers
        later = FrontEndInMemory(bench.port)
        await later.connect(bench.port)

        assert later.engine.state.offers == offers
        await bench.until(lambda: bench.engine.state.offers == offers)
        later.engine.close()


async def test_readiness_follows_the_engine(bench: Bench) -> None:
    assert (bench.engine.is_live(), bench.engine.is_ready(), bench.engine.is_exiting()) == (True, True, False)

    bench.fake.ready, bench.fake.exiting = False, True
    bench.fake.changed()
    await bench.until(bench.engine.is_exiting)

    assert not bench.engine.is_ready()


async def test_questions_are_answered_by_the_engine(tmp_path: Path) -> None:
    async def document(name: str, version: str) -> dict[str, object]:
        return {"model": [name, version]}

    async with Bench(tmp_path, Services(explain=document)) as bench:
        bench.fake.statistics = [ModelStatistics("identity", "1", success=Duration(3, 4))]
        (services,) = bench.services

        assert bench.engine.server_metadata() == bench.fake.server_metadata()
        assert await bench.engine.model_ready("identity")
        assert await bench.engine.model_statistics("identity", "1") == bench.fake.statistics
        assert await bench.engine.repository_index() == bench.fake.index
        assert len(await bench.engine.repository_index(ready_only=True)) == 1
        assert services.explain is not None
        assert await services.explain("m", "2") == {"model": ["m", "2"]}
        assert (services.rate_limits, services.sequences, services.demand, services.tracing) == (None,) * 4


async def test_an_exiting_front_end_takes_nothing_new_and_waits_for_the_rest(bench: Bench) -> None:
    bench.fake.hold = True
    before, after = Replies(), Replies()
    bench.engine.infer(request(), before)
    await bench.until(lambda: bench.fake.tickets)
    bench.engine.begin_exit()
    bench.engine.infer(request(), after)
    assert [code for code, _ in after.errors] == [Code.UNAVAILABLE]

    waiting = asyncio.ensure_future(bench.engine.drained(30))
    bench.fake.release(0)

    assert await waiting
    assert isinstance(before[0][0], InferResponse)


async def test_what_is_not_answered_at_the_exit_timeout_fails(bench: Bench) -> None:
    bench.fake.hold = True
    replies = Replies()
    bench.engine.infer(request(), replies)

    assert not await bench.engine.drained(0)
    assert "exit timeout expired" in replies.errors[0][1]


class Block:
    def view(self, offset: int, byte_size: int) -> memoryview:
        return memoryview(bytes(byte_size))

    def write(self, offset: int, data: memoryview) -> None:
        """Forget it."""


def opened(region: SystemRegion) -> Memory:
    return Block()


REGION = SystemRegion("r", "/key", 0, 64)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RegionRegistry.__init__

    def with_blocks(self: RegionRegistry, bytes_max: int, **_: Any) -> None:
        made(self, bytes_max, open_system=opened)

    monkeypatch.setattr(RegionRegistry, "__init__", with_blocks)


@pytest.mark.usefixtures("blocks")
async def test_a_region_is_registered_with_all_front_ends_or_none(tmp_path: Path) -> None:
    registry = RegionRegistry(2**20)

    async with Bench(tmp_path, Services(regions=registry), front_ends=2) as bench:
        first, second = bench.front_ends
        await first.regions.register_system(REGION)
        assert first.regions.system() == second.regions.system() == registry.system() == [REGION]
        with pytest.raises(ServingError) as caught:
            await second.regions.register_system(REGION)
        assert caught.value.code is Code.ALREADY_EXISTS

        await second.regions.unregister_system("r")
        assert first.regions.system() == second.regions.system() == registry.system() == []

        second.refusal = invalid("it cannot be mapped here")
        with pytest.raises(ServingError, match="it cannot be mapped here"):
            await first.regions.register_system(REGION)
        assert first.regions.system() == registry.system() == []


@pytest.mark.usefixtures("blocks")
async def test_a_new_front_end_gets_the_regions(tmp_path: Path) -> None:
    registry = RegionRegistry(2**20)

    async with Bench(tmp_path, Services(regions=registry)) as bench:
        await bench.front_ends[0].regions.register_system(REGION)
        new = FrontEndInMemory(bench.port)
        await new.services()

        assert new.regions.system() == [REGION]
        new.engine.close()


async def test_a_trace_has_the_events_of_both_processes(tmp_path: Path) -> None:
    tracing = TracingService(TraceOptions(file=str(tmp_path / "trace"), level=TraceLevel.TIMESTAMPS, rate=1))

    async with Bench(tmp_path, Services(tracing=tracing)) as bench:
        (services,) = bench.services
        assert services.tracer is not None
        sent, replies = request(), Replies()
        reply = begin(services.tracer, sent, replies, names=NAMES, received_ns=1, headers=lambda _: None)
        bench.fake.hold = True
        bench.engine.infer(sent, reply)
        await bench.until(lambda: bench.fake.tickets)

        trace = bench.fake.tickets[0].request.trace
        assert trace is not None
        trace.model_name, trace.model_version = "identity", "1"
        bench.fake.release(0)
        await bench.until(lambda: len(trace.tree.front) == 4)

        assert [name for name, _ in trace.tree.front] == list(NAMES)
        assert [at_ns for _, at_ns in trace.tree.front] == sorted(at_ns for _, at_ns in trace.tree.front)
        await services.tracer.change("", {"level": TraceLevel.OFF})
        assert services.tracer.sampler is None
        assert (await services.tracer.settings())["trace_level"] == ["OFF"]
        await tracing.aclose()
    assert "RECV_START" in (tmp_path / "trace").read_text()


async def test_a_message_that_is_none_ends_the_connection(bench: Bench) -> None:
    ours, theirs = socket.socketpair()
    bench.port.connect(theirs)
    ours.setblocking(False)
    ours.send(b"\xff" * 64)
    assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
    ours.close()

    replies = Replies()
    bench.engine.infer(request(), replies)
    await bench.until(lambda: replies)
    assert isinstance(replies[0][0], InferResponse)


async def test_a_front_end_without_models_of_its_own_has_counted_nothing(bench: Bench) -> None:
    (peer,) = bench.port._peers
    await peer.collect()

    assert "counts" not in [change for change, _ in bench.front_ends[0].told]


async def test_what_front_ends_have_taken_in_is_shown_by_front_end(tmp_path: Path) -> None:
    async with Bench(tmp_path, front_ends=2) as bench:
        found = [Traffic("front_end_2", "http", 1, 3, 9), Traffic("front_end_1", "grpc", 0, 2, 5)]
        for front_end, traffic in zip(bench.front_ends, found, strict=True):
            front_end.traffic = [traffic]

        assert await bench.port.collect() == found[::-1]


async def test_a_front_end_that_does_not_say_what_it_has_taken_in_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port, "COLLECT_S_MAX", 0.05)

    async with Bench(tmp_path, front_ends=3) as bench:
        slow, refusing, _ = bench.front_ends
        slow.delay_s = 5.0
        refusing.refusal = invalid("no")

        assert await bench.port.collect() == [TRAFFIC]


class CountedLoad:
    """Reports how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def request_report(self) -> None: ...

    def latest(self) -> Load:
        self.count += 1
        return {"count": self.count}

    async def report(self) -> Load:
        return self.latest()


async def test_a_report_of_the_load_comes_at_once_and_with_responses_while_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [now_ns()]
    monkeypatch.setattr(link, "now_ns", lambda: clock[0])

    async with Bench(tmp_path, Services(load=CountedLoad())) as bench:
        load = bench.services[0].load
        assert load is not None
        await bench.answered(request())
        assert load.latest() == {}  # nobody has wanted it

        load.request_report()
        await bench.answered(request())
        assert load.latest() == {"count": 1}
        clock[0] += LOAD_AGE_NS
        await bench.answered(request())
        await bench.answered(request())
        assert load.latest() == {"count": 2}
        clock[0] += LOAD_WANTED_NS
        await bench.answered(request())
        assert load.latest() == {"count": 2}


async def test_an_engine_that_ends_while_a_front_end_connects_to_it_is_not_the_next_one() -> None:
    class Ending:
        async def connect(self, sock: socket.socket) -> frozenset[str]:
            raise unavailable("it has ended")

    engines = Engines(lambda gone: cast(RemoteEngine, Ending()), lambda reason: None)
    with pytest.raises(ServingError, match="it has ended"), socket.socket() as sock:
        await engines.connect_next(sock)

    with pytest.raises(ServingError, match="the next engine has gone"):
        engines.move(())
