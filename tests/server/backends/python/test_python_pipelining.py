"""Batches that a Python model's worker is handed ahead of time: order, failures, time limits, much data at once."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.process import until
from tests.support.python_model import Loaded, Sink, config, load, request

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Outputs, Result
from charonia.server.backends.workers import instance as instance_module
from charonia.server.channel.channel import FDS_MAX, INLINE_BYTES_MAX

Array = np.ndarray

MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if x.dtype == object:
                what, _, argument = x.reshape(-1)[0].decode().partition(" ")
                if what == "sleep":
                    time.sleep(float(argument))
                elif what == "wait":
                    while not os.path.exists(argument):
                        time.sleep(0.005)
                elif what == "die":
                    os._exit(9)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
        return responses
"""

STRINGS = config(DataType.BYTES)


class Started:
    """Batches that were handed over, and the order in which they finished."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.finished: list[int] = []
        self.sinks: list[Sink] = []

    def start(self, requests: Sequence[InferRequest]) -> None:
        number = len(self.sinks)
        sink = Sink(len(requests))
        sink.done.add_done_callback(lambda _: self.finished.append(number))
        self.sinks.append(sink)
        self._loaded.instance.start(requests, sink)

    async def results(self) -> list[list[Result | ServingError | None]]:
        """Return the results of each batch, the batch's error in place of those that are missing."""
        errors = await asyncio.wait_for(asyncio.gather(*(s.done for s in self.sinks)), 50)
        return [[r if r is not None else error for r in s.results] for s, error in zip(self.sinks, errors, strict=True)]


def words(*values: str) -> list[InferRequest]:
    return [request(np.array([value.encode()], object), DataType.BYTES) for value in values]


def arrays_of(results: Sequence[Result | ServingError | None]) -> list[Array]:
    assert all(isinstance(r, Outputs) for r in results), results
    return [r.tensors[0].array for r in results if isinstance(r, Outputs)]


async def test_batches_handed_over_ahead_of_time_are_answered_in_order(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL, STRINGS)
    started = Started(loaded)
    started.start(words("sleep 0.05"))
    for number in range(1, 8):
        started.start(words(f"{number}", f"{number}b"))
    results = await started.results()
    await asyncio.sleep(0)
    assert started.finished == list(range(8))
    assert [[a[0] for a in arrays_of(r)] for r in results[1:]] == [
        [f"{n}".encode(), f"{n}b".encode()] for n in range(1, 8)
    ]


async def test_only_the_batches_in_which_a_worker_dies_fail_and_the_others_run_on_the_next(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL, STRINGS)
    pid = loaded.instance.pid
    started = Started(loaded)
    for word in ("die", "second", "third", "die", "last"):
        started.start(words(word))
    (died,), *others, (again,), last = await started.results()
    assert isinstance(died, ServingError)
    assert died.code is Code.INTERNAL
    assert "exited with status 9" in str(died)
    assert isinstance(again, ServingError)
    assert [arrays_of(r)[0][0] for r in (*others, last)] == [b"second", b"third", b"last"]
    assert started.finished == [0, 1, 2, 3, 4]
    assert loaded.instance.pid != pid


async def test_the_time_limit_of_a_batch_counts_from_its_own_start(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL, config(DataType.BYTES, EXECUTE_TIMEOUT_SECONDS="0.8"))
    started = Started(loaded)
    for _ in range(3):
        started.start(words("sleep 0.4"))
    for result in await started.results():
        arrays_of(result)


async def test_a_batch_that_hangs_behind_another_is_ended_and_those_behind_it_run(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL, config(DataType.BYTES, EXECUTE_TIMEOUT_SECONDS="0.5"))
    started = Started(loaded)
    for word in ("first", "sleep 30", "last"):
        started.start(words(word))
    first, (hung,), last = await started.results()
    assert [arrays_of(r)[0][0] for r in (first, last)] == [b"first", b"last"]
    assert isinstance(hung, ServingError)
    assert "did not finish within 0.5 s" in str(hung)


async def test_large_tensors_of_several_batches_in_flight_do_not_mix(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL)
    rng = np.random.default_rng(3)
    kept: list[Array] = []
    sent: list[Array] = []
    for _ in range(5):
        started = Started(loaded)
        for _ in range(4):
            batch = [rng.random(int(rng.integers(20_000, 200_000)), "f4") for _ in range(3)]
            sent += batch
            started.start([request(a) for a in batch])
        for result in await started.results():
            kept += arrays_of(result)
    for expected, got in zip(sent, kept, strict=True):
        np.testing.assert_array_equal(got, expected)


