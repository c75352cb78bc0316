"""From facts to findings: every rule where it speaks, where it is silent, and in which order they come."""

from dataclasses import replace
from typing import cast

import pytest

from charonia.config.parameters import InstanceBounds
from charonia.server.explain.explainer import Explanation, explanation_json
from charonia.server.explain.rules import Activity, Counts, Facts, ModelSetup, explain, useful_delay_us
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.api import CloseReason

S, MS = 1_000_000_000, 1_000_000
BOUNDS = (MS, 10 * MS, 100 * MS)
SETUP = ModelSetup("m", "1", instances=2, cores=4, batch_max=8, batches=True)


def activity(
    *,
    busy: float = 0.6,
    size: int = 4,
    reason: CloseReason = CloseReason.QUEUE_EMPTY,
    moving: float = 0.1,
    idle_cores: float = 0.0,
    waits: tuple[int, ...] = (4000, 0, 0, 0),
    failed: dict[FailureReason, int] | None = None,
    hits: int = 0,
) -> Activity:
    """Return 10 s with 1000 batches on two instances that had work for a share of the time."""
    spent = round(busy * 10 * S * 2)
    counts = Counts(
        success=1000 * size,
        hits=hits,
        failed=failed or {},
        inferences=1000 * size,
        batches={size: 1000},
        closes={reason: 1000},
        request_ns=1000 * size * 5 * MS,
        queue_ns=1000 * size * MS,
        infer_ns=round(spent * (1 - moving)),
        moving_ns=round(spent * moving),
        waits=waits,
    )
    return Activity(10.0, 10.0, counts, BOUNDS, (0, 3, 1), idle_cores)


def one(busy_s: float, *, seconds: float = 1.0, failed: dict[FailureReason, int] | None = None) -> Activity:
    """Return a single request that waited 100.24 ms, as the histogram and the sum of waiting times have it."""
    counts = Counts(
        success=1,
        failed=failed or {},
        inferences=1,
        batches={8: 1},
        closes={CloseReason.FULL: 1},
        request_ns=round(busy_s * S) + 100_240_000,
        queue_ns=100_240_000,
        infer_ns=round(busy_s * S),
        waits=(0, 0, 0, 1),
    )
    return Activity(10.0, seconds, counts, BOUNDS, (0, 0))


def short(done: Activity, *, holders: tuple[str, ...] = ("big",)) -> Activity:
    """Return it with instances that waited for memory, which others held."""
    return replace(done, short=0.9, resources=("memory",), holders=holders)


def kinds(setup: ModelSetup, done: Activity, busiest: tuple[str, float] | None = None) -> list[str]:
    return [finding.kind for finding in explain(Facts(setup, done, busiest))]


def change(kind: str, setup: ModelSetup, done: Activity) -> str:
    (found,) = [finding.change for finding in explain(Facts(setup, done)) if finding.kind == kind]
    return found


