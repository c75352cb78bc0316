"""ModelStreamInfer and reflection, over a connection in memory."""

import asyncio
from io import StringIO
from typing import Any

import numpy as np
import pytest
from tests.server.grpc.conftest import Bench
from tests.support.fake_engine import FakeTicket
from tests.support.grpc_memory import MemoryClient, frame
from tests.support.idle_time import IdleTimeLoop
from tests.support.linked_engine import BOTH_SHAPES
from tritonclient.grpc import service_pb2

from charonia.config.model import ModelConfig, TransactionPolicy
from charonia.core.errors import internal
from charonia.core.response import InferResponse
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.grpc.frontend import GrpcLimits
from charonia.wire.grpc_status import Status

new_loop = IdleTimeLoop


def infer_message(model: str = "identity", id: str = "", **parameters: Any) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(np.zeros(16, "<f4").tobytes())
    for key, value in parameters.items():
        message.parameters[key].bool_param = value
    data: bytes = message.SerializeToString()
    return data


class Stream:
    """A ModelStreamInfer call of a client."""

    def __init__(self, client: MemoryClient, *headers: tuple[bytes, bytes]) -> None:
        self.client = client
        self.stream_id = client.start("ModelStreamInfer", None, *headers)

    def send(self, *messages: bytes, end: bool = False) -> None:
        data = b"".join(map(frame, messages))
        self.client.http2.send_data(self.stream_id, data, end_stream=end)
        self.client.exchange()

    @property
    def response(self) -> Any:
        return self.client.responses[self.stream_id]

    @property
    def answers(self) -> list[Any]:
        return [service_pb2.ModelStreamInferResponse.FromString(data) for data in self.response.messages]

    @property
    def ids(self) -> list[str]:
        return [answer.infer_response.id for answer in self.answers]

    @property
    def finals(self) -> list[bool]:
        return [answer.infer_response.parameters["triton_final_response"].bool_param for answer in self.answers]


def decoupled_config() -> ModelConfig:
    return ModelConfig(name="decoupled", model_transaction_policy=TransactionPolicy(decoupled=True))


def some_response(id: str) -> InferResponse:
    return InferResponse("decoupled", "1", id, [])


@BOTH_SHAPES
async def test_requests_are_answered_in_order_and_the_stream_ends_when_all_are(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client())
    stream.send(infer_message(id="a"), infer_message(id="b"), infer_message(id="c"), end=True)
    await stream.client.settle()
    for number in (2, 1):
        bench.engine.release(number)
    await stream.client.settle()
    assert stream.ids == []
    bench.engine.release(0)
    await stream.client.settle()

    assert stream.ids == ["a", "b", "c"]
    assert stream.finals == [True, True, True]
    assert (stream.response.status, stream.response.is_closed) == (Status.OK, True)


async def test_a_stream_without_requests_ends_well(bench: Bench) -> None:
    stream = Stream(bench.client())
    stream.send(end=True)

    assert (stream.response.status, stream.answers) == (Status.OK, [])


@BOTH_SHAPES
async def test_an_error_is_an_answer_in_its_turn(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client())
    bad = service_pb2.ModelInferRequest(model_name="identity", id="b")
    bad.inputs.add(name="x", datatype="FP32", shape=[1])
    stream.send(infer_message(id="a"), bad.SerializeToString(), infer_message("nope", "c"))
    await stream.client.settle()
    bench.engine.release(1)
    bench.engine.release(0)
    await stream.client.settle()

    assert stream.ids == ["a", "b", "c"]
    assert [bool(answer.error_message) for answer in stream.answers] == [False, True, True]
    assert "unable to find data for input tensor 'x'" in stream.answers[1].error_message
    assert stream.answers[2].infer_response.model_name == "nope"
    assert stream.finals == [True, True, True]
    assert stream.response.status is None


async def test_with_grpc_errors_the_first_error_ends_the_stream(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client(), (b"triton_grpc_error", b"true"))
    stream.send(infer_message(id="a"), infer_message("nope", "b"), infer_message(id="c"))
    bench.engine.release(1)
    await stream.client.settle()
    assert stream.response.status is None
    bench.engine.release(0)
    await stream.client.settle()

    assert stream.ids == ["a"]
    assert stream.response.status == Status.NOT_FOUND
    assert stream.response.reset_code == 0
    assert [ticket.cancelled for ticket in bench.engine.tickets] == [False, False, True]


