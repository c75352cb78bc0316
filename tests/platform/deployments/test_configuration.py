"""Configurations of deployed models."""

import pytest

from charonia.config import pbtxt
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.platform.deployments.spec import Batching, DeployedModel, Instances
from charonia.platform.deployments.workloads import configured


def result(text: str = "", **changes: object) -> ModelConfig:
    model = DeployedModel(name="echo", **changes)  # type: ignore[arg-type]
    return pbtxt.parse(configured(text, model, [1, 3]))


def test_a_model_without_a_configuration_has_its_name_and_its_versions_and_nothing_else() -> None:
    found = result()

    assert found.name == "echo"
    assert found.version_policy is not None
    assert found.version_policy.specific is not None
    assert found.version_policy.specific.versions == (1, 3)
    assert found.instance_group == ()
    assert found.dynamic_batching is None


def test_what_the_deployment_says_holds_and_the_rest_is_that_of_the_version() -> None:
    text = """
        name: "other" backend: "identity" max_batch_size: 4
        instance_group { kind: KIND_CPU count: 1 }
        dynamic_batching { preferred_batch_size: 4 }
        parameters { key: "a" value { string_value: "b" } }
    """

    found = result(
        text,
        instances=Instances(min=1, max=4),
        batching=Batching(max_batch_size=8, max_queue_delay_microseconds=100),
        traffic={"weights": {"1": 90, "3": 10}},
        config={"dynamic_batching": {"preserve_ordering": True}, "response_cache": {"enable": True}},
    )

    assert (found.name, found.backend, found.max_batch_size) == ("echo", "identity", 8)
    (group,) = found.instance_group
    assert (group.count, group.kind.name) == (1, "KIND_CPU")
    batching = found.dynamic_batching
    assert batching is not None
    assert (batching.preferred_batch_size, batching.max_queue_delay_microseconds) == ((4,), 100)
    assert batching.preserve_ordering
    assert found.response_cache is not None
    assert found.parameters == {
        "a": "b",
        "INSTANCES_MIN": "1",
        "INSTANCES_MAX": "4",
        "traffic": '{"weights": {"1": 90, "3": 10}}',
    }


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        ("", {"config": {"colour": 1}}, "ModelConfig has no field 'colour'"),
        ("colour: 1", {}, "colour"),
        (
            "instance_group [ { count: 1 }, { count: 2 } ]",
            {"instances": Instances(min=2)},
            "expected one instance group",
        ),
        (
            "sequence_batching { }",
            {"batching": Batching(max_queue_delay_microseconds=5)},
            "this one has sequence_batching",
        ),
    ],
)
def test_what_cannot_be_so_is_refused(text: str, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ServingError, match=problem):
        result(text, **changes)
