"""The worker polls for the response of a lone request, and sleeps while several are in flight."""

import asyncio
import os
from itertools import repeat

import pytest

from charonia.busy_poll import ALONE_MIN, BusyPoll
from charonia.tools.perf.loops import ClosedLoopLoad
from charonia.tools.perf.sending import RequestSender, SentRequest, Then
from charonia.tools.perf.sequences import Part

SECOND_NS = 1_000_000_000


class Instant(RequestSender):
    """Every request ends in the turn of the event loop after the next."""

    def __init__(self) -> None:
        self.is_recording = True
        self.in_flight = set()

    def send(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
        call_soon = asyncio.get_running_loop().call_soon
        call_soon(call_soon, then, "")
        return SentRequest(self, part, intended_ns, then)


@pytest.mark.parametrize(("slots", "polls"), [(1, True), (2, False)])
async def test_a_closed_loop_polls_for_the_response_of_a_lone_request_only(
    monkeypatch: pytest.MonkeyPatch, slots: int, *, polls: bool
) -> None:
    yields = 0

    def counted() -> None:
        nonlocal yields
        yields += 1

    monkeypatch.setattr(os, "sched_yield", counted)
    parts = repeat(Part(0, 0))
    poll = BusyPoll(asyncio.get_running_loop(), SECOND_NS)
    load = ClosedLoopLoad(Instant(), [parts] * slots, 3 * ALONE_MIN * slots, poll)

    load.start()
    while not load.is_finished:
        await asyncio.sleep(0)

    assert bool(yields) is polls