async def test_with_grpc_errors_the_oldest_request_may_fail_as_well(bench: Bench) -> None:
    stream = Stream(bench.client(), (b"triton_grpc_error", b"true"))
    stream.send(infer_message("nope", "a"), infer_message(id="b"))

    assert (stream.response.status, stream.answers) == (Status.NOT_FOUND, [])
    assert len(bench.engine.tickets) == 1


@BOTH_SHAPES
async def test_a_decoupled_model_sends_as_it_pleases(bench: Bench) -> None:
    bench.engine.hold = True
    await bench.add_model(decoupled_config())
    stream = Stream(bench.client())
    stream.send(infer_message(id="slow"), infer_message("decoupled", "d"), infer_message("decoupled", "e"))
    await stream.client.settle()
    _, first, second = bench.engine.tickets
    first.answer(some_response("d"), False)
    second.answer(some_response("e"), True)
    first.answer(some_response("d"), False)
    first.answer(None, True)
    await stream.client.settle()

    assert stream.ids == ["d", "e", "d"]
    assert stream.finals == [False, True, False]


@BOTH_SHAPES
async def test_an_empty_final_response_comes_where_it_is_asked_for(bench: Bench) -> None:
    await bench.add_model(decoupled_config())
    bench.engine.outcomes = [[(some_response("d"), False), (None, True)]]
    stream = Stream(bench.client())
    stream.send(infer_message("decoupled", "d", triton_enable_empty_final_response=True), end=True)
    await stream.client.settle()

    last = stream.answers[1].infer_response
    assert stream.finals == [False, True]
    assert (last.id, last.model_name, last.model_version, len(last.outputs)) == ("d", "decoupled", "1", 0)
    assert stream.response.status == Status.OK


async def test_an_empty_final_response_comes_whatever_else_the_request_asks_for(bench: Bench) -> None:
    message = service_pb2.ModelInferRequest(model_name="decoupled", id="d")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    # Before and behind it, in whatever order a map gives them: fields of the request, and parameters of its own.
    message.parameters["sequence_id"].int64_param = 7
    message.parameters["sequence_start"].bool_param = True
    message.parameters["priority"].uint64_param = 2
    message.parameters["timeout"].int64_param = 5
    own = {f"key{number}": number for number in range(16)}
    for key, value in own.items():
        message.parameters[key].int64_param = value

    bench.engine.models["decoupled"] = decoupled_config()
    first = InferResponse("decoupled", "1", "d", [], {"own": "x"})
    bench.engine.outcomes = [[(first, False), (None, True)]]
    stream = Stream(bench.client())
    stream.send(message.SerializeToString(), end=True)

    answers = [answer.infer_response for answer in stream.answers]
    assert [sorted(answer.parameters) for answer in answers] == [
        ["own", "triton_final_response"],
        ["triton_final_response"],
    ]
    assert stream.finals == [False, True]
    last = answers[1]
    assert (last.id, last.model_name, last.model_version, len(last.outputs)) == ("d", "decoupled", "1", 0)
    request = bench.engine.tickets[0].request
    assert request.parameters == own
    assert (request.correlation_id, request.flags, request.priority, request.timeout_us) == (7, 1, 2, 5)


@pytest.mark.parametrize("asks", [{}, {"triton_enable_empty_final_response": False}])
async def test_no_empty_final_response_comes_where_other_parameters_are_all_that_is_given(
    asks: Any, bench: Bench
) -> None:
    bench.engine.models["decoupled"] = decoupled_config()
    bench.engine.outcomes = [[(some_response("d"), False), (None, True)]]
    stream = Stream(bench.client())
    stream.send(infer_message("decoupled", "d", own=True, sequence_end=True, **asks), end=True)

    assert stream.finals == [False]
    assert stream.response.status == Status.OK


@BOTH_SHAPES
async def test_a_decoupled_request_may_fail_after_a_response(bench: Bench) -> None:
    await bench.add_model(decoupled_config())
    bench.engine.outcomes = [[(some_response("d"), False), (internal("broken"), True)]]
    stream = Stream(bench.client())
    stream.send(infer_message("decoupled", "d"), end=True)
    await stream.client.settle()

    assert [answer.error_message for answer in stream.answers] == ["", "broken"]
    assert stream.finals == [False, True]


