"""Calls with one request and one response, over a connection in memory."""

import asyncio
import gzip
from io import StringIO
from typing import Any

import numpy as np
import pytest
from tests.server.grpc.conftest import Bench
from tests.support.grpc_memory import MemoryResponse, frame, request_headers
from tests.support.idle_time import IdleTimeLoop
from tests.support.linked_engine import BOTH_SHAPES
from tritonclient.grpc import service_pb2

from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import Flow
from charonia.core.response import InferResponse
from charonia.server.grpc.frontend import GrpcLimits
from charonia.wire.grpc_status import Status

new_loop = IdleTimeLoop


def infer_message(model: str = "identity", id: str = "", values: int = 16) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, values])
    message.raw_input_contents.append(np.arange(values, dtype="<f4").tobytes())
    data: bytes = message.SerializeToString()
    return data


def infer_response(data: bytes) -> Any:
    return service_pb2.ModelInferResponse.FromString(data)


@BOTH_SHAPES
async def test_an_inference_is_answered(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message(id="a"))

    assert (response.headers[b":status"], response.status) == (b"200", Status.OK)
    answer = infer_response(response.messages[0])
    assert (answer.id, answer.model_name, answer.outputs[0].name) == ("a", "identity", "OUTPUT0")
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == list(range(16))
    assert "triton_final_response" not in answer.parameters


async def test_an_inference_that_was_answered_is_not_cancelled(bench: Bench) -> None:
    await bench.client().call("ModelInfer", infer_message(id="a"))

    ticket = bench.engine.tickets[0]
    assert (ticket.finished, ticket.cancelled, ticket.late_cancels) == (True, False, 0)


