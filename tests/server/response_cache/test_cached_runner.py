"""A runner behind a cache: hits, misses, insertions and single flight."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.closing import InLoop
from tests.support.idle_time import IdleTimeLoop

from charonia.config.kinds import TimeoutAction
from charonia.config.model import DynamicBatching, ModelConfig, QueuePolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import CallFrame, InferRequest, ParameterValue
from charonia.core.response import InferResponse, Outcome, Reply
from charonia.core.tensor import Tensor
from charonia.server.metrics.metric_families import Family
from charonia.server.metrics.model_metrics import FailureReason, ModelMetrics
from charonia.server.response_cache.api import CachedResponse, CacheKey
from charonia.server.response_cache.memory import LocalCache
from charonia.server.response_cache.runner import HASH_IN_LOOP_BYTES_MAX, CachedCall, CachedRunner


class Waiting:
    def __init__(self, runner: "ScriptedRunner", request: InferRequest, reply: Reply) -> None:
        self.runner = runner
        self.request = request
        self.reply = reply

    def cancel(self) -> None:
        self.runner.waiting.remove(self)
        self.reply(ServingError(Code.CANCELLED, "the request was cancelled"), True)


class ScriptedRunner:
    """Answers when the test says so, with twice the input."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.version = "1"
        self.metrics = ModelMetrics("m", "1")
        self.waiting: list[Waiting] = []
        self.seen: list[InferRequest] = []
        self.is_closed = False
        self.is_at_once = False

    @property
    def pending(self) -> int:
        return len(self.waiting)

    @property
    def in_flight(self) -> int:
        return len(self.waiting)

    def run_at_once(self, request: InferRequest) -> None:
        raise AssertionError("every request is looked up before it is run")

    def submit(self, request: InferRequest, reply: Reply) -> Waiting:
        ticket = Waiting(self, request, reply)
        self.waiting.append(ticket)
        self.seen.append(request)
        if self.is_at_once:
            self.answer()
        return ticket

    def answer(self, outcome: Outcome = None, index: int = 0) -> None:
        one = self.waiting.pop(index)
        if outcome is None:
            array = np.array(2 * one.request.inputs["IN"].array)
            tensors = [Tensor("OUT", DataType.FP32, array)]
            outcome = InferResponse("m", "1", one.request.id, tensors, {"p": "kept"})
            one.reply(outcome, True)
            array[:] = -1  # the model reuses its memory
        else:
            one.reply(outcome, True)

    async def drain(self) -> None:
        assert not self.waiting

    async def aclose(self) -> None:
        self.is_closed = True

    def abandon(self, error: ServingError) -> None:
        while self.waiting:
            self.waiting.pop().reply(error, True)


class SlowCache:
    """A cache elsewhere: answers when the test says so."""

    is_shared = True

    def __init__(self) -> None:
        self.lookups: list[tuple[CacheKey, Callable[[CachedResponse | None], None]]] = []
        self.inserts: list[tuple[CacheKey, CachedResponse, Callable[[], None]]] = []
        self.forgotten: list[bytes] = []

    def get(self, key: CacheKey, found: Callable[[CachedResponse | None], None]) -> None:
        self.lookups.append((key, found))

    def put(self, key: CacheKey, response: CachedResponse, done: Callable[[], None]) -> None:
        self.inserts.append((key, response, done))

    def evict_namespace(self, namespace: bytes) -> None:
        self.forgotten.append(namespace)

    async def namespace(self, model: str, version: str, content: bytes) -> bytes:
        return content

    def families(self) -> list[Family]:
        return []

    async def aclose(self) -> None:
        pass


