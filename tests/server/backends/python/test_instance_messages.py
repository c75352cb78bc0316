"""What an instance makes of a worker's messages, with a process that the test plays."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest
from tests.support.process import until

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import DeviceTensor, Tensor
from charonia.server.backends.api import Outputs, Result
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.process import WorkerProcess
from charonia.server.backends.workers.services import ServerServices
from charonia.server.channel.channel import Incoming, Outgoing, Receiver
from charonia.server.channel.end import RELEASES_HELD_MAX
from charonia.server.channel.regions import Mappings, RegionPool
from charonia.testing.backend_suite import StreamSink

LARGE = np.arange(50_000, dtype="<f4")


class Process:
    """Stands where a `WorkerProcess` does; its worker is the test."""

    pid = 7
    unsent = 0

    def __init__(self, message: Callable[[Incoming], None], end: Callable[[str], None]) -> None:
        self.pool = RegionPool()
        self.sent: list[tuple[Any, ...]] = []
        self.killed = ""
        self.dropped: list[int] = []
        self._message = message
        self._end = end
        self._theirs = RegionPool()
        self._receiver = Receiver(Mappings(), self.pool)

    def send(self, header: tuple[Any, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        (outgoing or Outgoing(self.pool)).frame(header)
        self.sent.append(header)

    def soon(self, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(action)

    def drop(self, regions: list[int]) -> None:
        self.dropped += regions

    def kill(self, reason: str) -> None:
        self.killed = self.killed or reason

    async def stop(self, timeout_s: float) -> None:
        self.pool.close()
        self._theirs.close()
        self._receiver.close()

    def says(self, *header: object) -> None:
        """Have the worker send a message; an array in it becomes the tensors of a result."""
        outgoing = Outgoing(self._theirs)
        data = b"".join(bytes(part) for part in outgoing.frame(cast(Any, _placed(header, outgoing))))
        for message in self._receiver.feed(data, [os.dup(fd) for fd in outgoing.fds]):
            self._message(message)

    def dies(self, reason: str = "it was killed") -> None:
        self._end(reason)

    def kinds(self) -> list[str]:
        return [header[0] for header in self.sent]

    def numbers(self) -> list[list[int]]:
        return [[number for number, _ in header[1]] for header in self.sent if header[0] == "execute"]


def _placed(value: object, outgoing: Outgoing) -> object:
    if isinstance(value, np.ndarray):
        place = outgoing.place(value.reshape(-1).view(np.uint8).data)
        return (-1, [("OUT", "FP32", value.shape, place)], {})
    if isinstance(value, tuple):
        return tuple(_placed(item, outgoing) for item in value)
    return [_placed(item, outgoing) for item in value] if isinstance(value, list) else value


class Bench:
    def __init__(self, *, is_decoupled: bool = True) -> None:
        self.processes: list[Process] = []

        def make(message: Callable[[Incoming], None], end: Callable[[str], None]) -> WorkerProcess:
            self.processes.append(Process(message, end))
            return cast(WorkerProcess, self.processes[-1])

        self.instance = PythonInstance(
            "m_0",
            make,
            ("initialize",),
            output_names=("OUT",),
            start_s_max=10,
            execute_s_max=0,
            server=ServerServices(CallFrame("m", "1")),
            is_decoupled=is_decoupled,
        )

    @property
    def process(self) -> Process:
        return self.processes[-1]

    async def open(self) -> None:
        opening = asyncio.ensure_future(self.instance.open())
        await asyncio.sleep(0)
        self.process.says("ready", {"has_is_ready": True})
        await opening

    async def start(self, count: int = 1) -> StreamSink:
        """Start a batch, and have it sent where a worker is there."""
        sink = self.start_soon(*(request() for _ in range(count)))
        await asyncio.sleep(0)
        return sink

    def start_soon(self, *requests: InferRequest) -> StreamSink:
        sink = StreamSink(len(requests))
        self.instance.start(requests, sink)
        return sink

    async def restarted(self) -> None:
        count = len(self.processes)
        await until(lambda: len(self.processes) != count)
        self.process.says("ready", {})
        await asyncio.sleep(0)


def request(elements: int = 2) -> InferRequest:
    return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, np.zeros(elements, "<f4"))})


@asynccontextmanager
async def running(*, is_decoupled: bool = True) -> AsyncIterator[Bench]:
    bench = Bench(is_decoupled=is_decoupled)
    await bench.open()
    yield bench
    await bench.instance.aclose()


def error_of(results: list[Result]) -> ServingError:
    assert isinstance(results[-1], ServingError)
    return results[-1]


async def test_batches_that_come_together_are_sent_together() -> None:
    async with running() as bench:
        sinks = [bench.start_soon(request()) for _ in range(3)]
        assert bench.process.numbers() == []
        await asyncio.sleep(0)
        assert bench.process.numbers() == [[1, 2, 3]]
        await bench.start()
        assert bench.process.numbers() == [[1, 2, 3], [4]]
        for number, sink in enumerate(sinks, 1):
            bench.process.says("done", number, [np.ones(1, "<f4")], [], [], 1, 2)
            assert sink.finished.result() is False


async def test_a_batch_whose_memory_is_sent_along_is_the_last_of_its_message() -> None:
    async with running() as bench:
        for elements in (2, LARGE.size, LARGE.size, 2, 2):
            bench.start_soon(request(elements))
        await asyncio.sleep(0)
        assert bench.process.numbers() == [[1, 2], [3], [4, 5]]


async def test_of_batches_that_come_together_only_the_one_that_cannot_be_sent_fails() -> None:
    async with running() as bench:
        broken = request()
        broken.parameters = {"key": cast(Any, object())}
        first, second, third = (bench.start_soon(each) for each in (request(), broken, request()))
        await asyncio.sleep(0)
        assert error_of(second.outputs[0]).code is Code.INTERNAL
        assert "cannot be handed to instance 'm_0'" in error_of(second.outputs[0]).message
        assert bench.process.numbers() == [[1], [2]]
        for number, sink in ((1, first), (2, third)):
            bench.process.says("done", number, [np.ones(1, "<f4")], [], [], 1, 2)
            assert isinstance(sink.outputs[0][0], Outputs)


async def test_a_caller_that_leaves_in_the_round_in_which_it_came_is_told_of_after_its_batch() -> None:
    async with running() as bench:
        sink = bench.start_soon(request(), request())
        sink.cancel(bench.instance, 1)
        assert bench.process.kinds() == ["initialize"]
        await asyncio.sleep(0)
        assert bench.process.kinds()[1:] == ["execute", "cancel"]
        assert bench.process.sent[-1] == ("cancel", 1, 1)


async def test_batches_that_were_not_sent_when_the_worker_ends_run_on_the_next_one() -> None:
    async with running() as bench:
        sink = bench.start_soon(request())
        bench.process.dies()
        await bench.restarted()
        assert bench.process.numbers() == [[1]]
        bench.process.says("done", 1, [np.ones(1, "<f4")], [], [], 1, 2)
        assert isinstance(sink.outputs[0][0], Outputs)


async def test_a_request_without_a_result_stays_open_until_its_last_response() -> None:
    async with running() as bench:
        sink = await bench.start(2)
        one = np.ones(1, "<f4")
        bench.process.says("responses", [(1, 1, one, False)], [], [])
        bench.process.says("done", 1, [one, None], [], [], 1, 2)
        assert sink.finished.result() is True
        bench.process.says("responses", [(1, 1, one, False)], [], [])
        bench.process.says("responses", [(1, 1, None, True)], [], [])
        assert [len(outputs) for outputs in sink.outputs] == [1, 2]
        assert sink.over == [True, True]
        asking = asyncio.ensure_future(bench.instance.is_ready())
        await asyncio.sleep(0)
        assert bench.process.kinds()[-1] == "is_ready"  # as the worker has said that its model can answer it
        asking.cancel()


async def test_a_request_that_was_answered_while_it_ran_is_not_left_open() -> None:
    async with running() as bench:
        sink = await bench.start()
        bench.process.says("responses", [(1, 0, np.ones(1, "<f4"), True)], [], [])
        bench.process.says("done", 1, [None], [], [], 1, 2)
        assert sink.finished.result() is False
        assert len(sink.outputs[0]) == 1


async def test_the_first_response_of_an_ordinary_model_is_its_last() -> None:
    async with running(is_decoupled=False) as bench:
        sink = await bench.start()
        bench.process.says("done", 1, [None], [], [], 1, 2)
        bench.process.says("responses", [(1, 0, np.ones(1, "<f4"), False)], [], [])
        bench.process.dies()
        assert [isinstance(result, Outputs) for result in sink.outputs[0]] == [True]


async def test_the_end_of_a_worker_fails_what_is_open_and_what_runs_and_not_what_has_not_begun() -> None:
    async with running() as bench:
        left_open, runs, waits = await bench.start(2), await bench.start(), await bench.start()
        bench.process.says("done", 1, [None, None], [], [], 1, 2)
        bench.process.says("responses", [(1, 0, None, True)], [], [])
        assert bench.instance.health.problem == ""
        bench.process.dies("it was shot")
        assert left_open.outputs[0] == []
        for failed in (left_open.outputs[1], runs.outputs[0]):
            assert error_of(failed).code is Code.INTERNAL
            assert "it was shot" in error_of(failed).message
        assert "it was shot" in bench.instance.health.problem
        assert bench.instance.pid == 0
        await bench.restarted()
        assert bench.instance.health.problem == ""
        ((number,),) = bench.process.numbers()
        bench.process.says("done", number, [np.ones(1, "<f4")], [], [], 1, 2)
        assert waits.finished.result() is False


async def test_the_model_is_told_of_a_caller_that_leaves_while_its_request_runs_or_is_open() -> None:
    async with running() as bench:
        sink = await bench.start(3)
        sink.cancel(bench.instance, 2)
        bench.process.says("done", 1, [None, None, None], [], [], 1, 2)
        sink.cancel(bench.instance, 0)
        assert [header for header in bench.process.sent if header[0] == "cancel"] == [
            ("cancel", 1, 2),
            ("cancel", 1, 0),
        ]
        sink.cancel(bench.instance, 1)
        bench.process.says("responses", [(1, 0, np.ones(1, "<f4"), True)], [], [])
        bench.instance.cancel(sink, 1)
        assert bench.process.kinds().count("cancel") == 3
        assert bench.process.killed == ""


async def test_callers_that_left_before_the_batch_was_sent_are_told_of_with_it() -> None:
    async with running() as bench:
        bench.process.dies()
        sink = await bench.start(2)
        sink.cancel(bench.instance, 1)
        await bench.restarted()
        kinds = bench.process.kinds()
        assert kinds[kinds.index("execute") + 1] == "cancel"
        bench.process.says("done", 1, [None, None], [], [], 1, 2)
        assert sink.finished.result() is True
        sink.cancel(bench.instance, 0)


async def test_responses_of_batches_that_are_not_known_are_ignored_and_their_memory_given_back() -> None:
    async with running() as bench:
        for _ in range(RELEASES_HELD_MAX):
            bench.process.says("responses", [(99, 0, LARGE, False)], [], [])
        release = bench.process.sent[-1]
        assert release[0] == "release"
        assert len(release[1]) == RELEASES_HELD_MAX
        assert bench.process.killed == ""


@pytest.mark.parametrize(
    "message",
    [
        ("responses", [(1, 7, None, True)], [], []),
        ("responses", [(1, 0)], [], []),
        ("responses", 1, 0),
        ("done", 1, [(-1, [("OUT", "FP32", (9,), (0, False, 4))], {})], [], [], 1, 2),
        ("done", 1, [(-1, [("OUT", "FP32", (1,), (1, 4, b"no uuid", bytes(64), 0))], {})], [], [], 1, 2),
        ("done", 1, [(-1, [("OUT", "FP32", (2,), (1, 4, bytes(16), bytes(64), 0))], {})], [], [], 1, 2),
        ("done", 1, [(-1, [("OUT", "FP32", (1,), (-9, 4, b"", b"", 0))], {})], [], [], 1, 2),
        ("done", 1, [(-1, [("OUT", "FP32", (1,), 7)], {})], [], [], 1, 2),
        ("nonsense",),
        ("metrics", [("nonsense", 1)]),
        ("call", 1, 1, "other", "", False, False, ("too few",), [], [], []),
    ],
)
async def test_a_worker_that_sends_what_cannot_be_read_is_ended(message: tuple[object, ...]) -> None:
    async with running() as bench:
        await bench.start()
        bench.process.says(*message)
        assert "cannot be read" in bench.process.killed


async def test_a_tensor_of_a_gpu_is_given_back_to_an_idle_worker_when_nobody_needs_it() -> None:
    async with running() as bench:
        sink = await bench.start()
        bench.process.says(
            "done", 1, [(-1, [("OUT", "FP32", (1,), (5, 4, bytes(16), bytes(64), 0))], {})], [], [], 1, 2
        )
        (result,) = sink.outputs[0]
        assert isinstance(result, Outputs)
        assert isinstance(result.tensors[0], DeviceTensor)
        assert result.tensors[0].shape == (1,)
        await asyncio.sleep(0)
        assert "release" not in bench.process.kinds()
        result.tensors.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.process.sent[-1] == ("release", [5], [])


async def test_a_model_that_is_not_initialized_may_call_no_other_and_change_none() -> None:
    bench = Bench()
    opening = asyncio.ensure_future(bench.instance.open())
    await asyncio.sleep(0)
    fields = ("", 0, 0, 0, 0, "{}", (), "")
    bench.process.says("call", 5, 0, "other", "", False, False, fields, [], [], [])
    bench.process.says("control", 6, "load", "other", {})
    reply, answer = bench.process.sent[1:]
    assert reply[:2] == ("reply", 5)
    assert "BLS is only supported during the 'execute' function." in reply[2][1]
    assert answer[:2] == ("answer", 6)
    assert answer[2][0] == "error"
    bench.process.says("ready", {})
    await opening
    await bench.instance.aclose()


async def test_an_instance_that_is_closed_refuses_batches_and_hears_nothing() -> None:
    bench = Bench()
    await bench.open()
    await bench.instance.aclose()
    sink = await bench.start()
    assert error_of(sink.outputs[0]).code is Code.UNAVAILABLE
    bench.process.says("nonsense")
    assert bench.process.killed == ""


async def test_a_model_is_asked_whether_it_is_ready() -> None:
    async with running() as bench:
        for said in (True, False):
            asking = asyncio.ensure_future(bench.instance.is_ready())
            await asyncio.sleep(0)
            kind, number = bench.process.sent[-1]
            assert kind == "is_ready"
            bench.process.says("answer_ready", number, said)
            assert await asking is said
        assert bench.process.killed == ""


async def test_a_model_that_ends_is_not_ready_and_one_that_cannot_say_is() -> None:
    async with running() as bench:
        asking = asyncio.ensure_future(bench.instance.is_ready())
        await asyncio.sleep(0)
        bench.process.dies()
        assert not await asking
        assert not await bench.instance.is_ready()
        await bench.restarted()  # as one without is_ready
        assert await bench.instance.is_ready()
        assert "is_ready" not in bench.process.kinds()


async def test_an_instance_says_its_state_in_one_line() -> None:
    async with running() as bench:
        assert repr(bench.instance) == "<PythonInstance 'm_0' pid=7 ready restarts=0 batches=0>"
        await bench.start()
        assert repr(bench.instance) == "<PythonInstance 'm_0' pid=7 ready restarts=0 batches=1>"
        bench.process.says("done", 1, [None], [], [], 1, 2)
        assert repr(bench.instance) == "<PythonInstance 'm_0' pid=7 ready restarts=0 batches=1>"  # it is left open
        bench.process.dies()
        assert repr(bench.instance) == "<PythonInstance 'm_0' pid=0 waiting to restart restarts=0 batches=0>"
        await bench.restarted()
        assert repr(bench.instance) == "<PythonInstance 'm_0' pid=7 ready restarts=1 batches=0>"