async def test_more_new_regions_in_one_round_than_one_call_can_announce(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL)
    started = Started(loaded)
    for batch in range(4):
        started.start([request(np.full(INLINE_BYTES_MAX // 4 + 1, batch, "<f4")) for _ in range(FDS_MAX)])
    for batch, result in enumerate(await started.results()):
        assert {float(a[-1]) for a in arrays_of(result)} == {float(batch)}


async def test_a_batch_of_more_tensors_than_one_call_takes_buffers(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL)
    started = Started(loaded)
    started.start([request(np.array([i], "<f4")) for i in range(3000)])
    (result,) = await started.results()
    assert [float(a[0]) for a in arrays_of(result)] == list(range(3000))


async def test_a_full_socket_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL, STRINGS)
    started = Started(loaded)
    gate = tmp_path / "gate"
    started.start(words(f"wait {gate}"))
    big = b"x" * (INLINE_BYTES_MAX - 64)
    for _ in range(4):
        started.start([request(np.array([big], object), DataType.BYTES) for _ in range(100)])
    await asyncio.sleep(0.05)
    gate.touch()  # before, the worker takes nothing: an event loop that waited for it would not get here
    for result in (await started.results())[1:]:
        assert {a[0] for a in arrays_of(result)} == {big}


async def test_responses_that_are_given_up_late_leave_their_memory_for_reuse(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL)
    worker = psutil.Process(loaded.instance.pid)
    sent = request(np.zeros(50_000, "<f4"))
    held: list[Result] = []

    async def batches(count: int) -> None:
        for _ in range(count):
            # The response of a batch is let go only after the next batch was sent.
            held.extend(await loaded.run([sent]))
            del held[:-2]

    await batches(5)
    before = worker.num_fds()
    await batches(100)
    assert worker.num_fds() <= before + 2
    held.clear()
    gc.collect()


async def test_a_model_whose_response_fails_halfway_keeps_no_memory(tmp_path: Path) -> None:
    code = MODEL.replace(
        "return responses", "return [*responses[:-1], 'no response'] if len(responses) > 1 else responses"
    )

    loaded = await load(tmp_path, code)
    worker = psutil.Process(loaded.instance.pid)
    large = np.arange(50_000, dtype="<f4")

    async def batches(count: int) -> None:
        for _ in range(count):
            failed = await loaded.run([request(large), request(large)])
            assert all(isinstance(r, ServingError) for r in failed)

    await batches(3)
    before = worker.num_fds()
    await batches(20)
    assert worker.num_fds() <= before + 2
    np.testing.assert_array_equal(arrays_of(await loaded.run([request(large)]))[0], large)


async def test_a_batch_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    loaded = await load(tmp_path, MODEL)
    large = np.arange(50_000, dtype="<f4")
    (failed,) = await loaded.run([request(large, parameters={"": object()})])
    assert isinstance(failed, ServingError)
    assert "cannot be handed to instance 'm_0_0'" in str(failed)
    np.testing.assert_array_equal(arrays_of(await loaded.run([request(large)]))[0], large)


async def test_a_batch_that_fails_on_the_way_to_a_new_worker_leaves_the_order_of_those_it_brings_in(
    tmp_path: Path,
) -> None:
    loaded = await load(tmp_path, MODEL, STRINGS)
    pid = loaded.instance.pid
    psutil.Process(pid).kill()
    await until(lambda: loaded.instance.pid != pid)
    started = Started(loaded)

    class Successor(Sink):
        def finish(
            self,
            input_end_ns: int,
            output_start_ns: int,
            error: ServingError | None = None,
            *,
            leaves_open: bool = False,
        ) -> None:
            super().finish(input_end_ns, output_start_ns, error, leaves_open=leaves_open)
            started.start(words("brought in"))

    unwritable = Successor(1)
    loaded.instance.start([request(np.array([b"x"], object), DataType.BYTES, parameters={"": object()})], unwritable)
    started.start(words("second"))
    started.start(words("third"))
    assert await asyncio.wait_for(unwritable.done, 20) is not None
    results = await started.results()
    assert [arrays_of(r)[0][0] for r in results] == [b"second", b"third", b"brought in"]
    assert started.finished == [0, 1, 2]


async def test_the_pause_before_a_restart_doubles_until_a_batch_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "RESTART_DELAY_S", 0.001)
    monkeypatch.setattr(instance_module, "RESTART_DELAY_S_MAX", 0.004)

    loaded = await load(tmp_path, MODEL, STRINGS)
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    call_later = loop.call_later

    def recorded(delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "_start_process":
            delays.append(delay)
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", recorded)
    for _ in range(4):
        await loaded.run(words("die"))
    await loaded.run(words("fine"))
    await loaded.run(words("die"))
    await loaded.run(words("fine"))
    assert delays == [0.001, 0.002, 0.004, 0.004, 0.001]


async def test_a_worker_that_hangs_while_it_starts_again_is_replaced_though_batches_wait(tmp_path: Path) -> None:
    hangs_once = """
    def initialize(self, args):
        mark = __file__ + ".started"
        count = os.path.getsize(mark) if os.path.exists(mark) else 0
        with open(mark, "ab") as file:
            file.write(b"x")
        if count == 1:
            time.sleep(60)
"""

    loaded = await load(tmp_path, MODEL + hangs_once, STRINGS)
    started = Started(loaded)
    for word in ("die", "taken for the culprit", "fine"):
        started.start(words(word))
    await until(lambda: (tmp_path / "m" / "1" / "model.py.started").stat().st_size >= 2)
    assert loaded.instance._timer is not None
    loaded.instance._timer._run()  # when the limit is due, which holds for the next start, too
    results = await started.results()
    assert [isinstance(r, ServingError) for (r,) in results] == [True, True, False]
    assert "did not initialize within 600 s" in str(results[1][0])


async def test_several_inputs_of_all_sizes_reach_the_model_as_they_were(tmp_path: Path) -> None:
    code = MODEL.replace(
        "responses.append(",
        "x = sum(t.as_numpy().sum() for t in request.inputs()).reshape(1)\n            responses.append(",
    )

    loaded = await load(tmp_path, code, config(DataType.INT64))
    sizes = (0, 1, 7, INLINE_BYTES_MAX // 8, INLINE_BYTES_MAX // 8 + 1, 100_000)
    inputs = {
        name: Tensor(name, DataType.INT64, np.full(size, index + 1, "<i8"))
        for index, (name, size) in enumerate(zip(["IN", *"abcde"], sizes, strict=True))
    }
    (result,) = await loaded.run([InferRequest("m", inputs)])
    expected = sum((index + 1) * size for index, size in enumerate(sizes))
    assert arrays_of([result])[0].tolist() == [expected]
