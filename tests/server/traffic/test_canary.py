"""Canary plans over simulated time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.traffic.canary import (
    LOOK_NS,
    Canary,
    CanaryEvent,
    EngineEnded,
    LogEvent,
    ObservedTraffic,
    OperatorAction,
    ReadyVersions,
    Replaced,
    RequestWindow,
    RestoreSplit,
    SetShare,
)
from charonia.wire.traffic import CanaryAction, CanaryPlan, CanaryState

S = 1_000_000_000
PLAN = CanaryPlan(2, 1, step_seconds=10, samples_min=50)


BEFORE = -1.0
"""The split from before a plan."""


class Simulated:
    """A canary plan and clients."""

    def __init__(
        self,
        plan: CanaryPlan,
        *,
        rate: int = 300,
        errors: tuple[float, float] = (0.01, 0.01),
        times: float = 1,
        seed: int = 1,
    ) -> None:
        self.now_ns = 0
        self.canary = Canary(plan, 0)
        self.said = [each.text for each in self.canary.start() if isinstance(each, LogEvent)]
        self.share = self.canary.percent
        self._rate, self._errors, self._times = rate, errors, times
        self._random = np.random.default_rng(seed)

    def tick(self, compared: int = 0, different: int = 0) -> None:
        self.now_ns += LOOK_NS
        count = int(self._random.poisson(self._rate))
        ours = int(self._random.binomial(count, self.share / 100))
        canary, stable = self._window(ours, 0, self._times), self._window(count - ours, 1, 1.0)
        self.do(ObservedTraffic(canary, stable, compared, different))

    def run(self, seconds: int) -> CanaryState:
        for _ in range(seconds):
            if self.canary.state.is_over:
                break
            self.tick()
        return self.canary.state

    def do(self, event: CanaryEvent) -> None:
        for command in self.canary.handle(event, self.now_ns):
            if isinstance(command, SetShare):
                self.share = command.percent
            elif isinstance(command, RestoreSplit):
                self.share = BEFORE
            else:
                self.said.append(command.text)

    def _window(self, count: int, which: int, times: float) -> RequestWindow:
        errors = int(self._random.binomial(count, self._errors[which]))
        return RequestWindow(count, errors, (self._random.lognormal(14, 0.3, count - errors) * times).astype(np.int64))


def test_a_healthy_canary_goes_from_step_to_step_and_finishes() -> None:
    simulated = Simulated(PLAN)

    assert simulated.run(200) is CanaryState.FINISHED
    assert simulated.share == 100
    assert [text.partition(":")[0] for text in simulated.said] == [
        "version 2 gets 1 % of the requests, version 1 the rest",
        *("1 % went well", "10 % went well", "50 % went well"),
    ]
    assert simulated.canary.reason == "50 % went well: version 2 gets all requests"
    assert simulated.canary.wake_at() is None


def test_a_step_lasts_its_time() -> None:
    simulated = Simulated(PLAN, rate=10_000)

    simulated.run(9)
    assert simulated.share == 1
    simulated.run(1)
    assert simulated.share == 10


def test_a_step_waits_for_enough_requests() -> None:
    simulated = Simulated(PLAN, rate=100)

    simulated.run(30)

    assert simulated.share == 1
    assert simulated.canary.waits_for(simulated.now_ns).startswith("50 requests of version 2 (has ")
    simulated.run(60)
    assert simulated.share > 1


def test_as_many_requests_as_are_wanted_are_enough() -> None:
    simulated = Simulated(PLAN)
    fifty = RequestWindow(50, 0, np.full(50, 1_000_000))
    simulated.do(ObservedTraffic(fifty, fifty, 0, 0))

    assert "(has " not in simulated.canary.missing()


def test_a_step_waits_until_there_is_enough_to_compare_p99() -> None:
    plan = CanaryPlan(2, 1, steps=(50.0, 100.0), step_seconds=1, samples_min=10)
    simulated = Simulated(plan, rate=100, errors=(0, 0))

    simulated.run(10)

    assert simulated.share == 50
    assert "to compare p99: " in simulated.canary.waits_for(simulated.now_ns)
    assert " of version 1 without an error are too few" in simulated.canary.waits_for(simulated.now_ns)
    assert simulated.run(30) is CanaryState.FINISHED


def test_a_canary_that_fails_is_rolled_back_within_seconds_and_says_why() -> None:
    simulated = Simulated(PLAN, errors=(1.0, 0.0))

    assert simulated.run(10) is CanaryState.ROLLED_BACK
    assert simulated.share == 0
    assert "rolled back at 1 %" in simulated.said[-1]
    assert "requests failed with version 2, 0 of" in simulated.said[-1]
    assert simulated.said[-1].endswith("version 1 gets all requests")


@pytest.mark.parametrize(("errors", "times", "why"), [((0.1, 0.01), 1, "failed"), ((0.01, 0.01), 4, "p99 is")])
def test_a_canary_that_is_worse_is_rolled_back(errors: tuple[float, float], times: float, why: str) -> None:
    found = [Simulated(PLAN, errors=errors, times=times, seed=seed) for seed in range(30)]

    assert Counter(each.run(200) for each in found) == {CanaryState.ROLLED_BACK: 30}
    assert all(why in each.canary.reason for each in found)


def test_a_canary_that_is_as_good_is_rolled_back_with_the_stated_chance_at_most() -> None:
    plan = CanaryPlan(2, 1, step_seconds=10, samples_min=50, significance=0.1, p99_ratio_max=1.0)
    states = Counter(Simulated(plan, errors=(0.05, 0.05), seed=seed).run(300) for seed in range(200))

    assert states[CanaryState.ROLLED_BACK] <= 20
    assert states[CanaryState.FINISHED] == 200 - states[CanaryState.ROLLED_BACK]


def test_stalls_that_hit_both_versions_do_not_roll_back() -> None:
    """In 2 % of all seconds, everything takes 20 ms more: latencies are not independent."""
    states: Counter[CanaryState] = Counter()
    for seed in range(100):
        random, simulated = np.random.default_rng(seed), Simulated(PLAN, seed=seed)
        while not simulated.canary.state.is_over and simulated.now_ns < 300 * S:
            stall = 20_000_000 if random.random() < 0.02 else 0
            simulated.now_ns += LOOK_NS
            ours = int(random.binomial(300, simulated.share / 100))
            canary, stable = (
                RequestWindow(count, 0, (random.lognormal(14, 0.3, count) + stall).astype(np.int64))
                for count in (ours, 300 - ours)
            )
            simulated.do(ObservedTraffic(canary, stable))
        states[simulated.canary.state] += 1

    assert states[CanaryState.ROLLED_BACK] <= 3


def test_the_end_of_a_step_looks_at_what_came_since_the_last_look() -> None:
    canary = Canary(CanaryPlan(2, 1, steps=(10.0, 100.0), step_seconds=2, samples_min=10), 0)

    def window(count: int, latency_ns: int) -> RequestWindow:
        return RequestWindow(count, 0, np.full(count, latency_ns))

    assert canary.handle(ObservedTraffic(window(60, 1_000_000), window(2000, 1_000_000)), S) == []
    commands = canary.handle(ObservedTraffic(window(59, 9_000_000), window(100, 1_000_000)), 2 * S)

    assert commands[0] == SetShare(0.0)
    assert canary.reason.startswith("rolled back at 10 %: p99 is 9 ms with version 2, 1 ms with version 1")


def test_differences_of_shadow_answers_roll_back() -> None:
    plan = CanaryPlan(2, 1, step_seconds=10, samples_min=20, difference_rate_max=0.01)
    good, bad = Simulated(plan), Simulated(plan)

    for second in range(80):
        good.tick(compared=20, different=int(second % 10 == 0))  # 0.5 %
        bad.tick(compared=20, different=1)  # 5 %

    assert good.canary.state is CanaryState.FINISHED
    assert bad.canary.state is CanaryState.ROLLED_BACK
    assert "answers differ from those given, 1.00% may" in bad.canary.reason


def test_a_step_waits_for_comparisons_if_they_count() -> None:
    simulated = Simulated(CanaryPlan(2, 1, step_seconds=5, samples_min=50, difference_rate_max=0.01), rate=10_000)

    simulated.run(20)

    assert simulated.share == 1
    assert "50 compared answers (has 0)" in simulated.canary.waits_for(simulated.now_ns)


def test_a_plan_may_end_with_less_than_all() -> None:
    simulated = Simulated(CanaryPlan(2, 1, steps=(5.0, 20.0), step_seconds=5, samples_min=50))

    assert simulated.run(100) is CanaryState.FINISHED
    assert simulated.share == 20
    assert simulated.canary.reason == "20 % went well: version 2 keeps this share"


def test_a_plan_without_conditions_goes_by_time_and_samples() -> None:
    plan = CanaryPlan(2, 1, step_seconds=5, samples_min=1, checks_errors=False, p99_ratio_max=None)

    assert Simulated(plan, errors=(1, 0), times=50).run(100) is CanaryState.FINISHED


def test_a_paused_plan_stays_and_goes_on_later() -> None:
    simulated = Simulated(PLAN)
    simulated.do(OperatorAction(CanaryAction.PAUSE))
    simulated.run(60)
    assert (simulated.canary.state, simulated.share) == (CanaryState.PAUSED, 1)

    simulated.do(OperatorAction(CanaryAction.RESUME))
    assert simulated.run(200) is CanaryState.FINISHED


def test_a_paused_plan_is_still_rolled_back() -> None:
    simulated = Simulated(PLAN, errors=(1.0, 0.0))
    simulated.do(OperatorAction(CanaryAction.PAUSE))

    assert simulated.run(20) is CanaryState.ROLLED_BACK


@pytest.mark.parametrize(
    ("action", "state", "share"),
    [(CanaryAction.PROMOTE, CanaryState.FINISHED, 100), (CanaryAction.ABORT, CanaryState.ABORTED, BEFORE)],
)
def test_an_operator_may_end_a_plan(action: CanaryAction, state: CanaryState, share: float) -> None:
    simulated = Simulated(PLAN)
    simulated.do(OperatorAction(action))

    assert (simulated.canary.state, simulated.share) == (state, share)
    assert "by an operator" in simulated.said[-1]
    assert simulated.canary.handle(OperatorAction(CanaryAction.PROMOTE), simulated.now_ns) == []


def test_a_canary_that_is_not_ready_any_more_is_rolled_back() -> None:
    simulated = Simulated(PLAN)
    simulated.do(ReadyVersions({1, 2, 3}))
    assert simulated.canary.state is CanaryState.RUNNING

    simulated.do(ReadyVersions({1}))
    assert (simulated.canary.state, simulated.share) == (CanaryState.ROLLED_BACK, 0)
    assert "version 2 is not ready any more" in simulated.canary.reason


def test_a_plan_waits_for_a_model_that_is_unloaded_as_a_whole() -> None:
    simulated = Simulated(PLAN)
    simulated.do(ReadyVersions(set()))
    simulated.do(ReadyVersions({1, 2}))

    assert (simulated.canary.state, simulated.share) == (CanaryState.RUNNING, 1)


def test_a_canary_that_only_hangs_is_rolled_back() -> None:
    """Its clients give up after 10 s; that is no error, but a latency."""
    canary = Canary(PLAN, 0)
    for second in range(1, 11):
        given_up = RequestWindow(0, 0, np.full(9, 10 * S))
        canary.handle(ObservedTraffic(given_up, RequestWindow(200, 0, np.full(200, 2_000_000))), second * S)

    assert canary.state is CanaryState.ROLLED_BACK
    assert "p99 is 10000 ms with version 2, 2 ms with version 1" in canary.reason


def test_what_both_versions_did_is_shown_with_its_weight() -> None:
    canary = Canary(CanaryPlan(2, 1, significance=0.3, difference_rate_max=0.01), 0)
    assert canary.checks() == {
        "errors": "0 of 0 requests failed with version 2, 0 of 0 with version 1; no evidence of a regression so far",
        "p99": "p99: no data yet",
        "differences": "0 of 0 answers differ from those given, 1.00% may; no evidence of a regression so far",
    }

    ours, theirs = np.arange(1, 101) * 1_000_000, np.arange(1, 201) * 1_000_000
    for second in (1, 2):
        seen = ObservedTraffic(RequestWindow(50, 2, ours), RequestWindow(200, 1, theirs), 20, second)
        canary.handle(seen, second * S)

    assert canary.checks() == {
        "errors": "4 of 100 requests failed with version 2, 2 of 400 with version 1; evidence 4.47 of 10 to roll back",
        "p99": (
            "p99 is 98.8 ms with version 2, 198 ms with version 1: at least 0.49 times as long, 1.5 times is permitted"
        ),
        "differences": "3 of 40 answers differ from those given, 1.00% may; evidence 4.8 of 10 to roll back",
    }


def test_errors_are_compared_when_both_versions_can_be_expected_to_have_requests() -> None:
    canary = Canary(CanaryPlan(2, 1, steps=(1.0,), difference_rate_max=0.0), 0)

    canary.handle(ObservedTraffic(RequestWindow(5, 5), RequestWindow(5, 0)), S)
    canary.handle(ObservedTraffic(), 2 * S)

    assert canary.checks()["errors"].endswith(
        "5 of 5 requests failed with version 2, 0 of 5 with version 1; no evidence of a regression so far"
    )
    assert canary.checks()["differences"].startswith("0 of 0 answers differ from those given, 0.00% may")


@pytest.mark.parametrize(("ours", "few"), [(49, "49 of version 2"), (50, "60 of version 1")])
def test_the_version_with_too_few_latencies_is_named(ours: int, few: str) -> None:
    canary = Canary(PLAN, 0)
    canary.handle(ObservedTraffic(RequestWindow(50, 0, np.full(ours, S)), RequestWindow(60, 0, np.full(60, S))), S)

    assert canary.missing() == f"more requests to compare p99: {few} without an error are too few"


def test_a_version_that_is_loaded_again_is_judged_by_what_comes_then() -> None:
    simulated = Simulated(PLAN, rate=10_000, errors=(0.5, 0.5))
    simulated.run(9)
    simulated.do(Replaced(2))
    assert simulated.said[-1] == "version 2 was loaded again: the step of 1 % begins again"
    assert simulated.canary.checks()["errors"].startswith("0 of 0 requests failed with version 2")

    simulated.run(9)
    assert simulated.share == 1
    simulated.run(1)
    assert simulated.share == 10


def test_a_plan_during_which_the_engine_ends_twice_is_rolled_back() -> None:
    simulated = Simulated(PLAN)
    simulated.do(EngineEnded())
    assert (simulated.canary.state, simulated.share) == (CanaryState.RUNNING, 1)
    assert simulated.said[-1] == "the engine ended at 1 %: the step begins again"

    simulated.do(EngineEnded())
    assert (simulated.canary.state, simulated.share) == (CanaryState.ROLLED_BACK, 0)
    assert "rolled back at 1 %: the engine has ended 2 times during this plan" in simulated.canary.reason


def test_without_the_stable_version_a_plan_pauses() -> None:
    simulated = Simulated(PLAN)
    simulated.do(ReadyVersions({2}))

    assert (simulated.canary.state, simulated.share) == (CanaryState.PAUSED, 1)
    assert "version 1 is not ready any more" in simulated.canary.reason


def test_a_plan_that_begins_with_everything_is_finished_at_once() -> None:
    canary = Canary(CanaryPlan(2, 1, steps=(100.0,)), 0)

    assert SetShare(100.0) in canary.start()
    assert canary.state is CanaryState.FINISHED


EVENTS = st.one_of(
    st.sampled_from([OperatorAction(action) for action in CanaryAction]),
    st.sampled_from([ReadyVersions({1, 2}), ReadyVersions({1}), ReadyVersions({2}), ReadyVersions(set())]),
    st.sampled_from([Replaced(1), Replaced(2), EngineEnded()]),
    st.builds(
        lambda ours, failed, theirs, also, compared, different: ObservedTraffic(
            RequestWindow(ours, min(failed, ours), np.full(ours - min(failed, ours), 1_000_000)),
            RequestWindow(theirs, min(also, theirs), np.full(theirs - min(also, theirs), 900_000)),
            compared,
            min(different, compared),
        ),
        *[st.integers(0, 400)] * 6,
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 20)), max_size=30), st.sampled_from([None, 0.0, 0.1]))
def test_whatever_happens_the_share_belongs_to_the_state(
    events: list[tuple[CanaryEvent, int]], rate: float | None
) -> None:
    simulated = Simulated(CanaryPlan(2, 1, step_seconds=5, samples_min=100, difference_rate_max=rate))
    canary = simulated.canary
    for event, seconds in events:
        was_over, share = canary.state.is_over, simulated.share
        simulated.now_ns += seconds * S
        simulated.do(event)

        assert not (was_over and simulated.share != share)
        assert simulated.share >= share or simulated.share in (0, BEFORE)
        expected = {CanaryState.ROLLED_BACK: 0, CanaryState.ABORTED: BEFORE, CanaryState.FINISHED: 100}
        assert simulated.share == expected.get(canary.state, canary.percent)
        assert (canary.wake_at() is None) == canary.state.is_over
        assert bool(canary.waits_for(simulated.now_ns)) is not canary.state.is_over
        assert canary.reason == simulated.said[-1]
        assert canary.checks().keys() == {"errors", "p99"} | ({"differences"} if rate is not None else set())