class Bench:
    """A cached runner, what it wraps, and the answers of requests by id."""

    def __init__(
        self, dynamic: DynamicBatching | None = None, *, backend: str = "python", slow: bool = False, size: int = 10**6
    ) -> None:
        self.inner = ScriptedRunner(
            ModelConfig(name="m", backend=backend, max_batch_size=8 if dynamic else 0, dynamic_batching=dynamic)
        )
        self.slow = SlowCache()
        self.runner = CachedRunner(self.inner, self.slow if slow else LocalCache(size), b"namespace")
        self.answers: dict[str, list[Outcome]] = {}
        self.values: dict[str, float] = {}
        self.order: list[str] = []

    def send(
        self,
        id: str,
        value: float = 1,
        *,
        size: int = 2,
        parameters: dict[str, ParameterValue] | None = None,
        caller: CallFrame | None = None,
        timeout_us: int = 0,
        priority: int = 0,
    ) -> CachedCall:
        data = np.full(size, value, "<f4").tobytes()
        request = InferRequest(
            "m",
            {"IN": Tensor("IN", DataType.FP32, np.frombuffer(data, "<f4"))},
            id=id,
            parameters=parameters,
            caller=caller,
            timeout_us=timeout_us,
            priority=priority,
        )

        def reply(outcome: Outcome, final: bool) -> None:
            assert final
            self.answers.setdefault(id, []).append(outcome)
            if isinstance(outcome, InferResponse):
                self.values[id] = float(outcome.outputs[0].array[0])
            self.order.append(id)

        return self.runner.submit(request, reply)

    def value(self, id: str) -> float:
        (outcome,) = self.answers[id]
        assert isinstance(outcome, InferResponse)
        assert outcome.id == id
        assert outcome.parameters == {"p": "kept"}
        return self.values[id]

    def code(self, id: str) -> Code:
        (outcome,) = self.answers[id]
        assert isinstance(outcome, ServingError)
        return outcome.code

    def counts(self) -> tuple[int, int]:
        statistics = self.runner.metrics.statistics
        return statistics.cache_hit.count, statistics.cache_miss.count


new_loop = IdleTimeLoop


@pytest.fixture
def bench() -> InLoop:
    return InLoop(Bench)


async def test_the_second_equal_request_gets_the_response_of_the_first_with_its_own_id(bench: Bench) -> None:
    bench.send("a")
    bench.inner.answer()

    bench.send("b")

    assert bench.value("b") == 2
    assert len(bench.inner.seen) == 1
    assert bench.counts() == (1, 1)
    statistics = bench.runner.metrics.statistics
    assert statistics.success.count == 1  # the other one is counted by the runner behind the cache
    assert statistics.queue.count == 1
    assert statistics.execution_count == statistics.inference_count == 0
    assert bench.runner.metrics.is_cached


async def test_other_requests_and_errors_are_not_answered_from_the_cache(bench: Bench) -> None:
    bench.send("a")
    bench.inner.answer(internal("no"))
    bench.send("b", 2)
    bench.inner.answer()

    bench.send("c")
    bench.send("d", 2, parameters={"x": 1})

    assert [r.id for r in bench.inner.seen] == ["a", "b", "c", "d"]
    assert bench.code("a") is Code.INTERNAL
    assert bench.counts() == (0, 1)


@pytest.mark.parametrize(("backend", "runs"), [("python", 2), ("onnxruntime", 1)])
async def test_parameters_matter_where_a_model_sees_them(backend: str, runs: int) -> None:
    bench = Bench(backend=backend)
    bench.inner.is_at_once = True
    bench.send("a", parameters={"x": 1})
    bench.send("b", parameters={"x": 2})

    assert len(bench.inner.seen) == runs


async def test_equal_requests_in_flight_run_once(bench: Bench) -> None:
    for name in "abc":
        bench.send(name)
    assert len(bench.inner.waiting) == 1
    assert bench.runner.in_flight == 3

    bench.inner.answer()

    assert [bench.value(name) for name in "abc"] == [2, 2, 2]
    assert bench.order == ["a", "b", "c"]
    assert bench.counts() == (2, 1)
    assert bench.runner.metrics.collapsed == 2
    assert bench.runner.in_flight == 0


async def test_requests_of_another_priority_do_not_wait_for_one_another() -> None:
    bench = Bench(DynamicBatching(priority_levels=2, default_priority_level=1))
    bench.send("a", priority=2)
    bench.send("b", priority=1)

    assert len(bench.inner.waiting) == 2


async def test_when_the_one_that_runs_is_cancelled_the_next_one_runs(bench: Bench) -> None:
    leader = bench.send("a")
    bench.send("b")
    bench.send("c")

    leader.cancel()
    leader.cancel()

    assert bench.code("a") is Code.CANCELLED
    assert [w.request.id for w in bench.inner.waiting] == ["b"]
    bench.inner.answer()
    assert (bench.value("b"), bench.value("c")) == (2, 2)


