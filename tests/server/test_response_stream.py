"""The responses of a request, taken one by one on the engine's own loop."""

import asyncio

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine, FakeTicket

from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Reply
from charonia.server import embedding as inproc
from charonia.server.embedding import InProcessFrontend, make_request


def request() -> InferRequest:
    return make_request(FakeEngine(), "identity", {"INPUT0": np.zeros((1, 16), "f4")})


def response(id: str = "") -> InferResponse:
    return InferResponse("identity", "1", id, [])


def held() -> tuple[FakeEngine, InProcessFrontend]:
    engine = FakeEngine(hold=True)
    return engine, InProcessFrontend(engine)


def test_a_version_may_be_a_number() -> None:
    made = make_request(FakeEngine(), "identity", {"INPUT0": np.zeros((1, 16), "f4")}, version=1)  # type: ignore[arg-type]

    assert made.model_version == "1"


async def test_responses_come_as_they_are_sent_and_the_stream_ends_after_the_last() -> None:
    engine, frontend = held()
    stream = frontend.stream(request())
    taking = asyncio.ensure_future(_ids(stream))
    await asyncio.sleep(0)
    engine.tickets[0].answer(response("a"), False)
    await asyncio.sleep(0)
    engine.tickets[0].answer(response("b"), False)
    engine.tickets[0].answer(None, True)
    assert await taking == ["a", "b"]
    stream.close()
    assert not engine.tickets[0].cancelled


async def _ids(stream: inproc.ResponseStream) -> list[str]:
    return [answer.id async for answer in stream]


async def test_an_error_is_raised_after_the_responses_before_it() -> None:
    engine, frontend = held()
    stream = frontend.stream(request())
    engine.tickets[0].answer(response("a"), False)
    engine.tickets[0].answer(internal("broken"), True)
    first = await stream.next()
    assert first is not None
    assert first.id == "a"
    for _ in range(2):
        with pytest.raises(ServingError, match="broken"):
            await stream.next()


async def test_closing_cancels_the_request_and_wakes_who_waits() -> None:
    engine, frontend = held()
    stream = frontend.stream(request())
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    stream.close()
    assert await waiting is None
    assert engine.tickets[0].cancelled
    stream.close()


async def test_a_request_whose_responses_are_not_taken_fails_and_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inproc, "UNREAD_RESPONSES_MAX", 3)

    engine, frontend = held()
    stream = frontend.stream(request())
    for _ in range(5):
        engine.tickets[0].answer(response(), False)
    assert engine.tickets[0].cancelled
    for _ in range(3):
        assert await stream.next() is not None
    with pytest.raises(ServingError, match="3 responses of model 'identity' were not taken") as caught:
        await stream.next()
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_model_that_floods_before_the_request_is_known_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inproc, "UNREAD_RESPONSES_MAX", 1)

    class Flooding(FakeEngine):
        def infer(self, request: InferRequest, reply: Reply) -> FakeTicket:
            ticket = FakeTicket(request, reply)
            self.tickets.append(ticket)
            for _ in range(3):
                ticket.answer(response(), False)
            return ticket

    engine = Flooding()
    InProcessFrontend(engine).stream(request())
    assert engine.tickets[0].cancelled


@pytest.mark.parametrize(
    ("outcomes", "is_answered"),
    [
        ([(True, True)], True),
        ([(True, False), (False, True)], True),
        ([(False, True)], False),
        ([(True, False), (True, True)], False),
    ],
)
async def test_a_request_for_one_response_takes_exactly_one(
    outcomes: list[tuple[bool, bool]], is_answered: bool
) -> None:
    engine = FakeEngine(outcomes=[[(response() if there else None, final) for there, final in outcomes]])
    if is_answered:
        await InProcessFrontend(engine).infer(request())
        return
    with pytest.raises(ServingError, match="did not answer exactly once") as caught:
        await InProcessFrontend(engine).infer(request())
    assert caught.value.code is Code.UNSUPPORTED
