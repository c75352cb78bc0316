"""The worker polls where it would sleep only briefly, and says how long it had nothing to do."""

import asyncio
import os
from itertools import count, repeat

import pytest

from charonia.clock import now_ns
from charonia.tools.perf.loops import GAP_NS_MAX, ClosedLoopLoad, OpenLoop
from charonia.tools.perf.sending import RequestSender, SentRequest, Then
from charonia.tools.perf.sequences import Part
from charonia.tools.perf.worker import CHUNK_ROWS, FLUSH_S_MAX, FLUSH_S_MIN, next_flush_s


class Instant(RequestSender):
    """Every request ends in the turn of the event loop after the next."""

    def __init__(self) -> None:
        self.is_recording = True
        self.in_flight = set()

    def send(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
        call_soon = asyncio.get_running_loop().call_soon
        call_soon(call_soon, then, "")
        return SentRequest(self, part, intended_ns, then)


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times at which the core was yielded."""
    found: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: found.append(now_ns()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return found


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_closed_loop_polls_for_the_response_of_a_lone_request_only(yields: list[int], slots: int) -> None:
    load = ClosedLoopLoad(Instant(), [repeat(Part(0, 0))] * slots, 100, polls=True)

    load.start()
    while not load.is_finished:
        await asyncio.sleep(0)

    assert bool(yields) is (slots == 1)


async def test_an_open_loop_polls_for_the_time_of_the_next_request_if_that_is_soon(yields: list[int]) -> None:
    begin_ns = now_ns()
    load = OpenLoop(Instant(), [repeat(Part(0, 0))], count(begin_ns, GAP_NS_MAX // 2))
    load.start()
    while not load.waited_ns:
        await asyncio.sleep(0.001)
    load.stop()

    assert load.waited_ns < now_ns() - begin_ns
    assert not yields


async def test_an_open_loop_sleeps_until_a_request_that_is_due_later() -> None:
    gap_ns = 20 * GAP_NS_MAX
    late_ns: list[int] = []

    class Timed(Instant):
        def send(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
            late_ns.append(now_ns() - intended_ns)
            return super().send(part, intended_ns, then)

    load = OpenLoop(Timed(), [repeat(Part(0, 0))], count(now_ns(), gap_ns), 40)
    load.start()
    while not load.is_finished:
        await asyncio.sleep(0.001)
    load.stop()

    assert len(late_ns) == 40
    assert min(late_ns) >= 0
    assert load.waited_ns < 40 * gap_ns / 2  # one that is late may find the next time close


async def test_with_a_single_core_nothing_polls(yields: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    load = ClosedLoopLoad(Instant(), [repeat(Part(0, 0))], 100, polls=True)

    load.start()
    while not load.is_finished:
        await asyncio.sleep(0)

    assert (yields, load.waited_ns) == ([], 0)


@pytest.mark.parametrize("rate", [1, 1000, 10_000, 50_000, 1_000_000])
def test_chunks_have_about_as_many_requests_whatever_the_rate(rate: int) -> None:
    seconds = FLUSH_S_MIN
    for _ in range(10):
        seconds = next_flush_s(seconds, round(rate * seconds))

    assert seconds == pytest.approx(min(max(CHUNK_ROWS / rate, FLUSH_S_MIN), FLUSH_S_MAX), rel=0.05)
