"""The rate limiter's shell: members from a configuration, what shows of them, calls of models that hold resources."""

import asyncio
from typing import Any

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, RateLimiter, RateLimiterResource
from charonia.core.errors import Code, ServingError
from charonia.core.request import CallFrame
from charonia.server.backends.api import Placement
from charonia.server.execution.deadlock import DeadlockDetector, InstancePool
from charonia.server.rate_limiter.limiter import Claim, RateLimits, Shortage
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.resources import SERVER_WIDE, MemberState, ResourcePool
from charonia.server.scheduling.api import BatchPolicy, Run, SlotIdle, Submit, Tick
from charonia.server.scheduling.dynamic import DynamicBatcher

CPU, GPU = InstanceKind.KIND_CPU, InstanceKind.KIND_GPU


def model(
    name: str, *resources: RateLimiterResource, count: int = 1, priority: int = 0, gpus: tuple[int, ...] = ()
) -> tuple[ModelConfig, list[Placement]]:
    limiter = RateLimiter(resources, priority)
    kind = GPU if gpus else CPU
    config = ModelConfig(
        name=name, instance_group=(InstanceGroup(f"{name}_0", kind, count, gpus=gpus, rate_limiter=limiter),)
    )
    placed = [Placement(f"{name}_0_{i}", kind, gpus[i] if gpus else 0) for i in range(max(count, len(gpus)))]
    return config, placed


def claim(limits: RateLimits, made: tuple[ModelConfig, list[Placement]], version: str = "1") -> Claim:
    claimed = limits.claim(made[0], version, made[1])
    assert claimed is not None
    return claimed


def resource(count: int, name: str = "R", *, is_global: bool = False) -> RateLimiterResource:
    return RateLimiterResource(name, is_global, count)


def test_a_model_without_a_section_takes_no_part() -> None:
    config = ModelConfig(name="m", instance_group=(InstanceGroup("m_0", CPU),))

    assert RateLimits().claim(config, "1", [Placement("m_0_0", CPU)]) is None


def test_each_instance_needs_what_its_group_says_on_its_device() -> None:
    limits = RateLimits([ResourceLimit("R", 7)])

    claim(
        limits, model("m", resource(2), resource(1), resource(3, "G", is_global=True), resource(0, "none"), gpus=(0, 1))
    )

    shown: Any = limits.document()
    assert [(p["name"], p["device"], p["capacity"], p["in_use"], p["explicit"]) for p in shown["resources"]] == [
        ("G", "global", 3, 0, False),
        ("R", 0, 7, 0, True),
        ("R", 1, 7, 0, True),
    ]
    assert [(m.instance, m.state, m.priority, [need[:2] for need in m.needs]) for m in limits._arbiter.members] == [
        ("m_0_0", MemberState.IDLE, 1, [(ResourcePool("R", 0), 3), (ResourcePool("G", SERVER_WIDE), 3)]),
        ("m_0_1", MemberState.IDLE, 1, [(ResourcePool("R", 1), 3), (ResourcePool("G", SERVER_WIDE), 3)]),
    ]


def test_a_model_that_could_never_run_is_refused_with_the_path() -> None:
    limits = RateLimits([ResourceLimit("R", 1)])

    with pytest.raises(ServingError) as caught:
        claim(limits, model("m", resource(1, "Q"), resource(2)))

    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith("instance_group[0].rate_limiter.resources[1].count: Resource count")
    assert limits.document() == {"resources": [], "instances": []}


def test_who_holds_what_and_who_waits_can_be_seen_and_counted() -> None:
    limits = RateLimits()
    one, two = claim(limits, model("a", resource(1))), claim(limits, model("b", resource(1), priority=2))
    first, second = (each.scheduler(DynamicBatcher(BatchPolicy())) for each in (one, two))
    for scheduler in (first, second):
        scheduler.handle(SlotIdle(0), 0)
        scheduler.handle(Submit(1), 0)

    document = limits.document()
    assert document["resources"] == [
        {
            "name": "R",
            "device": 0,
            "capacity": 1,
            "explicit": False,
            "in_use": 1,
            "holders": [{"model": "a", "version": "1", "instance": "a_0_0", "count": 1}],
            "waiting": [{"model": "b", "version": "1", "instance": "b_0_0", "count": 1}],
        }
    ]
    assert document["instances"] == [
        {"model": n, "version": "1", "instance": f"{n}_0_0", "state": s, "priority": p, "executions": e}
        for n, s, p, e in (("a", "running", 1, 1), ("b", "waiting", 2, 0))
    ]
    values = {(f.name, s.labels.get("model_instance", "")): s.value for f in limits.families() for s in f.samples}
    assert values == {
        ("charonia_rate_limit_capacity", ""): 1,
        ("charonia_rate_limit_in_use", ""): 1,
        ("charonia_rate_limit_waiting", "a_0_0"): 0,
        ("charonia_rate_limit_waiting", "b_0_0"): 1,
        ("charonia_rate_limit_executions_total", "a_0_0"): 1,
        ("charonia_rate_limit_executions_total", "b_0_0"): 0,
    }


