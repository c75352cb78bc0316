"""Responses as server-sent events, and the generate routes, in memory."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response, request

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.access_log import AccessEntry
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

GENERATE = "/v2/models/m/generate"
STREAM = "/v2/models/m/generate_stream"
INFER = "/v2/models/m/infer"
EVENTS = {"Accept": "text/event-stream"}
INPUTS = {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [1]}]}
CONFIG = ModelConfig(
    name="m",
    input=(ModelInput("X", DataType.INT32, dims=(1,)),),
    output=(ModelOutput("Y", DataType.INT32, (1,)),),
)


def engine(*outcomes: tuple[Outcome, bool]) -> FakeEngine:
    """Return an engine with a model that gives these outcomes at once, or none until the test says."""
    return FakeEngine(models={"m": CONFIG}, outcomes=[list(outcomes)] if outcomes else [], hold=not outcomes)


def response(value: int) -> InferResponse:
    return InferResponse("m", "1", "", [Tensor("Y", DataType.INT32, np.array([value], np.int32))], {"n": value})


BROKEN = InferResponse("m", "1", "", [Tensor("Y", DataType.FP16, np.zeros(1, np.float16))])
FAULT = InferResponse("m", "1", "", [Tensor("Y", DataType.BYTES, np.array([1], object))])


def client_of(fake: FakeEngine, limits: HttpLimits | None = None) -> MemoryClient:
    return MemoryClient(HttpFrontend(fake, limits or HttpLimits()))


def post(url: str, document: object, headers: dict[str, str] | None = None, version: str = "1.1") -> bytes:
    return request(url, body=json.dumps(document).encode(), headers=headers, version=version)


def events(body: bytes) -> list[dict[str, object]]:
    frames = body.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def ask(fake: FakeEngine, url: str, document: object, headers: dict[str, str] | None = None) -> Response:
    (only,) = client_of(fake).send(post(url, document, headers))
    return only


def generated(value: int) -> dict[str, object]:
    return {"model_name": "m", "model_version": "1", "n": value, "Y": value}


def test_each_response_is_an_event() -> None:
    fake = engine((response(1), False), (response(2), True))

    answer = ask(fake, STREAM, {"X": 1})

    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events(answer.body) == [generated(1), generated(2)]


def test_events_are_sent_as_the_responses_come() -> None:
    fake = engine()
    client = client_of(fake)

    client.send(post(STREAM, {"X": 1}))
    before = client.received
    fake.tickets[0].answer(response(1), False)
    first = client.received
    fake.tickets[0].answer(None, True)

    assert before == b""
    assert b'"Y":1' in first
    assert not client.transport.is_closed
    assert events(client.responses[0].body) == [generated(1)]


def test_a_request_without_responses_is_an_empty_stream() -> None:
    answer = ask(engine((None, True)), STREAM, {"X": 1})

    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_an_error_in_the_middle_is_an_event_and_the_status_stays() -> None:
    fake = engine((response(1), False), (internal("boom"), False), (response(3), False), (None, True))

    answer = ask(fake, STREAM, {"X": 1})

    assert answer.status == 200
    assert events(answer.body) == [generated(1), {"error": "boom"}, generated(3)]


def test_the_first_response_fixes_the_status() -> None:
    fake = engine()
    client = client_of(fake)

    client.send(post(STREAM, {"X": 1}))
    fake.tickets[0].answer(unavailable("no"), False)
    fake.tickets[0].answer(response(2), True)

    assert client.responses[0].status == 503
    assert events(client.responses[0].body) == [{"error": "no"}, generated(2)]


def test_an_error_before_the_model_is_asked_is_a_plain_document() -> None:
    answer = ask(engine((unavailable("full"), True)), STREAM, {"X": 1})

    assert (answer.status, json.loads(answer.body)) == (503, {"error": "full"})
    assert answer.headers["content-type"] == "application/json"


def test_an_error_of_the_model_is_an_event_with_its_status() -> None:
    fake = engine()
    client = client_of(fake)

    client.send(post(STREAM, {"X": 1}))
    fake.tickets[0].answer(internal("boom"), True)

    assert client.responses[0].status == 500
    assert events(client.responses[0].body) == [{"error": "boom"}]


@pytest.mark.parametrize(("outcome", "status"), [(BROKEN, 400), (FAULT, 500)])
def test_a_response_that_cannot_be_written_is_an_error_of_its_own(outcome: InferResponse, status: int) -> None:
    stream = ask(engine((response(1), False), (outcome, False), (response(3), True)), STREAM, {"X": 1})
    single = ask(engine((outcome, True)), GENERATE, {"X": 1})

    assert [sorted(event)[0] for event in events(stream.body)] == ["Y", "error", "Y"]
    assert single.status == status


@pytest.mark.parametrize("url", [GENERATE, STREAM, "/v2/models/m/versions/1/generate"])
@pytest.mark.parametrize(
    ("document", "headers", "status"),
    [
        ({"X": "a"}, {}, 400),
        ({"X": [1, 2]}, {}, 400),
        ([1], {}, 400),
        ({"X": 1}, {"Content-Encoding": "gzip"}, 501),
    ],
)
def test_a_wrong_request_gets_a_plain_document(
    url: str, document: object, headers: dict[str, str], status: int
) -> None:
    answer = ask(engine(), url, document, headers)

    assert answer.status == status
    assert list(json.loads(answer.body)) == ["error"]


def test_an_unknown_model_is_not_found() -> None:
    assert ask(engine(), "/v2/models/other/generate", {"X": 1}).status == 404


def test_generate_returns_the_one_response() -> None:
    answer = ask(engine((response(5), True)), GENERATE, {"id": "a", "X": 5})

    assert (answer.status, json.loads(answer.body)) == (200, generated(5))
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "outcomes",
    [[(None, True)], [(response(1), False), (response(2), False)], [(response(1), False), (response(2), True)]],
)
def test_generate_wants_exactly_one_response(outcomes: list[tuple[Outcome, bool]]) -> None:
    fake = engine()
    client = client_of(fake)

    client.send(post(GENERATE, {"X": 1}))
    for outcome, final in outcomes:
        fake.tickets[0].answer(outcome, final)

    assert client.responses[0].status == 501
    assert "exactly 1 response" in json.loads(client.responses[0].body)["error"]
    assert fake.tickets[0].finished


def test_generate_reports_the_error_of_the_model() -> None:
    assert ask(engine((ServingError(Code.UNAVAILABLE, "later"), True)), GENERATE, {"X": 1}).status == 503


def test_infer_answers_with_events_where_the_client_asks_for_them() -> None:
    fake = engine((response(1), False), (response(2), True))

    answer = ask(fake, INFER, INPUTS, EVENTS)

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events(answer.body) == [
        {
            "model_name": "m",
            "model_version": "1",
            "parameters": {"n": value},
            "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1], "data": [value]}],
        }
        for value in (1, 2)
    ]


def test_infer_without_that_header_still_wants_one_response() -> None:
    answer = ask(engine((response(1), False), (response(2), True)), INFER, INPUTS, {"Accept": "*/*"})

    assert answer.status == 501
    assert "Accept: text/event-stream" in json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    "more",
    [{"parameters": {"binary_data_output": True}}, {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]}],
)
def test_events_carry_no_binary_outputs(more: dict[str, object]) -> None:
    assert ask(engine(), INFER, {**INPUTS, **more}, EVENTS).status == 400


@pytest.mark.parametrize("url", [GENERATE, STREAM])
def test_a_client_that_leaves_cancels_its_request(url: str) -> None:
    fake = engine()
    client = client_of(fake)
    client.send(post(url, {"X": 1}))
    fake.tickets[0].answer(response(1), False)

    client.leave()

    assert fake.tickets[0].cancelled


def test_a_client_that_does_not_read_has_its_request_given_up() -> None:
    fake = engine()
    client = client_of(fake, HttpLimits(stream_unsent_bytes_max=1000))
    client.send(post(STREAM, {"X": 1}))
    client.transport.is_blocked = True

    for value in range(100):
        fake.tickets[0].answer(response(value), False)
    unsent = len(client.transport.pending)
    client.transport.unblock()

    assert fake.tickets[0].cancelled
    assert unsent < 1500
    found = events(client.responses[0].body)
    assert found[:-1] == [generated(value) for value in range(len(found) - 1)]
    assert "more than 1000 bytes of responses wait" in str(found[-1]["error"])


def test_a_response_that_waits_behind_another_counts_too() -> None:
    fake = engine()
    client = client_of(fake, HttpLimits(stream_unsent_bytes_max=1000))
    client.send(post(STREAM, {"X": 1}) * 2)

    for value in range(100):
        fake.tickets[1].answer(response(value), False)

    assert fake.tickets[1].cancelled
    assert client.received == b""


def test_responses_of_one_connection_come_in_the_order_of_the_requests() -> None:
    fake = engine()
    client = client_of(fake)
    client.send(post(STREAM, {"X": 1}) + post(STREAM, {"X": 2}) + post(GENERATE, {"X": 3}))

    fake.tickets[2].answer(response(30), True)
    fake.tickets[1].answer(response(20), False)
    fake.tickets[0].answer(response(10), False)
    fake.tickets[0].answer(None, True)
    assert b'"Y":20' in client.received  # as soon as it is its turn
    fake.tickets[1].answer(response(21), True)

    bodies = [answer.body for answer in client.responses]
    assert [events(body) for body in bodies[:2]] == [[generated(10)], [generated(20), generated(21)]]
    assert json.loads(bodies[2]) == generated(30)


@pytest.mark.parametrize("keep_alive", ["keep-alive", "close"])
def test_a_client_of_http_1_0_gets_the_events_and_then_the_end(keep_alive: str) -> None:
    client = client_of(engine((response(1), False), (None, True)))

    client.send(post(STREAM, {"X": 1}, {"Connection": keep_alive}, version="1.0"))

    head, _, body = client.received.partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    assert b"Transfer-Encoding" not in head
    assert events(body) == [generated(1)]
    assert client.transport.is_closed


def test_what_a_client_of_http_1_0_sent_behind_a_stream_is_given_up() -> None:
    fake = engine()
    client = client_of(fake)
    client.send(post(STREAM, {"X": 1}, {"Connection": "keep-alive"}, version="1.0") * 2)

    fake.tickets[0].answer(response(1), True)

    assert fake.tickets[1].cancelled
    assert client.transport.is_closed


def test_a_connection_that_is_to_close_closes_after_the_stream() -> None:
    client = client_of(engine((response(1), True)))

    (answer,) = client.send(post(STREAM, {"X": 1}, {"Connection": "close"}))

    assert events(answer.body) == [generated(1)]
    assert client.transport.is_closed


async def test_shutdown_waits_for_a_stream() -> None:
    fake = engine()
    frontend = HttpFrontend(fake, HttpLimits())
    client = MemoryClient(frontend)
    client.send(post(STREAM, {"X": 1}))
    fake.tickets[0].answer(response(1), False)
    frontend.stop_accepting()
    assert not client.transport.is_closed
    fake.tickets[0].answer(response(2), True)
    assert events(client.responses[0].body) == [generated(1), generated(2)]
    assert client.transport.is_closed


def test_a_stream_has_one_line_in_the_access_log() -> None:
    lines: list[AccessEntry] = []

    class Log:
        write: Callable[[AccessEntry], None] = staticmethod(lines.append)

    fake = engine((response(1), False), (response(2), True))
    client = MemoryClient(HttpFrontend(fake, HttpLimits(), access_log=Log()))  # type: ignore[arg-type]  # all it needs
    client.send(post(STREAM, {"id": "a", "X": 1}))

    (line,) = lines
    assert (line.status, line.model, line.request_id) == (200, "m", "a")
    assert line.bytes_out == len(client.responses[0].body)


def test_an_open_stream_ends_when_its_key_goes_and_other_requests_are_answered() -> None:
    lines = parse_keys("kept admin key-that-stays-valid\ngone infer key-that-is-revoked")
    ring = KeyRing(lines.keys, b"secret")
    fake = engine()
    frontend = HttpFrontend(fake, HttpLimits(), services=Services(http_gate=Gate((), ring, what="API")))

    def ask_with(key: str, url: str) -> MemoryClient:
        client = MemoryClient(frontend)
        document = {"X": 1} if url != INFER else INPUTS
        client.send(post(url, document, {"x-api-key": key}))
        return client

    keys = "key-that-stays-valid", "key-that-is-revoked", "key-that-is-revoked", "key-that-is-revoked"
    clients = [ask_with(key, url) for key, url in zip(keys, (STREAM, STREAM, STREAM, INFER), strict=True)]
    for ticket in fake.tickets[:2]:
        ticket.answer(response(1), False)

    ring.replace(lines.keys[:1])
    frontend.recheck()

    assert [ticket.cancelled for ticket in fake.tickets] == [False, True, True, False]
    for ticket in (fake.tickets[0], fake.tickets[3]):
        ticket.answer(response(2), True)
    kept, gone, not_begun, plain = (client.responses[0] for client in clients)
    assert events(kept.body) == [generated(1), generated(2)]
    assert gone.status == 200
    assert events(gone.body) == [generated(1), {"error": "The API key is not known to this server"}]
    assert not_begun.status == 401
    assert plain.status == 200


def test_a_character_that_is_cut_between_two_responses_arrives_whole() -> None:
    def text(piece: bytes) -> InferResponse:
        return InferResponse("m", "1", "", [Tensor("Y", DataType.BYTES, np.array([piece], object))])

    raw = "é".encode()
    whole = ask(engine((text(raw[:1]), False), (text(raw[1:]), False), (None, True)), STREAM, {"X": 1})
    cut = ask(engine((text(raw[:1]), False), (None, True)), STREAM, {"X": 1})

    assert [event["Y"] for event in events(whole.body)] == ["", "é"]
    assert events(cut.body)[-1] == {
        "error": "output 'Y' ends within a UTF-8 character (hint: send the rest of its bytes)"
    }