async def test_one_that_waits_for_another_can_leave(bench: Bench) -> None:
    bench.send("a")
    follower = bench.send("b")

    follower.cancel()
    bench.inner.answer()

    assert bench.code("b") is Code.CANCELLED
    assert bench.value("a") == 2
    assert bench.runner.metrics.failures[FailureReason.CANCELED] == 1
    assert bench.counts() == (0, 1)


async def test_after_a_failure_the_next_one_runs_and_after_two_all_others_do(bench: Bench) -> None:
    for name in "abcd":
        bench.send(name)

    bench.inner.answer(internal("first"))
    assert [w.request.id for w in bench.inner.waiting] == ["b"]
    bench.inner.answer(internal("second"))

    assert [w.request.id for w in bench.inner.waiting] == ["c", "d"]
    bench.inner.answer(internal("third"))
    bench.inner.answer()
    assert [bench.code(name) for name in "abc"] == [Code.INTERNAL] * 3
    assert bench.value("d") == 2
    bench.send("e")
    assert bench.value("e") == 2


async def test_a_runner_that_answers_at_once_is_fine(bench: Bench) -> None:
    bench.inner.is_at_once = True

    bench.send("a")
    bench.send("b")

    assert (bench.value("a"), bench.value("b")) == (2, 2)
    assert len(bench.inner.seen) == 1


async def test_a_request_of_a_model_that_occupies_an_instance_waits_for_no_other_one(bench: Bench) -> None:
    bench.send("a")
    bench.send("b", caller=CallFrame("other", "1", "other_0_0"))
    bench.send("c", caller=CallFrame("ensemble", "1"))

    assert [w.request.id for w in bench.inner.waiting] == ["a", "b"]
    bench.inner.answer(index=1)
    assert bench.value("b") == 2
    bench.send("d", caller=CallFrame("other", "1", "other_0_0"))
    assert bench.value("d") == 2


POLICY = QueuePolicy(default_timeout_microseconds=20_000, allow_timeout_override=True)


async def test_one_that_waits_for_another_has_its_own_queue_timeout() -> None:
    bench = Bench(DynamicBatching(default_queue_policy=POLICY))
    bench.send("a")
    bench.send("b")
    bench.send("c", timeout_us=1000)

    await asyncio.sleep(0.01)
    assert list(bench.answers) == ["c"]
    await asyncio.sleep(0.03)

    assert [bench.code(name) for name in "bc"] == [Code.UNAVAILABLE, Code.UNAVAILABLE]
    assert bench.runner.metrics.failures[FailureReason.REJECTED] == 2
    bench.inner.answer()
    assert bench.value("a") == 2


async def test_one_that_takes_over_has_what_is_left_of_its_timeout() -> None:
    bench = Bench(DynamicBatching(default_queue_policy=POLICY))
    bench.send("a")
    bench.send("b", timeout_us=10_000_000)
    time.sleep(0.002)

    bench.inner.answer(internal("no"))

    assert 0 < bench.inner.waiting[0].request.timeout_us <= 9_998_000
    await asyncio.sleep(20)
    assert "b" not in bench.answers  # it is up to the queue now


async def test_a_policy_that_only_delays_refuses_no_request() -> None:
    policy = QueuePolicy(default_timeout_microseconds=1000, timeout_action=TimeoutAction.DELAY)
    bench = Bench(DynamicBatching(default_queue_policy=policy))
    bench.send("a")
    bench.send("b")
    await asyncio.sleep(0.01)

    assert bench.answers == {}


async def test_answers_keep_the_order_of_their_requests_where_the_model_asks_for_that() -> None:
    bench = Bench(DynamicBatching(preserve_ordering=True))
    bench.send("a", 1)
    bench.inner.answer()
    bench.send("b", 2)
    bench.send("c", 1)

    assert bench.order == ["a"]
    bench.inner.answer()

    assert bench.order == ["a", "b", "c"]


async def test_a_large_request_is_hashed_elsewhere_and_found_again() -> None:
    bench = Bench(size=10**8)
    bench.inner.is_at_once = True
    size = HASH_IN_LOOP_BYTES_MAX
    bench.send("a", size=size)
    assert bench.inner.seen == []
    while "a" not in bench.answers:
        await asyncio.sleep(0)
    left = bench.send("b", size=size)
    left.cancel()
    bench.send("c", size=size)
    while "c" not in bench.answers:
        await asyncio.sleep(0)

    assert bench.code("b") is Code.CANCELLED
    assert bench.value("c") == 2
    assert len(bench.inner.seen) == 1


