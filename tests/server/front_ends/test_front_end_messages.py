"""What a front end and the engine send each other comes out as it went in."""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted import TraceIds

from charonia.config.model import DynamicBatching, InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelIndexEntry, ModelState, ServerMetadata
from charonia.core.request import Flow, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Outcome
from charonia.core.statistics import BatchStatistics, Duration, MemoryUsage, ModelStatistics, ResponseStatistics
from charonia.core.tensor import Tensor
from charonia.core.trace import RemoteParent, TraceLevel, TraceTree
from charonia.server.channel.channel import INLINE_BYTES_MAX, Incoming, Outgoing, Receiver
from charonia.server.channel.regions import Mappings, RegionPool
from charonia.server.directory import Directory, ModelView, VersionView
from charonia.server.front_ends.messages import (
    EngineState,
    ServerReadiness,
    decode_outcome,
    decode_parent,
    decode_request,
    encode_outcome,
    encode_request,
    encode_trace,
    plain,
    record,
)
from charonia.server.lifecycle.front_end_placement import Offer
from charonia.wire.log_settings import AccessLogFormat, LogFormat, LogOptions

TEXTS = st.text(max_size=20)
NUMBERS = st.integers(0, 2**63)
VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), TEXTS)
PARAMETERS = st.dictionaries(TEXTS, VALUES, max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    made = []
    for name in draw(st.lists(TEXTS, max_size=4, unique=True)):
        datatype = draw(st.sampled_from(list(DataType)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = math.prod(shape)
        if datatype is DataType.BYTES:
            array = np.empty(size, object)
            array[:] = draw(st.lists(st.binary(max_size=9), min_size=size, max_size=size))
        else:
            data = draw(st.binary(min_size=size * datatype.byte_size, max_size=size * datatype.byte_size))
            array = np.frombuffer(data, datatype.numpy)
        made.append(Tensor(name, datatype, array.reshape(shape)))
    return made


def large() -> Tensor:
    return Tensor("large", DataType.UINT8, np.arange(INLINE_BYTES_MAX + 1, dtype=np.uint8))


def carried(header: tuple[object, ...], outgoing: Outgoing) -> Incoming:
    """Return a message as the other end gets it."""
    data = b"".join(outgoing.frame(header))
    fds = [os.dup(fd) for fd in outgoing.fds]
    (message,) = Receiver(Mappings()).feed(bytearray(data), fds)
    return message


def same(one: Tensor, other: Tensor) -> bool:
    if (one.name, one.datatype, one.shape) != (other.name, other.datatype, other.shape):
        return False
    if one.datatype is DataType.BYTES:
        return bool(one.array.tolist() == other.array.tolist())
    return one.array.tobytes() == other.array.tobytes()


def never(region: int) -> None:
    raise AssertionError(f"region {region} is released though it is in use")


@given(
    tensors(), PARAMETERS, TEXTS, st.one_of(NUMBERS, TEXTS), st.lists(st.tuples(TEXTS, NUMBERS), max_size=3), NUMBERS
)
def test_a_request_arrives_as_it_was_sent(
    inputs: list[Tensor],
    parameters: dict[str, Any],
    text: str,
    correlation: int | str,
    outputs: list[tuple[str, int]],
    number: int,
) -> None:
    sent = InferRequest(
        "m",
        {tensor.name: tensor for tensor in inputs},
        model_version=text,
        id=text,
        outputs=tuple(RequestedOutput(*output) for output in outputs),
        parameters=parameters,
        correlation_id=correlation,
        flags=3,
        priority=number,
        timeout_us=number,
        deadline_ns=number,
        flow=Flow(text, number),
    )
    outgoing = Outgoing(RegionPool())
    message = carried(("infer", encode_request(sent, outgoing)), outgoing)

    got = decode_request(message.header[1], message, never)

    assert list(got.inputs) == list(sent.inputs)
    assert all(same(got.inputs[name], tensor) for name, tensor in sent.inputs.items())
    assert [(o.name, o.classification) for o in got.outputs] == outputs
    for field in ("model_name", "model_version", "id", "parameters", "correlation_id", "flags", "priority", "flow"):
        assert getattr(got, field) == getattr(sent, field)
    assert (got.timeout_us, got.deadline_ns, got.caller, got.trace) == (number, number, None, None)


@given(tensors(), PARAMETERS, st.booleans())
def test_a_response_arrives_as_it_was_sent(outputs: list[Tensor], parameters: dict[str, Any], is_run: bool) -> None:
    run = ExecutionRecord("m_0", 4, 100, 200) if is_run else None
    outgoing = Outgoing(RegionPool())
    fields = encode_outcome(InferResponse("m", "1", "id", outputs, parameters, run), outgoing)
    message = carried(("outcome", fields), outgoing)

    got = decode_outcome(message.header[1], message, never)

    assert isinstance(got, InferResponse)
    assert (got.model_name, got.model_version, got.id, got.parameters) == ("m", "1", "id", parameters)
    assert len(got.outputs) == len(outputs)
    assert all(map(same, got.outputs, outputs))
    assert (got.execution is None) is not is_run
    if got.execution is not None:
        assert (got.execution.instance, got.execution.batch_size) == ("m_0", 4)
        assert (got.execution.queue_ns, got.execution.compute_ns) == (100, 200)


@pytest.mark.parametrize("outcome", [None, *(ServingError(code, "why", hint="what to do") for code in Code)])
def test_the_end_and_every_error_arrive(outcome: Outcome) -> None:
    outgoing = Outgoing(RegionPool())
    message = carried(("outcome", encode_outcome(outcome, outgoing)), outgoing)

    got = decode_outcome(message.header[1], message, never)

    assert repr(got) == repr(outcome)
    if isinstance(got, ServingError) and isinstance(outcome, ServingError):
        assert (got.code, got.message, got.hint) == (outcome.code, outcome.message, outcome.hint)


def test_a_large_tensor_lies_in_memory_that_is_released_after_its_last_use() -> None:
    released: list[int] = []
    outgoing = Outgoing(RegionPool())
    message = carried(("outcome", encode_outcome(InferResponse("m", "1", "", [large()]), outgoing)), outgoing)

    got = decode_outcome(message.header[1], message, released.append)

    assert isinstance(got, InferResponse)
    assert same(got.outputs[0], large())
    assert outgoing.size == 0  # nothing was copied into the message
    assert released == []
    del got
    assert len(released) == 1


@pytest.mark.parametrize("remote", [None, RemoteParent(2**127, 2**63, "vendor=1")])
def test_a_trace_travels_with_its_events_and_its_sender(remote: RemoteParent | None) -> None:
    tree = TraceTree(TraceLevel.TIMESTAMPS, TraceIds(7), lambda tree: None, remote)
    tree.mark("HTTP_RECV_START", 5)
    outgoing = Outgoing(RegionPool())
    message = carried(("infer", encode_trace(tree)), outgoing)

    fields = message.header[1]
    parent = decode_parent(fields)

    assert fields[0] == [("HTTP_RECV_START", 5)]
    assert tree.front == []  # what was sent is not sent again
    assert (parent is None) is (remote is None)
    if parent is not None and remote is not None:
        assert (parent.trace_id, parent.span_id, parent.state) == (remote.trace_id, remote.span_id, remote.state)


CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(ModelInput(name="x", data_type=DataType.FP32, dims=(-1, 3)),),
    output=(ModelOutput(name="y", data_type=DataType.BYTES, dims=(1,)),),
    instance_group=(InstanceGroup(count=2),),
    dynamic_batching=DynamicBatching(preferred_batch_size=(2, 4)),
    parameters={"key": "value"},
)


@pytest.mark.parametrize(
    "value",
    [
        CONFIG,
        ServerMetadata("triton", "1", ("a", "b")),
        ModelIndexEntry("m"),
        ModelIndexEntry("m", "1", ModelState.READY, "reason"),
        LogOptions(verbose=2, info=False, format=LogFormat.ISO8601, access=AccessLogFormat.JSON),
        ModelStatistics(
            *("m", "1", 5, 6, 7, Duration(1, 2)),
            responses={"0": ResponseStatistics(success=Duration(3, 4))},
            batches={8: BatchStatistics(compute_infer=Duration(5, 6))},
            memory=[MemoryUsage("GPU", 0, 9)],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_record_is_read_from_its_plain_values(value: object) -> None:
    outgoing = Outgoing(RegionPool())
    message = carried(("answer", plain(value)), outgoing)

    assert record(type(value), message.header[1]) == value


OFFER = Offer(1, 1, "m", "/models/m", "ab12", is_immutable=True, labels={"OUT": ("a", "b")})


def view(state: ModelState, reason: str = "") -> ModelView:
    return ModelView("", {1: VersionView(state, reason)})


def test_a_state_follows_by_its_differences() -> None:
    there, first = EngineState(), EngineState(ServerReadiness(is_live=True), Directory({}, {}, "the disk is gone"))
    other = ModelConfig(name="other")
    loaded = EngineState(
        ServerReadiness(is_live=True, is_ready=True),
        Directory({("m", ""): CONFIG, ("m", "1"): CONFIG, ("other", ""): other}, {"m": view(ModelState.READY)}),
        {("m", ""): OFFER, ("m", "1"): OFFER, ("other", ""): replace(OFFER, number=2, steps=(1, 1))},
    )
    reloaded = EngineState(
        ServerReadiness(is_live=True, is_exiting=True),
        Directory({("m", ""): CONFIG}, {"m": view(ModelState.READY), "other": view(ModelState.UNAVAILABLE, "broken")}),
        {("m", ""): replace(OFFER, number=3)},
    )
    before = EngineState()
    for state in (first, loaded, reloaded):
        there.apply(state.difference(before))
        before = state

        assert there.readiness == state.readiness
        assert there.directory == state.directory
        assert there.offers == state.offers


def test_the_same_state_makes_no_difference_and_a_configuration_is_sent_once() -> None:
    one = EngineState(ServerReadiness(), Directory({("m", ""): CONFIG}, {"m": view(ModelState.READY)}))
    again = EngineState(ServerReadiness(), Directory({("m", ""): CONFIG}, {"m": view(ModelState.READY)}))
    busy = EngineState(ServerReadiness(), Directory({("m", ""): CONFIG}, {"m": view(ModelState.LOADING)}))

    assert again.difference(one) is None
    assert "value" in str(one.difference(EngineState()))
    assert "value" not in str(busy.difference(one))
