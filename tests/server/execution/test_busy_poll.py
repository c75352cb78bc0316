"""The server stays awake between the requests of a lone caller, and only then."""

import asyncio

import pytest

from charonia.server.execution.busy_poll import ALONE_MIN, BusyPoll, LoneCallerRule
from charonia.server.execution.clock import now_ns

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


class Rounds:
    """An event loop that counts how often it is asked for another round."""

    def __init__(self) -> None:
        self.scheduled: list[object] = []

    def call_soon(self, callback: object) -> None:
        self.scheduled.append(callback)

    def run(self) -> int:
        """Run what is scheduled until nothing is; return the number of rounds."""
        rounds = 0
        while self.scheduled:
            callback = self.scheduled.pop()
            assert callable(callback)
            callback()
            rounds += 1
        return rounds


def alone(poll: BusyPoll, count: int) -> None:
    for _ in range(count):
        poll.submitted(now_ns())
        poll.answered()


def poll_on(rounds: Rounds, limit_ns: int) -> BusyPoll:
    return BusyPoll(rounds, limit_ns)  # type: ignore[arg-type] # all that it uses of a loop


def test_the_loop_is_kept_awake_until_the_time_is_over() -> None:
    rounds = Rounds()
    poll = poll_on(rounds, 2_000_000)

    alone(poll, ALONE_MIN + 1)
    begin = now_ns()
    count = rounds.run()

    assert count > 1
    assert now_ns() - begin < 10**9
    assert poll.worker_ns == 2_000_000


def test_there_is_no_polling_before_there_is_a_single_client() -> None:
    rounds = Rounds()
    poll = poll_on(rounds, 10**9)

    alone(poll, 3)

    assert rounds.run() == 0
    assert poll.worker_ns == 0


def test_there_is_no_polling_with_two_clients() -> None:
    rounds = Rounds()
    poll = poll_on(rounds, 10**9)

    poll.submitted(now_ns())
    for _ in range(10 * ALONE_MIN):
        poll.submitted(now_ns())
        poll.answered()

    assert rounds.run() == 0


def test_a_thread_that_computes_is_not_kept_from_the_interpreter() -> None:
    rounds = Rounds()
    poll = poll_on(rounds, 2_000_000)
    alone(poll, ALONE_MIN + 1)

    poll.thread_runs()
    assert rounds.run() == 1  # it looks, and stops

    poll.thread_done()
    assert rounds.run() >= 1


def test_polling_on_a_real_loop_lets_everything_else_run() -> None:
    async def main() -> int:
        poll = BusyPoll(asyncio.get_running_loop(), 5_000_000)
        alone(poll, ALONE_MIN + 1)
        return await asyncio.wait_for(asyncio.to_thread(lambda: 7), 60)

    assert asyncio.run(main()) == 7
