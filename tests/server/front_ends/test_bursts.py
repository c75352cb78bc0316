"""Plain requests and responses come out of a message as they went in, each with its number; all others are left out."""

import itertools
import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted import TraceIds

from charonia.core.dtypes import DataType
from charonia.core.request import Flow, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel, TraceTree
from charonia.server.channel.channel import ALIGNMENT, Incoming, Outgoing, Receiver
from charonia.server.channel.regions import ChannelError, Mappings, RegionPool
from charonia.server.front_ends import bursts
from charonia.server.front_ends.bursts import (
    BURST_BYTES_MAX,
    BURST_MAX,
    BurstReader,
    RequestReader,
    RequestWriter,
    ResponseWriter,
)

NAMES = st.text(max_size=5)
NUMBERS = st.integers(0, 2**63)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    made = []
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        datatype = draw(st.sampled_from(list(DataType)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = math.prod(shape)
        if datatype is DataType.BYTES:
            array = np.empty(size, object)
            array[:] = draw(st.lists(st.binary(max_size=20), min_size=size, max_size=size))
        else:
            data = draw(st.binary(min_size=size * datatype.byte_size, max_size=size * datatype.byte_size))
            array = np.frombuffer(data, datatype.numpy)
        made.append(Tensor(name, datatype, array.reshape(shape)))
    return made


@st.composite
def requests(draw: st.DrawFn) -> InferRequest:
    return InferRequest(
        draw(st.sampled_from(["m", "n"])),
        {tensor.name: tensor for tensor in draw(tensors())},
        model_version=draw(st.sampled_from(["", "1"])),
        id=draw(NAMES),
        outputs=tuple(RequestedOutput(*each) for each in draw(st.lists(st.tuples(NAMES, NUMBERS), max_size=2))),
        deadline_ns=draw(NUMBERS),
        flow=Flow(draw(NAMES), draw(st.integers(1, 1000))),
    )


@st.composite
def responses(draw: st.DrawFn) -> InferResponse:
    run = ExecutionRecord(draw(NAMES), *(draw(NUMBERS) for _ in range(3)))
    return InferResponse(draw(NAMES), draw(NAMES), draw(NAMES), draw(tensors()), None, run)


def carried(header: tuple[object, ...], outgoing: Outgoing) -> Incoming:
    """Return a message as the other end gets it."""
    (message,) = Receiver(Mappings()).feed(bytearray(b"".join(outgoing.frame(header))))
    return message


def taken(writer: RequestWriter | ResponseWriter) -> Incoming:
    outgoing = Outgoing(RegionPool())
    return carried(writer.take(outgoing), outgoing)


def values(found: list[Tensor]) -> list[object]:
    """Return what tensors are, in a form that can be compared."""
    return [
        (
            *(each.name, each.datatype, each.shape),
            each.array.tolist() if each.datatype is DataType.BYTES else each.array.tobytes(),
        )
        for each in found
    ]


def request_values(request: InferRequest) -> object:
    plain = (request.model_name, request.model_version, request.id, request.deadline_ns, request.flow)
    outputs = [(each.name, each.classification) for each in request.outputs]
    return plain, outputs, values(list(request.inputs.values()))


def form_of(request: InferRequest) -> Hashable:
    outputs = tuple((each.name, each.classification) for each in request.outputs)
    inputs = tuple((name, each.datatype, each.shape) for name, each in request.inputs.items())
    return request.model_name, request.model_version, outputs, inputs


def response_values(response: InferResponse) -> object:
    run = response.execution
    assert run is not None
    how = (run.instance, run.batch_size, run.queue_ns, run.compute_ns)
    return how, (response.model_name, response.model_version, response.id), values(response.outputs)


@given(st.lists(st.lists(requests(), max_size=4), max_size=3))
def test_requests_arrive_as_they_were_sent(messages: list[list[InferRequest]]) -> None:
    writer, reader = RequestWriter(), RequestReader()
    for sent in messages:
        assert all(writer.add(2**40 + number, request) for number, request in enumerate(sent))
        assert bool(writer) is bool(sent)
        groups = list(reader.read(taken(writer)))
        assert not writer

        got = {number - 2**40: request for group in groups for number, request in zip(*group, strict=True)}
        assert sorted(got) == list(range(len(sent)))
        assert [request_values(got[n]) for n in range(len(sent))] == [request_values(request) for request in sent]
        assert all(len({form_of(request) for request in requests}) == 1 for _, requests in groups)
        for model in {request.model_name for request in sent}:
            of_model = [(numbers, form_of(each[0])) for numbers, each in groups if each[0].model_name == model]
            numbers = [number for numbers, _ in of_model for number in numbers]
            assert numbers == sorted(numbers)
            assert all(form != following for (_, form), (_, following) in itertools.pairwise(of_model))


def test_requests_of_a_model_stay_in_order_whatever_their_forms_and_those_of_others_are_grouped() -> None:
    writer = RequestWriter()
    sizes_and_models = [(1, "a"), (1, "b"), (2, "a"), (1, "b"), (1, "a"), (1, "a")]
    for number, (size, model) in enumerate(sizes_and_models):
        assert writer.add(number, floats(size, model))

    groups = RequestReader().read(taken(writer))

    assert [numbers for numbers, _ in groups] == [[0], [1, 3], [2], [4, 5]]


@given(st.lists(st.lists(responses(), max_size=4), max_size=3))
def test_responses_arrive_as_they_were_sent(messages: list[list[InferResponse]]) -> None:
    writer, reader = ResponseWriter(), BurstReader()
    for sent in messages:
        assert all(writer.add(number, response) for number, response in enumerate(sent))
        got = list(reader.read(taken(writer)))

        assert [number for number, _ in got] == list(range(len(sent)))
        assert [response_values(response) for _, response in got] == [response_values(response) for response in sent]


def floats(count: int = 4, model: str = "m", **fields: Any) -> InferRequest:
    return InferRequest(model, {"X": Tensor("X", DataType.FP32, np.arange(count, dtype="<f4"))}, **fields)


def text(size: int) -> Tensor:
    return Tensor("X", DataType.BYTES, np.array([bytes(size)], object))


def answer(tensor: Tensor, *, parameters: dict[str, Any] | None = None, is_run: bool = True) -> InferResponse:
    return InferResponse("m", "1", "", [tensor], parameters, ExecutionRecord("m_0", 1, 2, 3) if is_run else None)


@pytest.mark.parametrize(
    "request_",
    [
        floats(parameters={"key": 1}),
        floats(correlation_id=7),
        floats(correlation_id="seven"),
        floats(flags=1),
        floats(priority=1),
        floats(timeout_us=1),
        floats(trace=TraceTree(TraceLevel.TIMESTAMPS, TraceIds(7), lambda tree: None).root),
        floats(BURST_BYTES_MAX // 4 + 1),
        InferRequest("m", {"X": text(BURST_BYTES_MAX)}),
    ],
    ids=["parameters", "sequence", "named sequence", "flags", "priority", "timeout", "trace", "large", "long text"],
)
def test_a_request_with_more_than_that_travels_alone(request_: InferRequest) -> None:
    writer = RequestWriter()

    assert not writer.add(1, request_)
    assert not writer


@pytest.mark.parametrize(
    "response",
    [
        answer(text(1), parameters={"key": 1}),
        answer(text(1), is_run=False),
        answer(text(BURST_BYTES_MAX)),
        answer(Tensor("X", DataType.UINT8, np.zeros(BURST_BYTES_MAX + 1, np.uint8))),
    ],
    ids=["parameters", "from the cache", "long text", "large"],
)
def test_a_response_with_more_than_that_travels_alone(response: InferResponse) -> None:
    writer = ResponseWriter()

    assert not writer.add(1, response)
    assert not writer


def test_what_finds_no_room_travels_alone() -> None:
    many, large = RequestWriter(), RequestWriter()

    assert [many.add(number, floats(0)) for number in range(BURST_MAX + 1)] == [True] * BURST_MAX + [False]
    assert [large.add(number, floats(BURST_BYTES_MAX // 8)) for number in range(3)] == [True, True, False]
    ((numbers, _),) = RequestReader().read(taken(large))
    assert numbers == [0, 1]


def test_a_form_is_sent_once_and_forgotten_with_the_others_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bursts, "FORMS_MAX", 2)
    writer, reader = RequestWriter(), RequestReader()

    def sent(*models: str) -> list[str]:
        """Send requests and return the models whose forms went along."""
        assert all(writer.add(0, floats(model=model)) for model in models)
        message = taken(writer)
        groups = reader.read(message)
        assert sorted(request.model_name for _, group in groups for request in group) == sorted(models)
        return [form[0] for _, form in message.header[1]]

    assert sent("a", "a") == ["a"]
    assert sent("a", "b") == ["b"]
    assert sent("b", "a") == ["b", "a"]  # both were forgotten, and have each other's number now
    assert writer.add(0, floats(model="c"))
    assert writer.add(0, floats(model="d"))
    assert not writer.add(0, floats(model="e"))  # numbers change only between messages


def test_arrays_are_aligned_views_of_the_message_that_a_model_may_write_to() -> None:
    writer = RequestWriter()
    for _ in range(3):
        assert writer.add(0, floats(3))

    ((_, requests),) = RequestReader().read(taken(writer))
    arrays = [request.inputs["X"].array for request in requests]

    assert all(array.__array_interface__["data"][0] % ALIGNMENT == 0 for array in arrays)
    assert all(array.base is not None and array.flags.writeable for array in arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda kind, forms, records, sizes, place: (kind, [], records, sizes, place),
        lambda kind, forms, records, sizes, place: (kind, forms, records[:-1], sizes, place),
        lambda kind, forms, records, sizes, place: (kind, forms, records * 9, sizes, place),
        lambda kind, forms, records, sizes, place: (kind, forms, records, [], place),
    ],
    ids=["no form", "part of a record", "too little data", "no size"],
)
def test_a_message_that_contradicts_itself_is_an_error(change: Any) -> None:
    writer, outgoing = RequestWriter(), Outgoing(RegionPool())
    assert writer.add(1, floats())
    assert writer.add(2, InferRequest("m", {"X": text(3)}))

    message = carried(change(*writer.take(outgoing)), outgoing)

    with pytest.raises(ChannelError, match="malformed"):
        RequestReader().read(message)
