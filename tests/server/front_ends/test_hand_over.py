"""Front ends that an engine hands over to the next one: both engines and the front ends in this process."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.server.front_ends.test_remote_engine import Replies, part, request
from tests.support.closing import InLoop
from tests.support.fake_engine import identity_config
from tests.support.linked_engine import ServedFake

from charonia.config.model import SequenceBatching
from charonia.core.errors import ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START
from charonia.core.response import InferResponse
from charonia.server.facade import Document, Services
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.front_end import FrontEnd, connected, engine_socket
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.local_models import software_of
from charonia.server.front_ends.remote_engine import RemoteEngine
from charonia.server.options import GrpcOptions, HttpOptions, ServerOptions

NEXT = "engine_2.sock"
STATEFUL = replace(identity_config(), name="stateful", sequence_batching=SequenceBatching())
NO_ENDPOINTS = ServerOptions(http=HttpOptions(enabled=False), grpc=GrpcOptions(enabled=False))


class Served:
    """An engine that the test plays, behind a port."""

    def __init__(self, folder: Path, name: str = SOCKET_NAME, software: str = "", *, is_strict: bool = False) -> None:
        self.fake = ServedFake(models={"identity": identity_config(), "stateful": STATEFUL})
        self.open: set[tuple[str, int | str]] = set()
        self.port = EnginePort(folder, name, is_strict=is_strict, software=software)

    async def hand_over(self, name: str = NEXT) -> None:
        await self.port.hand_over.run(name, lambda: self.open)

    async def finish(self) -> None:
        """Let front ends leave."""
        await self.port.hand_over.finish(0.0, self.port.is_busy, lambda: self.open)


class Bench:
    """Two engines and two front ends. Use it as an asynchronous context manager."""

    def __init__(self, folder: Path, software: tuple[str, str] = ("", ""), *, is_strict: bool = False) -> None:
        self.first = Served(folder, software=software[0])
        self.second = Served(folder, NEXT, software[1], is_strict=is_strict)
        self.may_explain = asyncio.Event()
        self.front_ends = [FrontEnd(NO_ENDPOINTS, None, folder) for _ in range(2)]

    async def __aenter__(self) -> "Bench":
        await self.first.port.start(self.first.fake, Services(explain=self._explain))
        await self.second.port.start(self.second.fake, Services())
        for front_end in self.front_ends:
            await front_end.start()
        return self

    async def _explain(self, name: str, version: str) -> Document:
        """Explain when the test lets the engine."""
        await self.may_explain.wait()
        return {"name": name}

    async def __aexit__(self, *_: object) -> None:
        for front_end in self.front_ends:
            await front_end.close()
        await self.first.port.close()
        await self.second.port.close()

    def send(self, sent: object, front_end: int = 0) -> Replies:
        """Send a request through a front end, and return what will be its outcomes."""
        replies = Replies()
        engine = self.front_ends[front_end]._engine
        assert engine is not None
        engine.infer(sent, replies)  # type: ignore[arg-type]
        return replies

    async def answered(self, sent: object, front_end: int = 0) -> Replies:
        """Send a request and wait for its outcome."""
        replies = self.send(sent, front_end)
        await until(lambda: replies)
        return replies


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until a condition holds."""
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
def bench(tmp_path: Path) -> InLoop:
    return InLoop(lambda: Bench(tmp_path))


async def test_what_is_new_goes_to_the_next_engine_and_what_was_begun_is_answered(tmp_path: Path, bench: Bench) -> None:
    bench.first.fake.hold = True
    begun = bench.send(request())
    await until(lambda: bench.first.fake.tickets)
    await bench.first.hand_over()

    for front_end in range(2):
        ((outcome, _),) = await bench.answered(request(), front_end)
        assert isinstance(outcome, InferResponse)
    assert (len(bench.first.fake.tickets), len(bench.second.fake.tickets)) == (1, 2)
    assert bench.first.port.is_busy()
    bench.first.fake.release(0)
    await until(lambda: begun)
    await bench.first.finish()
    await bench.first.port.close()
    assert isinstance(begun[0][0], InferResponse)
    # A front end that comes now meets the engine of now.
    sock = connected(tmp_path / SOCKET_NAME)
    assert sock is not None
    sock.close()


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
async def test_front_ends_run_models_of_engines_with_their_own_packages_and_options(
    tmp_path: Path, *, first: bool, second: bool
) -> None:
    own = software_of(NO_ENDPOINTS)
    async with Bench(tmp_path, (own if first else "", own if second else "")) as bench:
        for front_end in bench.front_ends:
            assert front_end._engine is not None
            assert (front_end._engine.current.local is front_end._local) is first
        await bench.first.hand_over()
        for front_end in bench.front_ends:
            assert front_end._engine is not None
            assert (front_end._engine.current.local is front_end._local) is second


async def test_an_open_sequence_stays_over_every_front_end_until_it_ends(bench: Bench) -> None:
    first, second = bench.first.fake.tickets, bench.second.fake.tickets
    await bench.answered(part("stateful", SEQUENCE_START))
    bench.first.open = {("stateful", 7)}
    await bench.first.hand_over()
    await bench.answered(part("stateful", 0), 1)
    await bench.answered(part("stateful", SEQUENCE_END), 0)
    assert (len(first), len(second)) == (3, 0)

    await bench.answered(part("stateful", SEQUENCE_START), 1)
    await bench.answered(part("stateful", 0), 0)
    assert (len(first), len(second)) == (3, 2)


