"""The data flow of an ensemble request: its rules one by one, then random graphs against a simple interpreter."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.server.ensembles.flow import (
    Branch,
    Command,
    DataFlow,
    EnsembleGraph,
    Finish,
    FlowStep,
    Overflow,
    Plan,
    Respond,
    StartStep,
)


def step(needs: str, gives: str, *, takes: str = "", decoupled: bool = False) -> FlowStep:
    return FlowStep(tuple(needs.split()), tuple(gives.split()), tuple(takes.split()), is_decoupled=decoupled)


def begin(graph: EnsembleGraph, wanted: str, given: str = "a", limit: int = 0) -> tuple["DataFlow[str]", list[Command]]:
    flow: DataFlow[str] = DataFlow(graph.plan(given.split(), wanted.split()), limit)
    return flow, flow.start({name: name.upper() for name in given.split()})


def runs(commands: Sequence[Command]) -> list[int]:
    return [command.step for command in commands if isinstance(command, StartStep)]


def branch_of(command: Command) -> "Branch[str]":
    assert isinstance(command, StartStep | Respond)
    return command.branch


def test_a_chain_runs_one_step_after_the_other_and_responds_at_the_end() -> None:
    flow, (first,) = begin(EnsembleGraph(["a"], [step("a", "b"), step("b", "c")]), "c")
    branch = branch_of(first)

    (second,) = flow.respond(branch, 0, {"b": "B"}, True)
    respond, finish = flow.respond(branch, 1, {"c": "C"}, True)

    assert (runs([first]), runs([second])) == ([0], [1])
    assert flow.read(branch_of(respond), "c") == "C"
    assert finish == Finish()
    assert flow.respond(branch, 1, {"c": "late"}, True) == []


def test_parallel_branches_run_at_once_and_meet() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b"), step("a", "c"), step("b c", "d")])
    flow, started = begin(graph, "d")
    branch = branch_of(started[0])

    assert runs(started) == [0, 1]
    assert flow.respond(branch, 1, {"c": "C"}, True) == []
    assert runs(flow.respond(branch, 0, {"b": "B"}, True)) == [2]


def test_steps_that_no_wanted_output_needs_do_not_run() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b x"), step("b", "c"), step("x", "y")])
    plan = graph.plan(["a"], ["b"])

    assert plan.steps == (0,)
    assert plan.gives == {0: ("b",)}
    assert graph.plan(["a"], ["y", "c"]).steps == (0, 1, 2)


def test_an_output_may_be_an_input() -> None:
    flow, commands = begin(EnsembleGraph(["a"], [step("a", "b")]), "a")

    assert [type(command) for command in commands] == [Respond, Finish]
    assert flow.read(branch_of(commands[0]), "a") == "A"


def test_a_step_runs_without_an_optional_input_that_was_not_given() -> None:
    graph = EnsembleGraph(["a", "o"], [step("a", "b", takes="o"), step("o", "c"), step("b", "d", takes="c")])

    without = graph.plan(["a"], ["d"])

    assert without.steps == (0, 2)
    assert without.reads == {0: ("a",), 2: ("b",)}
    assert graph.plan(["a", "o"], ["d"]).reads[2] == ("b", "c")
    with pytest.raises(ServingError, match=r"output 'c' cannot be computed without the input\(s\) 'o'"):
        graph.plan(["a"], ["c"])


def test_an_output_that_no_step_writes_is_refused() -> None:
    with pytest.raises(ServingError, match="output 'z' is not written by any step"):
        EnsembleGraph(["a"], [step("a", "b")]).plan(["a"], ["z"])


def test_each_response_of_a_decoupled_step_triggers_what_follows() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("a b", "c")])
    flow, (first,) = begin(graph, "c a")
    root = branch_of(first)

    (one,) = flow.respond(root, 0, {"b": "B1"}, False)
    (two,) = flow.respond(root, 0, {"b": "B2"}, False)
    assert (flow.read(branch_of(one), "b"), flow.read(branch_of(two), "b")) == ("B1", "B2")
    assert flow.read(branch_of(two), "a") == "A"
    assert flow.respond(branch_of(two), 1, {"c": "C2"}, True) == []  # the first has not responded yet
    responses = flow.respond(branch_of(one), 1, {"c": "C1"}, True)
    end = flow.respond(root, 0, None, True)

    assert [flow.read(branch_of(r), "c") for r in responses] == ["C1", "C2"]
    assert end == [Finish()]


def test_the_last_response_and_the_end_come_together_where_the_step_is_over() -> None:
    flow, (first,) = begin(EnsembleGraph(["a"], [step("a", "b", decoupled=True)]), "b")

    commands = flow.respond(branch_of(first), 0, {"b": "B"}, True)

    assert [type(command) for command in commands] == [Respond, Finish]


def test_the_news_that_nothing_more_comes_opens_no_branch_and_an_empty_response_does() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("", "c", takes="b")])
    flow, (first,) = begin(graph, "c b")

    (second,) = flow.respond(branch_of(first), 0, {}, False)
    assert flow.respond(branch_of(first), 0, None, True) == []
    respond, finish = flow.respond(branch_of(second), 1, {"c": "C"}, True)

    assert flow.read(branch_of(second), "b") is None
    assert (flow.read(branch_of(respond), "c"), flow.read(branch_of(respond), "b")) == ("C", None)
    assert finish == Finish()


def test_a_branch_waits_for_a_tensor_from_around_it() -> None:
    graph = EnsembleGraph(
        ["a"], [step("a", "slow"), step("a", "b", decoupled=True), step("b slow", "c"), step("c", "d")]
    )
    flow, started = begin(graph, "d slow")
    root = branch_of(started[0])

    assert flow.respond(root, 1, {"b": "B"}, False) == []
    assert flow.respond(root, 1, {"b": "B2"}, False) == []
    third, other = flow.respond(root, 0, {"slow": "S"}, True)
    assert runs([third, other]) == [2, 2]
    (fourth,) = flow.respond(branch_of(third), 2, {"c": "C"}, True)
    (respond,) = flow.respond(branch_of(fourth), 3, {"d": "D"}, True)

    assert (flow.read(branch_of(respond), "d"), flow.read(branch_of(respond), "slow")) == ("D", "S")


def test_decoupled_steps_may_follow_each_other() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("b", "c", decoupled=True), step("b c", "d")])
    plan = graph.plan(["a"], ["d"])

    assert graph.origins.conflicts == []
    assert graph.origins.of_tensor["d"] == (0, 1)
    assert plan.is_decoupled


def test_tensors_of_different_decoupled_steps_do_not_meet() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("a", "c", decoupled=True), step("b c", "d")])

    assert graph.origins.conflicts == [2]
    with pytest.raises(ServingError, match="outputs 'b', 'c' cannot be in one response"):
        graph.plan(["a"], ["b", "c"])
    assert not graph.plan(["a"], ["a"]).is_decoupled


def test_steps_in_a_circle_are_named() -> None:
    graph = EnsembleGraph(["a"], [step("a c", "b"), step("b", "c"), step("a", "d"), step("unwritten", "e")])

    assert graph.cyclic == (0, 1, 3)


def test_no_more_branches_are_open_than_allowed_and_held_responses_follow_in_order() -> None:
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("b", "c")])
    flow, (first,) = begin(graph, "c", limit=2)
    root = branch_of(first)
    opened = [command for number in range(4) for command in flow.respond(root, 0, {"b": f"B{number}"}, False)]
    assert len(opened) == 2

    respond, third = flow.respond(branch_of(opened[0]), 1, {"c": "C0"}, True)

    assert isinstance(respond, Respond)
    assert flow.read(branch_of(third), "b") == "B2"
    # The second has not responded, so the third may not, and still counts as open.
    assert flow.respond(branch_of(third), 1, {"c": "C2"}, True) == []
    *both, fourth = flow.respond(branch_of(opened[1]), 1, {"c": "C1"}, True)
    assert [flow.read(branch_of(r), "c") for r in both] == ["C1", "C2"]
    assert flow.respond(root, 0, None, True) == []
    assert [type(c) for c in flow.respond(branch_of(fourth), 1, {"c": "C3"}, True)] == [Respond, Finish]


def test_many_held_responses_that_need_no_step_leave_at_once() -> None:
    graph = EnsembleGraph(["a"], [step("a", "slow"), step("a", "b", decoupled=True)])
    flow, started = begin(graph, "b slow", limit=1)
    root = branch_of(started[0])
    for number in range(5000):
        assert flow.respond(root, 1, {"b": str(number)}, number == 4999) == []

    *responses, finish = flow.respond(root, 0, {"slow": "S"}, True)

    assert [flow.read(branch_of(r), "b") for r in responses] == [str(number) for number in range(5000)]
    assert finish == Finish()


def test_too_many_held_responses_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.server.ensembles.flow.HELD_RESPONSES_MAX", 3)
    graph = EnsembleGraph(["a"], [step("a", "b", decoupled=True), step("b", "c")])
    flow, (first,) = begin(graph, "c", limit=1)
    for _ in range(4):
        flow.respond(branch_of(first), 0, {"b": "B"}, False)

    assert flow.respond(branch_of(first), 0, {"b": "B"}, False) == [Overflow(0)]
    assert flow.respond(branch_of(first), 0, None, True) == []


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_step_runs_without_what_a_model_left_out_though_it_needs_it(decoupled: bool) -> None:
    graph = EnsembleGraph(["a"], [step("a", "b x"), step("b x", "c", decoupled=decoupled)])
    flow, (first,) = begin(graph, "c")

    (second,) = flow.respond(branch_of(first), 0, {"x": "X"}, True)

    assert (flow.read(branch_of(second), "b"), flow.read(branch_of(second), "x")) == (None, "X")


def test_an_output_that_a_model_left_out_is_absent_in_the_response() -> None:
    flow, (first,) = begin(EnsembleGraph(["a"], [step("a", "b x")]), "x b")

    respond, finish = flow.respond(branch_of(first), 0, {"x": "X"}, True)

    assert (flow.read(branch_of(respond), "b"), flow.read(branch_of(respond), "x")) == (None, "X")
    assert finish == Finish()


def test_what_a_branch_waits_for_from_around_it_may_be_left_out() -> None:
    steps = [step("a", "s"), step("a", "b", decoupled=True), step("b s", "c")]
    flow, started = begin(EnsembleGraph(["a"], steps), "c")
    root = branch_of(started[0])
    assert flow.respond(root, 1, {"b": "B"}, True) == []

    (last,) = flow.respond(root, 0, {}, True)

    assert (flow.read(branch_of(last), "b"), flow.read(branch_of(last), "s")) == ("B", None)
    assert [type(c) for c in flow.respond(branch_of(last), 2, {"c": "C"}, True)] == [Respond, Finish]


# Random graphs. A value is the history of a tensor, so equal values mean that the same things happened.


@dataclass
class Scenario:
    graph: EnsembleGraph
    given: list[str]
    wanted: list[str]
    limit: int
    seed: int


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    inputs = [f"i{n}" for n in range(draw(st.integers(1, 3)))]
    origin: dict[str, tuple[int, ...]] = dict.fromkeys(inputs, ())
    steps: list[FlowStep] = []
    for index in range(draw(st.integers(1, 6))):
        reads: list[str] = []
        for name in draw(st.lists(st.sampled_from(sorted(origin)), min_size=1, max_size=3, unique=True)):
            if all(_in_line(origin[name], origin[other]) for other in reads):
                reads.append(name)
        inside = max((origin[name] for name in reads), key=len)
        optional = [name for name in reads if draw(st.integers(0, 3)) == 0]
        is_decoupled = draw(st.integers(0, 3)) == 0
        gives = [f"t{index}{n}" for n in range(draw(st.integers(1, 2)))]
        steps.append(
            FlowStep(
                tuple(n for n in reads if n not in optional), tuple(gives), tuple(optional), is_decoupled=is_decoupled
            )
        )
        origin |= dict.fromkeys(gives, (*inside, index) if is_decoupled else inside)
    wanted: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(origin)), min_size=1, max_size=3, unique=True)):
        if all(_in_line(origin[name], origin[other]) for other in wanted):
            wanted.append(name)
    is_given = draw(st.lists(st.integers(0, 4), min_size=len(inputs), max_size=len(inputs)))
    return Scenario(
        EnsembleGraph(inputs, steps),
        [name for name, is_there in zip(inputs, is_given, strict=True) if is_there],
        wanted,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1_000_000)),
    )


def _in_line(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return longer[: len(shorter)] == shorter


def outcomes(index: int, flow_step: FlowStep, read: Mapping[str, str]) -> list[dict[str, str]]:
    """What a step answers, which may lack outputs: a pure function of what it reads."""
    history = f"{index}({','.join(read[name] for name in sorted(read))})"
    mix = sum(map(ord, history))
    count = mix % 4 if flow_step.is_decoupled else 1
    gives = flow_step.gives if mix % 5 else flow_step.gives[1:]
    return [{name: f"{name}={history}#{number}" for name in gives} for number in range(count)]


def interpret(plan: Plan, values: dict[str, str], done: frozenset[int]) -> list[tuple[str, ...]]:
    """Run what can run, one step at a time; a decoupled step goes on with each of its responses."""
    for index in plan.steps:
        writers = {name: writer for writer in plan.steps for name in plan.gives[writer]}
        if index in done or any(writers.get(name, index) not in (index, *done) for name in plan.reads[index]):
            continue
        flow_step = plan.graph.steps[index]
        answers = outcomes(index, flow_step, {name: values[name] for name in plan.reads[index] if name in values})
        if flow_step.is_decoupled:
            return [
                response for answer in answers for response in interpret(plan, {**values, **answer}, done | {index})
            ]
        return interpret(plan, {**values, **answers[0]}, done | {index})
    return [tuple(values.get(name, "") for name in plan.wanted)]


@settings(max_examples=300, deadline=None)
@given(scenarios())
def test_random_graphs_give_what_a_simple_interpreter_gives(scenario: Scenario) -> None:
    try:
        plan = scenario.graph.plan(scenario.given, scenario.wanted)
    except ServingError:
        assert len(scenario.given) < len(scenario.graph.inputs)
        return
    inputs = {name: name.upper() for name in scenario.given}
    order = random.Random(scenario.seed)
    flow: DataFlow[str] = DataFlow(plan, scenario.limit)
    under_way: list[tuple[int, Branch[str], list[dict[str, str]]]] = []
    got: list[tuple[str, ...]] = []
    is_finished = False
    commands = flow.start(inputs)
    while True:
        for command in commands:
            assert not is_finished
            if isinstance(command, StartStep):
                read = {name: flow.read(command.branch, name) for name in plan.reads[command.step]}
                known = {name: value for name, value in read.items() if value is not None}
                answers = outcomes(command.step, plan.graph.steps[command.step], known)
                under_way.append((command.step, command.branch, answers))
            elif isinstance(command, Respond):
                got.append(tuple(flow.read(command.branch, name) or "" for name in plan.wanted))
            else:
                assert command == Finish()
                is_finished = True
        if not under_way:
            break
        if scenario.limit:
            # A step inside one decoupled step runs in open branches only.
            running = Counter(index for index, _, _ in under_way if len(plan.graph.origins.of_step[index]) == 1)
            assert max(running.values(), default=0) <= scenario.limit
        at = order.randrange(len(under_way))
        index, branch, answers = under_way[at]
        is_last = not answers or (len(answers) == 1 and order.random() < 0.5)
        if plan.graph.steps[index].is_decoupled:
            commands = flow.respond(branch, index, answers.pop(0) if answers else None, is_last)
        else:
            commands, is_last = flow.respond(branch, index, answers[0], True), True
        if is_last:
            del under_way[at]
    expected = interpret(plan, inputs, frozenset())

    assert is_finished
    assert sorted(got) == sorted(expected)
    if max(plan.depth_of.values()) < 2:
        assert got == expected
