"""The conformance suite of backends that run models with the decoupled transaction policy.

It complements `charonia.testing.backend_suite` and works in the same way: derive `DecoupledSuite` and provide the case
in a fixture `decoupled_case`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.server.backends.api import AsyncInstance, Backend, BackendSettings, ModelFiles, Outputs
from charonia.testing.backend_suite import PLACEMENT, TIMEOUT_S, StreamSink, synchronous


@dataclass(frozen=True, slots=True)
class DecoupledCase:
    """A backend and a decoupled model to test it with.

    Attributes:
        make: Makes the backend.
        files: The model's files.
        config: Its complete configuration.
        request: Makes a request that gets this many responses, none of which is an error.
        failing_request: Makes a request whose last outcome is an error; None for none.
        settings: Settings of the backend.
    """

    make: Callable[[], Backend]
    files: ModelFiles
    config: ModelConfig
    request: Callable[[int], InferRequest]
    failing_request: Callable[[], InferRequest] | None = None
    settings: BackendSettings = field(default_factory=BackendSettings)


def begin(instance: AsyncInstance, requests: Sequence[InferRequest]) -> StreamSink:
    """Start a batch."""
    sink = StreamSink(len(requests))
    instance.start(requests, sink)
    return sink


async def ended(*sinks: StreamSink) -> None:
    """Return when all requests are over and the instance is idle."""
    for sink in sinks:
        await asyncio.wait_for(sink.finished, TIMEOUT_S)
        await asyncio.wait_for(sink.ended, TIMEOUT_S)


@asynccontextmanager
async def _instance(case: DecoupledCase) -> AsyncIterator[AsyncInstance]:
    backend = case.make()
    model = await backend.load(case.files, case.config, case.settings)
    instance = await model.create_instance(PLACEMENT)
    assert isinstance(instance, AsyncInstance), "an instance that answers more than once is asynchronous"
    try:
        yield instance
    finally:
        await instance.aclose()
        await model.aclose()
        await backend.aclose()


class DecoupledSuite:
    """The tests. A derived class has a fixture `decoupled_case`."""

    @pytest.mark.parametrize("counts", [[0], [1], [5], [0, 3, 1], [2, 2, 2, 2]])
    @synchronous
    async def test_each_request_gets_its_responses_and_then_its_end(
        self, decoupled_case: DecoupledCase, counts: Sequence[int]
    ) -> None:
        async with _instance(decoupled_case) as instance:
            sink = begin(instance, [decoupled_case.request(count) for count in counts])
            await ended(sink)
        assert [len(outputs) for outputs in sink.outputs] == list(counts)
        assert all(isinstance(result, Outputs) for outputs in sink.outputs for result in outputs)

    @synchronous
    async def test_batches_follow_one_another_while_requests_are_open(self, decoupled_case: DecoupledCase) -> None:
        async with _instance(decoupled_case) as instance:
            sinks = [begin(instance, [decoupled_case.request(n), decoupled_case.request(1)]) for n in range(12)]
            await ended(*sinks)
        assert [[len(outputs) for outputs in sink.outputs] for sink in sinks] == [[n, 1] for n in range(12)]

    @synchronous
    async def test_responses_stay_what_they_are(self, decoupled_case: DecoupledCase) -> None:
        async with _instance(decoupled_case) as instance:
            first = begin(instance, [decoupled_case.request(4)])
            await ended(first)
            (kept,) = first.outputs
            before = [t.array.copy() for r in kept if isinstance(r, Outputs) for t in r.tensors]
            await ended(*[begin(instance, [decoupled_case.request(6)]) for _ in range(4)])
        after = [t.array for r in kept if isinstance(r, Outputs) for t in r.tensors]
        assert len(before) == len(after) >= 4
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)

    @synchronous
    async def test_a_request_that_fails_leaves_the_others_their_responses(self, decoupled_case: DecoupledCase) -> None:
        if decoupled_case.failing_request is None:
            pytest.skip("the model fails on nothing that its configuration allows")
        requests = [decoupled_case.request(2), decoupled_case.failing_request(), decoupled_case.request(3)]

        async with _instance(decoupled_case) as instance:
            sink = begin(instance, requests)
            await ended(sink)
        assert isinstance(sink.outputs[1][-1], ServingError)
        assert [len(sink.outputs[index]) for index in (0, 2)] == [2, 3]

    @synchronous
    async def test_callers_that_leave_do_not_disturb_others(self, decoupled_case: DecoupledCase) -> None:
        async with _instance(decoupled_case) as instance:
            sink = begin(instance, [decoupled_case.request(50), decoupled_case.request(3)])
            sink.cancel(instance, 0)
            instance.cancel(sink, 0)
            instance.cancel(StreamSink(1), 0)
            await ended(sink)
            assert len(sink.outputs[1]) == 3
            late = begin(instance, [decoupled_case.request(2)])
            await ended(late)
            instance.cancel(late, 0)
            again = begin(instance, [decoupled_case.request(2)])
            await ended(again)
        assert len(again.outputs[0]) == 2
