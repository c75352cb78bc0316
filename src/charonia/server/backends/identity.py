"""The identity backend: each OUTPUT<x> is INPUT<x>, of any datatype and shape.

For tests of clients, of schedulers and of the server's own speed. A response holds the request's own array under
another name: nothing is copied, concatenated or split; `reshape` applies as a view. Control tensors of sequences come
back, too, where they are named INPUT<x> and there is an OUTPUT<x>.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from charonia.config.model import ModelConfig
from charonia.config.sequence_tensors import added_names, seen_by_model
from charonia.core.errors import invalid, unsupported
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Completion, Execution, ModelFiles, Outputs, Placement, Result
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.parameters import Param, Params, Values

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


class IdentityInstance:
    """An instance.

    Args:
        names: Name of the output by that of its input.
    """

    def __init__(self, config: ModelConfig, names: Mapping[str, str], values: Values, delay_s: float) -> None:
        self._names = names
        self._shapes = ModelShapes.of(config)
        self._is_traced: bool = values["enable_custom_tracing"]
        self._parameters = RESPONSE_PARAMETERS if values["response_parameters"] else {}
        self._delay_s = delay_s

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        start = time.monotonic_ns()
        if self._delay_s > 0:
            time.sleep(self._delay_s)
        if self._is_traced:
            _report(requests)
        shapes, names, parameters = self._shapes, self._names, self._parameters
        results: list[Result] = [
            Outputs(
                [Tensor(names[t.name], t.datatype, t.array) for t in request.inputs.values() if t.name in names],
                dict(parameters) if parameters else None,
            )
            for request in (requests if shapes is None else map(shapes.in_model_shapes, requests))
        ]
        if shapes is not None:
            results = list(map(shapes.answered, results))
        return Execution(results, start, time.monotonic_ns())

    def close(self) -> None:
        """Do nothing: there are no resources."""


class IdentityModel:
    """A loaded version."""

    def __init__(self, config: ModelConfig, values: Values) -> None:
        self._config = config
        self._names = _pairs(config)
        self._values = values
        self._made = 0

    async def create_instance(self, placement: Placement) -> IdentityInstance:
        self._made += 1
        factor = self._values["instance_wise_delay_multiplier"] * self._made or 1.0
        if self._values["creation_delay_sec"] > 0:
            await asyncio.sleep(self._values["creation_delay_sec"])
        delay_s = self._values["execute_delay_ms"] / 1000 * factor
        return IdentityInstance(self._config, self._names, self._values, delay_s)

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
        return IdentityModel(config, values)

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


def _report(requests: Sequence[InferRequest]) -> None:
    """Add activities to the traces of requests, those that Triton's identity backend reports."""
    for request in requests:
        if request.trace is not None:
            for activity in ("CUSTOM_ACTIVITY_START", "CUSTOM_SINGLE_ACTIVITY", "CUSTOM_ACTIVITY_END"):
                request.trace.mark(activity, time.monotonic_ns())
