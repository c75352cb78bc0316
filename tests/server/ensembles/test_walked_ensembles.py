"""Ensembles whose steps are done at once, against the same ensembles in the general way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_place import FixedPlace
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import TraceIds

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import SEQUENCE_START, InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.statistics import ModelStatistics
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel, TraceTree
from charonia.server.backends.api import Execution, Outputs, Placement, Result
from charonia.server.ensembles.call import EnsembleRunner, never_at_once
from charonia.server.ensembles.plan import EnsemblePlan
from charonia.server.execution.executor import BlockingExecutor, ExecutableBatch
from charonia.server.execution.runner import ModelRunner
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.scheduling.schedulers import make_scheduler

KINDS = (
    *("plain", "plain", "plain", "batches", "batches", "merges", "later", "fails", "raises", "refuses"),
    *("sets a sequence", "leaves out", "other shape"),
)
"""What a model does. "merges" has dynamic batching, "later" is done in a later round of the event loop."""


@dataclass(frozen=True)
class Step:
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def model(self) -> str:
        return f"{self.kind.replace(' ', '_')}_{len(self.reads)}_{len(self.writes)}"


@dataclass(frozen=True)
class EnsembleRequest:
    """A request: the outputs that it names, and what else it has."""

    outputs: tuple[str, ...]
    is_traced: bool = False
    is_cancelled: bool = False
    sequence: int = 0


@dataclass(frozen=True)
class Case:
    steps: tuple[Step, ...]
    batches: bool
    requests: tuple[EnsembleRequest, ...]
    outputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        read = {tensor for step in self.steps for tensor in step.reads}
        unread = tuple(tensor for step in self.steps for tensor in step.writes if tensor not in read)
        object.__setattr__(self, "outputs", unread)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    known = ["A", "B"]
    steps = []
    for number in range(draw(st.integers(1, 6))):
        reads = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True)))
        writes = tuple(f"t{number}{letter}" for letter in "xy"[: draw(st.integers(1, 2))])
        steps.append(Step(draw(st.sampled_from(KINDS)), reads, writes))
        known += writes
    missing = tuple({"A", "B"} - {tensor for step in steps for tensor in step.reads})
    if missing:
        steps.append(Step("plain", missing, ("rest",)))
    steps = draw(st.permutations(steps))
    outputs = Case(tuple(steps), False, ()).outputs
    asked = st.builds(
        EnsembleRequest,
        st.just(()) | st.lists(st.sampled_from(outputs), min_size=1, unique=True).map(tuple),
        is_traced=st.sampled_from([False, False, True]),
        is_cancelled=st.sampled_from([False, False, True]),
        sequence=st.sampled_from([0, 0, 7]),
    )
    return Case(tuple(steps), draw(st.booleans()), tuple(draw(st.lists(asked, min_size=1, max_size=3))))


def tensors(field: str, names: Sequence[str]) -> str:
    return "".join(f'{field} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 2 ] }} ' for name in names)


def config_of(step: Step) -> ModelConfig:
    inputs = [f"I{index}" for index in range(len(step.reads))]
    outputs = [f"O{index}" for index in range(len(step.writes))]
    more = "max_batch_size: 4" if step.kind in ("batches", "merges") else ""
    more += " dynamic_batching { }" if step.kind == "merges" else ""
    return parse(f'name: "{step.model}" {tensors("input", inputs)} {tensors("output", outputs)} {more}')


def ensemble_config(case: Case) -> ModelConfig:
    text = "".join(
        f'step {{ model_name: "{step.model}" model_version: -1 '
        + "".join(f'input_map {{ key: "I{i}" value: "{tensor}" }} ' for i, tensor in enumerate(step.reads))
        + "".join(f'output_map {{ key: "O{i}" value: "{tensor}" }} ' for i, tensor in enumerate(step.writes))
        + "} "
        for step in case.steps
    )
    own = f"{tensors('input', 'AB')} {tensors('output', case.outputs)}"
    batch = "max_batch_size: 4" if case.batches else ""
    return parse(f'name: "e" platform: "ensemble" {batch} {own} ensemble_scheduling {{ {text} }}')


class Instance:
    """A model: it adds up its inputs, and does what its kind says. `seen` are the executions of all models."""

    def __init__(self, step: Step, seen: list[tuple[object, ...]]) -> None:
        self._step = step
        self._seen = seen

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        step = self._step
        for r in requests:
            says = (r.id, r.correlation_id, r.flags, r.parameters, r.caller, [o.name for o in r.outputs])
            self._seen.append((step.model, sorted(r.inputs), *map(str, says)))
        if step.kind == "fails":
            raise internal("out of memory")
        if step.kind == "raises":
            raise ValueError("a mistake")
        return Execution([self._result(request) for request in requests], 0, 0)

    def _result(self, request: InferRequest) -> Result:
        step = self._step
        if step.kind == "refuses":
            return internal("not this one")
        total = sum((tensor.array.astype("<f4") for tensor in request.inputs.values()), np.float32(1))
        if step.kind == "other shape":
            total = np.zeros((3, 2), "<f4")
        count = len(step.writes) - (step.kind == "leaves out")
        made = [Tensor(f"O{index}", DataType.FP32, np.asarray(total + index, "<f4")) for index in range(count)]
        parameters: dict[str, ParameterValue] = {"sequence_id": 99, "sequence_start": True}
        return Outputs(made, parameters if step.kind == "sets a sequence" else None)

    def close(self) -> None:
        pass


class Executor(BlockingExecutor):
    """One that does not measure where its model runs: in place, or in the next round of the loop, as if in a thread."""

    def __init__(self, instance: Instance, name: str, in_place: bool) -> None:
        super().__init__(instance, Placement(f"{name}_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
        self.rule = FixedPlace(in_place=in_place)

    def run(self, batch: ExecutableBatch) -> None:
        if self.rule.in_place:
            super().run(batch)
        else:
            asyncio.get_running_loop().call_soon(lambda: batch.executed(*self.run_in_place(batch.requests)))


def counts(metrics: ModelMetrics) -> tuple[object, ...]:
    """Everything that is counted, without how long it took."""
    s: ModelStatistics = metrics.statistics
    durations = (s.success, s.fail, s.queue, s.compute_input, s.compute_infer, s.compute_output)
    batches = {size: (b.compute_input.count, b.compute_infer.count) for size, b in s.batches.items()}
    histograms = (metrics.request_ns.count, metrics.queue_ns.count, metrics.compute_ns.count, metrics.batch_size.count)
    totals = (s.inference_count, s.execution_count, bool(s.last_inference_ms))
    return totals, [d.count for d in durations], batches, histograms, dict(metrics.failures), dict(metrics.closes)


def said(outcome: Outcome) -> object:
    """An outcome without how long it took."""
    if not isinstance(outcome, InferResponse):
        return type(outcome), str(outcome), getattr(outcome, "code", None)
    record = outcome.execution
    outputs = [(tensor.name, tensor.datatype, tensor.array.tolist()) for tensor in outcome.outputs]
    about = (outcome.model_name, outcome.model_version, outcome.id, outcome.parameters)
    return outputs, about, (record.instance, record.batch_size) if record is not None else None


def _collect(outcomes: list[tuple[Outcome, bool]], outcome: Outcome, final: bool) -> None:
    outcomes.append((outcome, final))


async def play(case: Case, *, at_once: bool) -> dict[str, Any]:
    """Return everything that a caller, an operator or a model can see."""
    seen: list[tuple[object, ...]] = []
    loop = asyncio.get_running_loop()
    runners: dict[str, ModelRunner] = {}
    for step in case.steps:
        if step.model not in runners:
            config = config_of(step)
            scheduler = make_scheduler(config)
            executor = Executor(Instance(step, seen), step.model, step.kind != "later")
            runners[step.model] = ModelRunner(
                config,
                "1",
                scheduler=scheduler if at_once else RecordedScheduler(scheduler),
                executors=[executor],
                labels={},
                loop=loop,
            )
    walked: list[str] = []

    def infer(request: InferRequest, reply: Reply) -> Ticket:
        return runners[request.model_name].submit(request, reply)

    def infer_at_once(request: InferRequest) -> InferResponse | ServingError | None:
        outcome = runners[request.model_name].run_at_once(request)
        if outcome is not None:
            walked.append(request.model_name)
        return outcome

    plan = EnsemblePlan(ensemble_config(case), [config_of(step) for step in case.steps], {})
    ensemble = EnsembleRunner("1", plan, infer, infer_at_once if at_once else never_at_once)
    outcomes: dict[int, list[tuple[Outcome, bool]]] = {}
    trees: list[TraceTree] = []
    for number, asked in enumerate(case.requests):
        shape = (2, 2) if case.batches else (2,)
        inputs = {name: Tensor(name, DataType.FP32, np.full(shape, number + i, "<f4")) for i, name in enumerate("AB")}
        request = InferRequest(
            "e",
            inputs,
            id=str(number),
            outputs=tuple(map(RequestedOutput, asked.outputs)),
            correlation_id=asked.sequence,
            flags=SEQUENCE_START if asked.sequence else 0,
            parameters={"key": number},
        )
        if asked.is_traced:
            trees.append(TraceTree(TraceLevel.TIMESTAMPS | TraceLevel.TENSORS, TraceIds(), lambda tree: None))
            request.trace = trees[-1].root
        outcomes[number] = []
        ticket = ensemble.submit(request, partial(_collect, outcomes[number]))
        if asked.is_cancelled:
            ticket.cancel()
    await asyncio.wait_for(ensemble.drain(), 60)
    for runner in runners.values():
        await asyncio.wait_for(runner.drain(), 60)
        await runner.aclose()
    return {
        "outcomes": {n: [(said(o), final) for o, final in got] for n, got in outcomes.items()},
        "executions": seen,
        "statistics": {name: counts(runner.metrics) for name, runner in runners.items()},
        "ensemble": counts(ensemble.metrics),
        "traces": [
            [(t.model_name, t.parent_id, sorted(n for n, _ in t.events), len(t.tensors)) for t in tree.traces]
            for tree in trees
        ],
        "walked": walked,
    }


def both_ways(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        return await play(case, at_once=True), await play(case, at_once=False)

    return asyncio.run(scenario())


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_walked_ensemble_does_what_it_does_in_the_general_way(case: Case) -> None:
    walked, general = both_ways(case)
    assert walked.keys() == general.keys()
    for key in general.keys() - {"walked"}:
        assert walked[key] == general[key], key


CHAIN = (Step("plain", ("A",), ("x",)), Step("batches", ("x", "B"), ("y",)), Step("plain", ("y",), ("z",)))


def test_steps_that_run_in_place_are_done_at_once_whatever_batch_dimension_they_have() -> None:
    walked, general = both_ways(Case(CHAIN, False, (EnsembleRequest(()), EnsembleRequest(()))))
    assert len(walked["walked"]) == 6
    assert general["walked"] == []


def test_a_step_that_may_wait_does_not_keep_the_others_from_being_done_at_once() -> None:
    case = Case((CHAIN[0], Step("later", ("x", "B"), ("y",)), CHAIN[2]), False, (EnsembleRequest(()),))
    walked, _ = both_ways(case)
    assert walked["walked"] == ["plain_1_1", "plain_1_1"]


def test_the_first_request_of_a_round_is_done_at_once_and_those_that_come_with_it_form_a_batch() -> None:
    case = Case((CHAIN[0], Step("merges", ("x", "B"), ("y",)), CHAIN[2]), False, (EnsembleRequest(()),) * 3)
    walked, general = both_ways(case)
    assert walked["walked"][:3] == ["plain_1_1", "merges_2_1", "plain_1_1"]
    assert walked["walked"].count("merges_2_1") == 1
    assert walked["statistics"] == general["statistics"]
    (_, executions, _), *_ = walked["statistics"]["merges_2_1"]
    assert executions == 2


def test_only_an_ensemble_without_parallel_steps_is_a_chain() -> None:
    def is_chain(*steps: Step) -> bool:
        case = Case(steps, False, ())
        request = InferRequest("e", {name: Tensor(name, DataType.FP32, np.zeros(2, "<f4")) for name in "AB"})
        return EnsemblePlan(ensemble_config(case), list(map(config_of, steps)), {}).route(request).is_chain

    first, second = Step("plain", ("A", "B"), ("x",)), Step("plain", ("x",), ("y",))
    assert is_chain(first, second, Step("plain", ("x", "y"), ("z",)))
    assert not is_chain(first, second, Step("plain", ("x",), ("z",)))
    assert not is_chain(Step("plain", ("A",), ("x",)), Step("plain", ("B",), ("y",)))


def test_steps_of_a_chain_that_wait_run_once_each_and_the_others_are_done_at_once() -> None:
    steps = [Step("plain" if i % 2 else "later", ("A", "B") if not i else (f"t{i}",), (f"t{i + 1}",)) for i in range(5)]
    walked, general = both_ways(
        Case(tuple(steps), False, (EnsembleRequest(()), EnsembleRequest((), is_cancelled=True), EnsembleRequest(())))
    )
    assert walked["walked"] == ["plain_1_1"] * 4
    assert walked["outcomes"] == general["outcomes"]
    assert walked["statistics"] == general["statistics"]
    assert walked["ensemble"] == general["ensemble"]


def test_a_request_with_a_trace_goes_the_general_way() -> None:
    walked, _ = both_ways(Case(CHAIN, False, (EnsembleRequest((), is_traced=True),)))
    assert walked["walked"] == []
    assert [name for name, *_ in walked["traces"][0]] == ["e", "plain_1_1", "batches_2_1", "plain_1_1"]