@pytest.mark.parametrize("piece_bytes", [1, 5, 7, 1000])
async def test_it_does_not_matter_how_the_bytes_arrive(piece_bytes: int, bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelInfer")
    body = frame(infer_message())
    for position in range(0, len(body), piece_bytes):
        client.http2.send_data(stream_id, body[position : position + piece_bytes])
        client.exchange()
    client.http2.end_stream(stream_id)
    client.exchange()
    await client.settle()

    assert client.responses[stream_id].status == Status.OK


async def test_many_calls_share_a_connection(bench: Bench) -> None:
    client = bench.client()
    bench.engine.hold = True
    streams = [client.start("ModelInfer", infer_message(id=str(number))) for number in range(5)]
    for number in (4, 2, 0, 1, 3):
        bench.engine.release(number)
    await client.settle()

    ids = [infer_response(client.responses[stream_id].messages[0]).id for stream_id in streams]
    assert ids == ["0", "1", "2", "3", "4"]


@BOTH_SHAPES
async def test_a_large_tensor_goes_both_ways(bench: Bench) -> None:
    client = bench.client({4: 2**24})
    client.http2.set_local_window_size(2**24)
    response = await client.call("ModelInfer", infer_message(values=3 * 224 * 224))

    array = np.frombuffer(infer_response(response.messages[0]).raw_output_contents[0], "<f4")
    assert array.size == 3 * 224 * 224
    assert array[-1] == 3 * 224 * 224 - 1


@BOTH_SHAPES
@pytest.mark.parametrize(
    ("code", "status"), [(Code.UNKNOWN, 2), (Code.INTERNAL, 13), (Code.UNAVAILABLE, 14), (Code.UNSUPPORTED, 12)]
)
async def test_an_error_becomes_a_status(code: Code, status: int, bench: Bench) -> None:
    bench.engine.errors["identity"] = ServingError(code, "it is so: 100 %", hint="wait")
    response = await bench.client().call("ModelInfer", infer_message())

    assert (response.status, response.message) == (status, "it is so: 100 %25 (hint: wait)")
    assert response.data == b""


@BOTH_SHAPES
async def test_an_unknown_model_is_not_found(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message("nope"))

    assert response.status == Status.NOT_FOUND
    assert "'nope'" in response.message


@pytest.mark.parametrize("outcomes", [[(True, True)], [(True, False), (False, True)]], ids=["at once", "in two steps"])
async def test_a_decoupled_model_that_answers_once_is_answered(outcomes: list[Any], bench: Bench) -> None:
    answer = InferResponse("identity", "1", "a", [])
    bench.engine.outcomes = [[(answer if outcome else None, final) for outcome, final in outcomes]]
    response = await bench.client().call("ModelInfer", infer_message())

    assert response.status == Status.OK


async def test_a_request_with_two_responses_is_cancelled_at_the_second(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    response = await client.call("ModelInfer", infer_message())
    (ticket,) = bench.engine.tickets
    ticket.answer(InferResponse("identity", "1", "", []), False)
    assert not ticket.cancelled
    ticket.answer(InferResponse("identity", "1", "", []), False)
    assert ticket.cancelled
    await client.settle()
    assert response.status == Status.UNIMPLEMENTED


@pytest.mark.parametrize("outcomes", [[(None, True)], [("response", False), ("response", True)]], ids=["none", "two"])
async def test_a_model_with_another_number_of_responses_is_refused(outcomes: list[Any], bench: Bench) -> None:
    answer = InferResponse("identity", "1", "", [])
    bench.engine.outcomes = [[(answer if outcome else None, final) for outcome, final in outcomes]]
    response = await bench.client().call("ModelInfer", infer_message())

    assert response.status == Status.UNIMPLEMENTED
    assert response.message.startswith("ModelInfer RPC doesn't support models with decoupled transaction policy")
    assert "use ModelStreamInfer" in response.message


async def test_a_response_that_cannot_be_written_is_a_fault_of_the_model(bench: Bench) -> None:
    answer = InferResponse("identity", "1", "", [], parameters={"p": object()})  # type: ignore[dict-item]  # the fault
    bench.engine.outcomes = [[(answer, True)]]
    response = await bench.client().call("ModelInfer", infer_message())

    assert response.status == Status.INTERNAL
    assert "response parameter 'p'" in response.message


async def test_a_response_that_breaks_the_codec_does_not_reach_the_engine(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with play() as bench:
        answer = InferResponse("identity", "1", "", [None])  # type: ignore[list-item]  # the fault
        bench.engine.outcomes = [[(answer, True)]]
        response = await bench.client().call("ModelInfer", infer_message())

        assert response.status == Status.INTERNAL
    assert "ModelInfer" in caplog.text


async def test_a_fault_of_the_server_hurts_one_call_and_is_logged(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with play() as bench:
        client = bench.client()
        infer, bench.engine.infer = bench.engine.infer, None
        response = await client.call("ModelInfer", infer_message())
        bench.engine.infer = infer
        after = await client.call("ModelInfer", infer_message())

        assert (response.status, after.status) == (Status.INTERNAL, Status.OK)
        assert "NoneType" not in response.message
    assert "NoneType" in caplog.text


async def test_while_the_server_exits_inferences_are_refused(bench: Bench) -> None:
    bench.engine.exiting = True
    client = bench.client()
    refused = await client.call("ModelInfer", infer_message())
    live = await client.call("ServerLive")

    assert refused.status == Status.UNAVAILABLE
    assert refused.message == "GRPC server is shutting down and has stopped accepting new requests."
    assert live.status == Status.OK


# Methods.


async def test_a_method_that_is_not_there_is_unimplemented(bench: Bench) -> None:
    response = await bench.client().call("/other.Service/Method")

    assert response.status == Status.UNIMPLEMENTED
    assert "'/other.Service/Method'" in response.message


@pytest.mark.parametrize("method", ["SystemSharedMemoryRegister", "CudaSharedMemoryUnregister"])
async def test_regions_are_registered_only_where_that_is_allowed(method: str, bench: Bench) -> None:
    response = await bench.client().call(method)

    assert response.status == Status.UNIMPLEMENTED
    assert "Client shared memory is disabled" in response.message


@pytest.mark.parametrize("method", ["TraceSetting", "LogSettings"])
async def test_what_is_not_offered_says_so(method: str, bench: Bench) -> None:
    response = await bench.client().call(method)

    assert response.status == Status.UNIMPLEMENTED
    assert "not offered by this server" in response.message


async def test_without_shared_memory_there_are_no_regions(bench: Bench) -> None:
    for method in ("SystemSharedMemoryStatus", "CudaSharedMemoryStatus"):
        response = await bench.client().call(method)
        assert (response.status, response.messages) == (Status.OK, [b""])


@pytest.mark.parametrize(
    "method",
    [
        "ServerLive",
        "ModelReady",
        "ModelInfer",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "/grpc.health.v1.Health/Check",
    ],
)
async def test_bytes_that_are_no_message_are_an_internal_error(method: str, bench: Bench) -> None:
    response = await bench.client().call(method, b"\xff\xff")

    assert response.status == Status.INTERNAL
    assert "the bytes received are no" in response.message


@BOTH_SHAPES
async def test_a_model_is_loaded_with_its_overrides(bench: Bench) -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/model.onnx"].bytes_param = b"onnx"
    response = await bench.client().call("RepositoryModelLoad", message.SerializeToString())

    assert (response.status, response.messages) == (Status.OK, [b""])
    assert bench.engine.loads == [("m", "{}", {"1/model.onnx": b"onnx"})]


@BOTH_SHAPES
async def test_a_model_is_unloaded_with_its_dependents(bench: Bench) -> None:
    message = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    message.parameters["unload_dependents"].bool_param = True
    response = await bench.client().call("RepositoryModelUnload", message.SerializeToString())

    assert response.status == Status.OK
    assert bench.engine.unloads == [("m", True)]


@BOTH_SHAPES
async def test_a_failed_load_is_an_error_of_the_call(bench: Bench) -> None:
    bench.engine.control_error = unavailable("not in this mode")
    response = await bench.client().call("RepositoryModelLoad")

    assert (response.status, response.message) == (Status.UNAVAILABLE, "not in this mode")


async def test_a_load_goes_on_when_its_caller_leaves(bench: Bench) -> None:
    client = bench.client()
    message = service_pb2.RepositoryModelLoadRequest(model_name="m").SerializeToString()
    stream_id = client.start("RepositoryModelLoad", message)
    client.http2.reset_stream(stream_id)
    await client.settle()

    assert bench.engine.loads == [("m", None, None)]


async def test_a_fault_in_a_load_is_an_internal_error(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with play() as bench:
        bench.engine.load_model = None
        assert (await bench.client().call("RepositoryModelLoad")).status == Status.INTERNAL
    assert "RepositoryModelLoad" in caplog.text


# Requests that are not one message.


@pytest.mark.parametrize(
    "body", [b"", frame(b"") * 2, b"\0\0\0\0\5ab", b"\0\0"], ids=["none", "two", "cut", "no length"]
)
async def test_any_other_number_of_messages_is_refused(body: bytes, bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ServerLive")
    client.http2.send_data(stream_id, body, end_stream=True)
    client.exchange()

    assert client.responses[stream_id].status == Status.UNIMPLEMENTED
    assert "expected exactly one request message" in client.responses[stream_id].message


async def test_headers_that_end_the_stream_are_no_message(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.http2.send_request(request_headers("ServerLive"), end_stream=True)
    client.responses[stream_id] = MemoryResponse()
    client.exchange()

    assert client.responses[stream_id].status == Status.UNIMPLEMENTED


async def test_trailers_end_a_request_as_well(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ServerLive", b"", end=False)
    client.http2.send_trailers(stream_id, [(b"x", b"y")])
    client.exchange()

    assert client.responses[stream_id].status == Status.OK


async def test_a_message_over_the_limit_is_refused_before_it_has_come(play: Any) -> None:
    async with play(GrpcLimits(message_bytes_max=100)) as bench:
        client = bench.client()
        stream_id = client.start("ModelInfer")
        client.http2.send_data(stream_id, b"\0" + (101).to_bytes(4, "big") + b"x")
        client.exchange()

        response = client.responses[stream_id]
        assert response.status == Status.RESOURCE_EXHAUSTED
        assert "at most 100 bytes" in response.message
        assert (response.is_closed, response.reset_code) == (True, 0)


# Compression.


async def test_a_compressed_request_is_read(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelInfer", None, (b"grpc-encoding", b"gzip"))
    client.http2.send_data(stream_id, frame(gzip.compress(infer_message()), 1), end_stream=True)
    client.exchange()
    await client.settle()

    assert client.responses[stream_id].status == Status.OK


async def test_an_unknown_encoding_is_refused_with_the_known_ones(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message(), (b"grpc-encoding", b"br"))

    assert response.status == Status.UNIMPLEMENTED
    assert response.headers[b"grpc-accept-encoding"] == b"identity,deflate,gzip"


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [(b"identity, deflate, gzip", b"gzip"), (b"deflate", b"deflate"), (b"identity", None), (b"", None)],
)
async def test_responses_are_compressed_as_the_caller_accepts(
    play: Any, accepted: bytes, encoding: bytes | None
) -> None:
    async with play(GrpcLimits(compression_level=1)) as bench:
        header = ((b"grpc-accept-encoding", accepted),) if accepted else ()
        response = await bench.client().call("ModelInfer", infer_message(values=1000), *header)

        assert response.headers.get(b"grpc-encoding") == encoding
        assert response.data[0] == (1 if encoding else 0)
        if encoding == b"gzip":
            assert len(infer_response(gzip.decompress(response.messages[0])).raw_output_contents[0]) == 4000


# Deadlines and cancellation.


@BOTH_SHAPES
async def test_a_request_belongs_to_the_flow_of_its_clients_address(bench: Bench) -> None:
    client = bench.client(peername=("192.0.2.7", 5000))
    await client.call("ModelInfer", infer_message())

    assert bench.engine.tickets[0].request.flow == Flow("192.0.2.7")


@BOTH_SHAPES
async def test_a_deadline_ends_the_call_and_cancels_the_request(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    stream_id = client.start("ModelInfer", infer_message(), (b"grpc-timeout", b"20m"))
    await asyncio.sleep(0.05)
    await client.settle()

    (ticket,) = bench.engine.tickets
    assert ticket.cancelled
    assert ticket.request.deadline_ns > 0
    assert client.responses[stream_id].status == Status.DEADLINE_EXCEEDED
    bench.engine.release(0)


async def test_a_deadline_that_is_met_does_nothing(bench: Bench) -> None:
    client = bench.client()
    response = await client.call("ModelInfer", infer_message(), (b"grpc-timeout", b"10m"))
    await asyncio.sleep(0.03)
    client.exchange()

    assert response.status == Status.OK


async def test_a_malformed_deadline_is_refused(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message(), (b"grpc-timeout", b"soon"))

    assert response.status == Status.INVALID_ARGUMENT


@BOTH_SHAPES
async def test_a_cancelled_call_cancels_its_request(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    first, second = (client.start("ModelInfer", infer_message()) for _ in range(2))
    await client.settle()
    client.http2.reset_stream(first)
    await client.settle()
    bench.engine.release(1)
    await client.settle()

    assert [ticket.cancelled for ticket in bench.engine.tickets] == [True, False]
    assert client.responses[second].status == Status.OK


@BOTH_SHAPES
async def test_a_lost_connection_cancels_its_requests(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    client.start("ModelInfer", infer_message())
    client.start("ModelInfer", infer_message())
    await client.settle()
    client.protocol.connection_lost(None)
    await client.settle()

    assert [ticket.cancelled for ticket in bench.engine.tickets] == [True, True]


@pytest.mark.parametrize("kept_bytes", [0, 1, 5, 9, 40])
async def test_a_client_may_leave_at_any_point_of_its_request(kept_bytes: int, bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelInfer")
    client.http2.send_data(stream_id, frame(infer_message())[:kept_bytes])
    client.exchange()
    client.http2.reset_stream(stream_id)
    client.exchange()

    assert (await client.call("ModelInfer", infer_message())).status == Status.OK
    assert len(bench.engine.tickets) == 1


async def test_an_answer_to_a_client_that_left_in_the_same_bytes_is_no_error(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.http2.send_request(request_headers("ModelInfer"))
    client.responses[stream_id] = MemoryResponse()
    client.http2.send_data(stream_id, frame(infer_message()), end_stream=True)
    data = client.http2.data_to_send()
    client.http2.reset_stream(stream_id)
    client.feed(data + client.http2.data_to_send())

    assert (await client.call("ModelInfer", infer_message())).status == Status.OK


# The access log.


async def test_each_call_has_its_line_in_the_access_log(play: Any) -> None:
    log = StringIO()

    async with play(None, log) as bench:
        client = bench.client()
        await client.call("ModelInfer", infer_message(id="a"))
        await client.call("ModelInfer", infer_message("nope"))
        bench.engine.errors["identity"] = internal("broken")
        await client.call("ModelInfer", infer_message())
        await client.call("ServerLive")

        bench.engine.errors.clear()
        bench.engine.hold = True
        client.http2.reset_stream(client.start("ModelInfer", infer_message(id="left")))
        await client.settle()

    lines = [dict(pair.split("=", 1) for pair in line.split()) for line in log.getvalue().splitlines()]
    assert [(line["method"], line["status"]) for line in lines] == [
        ("ModelInfer", "OK"),
        ("ModelInfer", "NOT_FOUND"),
        ("ModelInfer", "INTERNAL"),
        ("ServerLive", "OK"),
        ("ModelInfer", "CANCELLED"),
    ]
    assert lines[-1]["id"] == "left"
    assert (lines[0]["protocol"], lines[0]["model"], lines[0]["version"], lines[0]["id"]) == (
        "grpc",
        "identity",
        "1",
        "a",
    )
    assert (lines[0]["batch_size"], lines[0]["bytes_in"]) == ("1", str(len(infer_message(id="a"))))
    assert int(lines[0]["bytes_out"]) > 64


async def test_what_is_refused_before_it_is_a_call_has_its_line_too(play: Any) -> None:
    log = StringIO()

    async with play(None, log) as bench:
        client = bench.client()
        await client.call("NoSuchMethod")
        await client.call("ServerLive", b"", (b"grpc-encoding", b"snappy"))
        stream_id = client.http2.send_request([(b":method", b"GET"), *request_headers("/x")[1:]])
        client.responses[stream_id] = MemoryResponse()
        await client.settle()
    assert [line.split(" ", 2)[2].split(" bytes_in")[0] for line in log.getvalue().splitlines()] == [
        "method=/inference.GRPCInferenceService/NoSuchMethod status=UNIMPLEMENTED",
        "method=ServerLive status=UNIMPLEMENTED",
        "method=/x status=405",
    ]