@pytest.mark.parametrize(
    ("expected", "setup", "done"),
    [
        (["at_ease"], SETUP, activity(busy=0.3)),
        (["queue_empty"], SETUP, activity(busy=0.6)),
        # Full instances: with cores to spare, and without.
        (["busy", "full"], SETUP, activity(busy=0.95, size=8, reason=CloseReason.FULL, idle_cores=1.2)),
        (["cores", "full"], SETUP, activity(busy=0.95, size=8, reason=CloseReason.FULL)),
        (["busy"], replace(SETUP, on_gpu=True, batches=False, batch_max=0), activity(busy=0.95, size=1)),
        (["cores", "unbatched"], replace(SETUP, batches=False), activity(busy=0.95, size=1, reason=CloseReason.FULL)),
        (["cores"], replace(SETUP, batches=False, batch_max=0), activity(busy=0.95, size=1, reason=CloseReason.FULL)),
        (
            ["cores", "preferred"],
            replace(SETUP, preferred=(4,)),
            activity(busy=0.95, size=4, reason=CloseReason.PREFERRED),
        ),
        (["cores"], replace(SETUP, preferred=(8,)), activity(busy=0.95, size=8, reason=CloseReason.PREFERRED)),
        # Batches that could be fuller.
        (["cores", "queue_empty"], SETUP, activity(busy=0.95)),
        (["at_ease"], SETUP, activity(busy=0.6, size=6)),
        (["shapes"], SETUP, activity(reason=CloseReason.SHAPE)),
        # Delays in which no request arrives.
        (["delay"], replace(SETUP, delay_us=500), activity(busy=0.2, size=1, reason=CloseReason.DELAY)),
        (["at_ease"], replace(SETUP, delay_us=500), activity(busy=0.6, size=6, reason=CloseReason.DELAY)),
        # Where the time goes.
        (["moving"], SETUP, activity(busy=0.6, size=6, moving=0.8)),
        (["at_ease"], SETUP, activity(busy=0.2, size=6, moving=0.8)),
        (["threads"], replace(SETUP, threads=4), activity(busy=0.6, size=6)),
        (["at_ease"], replace(SETUP, threads=4), activity(busy=0.6, size=6, idle_cores=2)),
        (["at_ease"], replace(SETUP, threads=2), activity(busy=0.6, size=6)),
        (["at_ease"], replace(SETUP, threads=4, on_gpu=True), activity(busy=0.6, size=6)),
        (["bursts"], SETUP, activity(busy=0.3, size=6, waits=(90, 0, 10, 0))),
        (["at_ease"], SETUP, activity(busy=0.3, size=6, waits=(999, 0, 1, 0))),
        # What failed, and what was refused or cancelled.
        (["at_ease", "failing"], SETUP, activity(busy=0.3, failed={FailureReason.BACKEND: 5})),
        (["refused"], SETUP, activity(busy=0.3, failed={FailureReason.REJECTED: 5})),
        (["at_ease"], SETUP, activity(busy=0.3, failed={FailureReason.CANCELED: 5})),
        (["at_ease", "cache"], SETUP, activity(busy=0.3, hits=2000)),
        (["at_ease"], SETUP, activity(busy=0.3, hits=1)),
        # What the rate limiter held back is not for want of instances, nor because requests come in bursts.
        (["resources"], SETUP, short(activity(busy=0.3, size=6, waits=(90, 0, 10, 0)))),
        (["resources", "full"], SETUP, short(activity(busy=0.95, size=8, reason=CloseReason.FULL, idle_cores=1))),
        (["resources"], replace(SETUP, delay_us=500), short(activity(busy=0.2, size=1, reason=CloseReason.DELAY))),
        (["resources", "unbatched"], replace(SETUP, batches=False), short(activity(busy=0.3, size=1))),
        (["at_ease"], SETUP, replace(short(activity(busy=0.3, size=6)), short=0.2)),
        (["resources"], SETUP, short(Activity(10.0, 10.0, queued=(0, 3)))),
        # Few requests say that they failed, and little else; a model that works long on each says how busy it is.
        (["few"], SETUP, one(busy_s=0.95)),
        (["failing"], SETUP, one(busy_s=0.95, failed={FailureReason.BACKEND: 1})),
        (["resources"], SETUP, short(one(busy_s=0.95))),
        (["cores"], replace(SETUP, instances=1), one(busy_s=11.5, seconds=12.0)),
        (["idle"], SETUP, Activity(10.0, 10.0)),
        (["stuck"], SETUP, Activity(10.0, 10.0, queued=(0, 3))),
        (["starting"], SETUP, Activity()),
    ],
)
def test_what_is_seen_leads_to_what_is_said(expected: list[str], setup: ModelSetup, done: Activity) -> None:
    assert kinds(setup, done) == expected


