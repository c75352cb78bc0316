"""The conformance suite of backends: the specification of `charonia.server.backends.api` as tests.

A backend's tests derive a class and provide the case:

    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend_case(self, tmp_path: Path) -> BackendCase:
            return BackendCase(make=MyBackend, files=..., config=..., request=..., needs_files=True)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import numpy as np
import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import (
    AsyncInstance,
    Backend,
    BackendSettings,
    BlockingInstance,
    LoadedModel,
    ModelFiles,
    Outputs,
    Placement,
    Result,
    SelfChecking,
    SupervisedModel,
)

P = ParamSpec("P")
Instance = BlockingInstance | AsyncInstance

PLACEMENT = Placement("instance_0", InstanceKind.KIND_CPU)
"""The placement of the suite's instances."""

TOLERANCE = 1e-5
"""Relative and absolute: sums in another order differ in the last digits."""

TIMEOUT_S = 60.0
"""Time limit of one batch."""


@dataclass(frozen=True, slots=True)
class BackendCase:
    """A backend and a model to test it with.

    Attributes:
        make: Makes the backend.
        files: The model's files.
        config: Its complete configuration, with `max_batch_size` of at least 7.
        request: Makes a request from a seed and a batch size.
        bad_request: Makes a request that the configuration allows but on which the model fails; None for none.
        needs_files: Whether the backend reads the model's folder.
        settings: Settings of the backend.
    """

    make: Callable[[], Backend]
    files: ModelFiles
    config: ModelConfig
    request: Callable[[int, int], InferRequest]
    bad_request: Callable[[], InferRequest] | None = None
    needs_files: bool = True
    settings: BackendSettings = field(default_factory=BackendSettings)


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that ran: one result a request, and the monotonic times of the four steps in ns."""

    results: list[Result]
    times_ns: tuple[int, int, int, int]


class StreamSink:
    """A `BatchSink` that takes any number of responses and checks the rules of `BatchSink`.

    Attributes:
        outputs: The responses of each request, in order.
        over: Whether each request has its last outcome.
        finished: Done when the instance is idle again; its result tells whether it has left requests open.
        marks: The two times of `finish`.
        ended: Done when every request is over.
    """

    def __init__(self, count: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.outputs: list[list[Result]] = [[] for _ in range(count)]
        self.over = [False] * count
        self.cancelled = [False] * count
        self.marks = (0, 0)
        self.finished: asyncio.Future[bool] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Take a response."""
        assert asyncio.get_running_loop() is self._loop, "respond: not on the event loop's thread"
        assert final or result is not None, "respond: a response that is not final needs a result"
        if self.cancelled[index]:
            return
        assert not self.over[index], "respond: a response after the last one"
        if result is not None:
            self.outputs[index].append(result)
        self._note(index, final)

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """Take the end of the batch."""
        assert input_end_ns <= output_start_ns
        if not leaves_open:
            for index, is_over in enumerate(self.over):
                if not is_over:
                    assert error is not None, "finish: a request has no last response, and is not left open"
                    self.outputs[index].append(error)
                    self._note(index, True)
        self.marks = input_end_ns, output_start_ns
        self.finished.set_result(leaves_open)

    def is_cancelled(self, index: int) -> bool:
        """Return whether the test has cancelled the request, or it is over."""
        return self.cancelled[index] or self.over[index]

    def frame(self) -> CallFrame:
        """Return a frame of the suite's instance."""
        return CallFrame("m", "1", PLACEMENT.name)

    def cancel(self, instance: AsyncInstance, index: int) -> None:
        """Cancel a request, as a caller does."""
        self.cancelled[index] = True
        self._note(index, True)
        instance.cancel(self, index)

    def _note(self, index: int, final: bool) -> None:
        self.over[index] = self.over[index] or final
        if all(self.over) and not self.ended.done():
            self.ended.set_result(None)


async def run_batch(instance: Instance, requests: Sequence[InferRequest]) -> Ran:
    """Run requests as one batch, as the engine does: in a thread, or with a sink.

    An error of the whole batch becomes every request's result.
    """
    start = time.monotonic_ns()
    if isinstance(instance, BlockingInstance):
        try:
            execution = await asyncio.wait_for(asyncio.to_thread(instance.execute, requests), TIMEOUT_S)
        except ServingError as error:
            return Ran([error] * len(requests), (start, start, start, start))
        marks = (execution.input_end_ns, execution.output_start_ns)
        results = list(execution.results)
    else:
        sink = StreamSink(len(requests))
        instance.start(requests, sink)
        assert not await asyncio.wait_for(sink.finished, TIMEOUT_S), "finish: the model answers each request at once"
        assert [len(outputs) for outputs in sink.outputs] == [1] * len(requests), "respond: expected one response each"
        marks = sink.marks
        results = [outputs[0] for outputs in sink.outputs]
    return Ran(results, (start, *marks, time.monotonic_ns()))


