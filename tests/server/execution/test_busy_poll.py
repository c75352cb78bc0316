"""The server stays awake between the requests of a lone caller, and only then."""

import asyncio

import pytest

from charonia import busy_poll
from charonia.busy_poll import ALONE_MIN, BusyPoll, LoneCallerRule
from charonia.clock import now_ns

LIMIT = 500_000
SOON = 200_000


class Calls:
    """Requests that come one after the other, on a clock of their own."""

    def __init__(self) -> None:
        self.rule = LoneCallerRule(LIMIT)
        self.now = 10**9

    def come(self, count: int = 1, *, after_ns: int = SOON, is_alone: bool = True) -> None:
        for _ in range(count):
            self.now += after_ns
            self.rule.submitted(self.now, is_alone=is_alone)


@pytest.fixture
def calls() -> Calls:
    calls = Calls()
    calls.come(after_ns=10**9)
    return calls


def test_polling_begins_after_enough_requests_of_a_lone_caller(calls: Calls) -> None:
    calls.come(ALONE_MIN - 1)
    assert not calls.rule.is_open

    calls.come()

    assert calls.rule.is_open
    assert calls.rule.until_ns() == calls.now + LIMIT


def test_one_request_that_finds_another_in_flight_ends_it(calls: Calls) -> None:
    calls.come(ALONE_MIN)

    calls.come(is_alone=False)

    assert not calls.rule.is_open
    calls.come(ALONE_MIN - 1)
    assert not calls.rule.is_open


def test_one_request_that_comes_late_ends_it(calls: Calls) -> None:
    calls.come(ALONE_MIN)

    calls.come(after_ns=LIMIT + 1)

    assert not calls.rule.is_open


def test_a_limit_of_zero_never_opens() -> None:
    calls = Calls()
    calls.rule = LoneCallerRule(0)

    calls.come(10 * ALONE_MIN)

    assert not calls.rule.is_open


class Loop:
    """An event loop that a test lets go round, and the clock by which the module goes."""

    def __init__(self) -> None:
        self.now = 10**12
        self.scheduled: list[object] = []

    def call_soon(self, callback: object) -> None:
        self.scheduled.append(callback)

    def turn(self) -> None:
        """Run what is scheduled, and not what that schedules."""
        self.now += ROUND_NS
        scheduled, self.scheduled = self.scheduled, []
        for callback in scheduled:
            assert callable(callback)
            callback()

    def run(self) -> int:
        """Go round until nothing is scheduled; return how often."""
        rounds = 0
        while self.scheduled:
            self.turn()
            rounds += 1
        return rounds

    def alone(self, poll: BusyPoll, count: int) -> None:
        """Let requests come that are answered before the loop goes round."""
        for _ in range(count):
            poll.submitted(self.now)
            poll.answered()
            self.turn()

    def at_once(self, poll: BusyPoll, requests: int, turns: int) -> int:
        """Let so many requests come in each of many turns, and run in place; return after how many it polls."""
        polling = 0
        for _ in range(turns):
            for _ in range(requests):
                self.now += 1000
                poll.ran_at_once(self.now)
            self.turn()
            polling += bool(self.scheduled)
        return polling


ROUND_NS = 50_000


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(busy_poll, "now_ns", lambda: loop.now)
    return loop


def poll_on(loop: Loop, limit_ns: int) -> BusyPoll:
    return BusyPoll(loop, limit_ns)  # type: ignore[arg-type] # all that it uses of a loop


def test_the_loop_is_kept_awake_until_the_time_is_over(loop: Loop) -> None:
    poll = poll_on(loop, 20 * ROUND_NS)

    loop.alone(poll, ALONE_MIN + 1)

    assert loop.run() == 20 - 1  # a round has gone after the last request
    assert poll.worker_ns == 20 * ROUND_NS


def test_there_is_no_polling_before_there_is_a_single_client(loop: Loop) -> None:
    poll = poll_on(loop, 10**9)

    loop.alone(poll, 3)

    assert loop.scheduled == []
    assert poll.worker_ns == 0


def test_there_is_no_polling_with_two_clients(loop: Loop) -> None:
    poll = poll_on(loop, 10**9)

    poll.submitted(loop.now)
    loop.alone(poll, 10 * ALONE_MIN)

    assert loop.scheduled == []


@pytest.mark.parametrize("requests", [2, 64])
def test_requests_that_come_in_one_turn_are_of_several_clients_though_each_is_answered_at_once(
    loop: Loop, requests: int
) -> None:
    assert loop.at_once(poll_on(loop, 10**6), requests, 10 * ALONE_MIN) == 0


def test_a_second_client_ends_the_polling_and_a_lone_one_that_stays_begins_it_again(loop: Loop) -> None:
    poll = poll_on(loop, 10**6)

    assert loop.at_once(poll, 1, 100) == 100 - ALONE_MIN
    assert loop.at_once(poll, 2, 100) == 0
    assert loop.at_once(poll, 1, ALONE_MIN - 1) == 0
    assert loop.at_once(poll, 1, 3) > 0
    loop.now += 10**6
    loop.turn()
    assert loop.scheduled == []


@pytest.mark.parametrize(("count", "polls"), [(1, True), (2, False)])
def test_requests_that_come_together_are_not_those_of_a_lone_caller(loop: Loop, count: int, *, polls: bool) -> None:
    poll = poll_on(loop, 10**6)

    for _ in range(ALONE_MIN + 1):
        poll.ran_at_once(loop.now, count)
        loop.turn()

    assert bool(loop.scheduled) is polls


def test_a_thread_that_computes_is_not_kept_from_the_interpreter(loop: Loop) -> None:
    poll = poll_on(loop, 10**6)
    loop.alone(poll, ALONE_MIN + 1)

    poll.thread_runs()
    assert loop.run() == 1  # it looks, and stops

    poll.thread_done()
    assert loop.run() > 1


def test_polling_on_a_real_loop_lets_everything_else_run() -> None:
    async def main() -> int:
        poll = BusyPoll(asyncio.get_running_loop(), 5_000_000)
        for _ in range(ALONE_MIN + 1):
            poll.ran_at_once(now_ns())
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.to_thread(lambda: 7), 60)

    assert asyncio.run(main()) == 7