def test_every_finding_reads_like_a_sentence() -> None:
    done = activity(busy=0.95, moving=0.8, failed=dict.fromkeys(FailureReason, 3), hits=100)

    found = explain(Facts(replace(SETUP, threads=4), done))

    assert len(found) >= 6
    for finding in found:
        assert finding.says[0].isupper() or finding.says[0].isdigit()
        assert finding.says.endswith(".")
        assert not finding.change.endswith(".")


def test_instances_are_at_most_doubled_and_only_as_far_as_cores_are_idle() -> None:
    alone = replace(SETUP, instances=1, cores=8)
    many = activity(busy=0.48, idle_cores=7)  # of two instances: of one, it is 0.96

    assert change("busy", alone, many) == "try instance_group [ { count: 2 } ] in place of 1"
    assert "count: 3" in change("busy", SETUP, activity(busy=0.95, idle_cores=1.5))
    assert "count: 3" in change("busy", replace(SETUP, threads=2), activity(busy=0.95, idle_cores=3.0))


def test_cores_that_others_took_come_before_more_cores() -> None:
    full = activity(busy=0.95, idle_cores=0.1)

    assert kinds(SETUP, full)[0] == "cores"
    assert kinds(SETUP, replace(full, taken_cores=1.6))[0] == "taken"
    assert "elsewhere" in change("taken", SETUP, replace(full, taken_cores=1.6))
    assert kinds(SETUP, replace(full, idle_cores=1.5, taken_cores=1.6))[0] == "busy"


def test_an_ensemble_is_limited_by_its_busiest_step() -> None:
    ensemble = ModelSetup("e", "1", instances=0, cores=4, steps=("a", "b"))
    done = replace(activity(), counts=Counts(success=40, request_ns=40 * MS))

    assert kinds(ensemble, done, ("a", 0.97)) == ["step"]
    assert kinds(ensemble, done, ("a", 0.5)) == ["at_ease"]
    assert kinds(ensemble, done) == ["at_ease"]
    assert "charonia explain a" in explain(Facts(ensemble, done, ("a", 0.97)))[0].change


def test_an_ensemble_is_limited_by_the_step_that_waits_for_resources() -> None:
    ensemble = ModelSetup("e", "1", instances=0, cores=4, steps=("a", "b"))
    done = replace(activity(), counts=Counts(success=40, request_ns=40 * MS))

    (found,) = explain(Facts(ensemble, done, ("a", 0.4), ("b", 0.9)))

    assert found.says == "Step 'b' limits this ensemble: the rate limiter held its requests back 90% of the time."
    assert found.change.startswith("charonia explain b ")
    assert [each.kind for each in explain(Facts(ensemble, done, ("a", 0.4), ("b", 0.1)))] == ["at_ease"]


def test_what_requests_waited_for_and_who_had_it_is_named() -> None:
    (found,) = explain(Facts(SETUP, short(activity(busy=0.3, size=6), holders=("big", "m", "small"))))

    assert found.says == (
        "The rate limiter held requests back 90% of the time: instances waited for memory, which model 'big', its "
        "other instances and model 'small' had."
    )
    assert found.change.startswith("more of memory with --rate-limit-resource, ")


def test_who_had_it_is_left_out_where_nobody_was_seen() -> None:
    (found,) = explain(Facts(SETUP, short(activity(busy=0.3, size=6), holders=())))

    assert found.says.endswith(": instances waited for memory.")


def test_a_line_at_the_instance_is_told() -> None:
    (first, *_) = explain(Facts(SETUP, activity(busy=2.5)))

    assert first.says.startswith("All 2 instances were busy 100% of the time, and 2.5 batches were at each")


@pytest.mark.parametrize(
    ("setup", "done", "expected"),
    [
        # 400 elements a second for two instances: four more for each of them take 20 ms; half a batch is shorter.
        (SETUP, activity(busy=0.6), 6000),
        (replace(SETUP, instances=200, batch_max=16), activity(busy=5), 10_000),
        (SETUP, activity(busy=0.001), 0),  # batches that take no time are not waited for
        (replace(SETUP, batch_max=4), activity(busy=0.6), 50),
    ],
)
def test_a_delay_fills_the_batches_and_is_short_beside_them(setup: ModelSetup, done: Activity, expected: int) -> None:
    assert useful_delay_us(Facts(setup, done)) == expected