async def test_a_sequence_that_is_still_open_at_the_end_is_told_that_it_was_lost(bench: Bench) -> None:
    bench.first.open = {("stateful", 7)}
    await bench.first.hand_over()
    await bench.first.finish()

    lost = await bench.answered(part("stateful", 0))
    assert "sequence 7 of model 'stateful' was lost" in lost.errors[0][1]
    assert bench.first.fake.tickets == bench.second.fake.tickets == []


async def test_an_answer_that_takes_long_is_waited_for(bench: Bench) -> None:
    engine = bench.front_ends[0]._engine
    assert engine is not None
    asked = asyncio.ensure_future(engine.ask("Services.explain", "m", ""))
    await until(bench.first.port.is_busy)
    await bench.first.hand_over()
    assert bench.first.port.is_busy()
    bench.may_explain.set()

    assert await asked == {"name": "m"}
    await until(lambda: not bench.first.port.is_busy())


async def test_a_load_meanwhile_is_made_by_the_engine_of_then_and_a_load_before_by_both(bench: Bench) -> None:
    engine = bench.front_ends[0]._engine
    assert engine is not None
    assert bench.first.fake.requests is not None
    await engine.load_model("before")  # after the next engine has started: it catches up
    await bench.first.fake.requests.model_loaded("before", None, None, False)
    handing = asyncio.ensure_future(bench.first.hand_over())
    await asyncio.sleep(0)
    await engine.load_model("meanwhile")
    await handing

    assert [name for name, *_ in bench.first.fake.loads] == ["before"]
    assert [name for name, *_ in bench.second.fake.loads] == ["before", "meanwhile"]


async def test_a_model_that_the_next_engine_cannot_load_again_keeps_the_front_ends_where_they_are(
    tmp_path: Path,
) -> None:
    async with Bench(tmp_path, is_strict=True) as bench:
        engine = bench.front_ends[0]._engine
        assert engine is not None
        assert bench.first.fake.requests is not None
        await bench.first.fake.requests.model_loaded("m", None, None, False)
        bench.second.fake.control_error = invalid("no such file")
        for _ in range(2):
            with pytest.raises(ServingError, match="no such file"):
                await bench.first.hand_over()

        assert "no such file" in bench.second.port.failed.result().message
        await engine.load_model("goes on")
        assert [name for name, *_ in bench.first.fake.loads] == ["goes on"]
        await bench.answered(request())
        assert (len(bench.first.fake.tickets), len(bench.second.fake.tickets)) == (1, 0)


async def test_where_the_next_engine_has_gone_all_is_as_before(tmp_path: Path, bench: Bench) -> None:
    await bench.second.port.close()
    with pytest.raises(ServingError, match="the next engine has gone"):
        await bench.first.hand_over()

    await bench.answered(request())
    engine = bench.front_ends[1]._engine
    assert engine is not None
    await engine.load_model("m")
    assert len(bench.first.fake.tickets) == len(bench.first.fake.loads) == 1
    sock = connected(tmp_path / SOCKET_NAME)
    assert sock is not None
    sock.close()


async def test_a_front_end_that_came_too_late_does_not_lose_the_next_engine_with_the_one_before(bench: Bench) -> None:
    await bench.first.hand_over()
    reasons: list[str] = []
    late = RemoteEngine(take=lambda *_: asyncio.sleep(0), ended=reasons.append)
    for served in (bench.first, bench.second):
        ours, theirs = socket.socketpair()
        served.port.connect(theirs)
        with contextlib.suppress(ServingError):
            await late.connect(ours)
    replies = Replies()
    bench.second.fake.hold = True
    late.infer(request(), replies)
    await until(lambda: bench.second.fake.tickets)
    await bench.first.port.close()
    await asyncio.sleep(0.01)
    bench.second.fake.release(0)
    await until(lambda: replies)

    assert isinstance(replies[0][0], InferResponse)
    assert reasons == []
    late.close()


async def test_a_front_end_without_a_descriptor_for_the_engine_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path):
        make, failures = socket.socket, [OSError(errno.EMFILE, "Too many open files")] * 2

        def limited(*arguments: int, **more: int) -> socket.socket:
            if failures:
                raise failures.pop()
            return make(*arguments, **more)

        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", limited)
            (await engine_socket(tmp_path)).close()
        assert not failures


async def test_requests_wait_where_the_next_engine_comes_later(tmp_path: Path, bench: Bench) -> None:
    bench.first.fake.hold = True
    begun = bench.send(request())
    await until(lambda: bench.first.fake.tickets)
    await bench.first.hand_over("")
    held = bench.send(request())
    bench.first.fake.release(0)
    await until(lambda: begun)
    await bench.first.finish()
    await bench.first.port.close()
    assert not held

    late = Served(tmp_path)
    await late.port.start(late.fake, Services())
    await until(lambda: held)
    await late.port.close()
    assert isinstance(begun[0][0], InferResponse)
    assert isinstance(held[0][0], InferResponse)
    assert len(late.fake.tickets) == 1
