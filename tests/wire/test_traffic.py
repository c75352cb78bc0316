"""Changes, settings and plans as JSON: what is read, and what is refused with which words."""

import json
from pathlib import Path

import pytest

from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.server.traffic.state import configured, traffic_problems
from charonia.wire.traffic import (
    CanaryAction,
    CanaryPlan,
    Shadow,
    TrafficChange,
    TrafficSettings,
    plan_json,
    read_change,
    read_plan,
    read_settings,
    settings_json,
)

WHOLE = TrafficSettings({1: 90.0, 2: 10.0}, "header:x-user", {3: Shadow(0.25, 0.1, 0.2)})


def test_settings_and_plans_survive_the_way_to_json_and_back() -> None:
    plan = CanaryPlan(2, 1, (5.0, 100.0), 1.5, 10, 0.05, False, None, 0.01)

    assert read_settings(json.loads(json.dumps(settings_json(WHOLE)))) == WHOLE
    assert read_plan(json.loads(json.dumps(plan_json(plan)))) == plan
    assert read_plan(json.loads(json.dumps(plan_json(CanaryPlan(2, 1))))) == CanaryPlan(2, 1)


@pytest.mark.parametrize(
    ("members", "count"),
    [
        ({}, 2),
        ({"checks_errors": False}, 1),
        ({"checks_errors": False, "difference_rate_max": 0}, 2),
        ({"p99_ratio_max": None, "difference_rate_max": 0.1}, 2),
        ({"difference_rate_max": 0.1}, 3),
    ],
)
def test_the_conditions_of_a_plan_are_counted(members: dict[str, object], count: int) -> None:
    assert read_plan({"version": 2, **members}).condition_count == count


def test_a_change_leaves_alone_what_it_does_not_name_and_null_resets() -> None:
    assert read_change({"weights": {"1": 1}}) == TrafficChange(weights={1: 1.0})
    assert read_change({"weights": None, "sticky": None, "shadow": None}) == TrafficChange({}, "", {})
    assert read_change({"shadow": {"2": 0.5}}) == TrafficChange(shadow={2: Shadow(0.5)})
    assert read_change({"action": "pause"}) == TrafficChange(action=CanaryAction.PAUSE)
    assert read_change({"canary": {"version": 2}}) == TrafficChange(canary=CanaryPlan(2))
    assert read_change({"sticky": "Header:X-User"}) == TrafficChange(sticky="header:x-user")


def test_the_defaults_of_a_plan_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "traffic.md").read_text(encoding="utf-8")
    example = json.loads('{"canary": ' + page.partition('{"canary": ')[2].partition("\n```")[0])

    assert read_plan(example["canary"]) == CanaryPlan(2)


