"""Streams of OpenAI's API in memory: what is written together, slow readers, clients that leave, keys that go."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, request

from charonia.config.model import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import internal, invalid
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

CHAT = "/v1/chat/completions"
BODY = b'{"model": "e:poet", "messages": [], "stream":true,  "odd": [1, 2]}'
KEY = "a-key-of-some-length"
P = ParamSpec("P")


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="e",
        input=(ModelInput("text_input", DataType.BYTES, dims=(1,)),),
        output=(ModelOutput("text_output", DataType.BYTES, (1,)),),
        model_transaction_policy=TransactionPolicy(decoupled=True),
        parameters=parameters,
    )


def text(content: bytes, **parameters: ParameterValue) -> InferResponse:
    tensor = Tensor("text_output", DataType.BYTES, np.array([content], object))
    return InferResponse("e", "1", "", [tensor], parameters)


def engine() -> FakeEngine:
    return FakeEngine(models={"e": config(openai_routes="chat/completions")}, hold=True)


def connected(fake: FakeEngine, limits: HttpLimits | None = None, services: Services | None = None) -> MemoryClient:
    return MemoryClient(HttpFrontend(fake, limits or HttpLimits(), services=services or Services()))


async def turn() -> None:
    """Let everything that is due happen."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def on_loop(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Run a test on an event loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@on_loop
async def test_the_body_reaches_the_engine_as_it_came() -> None:
    fake = engine()

    connected(fake).send(request(CHAT, body=BODY, headers={"X-Request-Id": "r1"}))

    asked = fake.tickets[0].request
    assert asked.inputs["text_input"].array.tolist() == [BODY]
    assert asked.parameters == {"openai": "chat/completions", "lora_name": "poet"}
    assert asked.id == "r1"


@on_loop
async def test_events_of_one_turn_are_written_together() -> None:
    fake = engine()
    client = connected(fake)
    client.send(request(CHAT, body=BODY))
    (ticket,) = fake.tickets

    for number in range(3):
        ticket.answer(text(b'{"n":%d}' % number), final=False)
    assert client.received == b""
    await turn()
    assert client.received.endswith(b'\r\n2d\r\ndata: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\n\r\n')
    ticket.answer(text(b'{"n":3}', prompt_tokens=4, completion_tokens=4), final=False)
    ticket.answer(None)
    await turn()

    (response,) = client.responses
    assert response.status == 200
    assert response.body.endswith(b'data: {"n":3}\n\ndata: [DONE]\n\n')
    assert ticket.late_cancels == 0


@on_loop
async def test_an_error_before_the_first_event_has_its_status_and_a_later_one_is_the_last_event() -> None:
    fake = engine()
    early, late = connected(fake), connected(fake)
    early.send(request(CHAT, body=BODY))
    late.send(request(CHAT, body=BODY))

    fake.tickets[0].answer(invalid("top_p: expected 0 to 1, got 5"))
    fake.tickets[1].answer(text(b"{}"), final=False)
    fake.tickets[1].answer(internal("the engine has died"))
    await turn()

    assert early.responses[0].status == 400
    assert json.loads(early.responses[0].body)["error"]["param"] == "top_p"
    events = late.responses[0].body.split(b"\n\n")
    assert late.responses[0].status == 200
    assert events[0] == b"data: {}"
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["message"] == "the engine has died"
    assert events[2:] == [b""]


@on_loop
async def test_a_client_that_does_not_read_is_aborted_at_the_limit_and_no_other() -> None:
    fake = engine()
    limits = HttpLimits(stream_unsent_bytes_max=10_000)
    front_end = HttpFrontend(fake, limits)
    slow, quick = MemoryClient(front_end), MemoryClient(front_end)
    slow.transport.is_blocked = True
    slow.send(request(CHAT, body=BODY))
    quick.send(request(CHAT, body=BODY))

    for _ in range(30):
        for ticket in fake.tickets:
            ticket.answer(text(b"x" * 1000), final=False)
        await turn()

    assert [ticket.cancelled for ticket in fake.tickets] == [True, False]
    assert len(slow.transport.pending) < 13_000
    slow.transport.unblock()
    assert b"more than 10000 bytes of the answer wait for the client" in slow.responses[0].body
    assert quick.received.count(b"data: ") == 30


@on_loop
async def test_a_client_that_leaves_cancels() -> None:
    fake = engine()
    client = connected(fake)
    client.send(request(CHAT, body=BODY))

    client.leave()

    assert fake.tickets[0].cancelled


@on_loop
async def test_a_stream_ends_when_its_key_is_gone() -> None:
    fake = engine()
    ring = KeyRing(parse_keys(f"me infer {KEY}").keys, b"secret")
    front_end = HttpFrontend(fake, HttpLimits(), services=Services(http_gate=Gate((), ring, what="API")))
    client = MemoryClient(front_end)
    client.send(request(CHAT, body=BODY, headers={"Authorization": f"Bearer {KEY}"}))
    fake.tickets[0].answer(text(b"{}"), final=False)
    await turn()

    ring.replace([])
    front_end.recheck()
    await turn()

    assert fake.tickets[0].cancelled
    assert b"authentication_error" in client.responses[0].body


@on_loop
async def test_a_plain_model_is_cancelled_when_its_client_leaves() -> None:
    fake = FakeEngine(models={"e": config()}, hold=True)
    client = connected(fake)
    client.send(request(CHAT, body=b'{"model":"e","messages":[{"role":"user","content":"hi"}],"n":2,"stream":true}'))
    while len(fake.tickets) < 2:
        await asyncio.sleep(0.001)

    client.leave()

    assert [ticket.cancelled for ticket in fake.tickets] == [True, True]


@on_loop
async def test_when_one_of_several_answers_fails_the_others_are_cancelled() -> None:
    fake = FakeEngine(models={"e": config()}, hold=True)
    client = connected(fake)
    client.send(request(CHAT, body=b'{"model":"e","messages":[{"role":"user","content":"hi"}],"n":3}'))
    while len(fake.tickets) < 3:
        await asyncio.sleep(0.001)

    fake.tickets[0].answer(text(b"fine"))
    fake.tickets[1].answer(internal("broken"))

    assert client.responses[0].status == 500
    assert fake.tickets[2].cancelled


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
@on_loop
async def test_characters_that_come_in_pieces_are_whole(kind: str) -> None:
    fake = FakeEngine(models={"e": config(text_output_kind=kind)}, hold=True)
    client = connected(fake)
    client.send(request(CHAT, body=b'{"model":"e","messages":[{"role":"user","content":"hi"}],"stream":true}'))
    while not fake.tickets:
        await asyncio.sleep(0.001)
    whole = "é世🙂".encode() + b"\xf0"

    for end in range(1, len(whole) + 1):
        fake.tickets[0].answer(text(whole[end - 1 : end] if kind == "delta" else whole[:end]), final=False)
    fake.tickets[0].answer(None)
    await turn()

    events = [json.loads(event[6:]) for event in client.responses[0].body.split(b"\n\n")[:-2]]
    pieces = [event["choices"][0]["delta"].get("content") for event in events]
    assert pieces == ["", "é", "世", "🙂", "�", None]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
