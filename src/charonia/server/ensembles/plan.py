"""The plan of an ensemble: the routes of tensors through its steps, prepared once and shared by all requests."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

from charonia.config.model import EnsembleStep, ModelConfig
from charonia.config.tensors import WILDCARD
from charonia.core.metadata import model_key
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Array
from charonia.server.backends.batch import input_plans, output_plans
from charonia.server.ensembles.configuration import composed, scheduling_of
from charonia.server.ensembles.flow import DataFlow, EnsembleGraph, FlowStep, Plan, StartStep

ROUTES_MAX = 256
"""Most cached routes: one for each combination of given inputs and requested outputs."""

Labels = Mapping[str, tuple[str, ...]]
"""Class labels by output."""

Fit = Callable[[Array], Array]
"""Adapts a tensor to its reader, as a view."""


class BatchFit(NamedTuple):
    """Adapts a tensor to a model with a batch dimension if its source has none, or the reverse.

    Attributes:
        batches: Whether the model has a batch dimension.
        dims: The model's dims for the tensor.
    """

    batches: bool
    dims: tuple[int, ...]

    def apply(self, array: Array) -> Array:
        """Return a view with a batch dimension of 1 added or removed, or the array itself if that does not fit."""
        shape, dims = array.shape, self.dims
        if self.batches:
            if len(shape) == len(dims) and all(d in (WILDCARD, s) for d, s in zip(dims, shape, strict=True)):
                return array[None]
        elif len(shape) == len(dims) + 1 and shape[0] == 1:
            view: Array = array[0, ...]
            return view
        return array


class MappedTensor(NamedTuple):
    """An input of a step's model, or an output of the ensemble.

    Attributes:
        tensor: The ensemble tensor.
        fit: None if the tensor is passed unchanged.
    """

    name: str
    tensor: str
    fit: Fit | None


class StepRoute(NamedTuple):
    """A step on a route.

    Attributes:
        model_name: Key of its model.
        model_version: Version as text, "" for the highest ready one.
        inputs: Inputs of the model.
        outputs: Requested outputs; empty for all.
        gives: Ensemble tensor by output of the model, for needed outputs.
        is_decoupled: Whether its model is decoupled.
    """

    model_name: str
    model_version: str
    inputs: tuple[MappedTensor, ...]
    outputs: tuple[RequestedOutput, ...]
    gives: Mapping[str, str]
    is_decoupled: bool


class TensorRoute(NamedTuple):
    """The route of requests with the same inputs and requested outputs.

    Attributes:
        plan: Which steps run, and when.
        steps: The steps by number.
        outputs: The outputs of a response, in order.
        order: The steps in the order in which they start if each responds immediately; empty with decoupled ones.
        is_chain: Whether there is never more than one step that can run.
    """

    plan: Plan
    steps: Mapping[int, StepRoute]
    outputs: tuple[MappedTensor, ...]
    order: tuple[int, ...]
    is_chain: bool


class EnsemblePlan:
    """An ensemble with the currently loaded models of its steps.

    Args:
        config: The ensemble's configuration.
        models: The complete configuration of each step's model.
        labels: Class labels of the ensemble's outputs.

    Attributes:
        config: The configuration, completed from the steps.
        labels: Class labels of its outputs.
        batches: Whether it has a batch dimension.
        graph: The steps and the tensors between them.
        branches_max: Most responses of a decoupled step that a request processes concurrently, 0 for no limit.
    """

    def __init__(self, config: ModelConfig, models: Sequence[ModelConfig], labels: Labels) -> None:
        self.config = composed(config, models)
        self.labels = labels
        self.batches = config.max_batch_size > 0
        scheduling = scheduling_of(config)
        self.branches_max = scheduling.max_inflight_requests
        self._steps = scheduling.step
        self._models = models
        self._batches = dict.fromkeys([tensor.name for tensor in config.input], self.batches)
        for step, model in zip(self._steps, models, strict=True):
            self._batches |= dict.fromkeys(step.output_map.values(), model.max_batch_size > 0)
        self._given, self._wanted = (
            {each.name: partial(each.reshape, is_batched=self.batches) for each in plans if each.target is not None}
            for plans in (input_plans(config), output_plans(config))
        )
        flow = [_flow_step(step, model) for step, model in zip(self._steps, models, strict=True)]
        self.graph = EnsembleGraph([tensor.name for tensor in config.input], flow)
        self._routes: dict[tuple[frozenset[str], tuple[str, ...]], TensorRoute] = {}
        self._input_count = len(config.input)
        self._usual: TensorRoute | None = None

    def route(self, request: InferRequest) -> TensorRoute:
        """Return the route of a request.

        Raises:
            ServingError: INVALID_ARG: an output cannot be computed from the inputs, or not together with the others.
        """
        is_usual = not request.outputs and len(request.inputs) == self._input_count
        if is_usual and self._usual is not None:
            return self._usual
        wanted = tuple(o.name for o in request.outputs) or tuple(o.name for o in self.config.output)
        key = (frozenset(request.inputs), wanted)
        route = self._routes.get(key)
        if route is None:
            route = self._make(*key)
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            self._routes[key] = route
        if is_usual:
            self._usual = route
        return route

    def _make(self, inputs: frozenset[str], wanted: tuple[str, ...]) -> TensorRoute:
        plan = self.graph.plan(inputs, wanted)
        steps = {index: self._step(index, plan) for index in plan.steps}
        dims = {output.name: output.inner_dims for output in self.config.output}
        outputs = tuple(self._mapped(name, name, self.batches, dims[name], self._wanted.get(name)) for name in wanted)
        return TensorRoute(plan, steps, outputs, *_order(plan))

    def _step(self, index: int, plan: Plan) -> StepRoute:
        step, model = self._steps[index], self._models[index]
        dims = {tensor.name: tensor.dims for tensor in model.input}
        batches = model.max_batch_size > 0
        reads, needed = plan.reads[index], plan.gives[index]
        gives = {key: tensor for key, tensor in step.output_map.items() if tensor in needed}
        is_all = len(gives) == len(model.output)
        return StepRoute(
            key_of(step),
            str(step.model_version) if step.model_version > 0 else "",
            tuple(self._mapped(k, t, batches, dims[k]) for k, t in step.input_map.items() if t in reads),
            () if is_all else tuple(RequestedOutput(name) for name in gives),
            gives,
            model.is_decoupled,
        )

    def _mapped(
        self, name: str, tensor: str, batches: bool, dims: tuple[int, ...], wanted: Fit | None = None
    ) -> MappedTensor:
        batched = None if self._batches[tensor] == batches else BatchFit(batches, dims).apply
        fits = [fit for fit in (self._given.get(tensor), batched, wanted) if fit is not None]
        if len(fits) < 2:
            return MappedTensor(name, tensor, fits[0] if fits else None)
        return MappedTensor(name, tensor, lambda array: reduce(lambda form, fit: fit(form), fits, array))


def _order(plan: Plan) -> tuple[tuple[int, ...], bool]:
    """Return the order of a route, and whether it is a chain."""
    if any(plan.graph.steps[step].is_decoupled for step in plan.steps):
        return (), False
    order: list[int] = []
    is_chain = True
    flow: DataFlow[None] = DataFlow(plan)
    commands = flow.start(dict.fromkeys(plan.inputs))
    while starts := [command for command in commands if isinstance(command, StartStep)]:
        is_chain = is_chain and len(starts) == 1
        first = starts[0]
        order.append(first.step)
        commands = [*starts[1:], *flow.respond(first.branch, first.step, {}, True)]
    return tuple(order), is_chain


def key_of(step: EnsembleStep) -> str:
    return model_key(step.model_namespace, step.model_name)


def _flow_step(step: EnsembleStep, model: ModelConfig) -> FlowStep:
    optional = {model_input.name for model_input in model.input if model_input.optional}
    needs = {tensor for key, tensor in step.input_map.items() if key not in optional}
    takes = {tensor for key, tensor in step.input_map.items() if key in optional} - needs
    return FlowStep(
        tuple(sorted(needs)), tuple(step.output_map.values()), tuple(sorted(takes)), is_decoupled=model.is_decoupled
    )
