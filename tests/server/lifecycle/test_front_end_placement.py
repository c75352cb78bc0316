"""Which models front ends load, too: the rule, and what the engine offers by it."""

from dataclasses import replace

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    RateLimiter,
    ResponseCacheConfig,
    SequenceBatching,
    TransactionPolicy,
)
from charonia.config.parameters import FRONT_END
from charonia.server.lifecycle.front_end_placement import (
    BYTES_MAX,
    for_front_end,
    front_end_problems,
    obstacle,
    placing_text,
    reason_to_stay,
)

GROUP = InstanceGroup("m", InstanceKind.KIND_CPU, 2)
CONFIG = ModelConfig(name="m", backend="onnxruntime", instance_group=(GROUP,))
ENSEMBLE = ModelConfig(name="e", platform="ensemble")


def chosen(config: ModelConfig, choice: str) -> ModelConfig:
    return replace(config, parameters={FRONT_END: choice})


def test_a_model_without_state_that_computes_in_microseconds_runs_in_front_ends() -> None:
    assert reason_to_stay(CONFIG, has_short_requests=True) == ""
    batching = DynamicBatching(preferred_batch_size=(8,))  # those of a complete configuration, without a delay
    assert reason_to_stay(replace(CONFIG, dynamic_batching=batching), has_short_requests=True) == ""
    assert "not been measured" in reason_to_stay(CONFIG)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (replace(CONFIG, backend="python"), "'python'"),
        (replace(CONFIG, instance_group=(replace(GROUP, kind=InstanceKind.KIND_GPU),)), "CPU"),
        (replace(CONFIG, instance_group=(GROUP, replace(GROUP, host_policy="near"))), "host_policy"),
        (replace(CONFIG, instance_group=(replace(GROUP, rate_limiter=RateLimiter()),)), "rate_limiter"),
        (replace(CONFIG, parameters={"INSTANCES_MAX": "3"}), "INSTANCES_MAX"),
        (replace(CONFIG, sequence_batching=SequenceBatching()), "sequences"),
        (replace(CONFIG, model_transaction_policy=TransactionPolicy(decoupled=True)), "decoupled"),
        (replace(CONFIG, response_cache=ResponseCacheConfig(enable=True)), "cached"),
        (replace(CONFIG, parameters={"BATCHING_STRATEGY": "strategy.py"}), "batching strategy"),
        (replace(CONFIG, dynamic_batching=DynamicBatching(max_queue_delay_microseconds=1)), "max_queue_delay"),
        (replace(CONFIG, dynamic_batching=DynamicBatching(preserve_ordering=True)), "preserve_ordering"),
        (replace(CONFIG, dynamic_batching=DynamicBatching(priority_levels=2)), "priority_levels"),
        (
            replace(CONFIG, dynamic_batching=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1))),
            "default_queue_policy",
        ),
    ],
)
def test_everything_else_stays_in_the_engine_and_cannot_be_forced_out(config: ModelConfig, part: str) -> None:
    assert part in reason_to_stay(config, has_short_requests=True)
    forced = replace(config, parameters={**config.parameters, FRONT_END: "yes"})
    (problem,) = front_end_problems(forced)
    assert problem.path == "parameters[front_end]"
    assert part in problem.message


def test_a_large_or_limited_model_stays_in_the_engine() -> None:
    assert reason_to_stay(CONFIG, BYTES_MAX, has_short_requests=True) == ""
    assert "64 MiB" in reason_to_stay(CONFIG, BYTES_MAX + 1, has_short_requests=True)
    assert "rate limiter" in reason_to_stay(CONFIG, is_limited=True, has_short_requests=True)


def test_the_parameter_replaces_the_measurement_and_nothing_else() -> None:
    assert reason_to_stay(chosen(CONFIG, "yes")) == ""
    assert "'no'" in reason_to_stay(chosen(CONFIG, "no"), has_short_requests=True)
    assert "MiB" in reason_to_stay(chosen(CONFIG, "yes"), BYTES_MAX + 1)
    assert list(front_end_problems(chosen(CONFIG, "auto"))) == list(front_end_problems(CONFIG)) == []
    (problem,) = front_end_problems(chosen(CONFIG, "always"))
    assert problem.message == "must be yes, no or auto, got 'always'"


def test_an_ensemble_runs_where_all_of_its_steps_do() -> None:
    assert reason_to_stay(ENSEMBLE, steps=[("a", ""), ("b", "")]) == ""
    reason = reason_to_stay(ENSEMBLE, steps=[("a", ""), ("b", "it is decoupled")])
    assert reason == "its step 'b' stays there: it is decoupled"
    assert "'no'" in reason_to_stay(chosen(ENSEMBLE, "no"))


def test_where_a_model_will_run_is_said_before_it_is_served() -> None:
    assert "in front ends, when it is measured" in placing_text(CONFIG)
    assert "in front ends, at once" in placing_text(chosen(CONFIG, "yes"))
    assert "all of its steps" in placing_text(ENSEMBLE)
    assert (
        placing_text(chosen(CONFIG, "no")) == "With --front-ends: in the engine only, as parameter front_end is 'no'."
    )


def test_a_copy_has_one_instance() -> None:
    copy = for_front_end(replace(CONFIG, instance_group=(GROUP, replace(GROUP, name="other"))))

    assert copy.instance_group == (replace(GROUP, count=1),)
    assert obstacle(copy) == ""
