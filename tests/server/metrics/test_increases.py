"""What one process has counted is counted in another one: the sum is as if one had counted everything."""

import marshal
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.statistics import TokenUsage
from charonia.server.front_ends.messages import plain, record
from charonia.server.metrics.model_metrics import SUMMARIES, FailureReason, Increase, ModelMetrics
from charonia.server.scheduling.api import CloseReason

START_NS = 10**12
DURATIONS = st.integers(1, 10**8)


Count = Callable[[ModelMetrics, int], None]
"""Counts something that happens at a time."""


def batch(waits: list[int], infer_ns: int, reason: CloseReason) -> Count:
    def count(metrics: ModelMetrics, start_ns: int) -> None:
        metrics.batch_done(
            arrivals_ns=[start_ns - wait for wait in waits],
            inferences=len(waits),
            batch_size=len(waits) or 1,
            reason=reason,
            marks_ns=(start_ns, start_ns + 10, start_ns + 10 + infer_ns, start_ns + 20 + infer_ns),
            wall_ms=start_ns // 10**6,
        )

    return count


def failure(reason: FailureReason, ns: int) -> Count:
    return lambda metrics, _: metrics.failed(reason, ns)


def composed(ns: int) -> Count:
    return lambda metrics, start_ns: metrics.composed(
        duration_ns=ns, inferences=2, queue_ns=ns // 3, compute_ns=ns // 2, end_ns=start_ns, wall_ms=start_ns // 10**6
    )


EVENTS = st.one_of(
    st.builds(batch, st.lists(DURATIONS, max_size=3), DURATIONS, st.sampled_from(CloseReason)),
    st.builds(failure, st.sampled_from(FailureReason), DURATIONS),
    st.builds(composed, DURATIONS),
)


def counters() -> ModelMetrics:
    metrics = ModelMetrics("m", "1")
    metrics.summarize()
    return metrics


def shown(metrics: ModelMetrics) -> object:
    summaries = metrics.summaries
    assert summaries is not None
    histograms = [metrics.request_ns, metrics.queue_ns, metrics.compute_ns, metrics.batch_size]
    lines = [line for name in SUMMARIES for line in summaries.lines(name, "", (0.5, 0.99), START_NS)]
    return metrics.statistics, metrics.failures, metrics.closes, [(h.counts, h.total) for h in histograms], lines


def sent(increase: Increase) -> Increase:
    return record(Increase, marshal.loads(marshal.dumps(plain(increase))))  # type: ignore[arg-type] # plain values


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**10), EVENTS), max_size=30))
def test_increases_add_up(events: list[tuple[int, int, Count]]) -> None:
    alone, engine, front_ends = counters(), counters(), [counters(), counters()]
    now_ns = START_NS
    for at, later_ns, count in events:
        now_ns += later_ns
        count(alone, now_ns)
        count(front_ends[at] if at < 2 else engine, now_ns)
        if at == 3:
            for front_end in front_ends:
                increase = front_end.take()
                if increase is not None:
                    engine.merge(sent(increase))
    for front_end in front_ends:
        increase = front_end.take()
        if increase is not None:
            engine.merge(sent(increase))
        assert front_end.take() is None

    assert shown(engine) == shown(alone)


def test_nothing_counted_is_nothing_to_send() -> None:
    metrics = counters()

    assert metrics.take() is None
    metrics.failed(FailureReason.OTHER, 5)
    increase = metrics.take()
    assert increase is not None
    assert increase.failures[FailureReason.OTHER] == 1
    assert metrics.take() is None


def test_the_memory_of_a_model_is_not_counted_twice() -> None:
    engine, front_end = counters(), counters()
    memory = [object()]
    engine.statistics.memory = front_end.statistics.memory = memory  # type: ignore[assignment]
    batch([1], 5, CloseReason.FULL)(front_end, START_NS)
    increase = front_end.take()
    assert increase is not None

    engine.merge(increase)

    assert engine.statistics.memory == front_end.statistics.memory == memory
    assert np.sum(engine.request_ns.counts) == 1


def test_an_answer_after_its_batch_counts_as_computing_until_then() -> None:
    metrics = counters()
    metrics.request_done(arrival_ns=100, inferences=3, start_ns=150, marks_ns=(160, 170), end_ns=200)

    counted = metrics.statistics
    phases = counted.success, counted.queue, counted.compute_input, counted.compute_infer, counted.compute_output
    assert counted.inference_count == 3
    assert [(each.count, each.ns) for each in phases] == [(1, 100), (1, 50), (1, 10), (1, 40), (1, 0)]
    assert (metrics.request_ns.total, metrics.queue_ns.total, metrics.compute_ns.total) == (100, 50, 50)
    summaries = metrics.summaries
    assert summaries is not None
    lines = [line for name in SUMMARIES for line in summaries.lines(name, "", (), 200)]
    sums = [line for line in lines if "_us_sum" in line]
    assert [line.split()[-1] for line in sums] == ["0.1", "0.05", "0.01", "0.04", "0"]


def test_the_time_of_the_latest_composed_request_is_known() -> None:
    metrics = counters()
    composed(10)(metrics, START_NS)

    assert metrics.statistics.last_inference_ms == START_NS // 10**6


def test_tokens_that_the_model_does_not_report_are_counted() -> None:
    metrics = counters()
    metrics.count_tokens(TokenUsage(3, 2, 1))
    metrics.count_tokens(TokenUsage(4))

    assert metrics.tokens is not None
    assert (metrics.tokens.prompt, metrics.tokens.completion, metrics.tokens.cached) == (7, 2, 1)


def test_batches_count_together_as_they_do_one_by_one() -> None:
    marks_ns = (START_NS, START_NS + 10, START_NS + 30, START_NS + 60)
    waiting, one = [START_NS - 7, START_NS - 9], [START_NS]
    together, alone = counters(), counters()

    together.batches_done([(waiting, 2, 2, CloseReason.FULL, marks_ns), (one, 1, 4, CloseReason.FULL, marks_ns)], 5)
    for arrivals_ns, inferences, size in ((waiting, 2, 2), (one, 1, 4)):
        alone.batch_done(
            arrivals_ns=arrivals_ns,
            inferences=inferences,
            batch_size=size,
            reason=CloseReason.FULL,
            marks_ns=marks_ns,
            wall_ms=5,
        )

    assert shown(together) == shown(alone)
    assert together.statistics.success.count == 3
    assert (together.collapsed, together.load_seconds) == (0, 0.0)
