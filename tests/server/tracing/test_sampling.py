"""Which requests are traced: one of so many, so many in all, and those whose senders trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted import TraceIds

from charonia.core.trace import RemoteParent, TraceLevel, TraceTree
from charonia.server.tracing.sampling import RequestSampler, Sampling
from charonia.wire.trace_settings import TraceSettings

REMOTE = RemoteParent(1, 2)


def sampling(
    rate: int = 1, traces: int = -1, level: TraceLevel = TraceLevel.TIMESTAMPS, *, otel: bool = False
) -> Sampling:
    return Sampling(TraceSettings(level, rate, traces), allows_remote=otel)


@given(st.integers(1, 20), st.integers(-1, 10), st.integers(0, 200))
def test_one_of_so_many_is_picked_until_the_count_is_reached(rate: int, traces: int, requests: int) -> None:
    made = sampling(rate, traces)

    picked = sum(made.pick(None) for _ in range(requests))

    assert picked == (requests // rate if traces < 0 else min(requests // rate, traces))
    assert made.count_left == (-1 if traces < 0 else traces - picked)


def test_the_requests_that_are_picked_are_those_that_complete_a_round() -> None:
    made = sampling(rate=3)

    assert [made.pick(None) for _ in range(6)] == [False, False, True, False, False, True]


def test_a_sender_that_traces_is_followed_whatever_rate_and_count_say() -> None:
    assert [sampling(1000, otel=True).pick(REMOTE), sampling(1, 0, otel=True).pick(REMOTE)] == [True, True]
    assert sampling(0, otel=True).pick(REMOTE)
    assert not sampling(0, otel=True).pick(None)


def test_a_file_does_not_follow_senders() -> None:
    assert not sampling(1000).pick(REMOTE)


def test_without_a_level_nothing_is_picked() -> None:
    made = sampling(level=TraceLevel.OFF, otel=True)

    assert not made.pick(REMOTE)
    assert not made.is_active


@pytest.mark.parametrize(
    ("made", "active"), [(sampling(0), False), (sampling(1, 0), False), (sampling(0, otel=True), True)]
)
def test_a_setting_is_active_while_it_may_pick(made: Sampling, active: bool) -> None:
    assert made.is_active is active


def test_each_model_has_its_own_count_and_others_share_that_of_the_server() -> None:
    done: list[tuple[Sampling, TraceTree]] = []
    server, own = sampling(rate=2), sampling(rate=1)
    sampler = RequestSampler(server, {"m": own}, TraceIds(), lambda s, tree: done.append((s, tree)))

    trees = [sampler.sample("m"), sampler.sample("a"), sampler.sample("b")]

    assert [tree is not None for tree in trees] == [True, False, True]
    assert (server.open, own.open) == (1, 1)
    assert trees[0] is not None
    trees[0].release()
    assert done == [(own, trees[0])]
    assert (own.open, own.collected) == (0, 1)


def test_a_count_is_complete_when_the_last_trace_is_over() -> None:
    made = sampling(traces=2)
    sampler = RequestSampler(made, {}, TraceIds(), lambda s, tree: None)
    first, second = sampler.sample("m"), sampler.sample("m")
    assert first is not None
    assert second is not None

    first.release()
    assert not made.is_complete
    second.release()

    assert made.is_complete
    assert sampler.sample("m") is None