async def test_several_responses_of_an_ordered_model_wait_for_its_turn(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client())
    stream.send(infer_message(id="a"), infer_message(id="b"), infer_message(id="c"))
    first, second, third = bench.engine.tickets
    second.answer(some_response("b"), False)
    third.answer(some_response("c"), True)
    first.answer(some_response("a"), True)
    await stream.client.settle()
    assert stream.ids == ["a", "b"]
    second.answer(some_response("b"), True)
    await stream.client.settle()

    assert stream.ids == ["a", "b", "b", "c"]
    assert stream.finals == [True, False, True, True]


async def test_a_response_that_cannot_be_written_is_an_error_of_its_request(bench: Bench) -> None:
    answer = InferResponse("identity", "1", "a", [], parameters={"p": object()})  # type: ignore[dict-item]  # the fault
    bench.engine.outcomes = [[(answer, True)]]
    stream = Stream(bench.client())
    stream.send(infer_message(id="a"))

    assert "response parameter 'p'" in stream.answers[0].error_message


async def test_a_response_that_breaks_the_codec_ends_the_stream(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with play() as bench:
        bench.engine.hold = True
        stream = Stream(bench.client())
        stream.send(infer_message(id="a"), infer_message(id="b"))
        bench.engine.tickets[0].answer(InferResponse("identity", "1", "a", [None]), True)  # type: ignore[list-item]  # the fault
        await stream.client.settle()

        assert stream.response.status == Status.INTERNAL
        assert bench.engine.tickets[1].cancelled
    assert "ModelStreamInfer" in caplog.text


async def test_bytes_that_are_no_message_end_the_stream(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client())
    stream.send(infer_message(id="a"), b"\xff\xff")

    assert stream.response.status == Status.INTERNAL
    assert bench.engine.tickets[0].cancelled


async def test_a_stream_that_ends_within_a_message_is_an_error(bench: Bench) -> None:
    stream = Stream(bench.client())
    stream.client.http2.send_data(stream.stream_id, frame(infer_message())[:9], end_stream=True)
    stream.client.exchange()

    assert stream.response.status == Status.INTERNAL
    assert "ended within a message" in stream.response.message


async def test_a_message_over_the_limit_ends_the_stream(play: Any) -> None:
    async with play(GrpcLimits(message_bytes_max=1000)) as bench:
        stream = Stream(bench.client())
        stream.send(b"x" * 2000)

        assert stream.response.status == Status.RESOURCE_EXHAUSTED


@BOTH_SHAPES
@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
async def test_a_client_that_leaves_cancels_everything(leave: str, bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client())
    stream.send(infer_message(), infer_message())
    await stream.client.settle()
    if leave == "cancel":
        stream.client.http2.reset_stream(stream.stream_id)
        stream.client.exchange()
    else:
        stream.client.protocol.connection_lost(None)
    await stream.client.settle()

    assert [ticket.cancelled for ticket in bench.engine.tickets] == [True, True]


async def test_a_cancelled_request_may_release_the_response_of_another_one(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that preserves the order of responses holds that of the second request until the first one is over."""
    async with play() as bench:
        bench.engine.hold = True
        stream = Stream(bench.client())
        stream.send(infer_message(), infer_message())
        await stream.client.settle()
        first, second = bench.engine.tickets
        others = {first: 1, second: 0}
        monkeypatch.setattr(FakeTicket, "cancel", lambda ticket: bench.engine.release(others[ticket]))
        stream.client.http2.reset_stream(stream.stream_id)
        stream.client.exchange()

        assert first.finished
        assert second.finished
        assert not stream.response.messages


async def test_a_deadline_ends_the_stream(bench: Bench) -> None:
    bench.engine.hold = True
    stream = Stream(bench.client(), (b"grpc-timeout", b"20m"))
    stream.send(infer_message())
    await asyncio.sleep(0.05)
    stream.client.exchange()

    assert stream.response.status == Status.DEADLINE_EXCEEDED
    assert bench.engine.tickets[0].cancelled
    assert bench.engine.tickets[0].request.deadline_ns > 0


async def test_no_more_requests_are_in_flight_than_the_limit_says(play: Any) -> None:
    async with play(GrpcLimits(stream_inflight_max=2)) as bench:
        bench.engine.hold = True
        stream = Stream(bench.client())
        stream.send(*(infer_message(id=str(number)) for number in range(5)), end=True)
        assert len(bench.engine.tickets) == 2
        for number in range(5):
            bench.engine.release(number)
            assert len(bench.engine.tickets) == min(number + 3, 5)
        await stream.client.settle()

        assert stream.ids == ["0", "1", "2", "3", "4"]
        assert stream.response.status == Status.OK


async def test_requests_beyond_the_limit_close_the_callers_window(play: Any) -> None:
    async with play(GrpcLimits(stream_inflight_max=1, stream_window_bytes=4096)) as bench:
        bench.engine.hold = True
        stream = Stream(bench.client())
        message = infer_message()
        count = 10_000 // len(message)
        stream.send(*[message] * count)

        assert len(bench.engine.tickets) == 1
        left_bytes = stream.client.http2.queued_body_size(stream.stream_id)
        assert left_bytes == len(frame(message)) * count - 4096
        assert (await stream.client.call("ServerLive")).status == Status.OK

        for number in range(count):
            bench.engine.release(number)
            await stream.client.settle(2)
        assert len(stream.answers) == count


async def test_a_message_larger_than_the_window_still_comes_through(play: Any) -> None:
    async with play(GrpcLimits(stream_window_bytes=4096)) as bench:
        stream = Stream(bench.client())
        message = service_pb2.ModelInferRequest(model_name="identity")
        message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, 50_000])
        message.raw_input_contents.append(bytes(50_000))
        stream.send(message.SerializeToString(), end=True)
        await stream.client.settle()

        assert len(stream.answers[0].infer_response.raw_output_contents[0]) == 50_000


async def test_a_caller_that_takes_no_answers_gets_no_more_work_done(play: Any) -> None:
    async with play(GrpcLimits(stream_unsent_bytes_max=500)) as bench:
        client = bench.client({4: 100}, opens_window=False)
        stream = Stream(client)
        stream.send(*[infer_message()] * 20, end=True)
        await client.settle(40)
        assert len(bench.engine.tickets) < 10

        client.http2.update_settings({4: 100_000})
        await client.settle(40)

        assert len(stream.answers) == 20
        assert stream.response.status == Status.OK


async def test_a_message_larger_than_the_window_comes_through_after_the_caller_has_taken_answers(play: Any) -> None:
    async with play(GrpcLimits(stream_unsent_bytes_max=100, stream_window_bytes=4096)) as bench:
        client = bench.client({4: 0}, opens_window=False)
        stream = Stream(client)
        message = service_pb2.ModelInferRequest(model_name="identity", id="large")
        message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, 20_000])
        message.raw_input_contents.append(bytes(20_000))
        stream.send(*[infer_message()] * 5, message.SerializeToString(), end=True)
        client.http2.update_settings({4: 65_535})
        client.exchange()
        await client.settle()

        assert stream.ids == [*[""] * 5, "large"]


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_what_a_stream_has_sent_ahead_does_not_use_up_the_window_when_it_ends(play: Any, leave: str) -> None:
    async with play(GrpcLimits(stream_inflight_max=1, connection_window_bytes=65_535)) as bench:
        bench.engine.hold = True
        client = bench.client()
        for _ in range(20):
            stream = Stream(client, *[(b"grpc-timeout", b"20m")] * (leave == "deadline"))
            stream.send(*[infer_message()] * 50)
            if leave == "cancel":
                client.http2.reset_stream(stream.stream_id)
            await asyncio.sleep(0.05)
            client.exchange()

        assert client.http2.remote_window_size > 16_000


async def test_a_request_whose_responses_nobody_reads_fails_and_is_cancelled(play: Any) -> None:
    async with play(GrpcLimits(stream_response_bytes_max=4000)) as bench:
        bench.engine.hold = True
        bench.engine.models["decoupled"] = decoupled_config()
        client = bench.client({4: 100}, opens_window=False)
        stream = Stream(client)
        stream.send(infer_message("decoupled", "unread"), infer_message("decoupled", "quiet"))
        unread, quiet = bench.engine.tickets
        long = InferResponse("decoupled", "1", "unread", [], parameters={"text": "x" * 1000})
        for _ in range(20):
            unread.answer(long, False)
        assert unread.cancelled
        assert not quiet.cancelled
        quiet.answer(some_response("quiet"), True)
        client.http2.update_settings({4: 100_000})
        await client.settle(40)

        assert stream.ids == [*["unread"] * 5, "quiet"]
        assert stream.finals == [*[False] * 4, True, True]
        assert "wait for the caller to read them" in stream.answers[4].error_message


async def test_each_request_of_a_stream_has_its_line_in_the_access_log(play: Any) -> None:
    log = StringIO()

    async with play(None, log) as bench:
        stream = Stream(bench.client())
        stream.send(infer_message(id="a"), infer_message("nope", "b"), end=True)
        failing = Stream(bench.client(), (b"triton_grpc_error", b"true"))
        failing.send(infer_message("nope", "c"))
        bench.engine.hold = True
        left = Stream(bench.client())
        left.send(infer_message(id="d"))
        left.client.protocol.connection_lost(None)

    lines = [dict(pair.split("=", 1) for pair in line.split()) for line in log.getvalue().splitlines()]
    assert [(line["method"], line["id"], line["status"]) for line in lines] == [
        ("ModelStreamInfer", "a", "OK"),
        ("ModelStreamInfer", "b", "NOT_FOUND"),
        ("ModelStreamInfer", "c", "NOT_FOUND"),
        ("ModelStreamInfer", "d", "CANCELLED"),
    ]
    assert int(lines[0]["bytes_out"]) > 64


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_each_question(version: str, bench: Bench) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    client = bench.client()
    stream_id = client.start(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"),
    ]
    data = b"".join(frame(question.SerializeToString()) for question in questions)
    client.http2.send_data(stream_id, data, end_stream=True)
    client.exchange()

    services, error = map(reflection_pb2.ServerReflectionResponse.FromString, client.responses[stream_id].messages)
    names = [service.name for service in services.list_services_response.service]
    assert "inference.GRPCInferenceService" in names
    assert error.error_response.error_code == Status.NOT_FOUND
    assert client.responses[stream_id].status == Status.OK


async def test_when_the_server_stops_a_stream_ends_after_what_it_has_in_flight(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    busy, idle = Stream(client), Stream(client)
    busy.send(infer_message(id="a"))
    bench.frontend.stop_accepting()
    await client.settle()
    assert (idle.response.status, busy.response.status) == (Status.UNAVAILABLE, None)
    bench.engine.release(0)
    await client.settle()

    assert busy.ids == ["a"]
    assert busy.response.status == Status.UNAVAILABLE
    await bench.frontend.drain(5.0)
    assert client.transport.is_closed


async def test_an_open_stream_ends_when_its_key_goes_and_unary_calls_are_answered(bench: Bench) -> None:
    lines = parse_keys("kept admin key-that-stays-valid\ngone infer key-that-is-revoked")
    kept, gone = (b"x-api-key", b"key-that-stays-valid"), (b"x-api-key", b"key-that-is-revoked")

    ring = KeyRing(lines.keys, b"secret")
    bench.frontend.service.gate = Gate((), ring, what="protocol")
    bench.engine.hold = True
    client = bench.client()
    streams = [Stream(client, key) for key in (kept, gone)]
    for stream in streams:
        stream.send(infer_message())
    unary = client.start("ModelInfer", infer_message(), gone)

    ring.replace(lines.keys[:1])
    bench.frontend.recheck()
    await client.settle()

    assert [stream.response.status for stream in streams] == [None, Status.UNAUTHENTICATED]
    assert [ticket.cancelled for ticket in bench.engine.tickets] == [False, True, False]
    bench.engine.release(2)
    await client.settle()
    assert client.responses[unary].status == Status.OK


async def test_a_key_that_is_given_twice_must_be_the_same(bench: Bench) -> None:
    lines = parse_keys("a infer key-that-stays-valid")
    first, other = (b"x-api-key", b"key-that-stays-valid"), (b"x-api-key", b"key-that-is-another")

    bench.frontend.service.gate = Gate((), KeyRing(lines.keys, b"secret"), what="protocol")
    client = bench.client()
    for headers, status in (
        ((first, first), Status.OK),
        ((first, other), Status.INVALID_ARGUMENT),
        ((other, first), Status.INVALID_ARGUMENT),
    ):
        assert (await client.call("ModelInfer", infer_message(), *headers)).status == status


async def test_connections_calls_and_messages_of_streams_are_counted(bench: Bench) -> None:
    stream = Stream(bench.client())
    stream.send(infer_message(id="a"), infer_message(id="b"), end=True)
    await stream.client.settle()
    client = bench.client()
    await client.call("ModelInfer", infer_message())
    await client.call("NoSuchMethod", b"")

    frontend = bench.frontend
    assert (frontend.open_count, frontend.accepted_count, frontend.request_count) == (2, 2, 5)

    await frontend.close()
    assert (frontend.open_count, frontend.accepted_count) == (0, 2)