def test_only_conditions_may_be_null_in_a_plan() -> None:
    plan = read_plan({"version": 2, "p99_ratio_max": None, "difference_rate_max": 0, "steps": None})

    assert plan == CanaryPlan(2, p99_ratio_max=None, difference_rate_max=0.0)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "the traffic is not changed"),
        ({"wheights": {}}, "there is no traffic setting 'wheights'"),
        ({"weights": [1]}, "weights: expected an object, got an array"),
        ({"weights": {"one": 1}}, "weights: expected the number of a version, got 'one'"),
        ({"weights": {"0": 1}}, "weights: expected the number of a version, got '0'"),
        ({"weights": {"1": True}}, "weights.1: expected a number from 0 to 1e+12, got a boolean"),
        ({"weights": {"1": "9"}}, "weights.1: expected a number from 0 to 1e+12, got a string"),
        ({"weights": {"1": 0, "2": 0}}, "weights: expected a weight above 0, got none"),
        ({"weights": {str(n): 1 for n in range(1, 18)}}, "weights: expected at most 16 versions, got 17"),
        ({"sticky": "cookie"}, "sticky: expected 'header:NAME', 'key', 'correlation_id' or '', got 'cookie'"),
        ({"sticky": "header:a b"}, "sticky: expected 'header:NAME'"),
        ({"sticky": 7}, "got a number"),
        ({"shadow": {"2": {"part": 1}}}, "there is no traffic setting 'shadow.2.part'"),
        ({"canary": {}}, "canary.version: expected the version that takes over"),
        ({"canary": {"version": 2, "step": 1}}, "there is no traffic setting 'canary.step'"),
        ({"canary": {"version": 2, "stable": 2}}, "version 2 cannot be compared with itself"),
        ({"canary": {"version": 2, "steps": []}}, "canary.steps: expected a list of 1 to 32 percentages"),
        ({"canary": {"version": 2, "steps": [*range(1, 34)]}}, "canary.steps: expected a list of 1 to 32 percentages"),
        ({"canary": {"version": 2, "steps": [10, 5]}}, "canary.steps: expected percentages above 0 that grow"),
        ({"canary": {"version": 2, "steps": [0, 5]}}, "canary.steps: expected percentages above 0 that grow"),
        ({"canary": {"version": 2, "steps": [101]}}, "canary.steps: expected a number from 0 to 100, got 101"),
        ({"weights": {"1": float("nan")}}, "weights.1: expected a number from 0 to 1e+12, got nan"),
        ({"weights": {"1": float("inf")}}, "weights.1: expected a number from 0 to 1e+12, got inf"),
        ({"weights": {"1": 10**30}}, f"weights.1: expected a number from 0 to 1e+12, got {10**30}"),
        ({"canary": {"version": 2, "samples_min": 1.5}}, "canary.samples_min: expected a whole number"),
        ({"canary": {"version": 2, "significance": 0}}, "canary.significance: expected a number from 1e-09 to 0.5"),
        ({"canary": {"version": 2, "p99_ratio_max": 0.5}}, "canary.p99_ratio_max: expected a number from 1 to 1e+06"),
        ({"canary": {"version": 2, "checks_errors": 1}}, "canary.checks_errors: expected true or false"),
        ({"canary": {"version": 2}, "weights": {"1": 1}}, "canary: the plan sets the weights itself"),
        ({"action": "stop"}, "action: expected one of pause, resume, promote, abort, got 'stop'"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, object], says: str) -> None:
    with pytest.raises(ServingError) as refused:
        read_change(document)

    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("path", "low", "high"),
    [
        ("weights.1", 0, 1e12),
        ("shadow.2.share", 1e-9, 1),
        ("shadow.2.relative_tolerance", 0, 1e12),
        ("shadow.2.absolute_tolerance", 0, 1e12),
        ("canary.step_seconds", 0, 30 * 24 * 3600),
        ("canary.samples_min", 0, 10**9),
        ("canary.significance", 1e-9, 0.5),
        ("canary.p99_ratio_max", 1, 1e6),
        ("canary.difference_rate_max", 0, 0.999),
        ("canary.stable", 1, 2**63 - 1),
    ],
)
def test_numbers_have_limits(path: str, low: float, high: float) -> None:
    def read(value: float) -> TrafficChange:
        document: object = value
        for name in reversed(path.split(".")):
            document = {"9": 1, name: document} if name == "1" else {name: document}
        assert isinstance(document, dict)
        return read_change({"canary": {"version": 7, **document["canary"]}} if path.startswith("canary") else document)

    for value in (low, high):
        read(value)
    for value in (low - (1 if low else 1e-9), high + 1):
        with pytest.raises(ServingError, match=path.replace("stable", "")):
            read(value)


def test_the_parameter_of_a_configuration_has_the_same_form() -> None:
    text = json.dumps(settings_json(WHOLE)).replace('"', '\\"')
    config = parse(f'parameters {{ key: "traffic" value {{ string_value: "{text}" }} }}')

    assert list(traffic_problems(config)) == []
    assert configured(config) == WHOLE
    assert configured(parse("")) is None


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("{", "", "must be a JSON object"),
        ("{'canary': {}}", "", "there is no traffic setting 'canary'"),
        ("{'weights': {'x': 1}}", "", "expected the number of a version, got 'x'"),
        (
            "{'shadow': {'2': 1}}",
            "sequence_batching { }",
            "a model that works on sequences cannot have shadow versions",
        ),
        ("{'shadow': {'2': 1}}", "model_transaction_policy { decoupled: true }", "a decoupled model cannot have"),
    ],
)
def test_a_wrong_parameter_is_a_problem_of_the_configuration(text: str, more: str, says: str) -> None:
    text = text.replace("'", '\\"')
    config = parse(f'parameters {{ key: "traffic" value {{ string_value: "{text}" }} }} {more}')

    (problem,) = traffic_problems(config)

    assert problem.path == "parameters[traffic]"
    assert says in problem.message
