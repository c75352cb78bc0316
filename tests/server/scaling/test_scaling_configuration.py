"""The parameters of instances by load: what they mean, and every configuration with which they cannot be kept."""

from collections.abc import Sequence

import pytest

from charonia.config.complete import normalise
from charonia.config.model import ModelConfig
from charonia.config.parameters import InstanceBounds, bounds_of
from charonia.config.pbtxt import parse
from charonia.config.problems import Problem
from charonia.server.scaling.rule import scaling_problems


def complete(text: str, backend: str = "backend: 'identity'") -> ModelConfig:
    return normalise(parse(f"{backend} {text}"), name="m", gpu_count=0, default_instance_count=1)


def problems(text: str, *, backend: str = "backend: 'identity'") -> list[Problem]:
    return list(scaling_problems(complete(text, backend), 1024))


def check(found: Sequence[Problem], path: str, fragment: str) -> None:
    assert [problem.path for problem in found] == [path]
    assert fragment in found[0].message


def test_a_model_without_the_parameters_has_a_fixed_number() -> None:
    for text in ("", "instance_group [ { count: 3 }, { } ]", "sequence_batching { direct { } }"):
        assert problems(text) == []
        assert bounds_of(complete(text)) is None


def bounds(least: str | None, most: str | None) -> str:
    given = {"INSTANCES_MIN": least, "INSTANCES_MAX": most}
    texts = [f"parameters {{ key: '{k}' value {{ string_value: '{v}' }} }}" for k, v in given.items() if v is not None]
    return " ".join(texts)


@pytest.mark.parametrize(
    ("least", "most", "more", "count"),
    [
        ("1", "4", "", 1),
        ("2", "4", "", 2),
        (None, "4", "", 1),
        (None, "4", "instance_group { count: 3 }", 3),
        ("2", "4", "instance_group { count: 2 }", 2),
        ("2", "2", "sequence_batching { direct { } }", 2),
        ("1", "1024", "", 1),
        ("1", "3", "instance_group { kind: KIND_GPU gpus: [1] }", 1),
        ("1", "3", "instance_group { kind: KIND_CPU }", 1),
        (" 1 ", " 3 ", "", 1),
        ("1", "3", "instance_group { rate_limiter { resources { name: 'R' count: 1 } } }", 1),
    ],
)
def test_a_model_may_have_more_instances_than_it_is_loaded_with(
    least: str | None, most: str, more: str, count: int
) -> None:
    text = f"{bounds(least, most)} {more}"
    config = complete(text)

    assert problems(text) == []
    assert config.instance_group[0].count == count
    assert bounds_of(config) == (InstanceBounds(count, int(most)) if count < int(most) else None)


@pytest.mark.parametrize(
    ("least", "most", "more", "name", "fragment"),
    [
        ("5", "4", "", "MAX", "must be at least INSTANCES_MIN, which is 5, got 4"),
        (None, "2", "instance_group { count: 3 }", "MAX", "must be at least the count of instance_group, which is 3"),
        ("0", "4", "", "MIN", "expected a number of instances from 1 to 1024, got '0'"),
        ("1", "many", "", "MAX", "expected a number of instances from 1 to 1024, got 'many'"),
        ("1", "1025", "", "MAX", "got '1025'"),
        ("1", "-2", "", "MAX", "got '-2'"),
        ("1", "\u00b2", "", "MAX", "got '\u00b2'"),
        ("2", None, "", "MIN", "needs INSTANCES_MAX; a fixed number is the count of instance_group"),
        ("1", "4", "instance_group { count: 3 }", "MIN", "1 contradicts the count 3 of instance_group"),
        ("1", "4", "sequence_batching { direct { } }", "MAX", "a sequence is bound to its instance"),
        ("1", "4", "instance_group [ { }, { } ]", "MAX", "expected one instance_group, got 2"),
    ],
)
def test_bounds_of_instances_that_cannot_be_kept_are_refused(
    least: str | None, most: str | None, more: str, name: str, fragment: str
) -> None:
    check(problems(f"{bounds(least, most)} {more}"), f"parameters[INSTANCES_{name}]", fragment)


def test_backends_and_groups_with_a_fixed_number_of_instances_say_so() -> None:
    check(
        problems(bounds("1", "2"), backend="backend: 'openvino'"), "parameters[INSTANCES_MAX]", "streams of a network"
    )
    gpus = f"{bounds('1', '2')} instance_group {{ kind: KIND_GPU gpus: [0, 1] }}"
    check(problems(gpus), "parameters[INSTANCES_MAX]", "expected one GPU, got 2; gpus: [ 0 ] chooses one")
    found = problems(bounds("1", "2"), backend="platform: 'ensemble' ensemble_scheduling { }")
    assert [p.message for p in found if "INSTANCES" in p.path] == [
        "an ensemble has no instances; set it in the models of its steps"
    ]
