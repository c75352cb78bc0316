"""gRPC calls that another gRPC server has received."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine
from tritonclient.grpc import service_pb2

from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.grpc.detached import DetachedCall
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.grpc.methods import method_table
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import RpcError, Status

KEY = "0123456789abcdef0123456789abcdef"
GATE = Gate((), KeyRing(parse_keys(f"user infer {KEY}").keys, b"secret"), what="API")
METHODS = {method.name: method for method in method_table().values()}


def infer_message(model: str = "identity", id: str = "") -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    message.raw_input_contents.append(np.ones(2, "<f4").tobytes())
    data: bytes = message.SerializeToString()
    return data


class Caller:
    """What a call has sent, and how it ended."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ends: list[RpcError | None] = []
        self.consumed = 0

    def count(self, size: int) -> None:
        self.consumed += size


def play(
    name: str,
    scenario: Callable[[DetachedCall], None],
    engine: FakeEngine | None = None,
    services: Services | None = None,
    metadata: tuple[Header, ...] = (),
) -> Caller:
    async def run() -> Caller:
        caller = Caller()
        frontend = GrpcFrontend(engine or FakeEngine(), services=services or Services())
        call = DetachedCall(
            frontend.service,
            METHODS[name],
            metadata,
            send=caller.messages.append,
            end=caller.ends.append,
            consumed=caller.count,
        )
        scenario(call)
        for _ in range(5):
            await asyncio.sleep(0)
        return caller

    return asyncio.run(run())


def test_a_unary_call_has_one_answer() -> None:
    caller = play("ModelInfer", lambda call: call.receive(infer_message(id="7")))

    assert caller.ends == [None]
    (message,) = caller.messages
    response = service_pb2.ModelInferResponse.FromString(message)
    assert (response.id, response.raw_output_contents[0]) == ("7", np.ones(2, "<f4").tobytes())


def test_work_that_takes_a_while_is_answered_later() -> None:
    caller = play("RepositoryIndex", lambda call: call.receive(b""))

    assert [m.name for m in service_pb2.RepositoryIndexResponse.FromString(caller.messages[0]).models] == [
        "identity",
        "unloaded",
    ]


def test_an_error_ends_the_call_with_its_status() -> None:
    caller = play("ModelInfer", lambda call: call.receive(infer_message("nope")))

    assert caller.messages == []
    (error,) = caller.ends
    assert error is not None
    assert error.status is Status.NOT_FOUND


def test_what_is_not_a_message_is_refused() -> None:
    (error,) = play("ModelInfer", lambda call: call.receive(b"\xff\xff")).ends

    assert error is not None
    assert error.status is Status.INTERNAL


def test_a_stream_answers_each_message_and_says_what_it_has_taken() -> None:
    def scenario(call: DetachedCall) -> None:
        call.receive(infer_message(id="a"), end=False)
        call.receive(infer_message(id="b"), end=False)
        call.end()

    caller = play("ModelStreamInfer", scenario)

    found = [service_pb2.ModelStreamInferResponse.FromString(message).infer_response.id for message in caller.messages]
    assert found == ["a", "b"]
    assert caller.ends == [None]
    assert caller.consumed == 2 * (5 + len(infer_message(id="a")))


def test_the_inference_of_a_caller_that_leaves_is_cancelled() -> None:
    engine = FakeEngine(hold=True)

    def scenario(call: DetachedCall) -> None:
        call.receive(infer_message())
        call.abandon()

    caller = play("ModelInfer", scenario, engine)

    assert engine.tickets[0].cancelled
    assert (caller.messages, caller.ends) == ([], [])


@pytest.mark.parametrize(
    ("key", "status"), [(b"Bearer " + KEY.encode(), None), (b"Bearer wrong", Status.UNAUTHENTICATED)]
)
def test_keys_are_asked_for_as_on_a_connection(key: bytes, status: Status | None) -> None:
    services = Services(grpc_gate=GATE)

    caller = play(
        "ModelInfer", lambda call: call.receive(infer_message()), services=services, metadata=((b"authorization", key),)
    )

    assert [error and error.status for error in caller.ends] == [status]


def test_a_key_that_is_there_twice_is_refused() -> None:
    metadata = ((b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer other"))

    caller = play("ServerLive", lambda call: call.receive(b""), services=Services(grpc_gate=GATE), metadata=metadata)

    assert [error and error.status for error in caller.ends] == [Status.INVALID_ARGUMENT]
