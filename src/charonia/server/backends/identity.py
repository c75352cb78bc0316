"""The identity backend: each OUTPUT<x> is INPUT<x>, of any datatype and shape.

For tests of clients, of schedulers and of the server's own speed. A response holds the request's own array under
another name: nothing is copied, concatenated or split; `reshape` applies as a view. Control tensors of sequences come
back, too, where they are named INPUT<x> and there is an OUTPUT<x>.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.sequence_tensors import added_names, seen_by_model
from charonia.core.errors import invalid, unsupported
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Completion, Execution, ModelFiles, Outputs, Placement
from charonia.server.backends.batch import TensorPlan, input_plans, output_plans
from charonia.server.backends.parameters import Param, Params

RESPONSE_PARAMETERS: Mapping[str, ParameterValue] = {
    "param0": "an example string parameter",
    "param1": 42,
    "param2": False,
    "param3": 123.123,
}
"""What `response_parameters` adds; the values are those of Triton's identity backend."""


# fmt: off
PARAMETERS = Params(
    "identity",
    Param("execute_delay_ms", "how long a batch takes", float, 0.0, ge=0),
    Param("instance_wise_delay_multiplier", "instance i takes the delay times this times (i + 1); 0: all take the "
          "delay", float, 0.0, ge=0),
    Param("creation_delay_sec", "how long it takes to create an instance", float, 0.0, ge=0),
    Param("enable_custom_tracing", "adds CUSTOM_ACTIVITY_START, CUSTOM_SINGLE_ACTIVITY and CUSTOM_ACTIVITY_END to the "
          "trace of each request", bool, False),
    Param("response_parameters", "adds one response parameter of each type: param0 a string, param1 an integer, param2 "
          "a boolean, param3 a number", bool, False),
)
# fmt: on

_Reshape = tuple[TensorPlan, TensorPlan]
"""From the shape of an input to the model's, and from there to that of the output."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What every instance does."""

    names: Mapping[str, str]
    reshapes: Mapping[str, _Reshape]
    is_batched: bool
    parameters: Mapping[str, ParameterValue]
    is_traced: bool
    execute_s: float
    creation_s: float
    instance_multiplier: float


class IdentityInstance:
    """An instance."""

    def __init__(self, work: _Work, delay_s: float) -> None:
        self._names = work.names
        self._parameters = work.parameters
        self._work = work
        self._delay_s = delay_s

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        start = time.monotonic_ns()
        if self._delay_s > 0:
            time.sleep(self._delay_s)
        if self._work.is_traced:
            _report(requests)
        names, parameters = self._names, self._parameters
        results = [
            Outputs(
                [Tensor(names[t.name], t.datatype, t.array) for t in request.inputs.values() if t.name in names],
                dict(parameters) if parameters else None,
            )
            for request in requests
        ]
        if self._work.reshapes:
            for request, result in zip(requests, results, strict=True):
                self._reshape(request, result)
        return Execution(results, start, time.monotonic_ns())

    def _reshape(self, request: InferRequest, result: Outputs) -> None:
        work = self._work
        for given in request.inputs.values():
            if given.name in work.reshapes:
                array = given.array
                for plan in work.reshapes[given.name]:
                    array = plan.reshape(array, work.is_batched)
                name = work.names[given.name]
                index = next(i for i, tensor in enumerate(result.tensors) if tensor.name == name)
                result.tensors[index] = Tensor(name, given.datatype, array)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class IdentityModel:
    """A loaded version."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._made = 0

    async def create_instance(self, placement: Placement) -> IdentityInstance:
        index = self._made
        self._made += 1
        work = self._work
        if work.creation_s > 0:
            await asyncio.sleep(work.creation_s)
        factor = work.instance_multiplier * (index + 1) if work.instance_multiplier else 1.0
        return IdentityInstance(work, work.execute_s * factor)

    def memory(self) -> list[MemoryUsage]:
        return []

    async def aclose(self) -> None:
        """Do nothing: there are no resources."""


class IdentityBackend:
    """The `identity` backend."""

    name = "identity"

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> IdentityModel:
        values = PARAMETERS.checked(config)
        if unknown := ", ".join(f"'{key}'" for key, _ in PARAMETERS.unknown(config)):
            raise unsupported(
                f"model '{config.name}': the identity backend has no parameter {unknown}",
                hint=f"it has {', '.join(PARAMETERS.names)}",
            )
        names = _pairs(config)
        work = _Work(
            names,
            _reshapes(config, names),
            config.max_batch_size > 0,
            RESPONSE_PARAMETERS if values["response_parameters"] else {},
            values["enable_custom_tracing"],
            execute_s=values["execute_delay_ms"] / 1000,
            creation_s=values["creation_delay_sec"],
            instance_multiplier=values["instance_wise_delay_multiplier"],
        )
        return IdentityModel(work)

    async def aclose(self) -> None: ...


def _pairs(config: ModelConfig) -> dict[str, str]:
    """Return the output's name for each input's name; tensors that the server adds need not have an output."""
    added = added_names(config)
    config = seen_by_model(config)
    outputs = {o.name: o for o in config.output}
    pairs: dict[str, str] = {}
    problems = []
    for tensor in config.input:
        name = tensor.name.replace("INPUT", "OUTPUT", 1)
        output = outputs.pop(name, None)
        if output is None and tensor.name in added:
            continue
        pairs[tensor.name] = name
        if "INPUT" not in tensor.name or output is None:
            problems.append(f"input '{tensor.name}' needs the name INPUT<x> and an output OUTPUT<x>")
        elif (output.data_type, output.inner_dims) != (tensor.data_type, tensor.inner_dims):
            problems.append(f"output '{name}' needs the datatype and dims, or reshape, of input '{tensor.name}'")
    problems += [f"output '{name}' has no input" for name in outputs]
    if not config.input:
        problems.append("there is no input")
    if problems:
        raise invalid(f"model '{config.name}' cannot be served by the identity backend: {'; '.join(problems)}")
    return pairs


def _reshapes(config: ModelConfig, names: Mapping[str, str]) -> dict[str, _Reshape]:
    outputs = {plan.name: (plan, output.dims) for plan, output in zip(output_plans(config), config.output, strict=True)}
    ways: dict[str, _Reshape] = {}
    for plan in input_plans(config):
        if plan.name in names and names[plan.name] in outputs:
            back, dims = outputs[names[plan.name]]
            if dims != plan.source:
                ways[plan.name] = (plan, back)
    return ways


def _report(requests: Sequence[InferRequest]) -> None:
    """Add activities to the traces of requests, those that Triton's identity backend reports."""
    for request in requests:
        if request.trace is not None:
            for activity in ("CUSTOM_ACTIVITY_START", "CUSTOM_SINGLE_ACTIVITY", "CUSTOM_ACTIVITY_END"):
                request.trace.mark(activity, time.monotonic_ns())