async def test_memory_that_others_may_change_is_copied_before_it_is_looked_at(bench: Bench) -> None:
    array = np.ones(2, "<f4")
    request = InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id="a")

    bench.runner.submit(request, lambda outcome, final: None)
    array[:] = 5
    bench.inner.answer()
    bench.send("b", 1)

    assert bench.value("b") == 2
    assert len(bench.inner.seen) == 1


async def test_while_a_cache_elsewhere_is_asked_equal_requests_wait_for_its_answer() -> None:
    bench = Bench(slow=True)
    first = bench.send("a")
    bench.send("b")
    assert len(bench.slow.lookups) == 1

    first.cancel()
    bench.slow.lookups.pop()[1](None)

    assert bench.code("a") is Code.CANCELLED
    assert [w.request.id for w in bench.inner.waiting] == ["b"]
    bench.inner.answer()
    assert bench.value("b") == 2
    bench.send("c")  # the cache does not have it yet
    assert bench.value("c") == 2
    bench.slow.inserts[0][2]()
    bench.send("d")
    key, found = bench.slow.lookups.pop()
    assert key == bench.slow.inserts[0][0]
    found(bench.slow.inserts[0][1])
    assert bench.value("d") == 2
    assert bench.counts() == (2, 1)


async def test_a_look_up_whose_callers_have_all_gone_runs_nothing() -> None:
    bench = Bench(slow=True)
    bench.send("a").cancel()

    bench.slow.lookups.pop()[1](None)

    assert bench.inner.seen == []
    bench.send("b")
    assert len(bench.slow.lookups) == 1


async def test_what_was_kept_for_a_model_is_given_up_when_its_version_goes() -> None:
    bench = Bench(slow=True)
    bench.send("a")
    drained = asyncio.ensure_future(bench.runner.drain())
    await asyncio.sleep(0)
    assert not drained.done()

    bench.slow.lookups.pop()[1](None)
    bench.inner.answer()
    await drained
    await bench.runner.aclose()

    assert bench.slow.forgotten == [b"namespace"]
    assert bench.inner.is_closed


async def test_a_response_that_was_computed_with_models_that_have_changed_is_not_kept(bench: Bench) -> None:
    bench.send("a")

    bench.runner.renew(b"new namespace")
    bench.send("b")
    assert len(bench.inner.waiting) == 2
    bench.inner.answer()
    bench.send("c")

    assert "c" not in bench.answers  # it waits for the second
    bench.inner.answer()
    assert bench.value("c") == 2


async def test_when_the_time_limit_of_the_shutdown_has_passed_every_caller_gets_the_error(bench: Bench) -> None:
    bench.send("a")
    bench.send("b")

    bench.runner.abandon(internal("stopped"))

    assert [bench.code(name) for name in "ab"] == [Code.INTERNAL, Code.INTERNAL]
    assert bench.runner.in_flight == 0


async def test_a_reply_may_cancel_another_request_that_waits_for_the_same_response(bench: Bench) -> None:
    replies: list[Outcome] = []

    def reply(outcome: Outcome, final: bool) -> None:
        other.cancel()

    bench.send("leads")
    array = np.frombuffer(np.ones(2, "<f4").tobytes(), "<f4")
    requests = [InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}) for _ in range(2)]
    bench.runner.submit(requests[0], reply)
    other = bench.runner.submit(requests[1], lambda outcome, final: replies.append(outcome))
    bench.send("last")
    bench.inner.answer()

    assert [isinstance(each, ServingError) and each.code for each in replies] == [Code.CANCELLED]
    assert [bench.value(name) for name in ("leads", "last")] == [2, 2]
    assert bench.runner.in_flight == 0


async def test_a_reply_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture, bench: Bench) -> None:
    def broken(outcome: Outcome, final: bool) -> None:
        raise ValueError("broken")

    array = np.frombuffer(np.ones(2, "<f4").tobytes(), "<f4")
    bench.runner.submit(InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id="x"), broken)
    bench.send("b")
    bench.inner.answer()

    assert bench.value("b") == 2
    assert "the reply to request 'x'" in caplog.text