@asynccontextmanager
async def loaded(case: BackendCase, instances: int = 1) -> AsyncIterator[tuple[LoadedModel, list[Instance]]]:
    """Load the case's model with some instances, and close everything in the order that the engine does."""
    backend = case.make()
    model = await backend.load(case.files, case.config, case.settings)
    placements = [replace(PLACEMENT, name=f"instance_{index}") for index in range(instances)]
    made = list(await asyncio.gather(*(model.create_instance(placement) for placement in placements)))
    try:
        yield model, made
    finally:
        for instance in made:
            await close(instance)
        await model.aclose()
        await backend.aclose()


async def close(instance: Instance) -> None:
    """Close an instance of either form."""
    if isinstance(instance, BlockingInstance):
        await asyncio.to_thread(instance.close)
    else:
        await instance.aclose()


def arrays(result: Result) -> dict[str, Array]:
    """Return the arrays of a result, by output."""
    assert isinstance(result, Outputs), result
    return {tensor.name: tensor.array for tensor in result.tensors}


def assert_same(one: Result, other: Result) -> None:
    """Check that two results have the same outputs, except for rounding."""
    first, second = arrays(one), arrays(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.shape == second[name].shape, name
        if array.dtype.kind == "f":
            expected = second[name].astype(np.float64)
            np.testing.assert_allclose(array.astype(np.float64), expected, TOLERANCE, TOLERANCE, err_msg=name)
        else:
            np.testing.assert_array_equal(array, second[name], err_msg=name)


def synchronous(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Return a test that pytest runs without a plugin for coroutines."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class BackendSuite:
    """The tests. A derived class has a fixture `backend_case`."""

    @synchronous
    async def test_every_output_has_the_name_the_datatype_and_the_shape_that_the_configuration_says(
        self, backend_case: BackendCase
    ) -> None:
        async with loaded(backend_case) as (_, [instance]):
            [result] = (await run_batch(instance, [backend_case.request(1, 3)])).results
        assert isinstance(result, Outputs), result
        configured = {output.name: output for output in backend_case.config.output}
        assert {tensor.name for tensor in result.tensors} == configured.keys()
        for tensor in result.tensors:
            output = configured[tensor.name]
            assert tensor.datatype is output.data_type
            assert tensor.array.dtype == tensor.datatype.numpy
            assert tensor.shape[0] == 3
            assert len(tensor.shape) == 1 + len(output.dims)
            assert all(dim in (-1, size) for dim, size in zip(output.dims, tensor.shape[1:], strict=True))
            if tensor.datatype is DataType.BYTES:
                assert all(isinstance(element, bytes) for element in tensor.array.reshape(-1).tolist())

    @pytest.mark.parametrize("sizes", [[1], [1, 1], [3, 1, 2], [1, 1, 1, 1, 1, 1, 1]])
    @synchronous
    async def test_requests_get_the_same_answers_together_as_alone(
        self, backend_case: BackendCase, sizes: Sequence[int]
    ) -> None:
        requests = [backend_case.request(seed, size) for seed, size in enumerate(sizes)]

        async with loaded(backend_case) as (_, [instance]):
            alone = [(await run_batch(instance, [request])).results[0] for request in requests]
            together = (await run_batch(instance, requests)).results
        assert len(together) == len(requests)
        for one, other in zip(alone, together, strict=True):
            assert_same(one, other)

    @synchronous
    async def test_answers_stay_what_they_are_when_the_instance_goes_on_and_closes(
        self, backend_case: BackendCase
    ) -> None:
        async with loaded(backend_case) as (_, [instance]):
            [first] = (await run_batch(instance, [backend_case.request(1, 2)])).results
            copies = {name: array.copy() for name, array in arrays(first).items()}
            for seed in range(2, 6):
                await run_batch(instance, [backend_case.request(seed, 2)])
        for name, array in arrays(first).items():
            np.testing.assert_array_equal(array, copies[name])

    @synchronous
    async def test_inputs_may_be_read_only_and_are_not_changed(self, backend_case: BackendCase) -> None:
        requests = [backend_case.request(1, 1), backend_case.request(2, 2)]
        before = [tensor.array.copy() for request in requests for tensor in request.inputs.values()]
        for request in requests:
            for tensor in request.inputs.values():
                tensor.array.flags.writeable = False

        async with loaded(backend_case) as (_, [instance]):
            for result in (await run_batch(instance, requests)).results:
                assert isinstance(result, Outputs), result

        after = [tensor.array for request in requests for tensor in request.inputs.values()]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)

    @synchronous
    async def test_inputs_may_lie_anywhere_in_memory(self, backend_case: BackendCase) -> None:
        request = backend_case.request(4, 2)
        moved = backend_case.request(4, 2)
        for name, tensor in moved.inputs.items():
            if tensor.datatype is not DataType.BYTES:
                body = b"x" + tensor.array.tobytes()
                array = np.frombuffer(body, np.uint8)[1:].view(tensor.array.dtype)
                moved.inputs[name] = Tensor(name, tensor.datatype, array.reshape(tensor.array.shape))

        async with loaded(backend_case) as (_, [instance]):
            [one] = (await run_batch(instance, [request])).results
            [other] = (await run_batch(instance, [moved])).results
        assert_same(one, other)

    @synchronous
    async def test_the_times_of_an_execution_are_in_order(self, backend_case: BackendCase) -> None:
        async with loaded(backend_case) as (_, [instance]):
            ran = await run_batch(instance, [backend_case.request(1, 1)])
        assert list(ran.times_ns) == sorted(ran.times_ns)

    @synchronous
    async def test_instances_run_at_the_same_time_without_touching_one_another(self, backend_case: BackendCase) -> None:
        requests = [backend_case.request(seed, 1 + seed % 3) for seed in range(8)]

        async with loaded(backend_case, instances=3) as (_, instances):
            expected = [(await run_batch(instances[0], [request])).results[0] for request in requests]

            async def work(instance: Instance) -> list[Result]:
                return [(await run_batch(instance, [request])).results[0] for request in requests * 4]

            for got in await asyncio.gather(*(work(instance) for instance in instances)):
                for one, other in zip(expected * 4, got, strict=True):
                    assert_same(one, other)

    @synchronous
    async def test_an_instance_comes_and_goes_while_another_one_runs(self, backend_case: BackendCase) -> None:
        request = backend_case.request(3, 2)

        async with loaded(backend_case) as (model, [first]):
            expected = (await run_batch(first, [request])).results[0]
            for number in (1, 2, 1):
                placement = replace(PLACEMENT, name=f"instance_{number}")
                running = asyncio.ensure_future(run_batch(first, [request]))
                more = await model.create_instance(placement)
                assert_same(expected, (await run_batch(more, [request])).results[0])
                assert_same(expected, (await running).results[0])
                running = asyncio.ensure_future(run_batch(first, [request]))
                await close(more)
                assert_same(expected, (await running).results[0])
                if isinstance(model, SupervisedModel):
                    assert len(model.workers()) == 1
                assert not isinstance(model, SelfChecking) or await model.is_ready()

    @synchronous
    async def test_an_asynchronous_instance_takes_batches_ahead_of_time(self, backend_case: BackendCase) -> None:
        requests = [backend_case.request(seed, 2) for seed in range(4)]

        async with loaded(backend_case) as (_, [instance]):
            if isinstance(instance, BlockingInstance):
                pytest.skip("a blocking instance takes one batch at a time")
            expected = [(await run_batch(instance, [request])).results[0] for request in requests]
            ahead = await asyncio.gather(*(run_batch(instance, [request]) for request in requests))
        for one, other in zip(expected, ahead, strict=True):
            assert_same(one, other.results[0])

    @synchronous
    async def test_a_request_that_fails_leaves_its_batch_mates_their_answers(self, backend_case: BackendCase) -> None:
        if backend_case.bad_request is None:
            pytest.skip("the model fails on nothing that its configuration allows")
        requests = [backend_case.request(1, 1), backend_case.bad_request(), backend_case.request(2, 1)]

        async with loaded(backend_case) as (_, [instance]):
            alone = [(await run_batch(instance, [request])).results[0] for request in requests]
            together = (await run_batch(instance, requests)).results
            again = (await run_batch(instance, [requests[0]])).results[0]
        assert isinstance(alone[1], ServingError)
        assert isinstance(together[1], ServingError)
        assert_same(alone[0], together[0])
        assert_same(alone[2], together[2])
        assert_same(alone[0], again)

    @synchronous
    async def test_a_complete_configuration_stays_as_it_is(self, backend_case: BackendCase) -> None:
        backend = backend_case.make()
        completion = await backend.complete(backend_case.files, backend_case.config, backend_case.settings)
        await backend.aclose()
        assert completion.config == backend_case.config

    @synchronous
    async def test_a_model_can_be_loaded_again_and_beside_itself(self, backend_case: BackendCase) -> None:
        request = backend_case.request(1, 2)

        async with loaded(backend_case) as (_, [old]):
            [before] = (await run_batch(old, [request])).results
            async with loaded(backend_case) as (_, [new]):
                [during] = (await run_batch(new, [request])).results
            [after] = (await run_batch(old, [request])).results
        async with loaded(backend_case) as (_, [instance]):
            [again] = (await run_batch(instance, [request])).results
        for result in (during, after, again):
            assert_same(before, result)

    @synchronous
    async def test_memory_is_reported_in_bytes_of_a_device(self, backend_case: BackendCase) -> None:
        async with loaded(backend_case) as (model, _):
            for usage in model.memory():
                assert usage.type in ("CPU", "GPU")
                assert usage.byte_size >= 0

    @synchronous
    async def test_a_model_without_files_is_refused_with_a_reason(
        self, backend_case: BackendCase, tmp_path: Path
    ) -> None:
        if not backend_case.needs_files:
            pytest.skip("this backend reads no files")
        empty = tmp_path / "empty" / "1"
        empty.mkdir(parents=True)
        case = replace(backend_case, files=ModelFiles(empty.parent, 1, empty))

        with pytest.raises(ServingError) as caught:
            async with loaded(case):
                pass
        assert caught.value.message
