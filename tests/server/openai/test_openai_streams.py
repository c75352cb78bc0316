"""Streams of OpenAI's API in memory: what is written together, slow readers, clients that leave, keys that go."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, request
from tests.support.idle_time import IdleTimeLoop

from charonia.config.model import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import internal, invalid
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

CHAT = "/v1/chat/completions"
USER = b'[{"role":"user","content":"hi"}]'
BODY = b'{"model": "e:poet", "messages": %b, "stream":true,  "odd": [1, 2]}' % USER
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


def in_idle_time(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Run a test on an event loop whose clock jumps from timer to timer."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=IdleTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


STREAMED: tuple[tuple[str, bytes, dict[str, str]], ...] = (
    (CHAT, BODY, {"openai_routes": "chat/completions"}),
    (CHAT, b'{"model":"e","messages":%b,"stream":true}' % USER, {}),
    ("/v1/responses", b'{"model":"e","input":"hi","stream":true}', {"openai_routes": "chat/completions"}),
    ("/v2/models/e/generate_stream", b'{"text_input":"hi"}', {}),
)


@pytest.mark.parametrize(("route", "body", "parameters"), STREAMED)
@in_idle_time
async def test_a_stream_begins_without_an_event_and_comments_come_while_there_is_none(
    route: str, body: bytes, parameters: dict[str, str]
) -> None:
    fake = FakeEngine(models={"e": config(**parameters)}, hold=True)
    client = connected(fake, HttpLimits(stream_keep_alive_s=10))
    client.send(request(route, body=body))
    while not fake.tickets:
        await asyncio.sleep(0)

    assert client.received == b""
    await asyncio.sleep(1.5)
    assert client.received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert client.received.endswith(b": keep-alive\n\n\r\n")
    before = len(client.received)
    await asyncio.sleep(60)
    assert client.received[before:].count(b": keep-alive\n\n") >= 6
    fake.tickets[0].answer(invalid("found late"))
    await turn()

    assert client.responses[0].status == 200
    last = client.responses[0].body.split(b"\n\n")[-2].removeprefix(b"data: ")
    assert b"found late" in last
    received = len(client.received)
    await asyncio.sleep(60)
    assert len(client.received) == received


@in_idle_time
async def test_no_comments_between_events_that_come_in_time_and_none_without_an_interval() -> None:
    fake = engine()
    busy, silent = (
        connected(fake, HttpLimits(stream_keep_alive_s=10)),
        connected(fake, HttpLimits(stream_keep_alive_s=0)),
    )
    busy.send(request(CHAT, body=BODY))
    silent.send(request(CHAT, body=BODY))

    for _ in range(20):
        fake.tickets[0].answer(text(b"{}"), final=False)
        await asyncio.sleep(4)

    assert b"keep-alive" not in busy.received
    assert silent.received == b""


@on_loop
async def test_the_request_id_comes_back_or_one_is_made() -> None:
    fake = engine()
    given, made, refused = connected(fake), connected(fake), connected(fake)

    given.send(request(CHAT, body=BODY.replace(b"true", b"false"), headers={"X-Request-Id": "r-1"}))
    made.send(request(CHAT, body=BODY.replace(b"true", b"false")))
    refused.send(request(CHAT, body=b"{}"))
    for ticket in fake.tickets:
        ticket.answer(text(b"{}"))

    assert given.responses[0].headers["x-request-id"] == "r-1" == fake.tickets[0].request.id
    assert made.responses[0].headers["x-request-id"] == fake.tickets[1].request.id != ""
    assert refused.responses[0].status == 400
    assert refused.responses[0].headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("parameters", [{"openai_routes": "chat/completions,completions,embeddings"}, {}])
@pytest.mark.parametrize(
    ("route", "members", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": ["a", ""]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": "yes"}, "stream"),
        ("responses", {}, "input"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": "hi", "background": True}, "background"),
        ("responses", {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "tools"),
        ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ],
)
@on_loop
async def test_what_a_request_lacks_is_refused_by_name_before_any_model_sees_it(
    parameters: dict[str, str], route: str, members: dict[str, object], param: str
) -> None:
    fake = FakeEngine(models={"e": config(**parameters)}, hold=True)
    client = connected(fake)

    client.send(request(f"/v1/{route}", body=json.dumps({"model": "e", **members}).encode()))
    while not client.responses:
        await asyncio.sleep(0.001)

    assert client.responses[0].status == 400
    assert json.loads(client.responses[0].body)["error"]["param"] == param
    assert not fake.tickets


@on_loop
async def test_routes_that_clients_probe() -> None:
    fake = FakeEngine(models={"e": config(openai_routes="chat/completions", max_model_len="4096")}, hold=True)
    client = connected(fake)

    for path in ("/health", "/version", "/v1/models/e", "/v1/models/e/"):
        client.send(request(path, method="GET"))
    for path in ("/v1/chat/completions/", "/v1/messages", "/tokenize", "/v1/v1/chat/completions", "/chat/completions"):
        client.send(request(path, body=BODY.replace(b"e:poet", b"e").replace(b"true", b"false")))
        if fake.tickets:
            fake.tickets.pop().answer(text(b"{}"))
    health, version, model, same, chat, *refused = client.responses

    assert [response.status for response in client.responses] == [200] * 5 + [400, 400, 404, 404]
    assert json.loads(health.body) == {"status": "ok"}
    assert json.loads(version.body)["version"]
    assert json.loads(model.body)["max_model_len"] == 4096
    assert same.body == model.body
    assert chat.body == b"{}"
    assert b"does not answer /v1/messages (hint: it answers /v1/chat/completions, /v1/responses)" in refused[0].body
    assert b"does not answer /tokenize" in refused[1].body
    assert b"ends with /v1 already: /v1/chat/completions" in refused[2].body
    assert b"clients ends with /v1: /v1/chat/completions" in refused[3].body


@on_loop
async def test_an_alias_is_a_name_of_its_model() -> None:
    fake = FakeEngine(models={"e": config(openai_routes="chat/completions", openai_aliases="gpt, small")}, hold=True)
    fake.index = [ModelIndexEntry("e", "1", ModelState.READY)]
    client = connected(fake)
    body = BODY.replace(b"e:poet", b"small").replace(b"true", b"false")

    client.send(request("/v1/models/small", method="GET"))
    client.send(request(CHAT, body=body))
    client.send(request(CHAT, body=BODY.replace(b"e:poet", b"other")))
    while len(client.responses) < 1 or not fake.tickets:
        await asyncio.sleep(0.001)
    fake.tickets[0].answer(text(b"{}"))
    while len(client.responses) < 3:
        await asyncio.sleep(0.001)

    assert json.loads(client.responses[0].body)["id"] == "small"
    assert fake.tickets[0].request.model_name == "e"
    assert fake.tickets[0].request.inputs["text_input"].array.tolist() == [body]
    assert [response.status for response in client.responses] == [200, 200, 404]


async def asked_responses(client: MemoryClient, fake: FakeEngine, content: str, **members: object) -> dict[str, Any]:
    client.send(request("/v1/responses", body=json.dumps({"model": "e", **members}).encode()))
    message = {"role": "assistant", "content": content}
    fake.tickets[-1].answer(text(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()))
    document: dict[str, Any] = json.loads(client.responses[-1].body)
    return document


@on_loop
async def test_a_stored_response_is_continued_and_the_oldest_are_dropped() -> None:
    fake = engine()
    client = connected(fake, HttpLimits(responses_stored_max=2))

    first = await asked_responses(client, fake, "one", input="a", instructions="be brief")
    second = await asked_responses(client, fake, "two", input="b", previous_response_id=first["id"])
    kept_out = await asked_responses(client, fake, "x", input="c", store=False)
    await asked_responses(client, fake, "three", input="d", previous_response_id=second["id"])
    sent = json.loads(fake.tickets[-1].request.inputs["text_input"].array[0])
    for gone in (first["id"], kept_out["id"]):
        client.send(
            request(
                "/v1/responses", body=json.dumps({"model": "e", "input": "e", "previous_response_id": gone}).encode()
            )
        )

    contents = [(message["role"], message["content"]) for message in sent["messages"]]
    assert contents == [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "d")]
    assert [response.status for response in client.responses[-2:]] == [404, 404]


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


@on_loop
async def test_a_client_of_tensorflow_serving_is_told_where_to_go() -> None:
    client = connected(engine())

    client.send(request("/v1/models/e:predict", body=b'{"instances": [1]}'))

    assert client.responses[0].status == 404
    assert "POST /v2/models/e/infer" in json.loads(client.responses[0].body)["error"]["message"]


MOON = {"type": "object", "properties": {"moon": {"enum": ["Io", "Europa"]}}, "required": ["moon"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "moon", "schema": MOON}}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}}}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}]}
NO_TEXT = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALL = NO_TEXT.replace("Rome", "Paris")


async def guided(answers: list[str], **members: object) -> tuple[MemoryClient, FakeEngine]:
    """Ask a model that is not an engine, which gives these answers."""
    fake = FakeEngine(models={"e": config()}, hold=True)
    client = connected(fake)
    messages = [{"role": "user", "content": "hi"}]
    client.send(request(CHAT, body=json.dumps({"model": "e", "messages": messages, **members}).encode()))
    for number, answer in enumerate(answers):
        while len(fake.tickets) <= number and not client.responses:
            await asyncio.sleep(0.001)
        if client.responses:
            break
        fake.tickets[number].answer(text(answer.encode()))
    await turn()
    return client, fake


@pytest.mark.parametrize(
    ("members", "answers", "content", "called"),
    [
        (FORM, ['Sure:\n```json\n{"moon": "Io"}\n```'], '{"moon": "Io"}', None),
        (FORM, ["Io", '{"moon": "Luna"}', '{"moon": "Io"}'], '{"moon": "Io"}', None),
        ({"response_format": {"type": "json_object"}}, ["[1]", "{}"], "{}", None),
        (TOOLS, ["It is sunny."], "It is sunny.", None),
        (TOOLS, [CALL], None, {"city": "Paris"}),
        (TOOLS | {"tool_choice": "required"}, ["no", NO_TEXT, CALL], None, {"city": "Paris"}),
        (
            TOOLS | {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            [CALL],
            None,
            {"city": "Paris"},
        ),
        (TOOLS | {"tool_choice": "none"}, [CALL], CALL, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_model_without_tools_and_schemas_is_asked_until_its_answer_fits(
    members: dict[str, object], answers: list[str], content: str | None, called: object, stream: bool
) -> None:
    client, fake = await guided(answers, stream=stream, **members)

    assert len(fake.tickets) == len(answers)
    if stream:
        events = [json.loads(each[6:]) for each in client.responses[0].body.split(b"\n\n")[:-2]]
        deltas = [event["choices"][0]["delta"] for event in events]
        message: dict[str, Any] = {"content": "".join(delta.get("content") or "" for delta in deltas) or None}
        message["tool_calls"] = next((delta["tool_calls"] for delta in deltas if "tool_calls" in delta), None)
        choice = events[-1]["choices"][0]
    else:
        choice = json.loads(client.responses[0].body)["choices"][0]
        message = choice["message"]
    calls = message.get("tool_calls")
    assert message["content"] == content
    assert (json.loads(calls[0]["function"]["arguments"]) if calls else None) == called
    assert choice["finish_reason"] == ("tool_calls" if called else "stop")
    prompts = [ticket.request.inputs["text_input"].array.item().decode() for ticket in fake.tickets]
    assert all(f"{answer}\n\nuser: This answer is not valid" in prompts[-1] for answer in answers[-2:-1])


@on_loop
async def test_an_answer_that_never_fits_is_an_error_after_a_bounded_number_of_tries() -> None:
    client, fake = await guided(["Io"] * 3, **FORM)

    assert len(fake.tickets) == 3
    assert client.responses[0].status == 500
    assert b"gave no valid answer in 3 tries: expected JSON" in client.responses[0].body


@pytest.mark.parametrize(
    ("schema", "status"),
    [
        ({"type": "nothing"}, 400),
        ({"patternProperties": {"(a+)+$": {}}}, 400),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, 400),
        ({"$ref": "#"}, 400),
        ({"properties": {"moon": {"pattern": "(a+)+b"}}}, 500),
    ],
)
@on_loop
async def test_a_schema_of_a_client_costs_no_more_than_its_answer(schema: dict[str, object], status: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    client, _ = await guided([json.dumps({"moon": "a" * 100})] * 3, response_format=form)

    assert client.responses[0].status == status


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_max_tokens_ends_the_answer_of_a_model_that_does_not_know_it(stream: bool) -> None:
    fake = FakeEngine(models={"e": config()}, hold=True)
    client = connected(fake)
    body = {"model": "e", "prompt": "hi", "max_tokens": 2, "stream": stream, "stream_options": {"include_usage": True}}
    client.send(
        request("/v1/completions", body=json.dumps(body if stream else body | {"stream_options": None}).encode())
    )
    while not fake.tickets:
        await asyncio.sleep(0.001)

    for piece in (b"one ", b"two ", b"three "):
        fake.tickets[0].answer(text(piece), final=False)
    await turn()

    assert fake.tickets[0].cancelled
    found = client.responses[0].body
    events = [json.loads(each[6:]) for each in found.split(b"\n\n")[:-2]] if stream else [json.loads(found)]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "one two "
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "estimated": True}