def test_without_requests_no_delay_is_found() -> None:
    assert useful_delay_us(Facts(SETUP, replace(activity(), counts=replace(activity().counts, inferences=0)))) > 0


def test_a_delay_that_is_long_enough_already_is_not_lengthened() -> None:
    assert change("queue_empty", replace(SETUP, delay_us=20_000), activity()).startswith("nothing here")
    assert "in place of 500" in change("queue_empty", replace(SETUP, delay_us=500), activity())


@pytest.mark.parametrize(("size", "expected"), [(1, "max_queue_delay_microseconds: 0"), (3, "…: 250")])
def test_a_delay_in_vain_is_taken_out_or_shortened(size: int, expected: str) -> None:
    done = activity(busy=0.2, size=size, reason=CloseReason.DELAY)

    assert change("delay", replace(SETUP, delay_us=500), done).endswith(expected.lstrip("…"))


def test_a_busy_model_in_front_ends_asks_for_more_of_them() -> None:
    apart = replace(SETUP, instances=2, placement=ExecutionPlacement(2, ""))

    assert change("busy", apart, activity(busy=2.0, idle_cores=4.0)) == "try --front-ends 3, each with an instance"
    assert explanation_json(Explanation.of(Facts(apart, activity())))["runs_in"] == {
        "front_ends": 2,
        "only_in_engine_because": "",
    }
    assert explanation_json(Explanation.of(Facts(SETUP, activity())))["runs_in"] is None


@pytest.mark.parametrize(("most", "advice"), [(2, "INSTANCES_MAX: 3 in place of 2"), (4, "")])
def test_a_model_whose_instances_follow_the_load_is_not_told_a_fixed_number(most: int, advice: str) -> None:
    setup = replace(SETUP, bounds=InstanceBounds(1, most))

    assert change("busy", setup, activity(busy=0.95, size=8, idle_cores=1.2)) == advice


def test_the_document_says_how_many_instances_there_may_be_and_why_there_are_so_many() -> None:
    scaled = replace(SETUP, bounds=InstanceBounds(1, 4), scaling="2 of 1 to 4 instances")
    found = [explanation_json(Explanation.of(Facts(each, activity())))["instances"] for each in (SETUP, scaled)]

    assert [[each[name] for name in ("min", "max", "scaling")] for each in cast("list[dict[str, object]]", found)] == [
        [2, 2, ""],
        [1, 4, "2 of 1 to 4 instances"],
    ]


def test_the_document_has_the_facts_and_the_findings() -> None:
    step = Explanation.of(Facts(SETUP, activity()))

    found = explanation_json(
        Explanation.of(Facts(replace(SETUP, model="e", steps=("m",)), activity(), ("m", 0.6)), (step,))
    )

    assert (found["model_name"], found["seconds"], found["active_seconds"]) == ("e", 10.0, 10.0)
    assert found["steps"] == [explanation_json(step)]
    assert explanation_json(step)["batches"] == {
        "count": 1000,
        "mean_size": 4.0,
        "sizes": {"4": 1000},
        "closed": {"queue_empty": 1000},
    }
    assert explanation_json(step)["time_us"] == {
        "request": 5000.0,
        "queue": 1000.0,
        "queue_p50": 500,
        "queue_p99": 990,
        "batch_infer": 10800.0,
        "batch_moving": 1200.0,
    }


def test_a_model_that_was_just_loaded_has_a_document_too() -> None:
    found = explanation_json(Explanation.of(Facts(SETUP, Activity())))

    assert found["requests"] == {
        "success": 0,
        "per_second": 0.0,
        "failed": {},
        "from_cache": 0,
        "waiting": 0,
        "waiting_max": 0,
    }