def test_what_a_version_waits_for_is_told_with_the_models_that_have_it() -> None:
    limits = RateLimits()
    one, two = claim(limits, model("a", resource(1), gpus=(1,))), claim(limits, model("b", resource(1), gpus=(1,)))
    first, second = (each.scheduler(DynamicBatcher(BatchPolicy())) for each in (one, two))
    for scheduler in (first, second):
        scheduler.handle(SlotIdle(0), 0)
        scheduler.handle(Submit(1), 0)

    needs = ("R of device 1",)

    assert one.shortage(7) == Shortage(0, needs)
    assert two.shortage(7) == Shortage(7, needs, needs, ("a",))

    first.handle(SlotIdle(0), 10)
    second.handle(Tick(), 10)

    assert two.shortage(20) == Shortage(10, needs)


async def test_a_version_that_goes_gives_up_what_it_holds_and_the_next_is_woken() -> None:
    limits = RateLimits()
    one, two = claim(limits, model("a", resource(1))), claim(limits, model("b", resource(1)))
    first, second = (each.scheduler(DynamicBatcher(BatchPolicy())) for each in (one, two))
    started = []
    two.wake(asyncio.get_running_loop(), lambda: started.extend(second.handle(Tick(), 0)))
    for scheduler in (first, second):
        scheduler.handle(SlotIdle(0), 0)
        scheduler.handle(Submit(1), 0)

    one.release()
    assert started == []  # not within the event of another scheduler
    await asyncio.sleep(0)

    assert [(type(c), c.slot) for c in started if isinstance(c, Run)] == [(Run, 0)]
    assert [member.model for member in limits._arbiter.members] == ["b"]


def pool(limits: RateLimits, name: str, *resources: RateLimiterResource, count: int = 1) -> InstancePool:
    return InstancePool(name, count, claim(limits, model(name, *resources, count=count)))


def test_a_call_that_waits_for_what_its_caller_holds_is_refused() -> None:
    limits = RateLimits()
    detector, a, b = DeadlockDetector(), pool(limits, "a", resource(1)), pool(limits, "b", resource(1))
    caller = CallFrame("a", "1", "a_0_0")
    detector.occupy(caller, a, 0)

    with pytest.raises(ServingError) as caught:
        detector.submit(caller, b)

    assert caught.value.code is Code.UNAVAILABLE
    assert "the resources that it needs to run are held by models that wait for it (a -> b)" in caught.value.message
    assert "--rate-limit-resource" in caught.value.hint


def test_a_call_whose_resources_do_not_depend_on_its_caller_is_not_refused() -> None:
    limits = RateLimits([ResourceLimit("R", 2)])
    detector, a = DeadlockDetector(), pool(limits, "a", resource(1))
    caller = CallFrame("a", "1", "a_0_0")
    detector.occupy(caller, a, 0)

    detector.submit(caller, pool(limits, "enough", resource(1)))
    detector.submit(caller, pool(limits, "other", resource(1, "Q")))
    detector.submit(caller, InstancePool("free", 1))
    detector.submit(caller, pool(limits, "nothing"))


def test_two_callers_that_together_hold_what_both_wait_for_are_noticed() -> None:
    limits = RateLimits([ResourceLimit("R", 2)])
    detector, a, b = DeadlockDetector(), pool(limits, "a", resource(1), count=2), pool(limits, "b", resource(1))
    first, second = CallFrame("a", "1", "a_0_0"), CallFrame("a", "1", "a_0_1")
    detector.occupy(first, a, 0)
    detector.occupy(second, a, 1)
    call = detector.submit(first, b)  # the second may still finish

    with pytest.raises(ServingError, match="held by models that wait for it"):
        detector.submit(second, b)

    detector.batch_ended(second)
    detector.run(call, 0)
    detector.end(call)


def test_a_circle_that_goes_on_over_resources_is_noticed() -> None:
    limits = RateLimits()
    detector, a, b, c = (
        DeadlockDetector(),
        pool(limits, "a", resource(1)),
        InstancePool("b", 1),
        pool(limits, "c", resource(1)),
    )
    first = CallFrame("a", "1", "a_0_0")
    detector.occupy(first, a, 0)
    detector.run(detector.submit(first, b), 0)
    second = CallFrame("b", "1", "b_0_0", first)
    detector.occupy(second, b, 0)

    with pytest.raises(ServingError, match=r"\(a -> b -> c\)"):
        detector.submit(second, c)
