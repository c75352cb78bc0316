"""Specifications: from and to plain values, and what a change changes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.platform.deployments.spec import (
    Batching,
    DeployedModel,
    DeploymentSpec,
    Device,
    Instances,
    Replicas,
    Strategy,
    changes,
    changes_traffic_only,
    read_change,
    read_spec,
    rolled_out,
)

WHOLE = {
    "name": "reader",
    "target": "local",
    "environment": "pytorch",
    "models": [
        {
            "name": "detection",
            "versions": [2, 1],
            "traffic": {"weights": {1: 90, 2: 10}, "sticky": "key"},
            "instances": {"min": 1, "max": 4},
            "batching": {"max_batch_size": 8, "max_queue_delay_microseconds": 100},
            "config": {"response_cache": {"enable": True}},
        },
        {"name": "recognition", "instances": 2},
    ],
    "device": {"cpu_cores": 2, "gpus": [0], "memory_mib": 2048},
    "replicas": {"min": 1, "max": 3},
    "keys": True,
    "ready_within_s": 60,
    "idle_unload_s": 900,
}
SPEC = read_spec(WHOLE)


def written(spec: DeploymentSpec) -> dict[str, object]:
    """Return a specification as the database stores it."""
    return spec.model_dump(mode="json")


names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True)
models = st.builds(
    DeployedModel,
    name=names,
    versions=st.lists(st.integers(1, 9), max_size=3, unique=True).map(lambda found: tuple(sorted(found))),
    instances=st.builds(Instances, min=st.integers(1, 4), max=st.sampled_from([4, 5])),
    batching=st.builds(
        Batching,
        max_batch_size=st.none() | st.integers(1, 64),
        max_queue_delay_microseconds=st.none() | st.integers(0, 1000),
    ),
    config=st.dictionaries(st.text(min_size=1), st.integers() | st.booleans(), max_size=2),
)
specs = st.builds(
    DeploymentSpec,
    name=names,
    models=st.lists(models, min_size=1, max_size=3, unique_by=lambda model: model.name).map(tuple),
    environment=st.sampled_from(["", "pytorch"]),
    device=st.builds(Device, cpu_cores=st.integers(0, 8), gpus=st.sampled_from([(), (0,), (0, 1)])),
    replicas=st.builds(Replicas, max=st.integers(1, 3)),
    keys=st.booleans(),
)


def test_a_whole_specification_is_read() -> None:
    assert (
        DeploymentSpec(
            name="reader",
            target="local",
            models=(
                DeployedModel(
                    name="detection",
                    versions=(1, 2),
                    traffic={"weights": {"1": 90, "2": 10}, "sticky": "key"},
                    instances=Instances(min=1, max=4),
                    batching=Batching(max_batch_size=8, max_queue_delay_microseconds=100),
                    config={"response_cache": {"enable": True}},
                ),
                DeployedModel(name="recognition", instances=Instances(min=2)),
            ),
            environment="pytorch",
            device=Device(cpu_cores=2, gpus=(0,), memory_mib=2048),
            replicas=Replicas(max=3),
            keys=True,
            ready_within_s=60.0,
            idle_unload_s=900,
        )
        == SPEC
    )


@given(specs)
def test_what_is_written_is_read_as_the_same(spec: DeploymentSpec) -> None:
    assert read_spec(written(spec)) == spec
    assert changes(spec, read_spec(written(spec))) == []


@given(specs, specs)
def test_different_specifications_have_changes_that_words_say(one: DeploymentSpec, other: DeploymentSpec) -> None:
    other = other.model_copy(update={"name": one.name})

    assert bool(changes(one, other)) == (written(_sorted(one)) != written(_sorted(other)))


def _sorted(spec: DeploymentSpec) -> DeploymentSpec:
    return spec.model_copy(update={"models": tuple(sorted(spec.models, key=lambda model: model.name))})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["name", "models", "device", "gpus", "versions", "traffic", "weights", "x"]), inner
            )
        ),
    )
)
def test_values_of_any_kind_are_read_or_refused(value: object) -> None:
    with contextlib.suppress(ServingError):  # and nothing else
        assert read_spec(value).models


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"models": []}, "models: expected at least one model, got []"),
        ({"colour": 1}, "colour: unknown; expected one of name, target, environment, models, device, replicas, keys, "
            "ready_within_s, idle_unload_s, variables, secrets, strategy"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.max: expected at least min, 3, got 2"),
        ({"variables": {"LD_PRELOAD": "x"}}, "variables: expected letters, digits and _, and none of the server's own "
            "variables, got 'LD_PRELOAD'"),
        ({"variables": {"A": "1\n2"}}, "variables.A: expected a text of one line with 1 to 32768 characters"),
        ({"variables": {"A": "1"}, "secrets": {"A": "x"}}, "secrets: expected a variable that is not among "
            "'variables', got 'A'"),
        ({"replicas": 0}, "replicas: expected a whole number from 1 to 10000, got 0"),
        ({"ready_within_s": 0}, "ready_within_s: expected seconds, above 0 and up to 86400, got 0"),
        ({"device": {"gpus": [0, 0]}}, "device.gpus: expected each number once, got [0, 0]"),
        ({"models": [{"name": "a"}, {"name": "a"}]},
            "models: expected each model once, with all its versions, got 'a'"),
        ({"models": [{"name": "a", "versions": 1}]},
            "models[0].versions: expected a list of numbers, or 'latest', got 1"),
        ({"models": [{"name": "a", "versions": [1], "traffic": {"weights": {"2": 1}}}]},
            "models[0].traffic.weights: expected versions of [1], got '2'"),
        ({"models": [{"name": "a", "traffic": {"weights": {"1": float("nan")}}}]},
            "models[0].traffic.weights.1: expected a number from 0 to 1e+12, got nan"),
        ({"models": [{"name": "a", "traffic": {"weights": {1: float("inf"), 2: 1}}}]},
            "models[0].traffic.weights.1: expected a number from 0 to 1e+12, got inf"),
        ({"models": [{"name": "a", "traffic": {"weights": {"1": -1}}}]},
            "models[0].traffic.weights.1: expected a number from 0 to 1e+12, got -1"),
        ({"models": [{"name": "a", "traffic": {"weights": {"1": 0}}}]},
            "models[0].traffic.weights: expected a weight above 0, got none"),
        ({"models": [{"name": "a", "traffic": {"sticky": "moon"}}]},
            "models[0].traffic.sticky: expected 'header:NAME', 'key', 'correlation_id' or '', got 'moon'"),
        ({"models": [{"name": "a", "traffic": {"shadow": {"2": 1.5}}}]},
            "models[0].traffic.shadow.2: expected a number from 0 to 1, got 1.5"),
        ({"models": [{"name": "a", "traffic": {"canary": {}}}]},
            "models[0].traffic.canary: unknown; expected one of weights, sticky, shadow"),
        ({"models": [{"name": "a", "batching": {"max_batch_size": True}}]},
            "models[0].batching.max_batch_size: expected a whole number from 1 to 10000, got True"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_is_expected(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ServingError) as caught:
        read_spec({**WHOLE, **change})

    assert caught.value.message == problem


def test_changes_are_said_in_words() -> None:
    detection, recognition = SPEC.models
    batching = detection.batching.model_copy(update={"max_batch_size": None})
    changed = {"versions": (2,), "traffic": {}, "instances": Instances(min=1), "batching": batching, "config": {"a": 1}}
    after = SPEC.model_copy(
        update={
            "environment": "",
            "device": SPEC.device.model_copy(update={"gpus": ()}),
            "keys": False,
            "replicas": Replicas(),
            "models": (detection.model_copy(update=changed), DeployedModel(name="order", versions=(3,))),
        }
    )

    assert changes(SPEC, after) == [
        "environment pytorch -> none",
        "GPUs 0 -> none",
        "replicas 1 to 3 -> 1",
        "API keys needed -> not needed",
        "model 'detection': versions 1, 2 -> version 2",
        "model 'detection': traffic version 1: 90, version 2: 10; sticky key -> to the latest version",
        "model 'detection': instances 1 to 4 by load -> 1",
        "model 'detection': largest batch 8 -> as configured",
        "model 'detection': configuration, a as the model has it -> 1",
        "model 'detection': configuration, response_cache {\"enable\": true} -> as the model has it",
        "model 'order' version 3 is added",
        "model 'recognition' is removed",
    ]
    assert recognition not in after.models


@pytest.mark.parametrize(
    ("traffic", "words"),
    [
        ({"weights": {"1": 1}, "shadow": {"1": {"share": 0.05}}}, "version 1: 1; 5 % copied to version 1"),
        ({"shadow": {"1": 0.5}}, "50 % copied to version 1"),
        ({"weights": {"1": 1}, "sticky": None}, "version 1: 1; sticky as the model has it"),
    ],
)
def test_traffic_is_told_in_words(traffic: dict[str, object], words: str) -> None:
    before, after = (
        read_spec({"name": "a", "models": [{"name": "m", "versions": [1], **more}]})
        for more in ({}, {"traffic": traffic})
    )

    assert list(changes(before, after)) == [f"model 'm': traffic to the latest version -> {words}"]


def test_a_change_of_traffic_alone_is_known_as_such() -> None:
    detection, recognition = SPEC.models
    split = detection.model_copy(update={"traffic": {"weights": {"2": 1}}})
    traffic = SPEC.model_copy(update={"models": (split, recognition)})

    assert changes_traffic_only(SPEC, traffic)
    assert not changes_traffic_only(SPEC, traffic.model_copy(update={"keys": False}))


def _split(versions: tuple[int, ...], **weights: float) -> DeploymentSpec:
    traffic = {"weights": {name[1:]: weight for name, weight in weights.items()}, "sticky": "key"} if weights else {}
    return DeploymentSpec(name="a", models=(DeployedModel(name="m", versions=versions, traffic=traffic),))


@pytest.mark.parametrize(
    ("before", "kind", "versions", "expected", "weights", "begins"),
    [
        (_split((1,)), "replace", (2,), (2,), {}, {}),
        (_split((1, 2), v1=90, v2=10), "replace", (3,), (3,), {}, {}),
        (_split((1,)), "beside", (2,), (1, 2), {"1": 100}, {}),
        (_split((1,)), "canary", (2,), (1, 2), {"1": 100}, {"m": 2}),
        (_split((1, 2), v1=90, v2=10), "canary", (3,), (1, 2, 3), {"1": 90, "2": 10}, {"m": 3}),
        (_split((1, 2), v1=0, v2=100), "canary", (3,), (2, 3), {"2": 100}, {"m": 3}),  # version 1 has no requests
        (_split((1, 2), v1=100), "beside", (2,), (1, 2), {"1": 100}, {}),  # it is there already
        (_split((1, 2), v1=100), "canary", (2,), (1, 2), {"1": 100}, {"m": 2}),
        (_split((1, 2), v1=90, v2=10), "canary", (2,), (1, 2), {"1": 90, "2": 10}, {}),  # as before
        (_split((2,)), "canary", (2,), (2,), {}, {}),
    ],
)
def test_a_strategy_says_which_versions_stay_and_which_get_requests(
    before: DeploymentSpec,
    kind: str,
    versions: tuple[int, ...],
    expected: tuple[int, ...],
    weights: dict[str, float],
    begins: dict[str, int],
) -> None:
    wanted = DeploymentSpec(name="a", models=(DeployedModel(name="m", versions=versions),))

    spec, canaries = rolled_out(before, wanted, Strategy(kind=kind))

    assert (spec.models[0].versions, spec.models[0].traffic.get("weights", {})) == (expected, weights)
    assert spec.models[0].traffic.get("sticky") == before.models[0].traffic.get("sticky")
    assert canaries == begins
    assert rolled_out(before, wanted, Strategy(kind=kind), under_way=["m"])[1] == {}


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("slowly", "strategy: expected one of replace, beside, canary, or {canary: {...}}, got 'slowly'"),
        ({"canary": {"steps": [5], "speed": 1}}, "strategy: there is no traffic setting 'canary.speed'"),
        ({"canary": {"steps": [0]}}, "strategy: canary.steps"),
        ("beside", "models[0].traffic.weights: expected none with the strategy 'beside'"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(strategy: object, problem: str) -> None:
    model = {"name": "m", "versions": [1], "traffic": {"weights": {"1": 1}}}
    with pytest.raises(ServingError) as caught:
        read_change({"name": "a", "models": [model], "strategy": strategy})

    assert problem in caught.value.message
