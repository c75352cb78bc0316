"""An engine without models: it answers requests with their own inputs, when and how the test says.

For tests of front ends, ours and those of others. It follows the contract of `charonia.server.facade.Engine`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.classification import classify
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, not_found
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.request import InferRequest
from charonia.core.response import ExecutionRecord, InferResponse, Outcome, Reply
from charonia.core.statistics import ModelStatistics
from charonia.core.tensor import Tensor
from charonia.server.directory import models_at


def identity_config(
    name: str = "identity", datatype: DataType = DataType.FP32, dims: tuple[int, ...] = (16,), max_batch_size: int = 8
) -> ModelConfig:
    """Return the configuration of a model with input INPUT0 and output OUTPUT0."""
    return ModelConfig(
        name=name,
        backend="identity",
        max_batch_size=max_batch_size,
        input=(ModelInput(name="INPUT0", data_type=datatype, dims=dims),),
        output=(ModelOutput(name="OUTPUT0", data_type=datatype, dims=dims),),
    )


class FakeTicket:
    """A request that the fake engine was given.

    Attributes:
        late_cancels: Calls of `cancel` after that: needless work, which front ends avoid.
    """

    __slots__ = ("_reply", "cancelled", "finished", "late_cancels", "request")

    def __init__(self, request: InferRequest, reply: Reply) -> None:
        self.request = request
        self.cancelled = False
        self.finished = False
        self.late_cancels = 0
        self._reply = reply

    def cancel(self) -> None:
        """Drop the request: it gets a CANCELLED error unless it is over."""
        if self.finished:
            self.late_cancels += 1
        else:
            self.cancelled = True
            self.answer(ServingError(Code.CANCELLED, "the request was cancelled"))

    def answer(self, outcome: Outcome, final: bool = True) -> None:
        """Give an outcome; nothing happens after the last one."""
        if not self.finished:
            self.finished = final
            self._reply(outcome, final)


@dataclass
class FakeEngine:
    """The engine. Change its attributes at any time.

    Attributes:
        models: Configuration by name. Each has version "1".
        hold: Keep requests in `tickets` until the test answers them, e.g. `engine.release(0)`.
        delay_s: Answer this much later, on the running event loop; 0 answers before `infer` returns.
        outcomes: Outcomes to give instead of the echo, one list of (outcome, final) for each next request.
        errors: Error of each request of a model, by name.
        statistics: What `model_statistics` picks from.
        control_error: Raised by `load_model` and `unload_model`.
        loads: Arguments of `load_model` so far.
        unloads: Arguments of `unload_model` so far.
    """

    models: dict[str, ModelConfig] = field(default_factory=lambda: {"identity": identity_config()})
    hold: bool = False
    delay_s: float = 0.0
    outcomes: list[list[tuple[Outcome, bool]]] = field(default_factory=list)
    errors: dict[str, ServingError] = field(default_factory=dict)
    live: bool = True
    ready: bool = True
    exiting: bool = False
    statistics: list[ModelStatistics] = field(default_factory=list)
    index: list[ModelIndexEntry] = field(
        default_factory=lambda: [ModelIndexEntry("identity", "1", ModelState.READY), ModelIndexEntry("unloaded")]
    )
    control_error: ServingError | None = None
    tickets: list[FakeTicket] = field(default_factory=list)
    loads: list[tuple[str, str | None, Mapping[str, bytes] | None]] = field(default_factory=list)
    unloads: list[tuple[str, bool]] = field(default_factory=list)

    def infer(self, request: InferRequest, reply: Reply) -> FakeTicket:
        """Echo: output `OUTPUT<x>` is input `INPUT<x>`; any other input comes back under its own name."""
        ticket = FakeTicket(request, reply)
        self.tickets.append(ticket)
        if self.outcomes:
            for outcome, final in self.outcomes.pop(0):
                ticket.answer(outcome, final)
        elif self.hold:
            pass
        elif self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, ticket.answer, self.echo(request))
        else:
            ticket.answer(self.echo(request))
        return ticket

    def release(self, index: int) -> None:
        """Answer the held request `index` with its echo."""
        ticket = self.tickets[index]
        ticket.answer(self.echo(ticket.request))

    def echo(self, request: InferRequest) -> InferResponse | ServingError:
        try:
            config = self.model_config(request.model_name, request.model_version)
            if request.model_name in self.errors:
                return self.errors[request.model_name]
            tensors = {_output_name(t.name): t for t in request.inputs.values()}
            outputs = [Tensor(name, t.datatype, t.array) for name, t in tensors.items()]
            if request.outputs:
                outputs = [_select(tensors, o.name, o.classification, config) for o in request.outputs]
        except ServingError as error:
            return error
        execution = ExecutionRecord(f"{request.model_name}_0", 1, 1000, 2000)
        return InferResponse(request.model_name, "1", request.id, outputs, execution=execution)

    def is_live(self) -> bool:
        return self.live

    def is_ready(self) -> bool:
        return self.ready

    def is_exiting(self) -> bool:
        return self.exiting

    async def model_ready(self, name: str, version: str = "") -> bool:
        try:
            self.model_config(name, version)
        except ServingError:
            return False
        return self.ready

    def server_metadata(self) -> ServerMetadata:
        """Return a name, a version and one extension."""
        return ServerMetadata("charonia", "0.1.0", ("binary_tensor_data",))

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        config = self.model_config(name, version)
        batch = (-1,) if config.max_batch_size else ()
        return ModelMetadata(
            config.name,
            ("1",),
            config.backend,
            tuple(TensorMetadata(t.name, t.data_type or DataType.FP32, batch + t.dims) for t in config.input),
            tuple(TensorMetadata(t.name, t.data_type or DataType.FP32, batch + t.dims) for t in config.output),
        )

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if version and not version.isdigit():
            raise invalid(
                f"failed to get model version from specified version string '{version}': a number is expected"
            )
        if name not in self.models:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        if version not in ("", "1"):
            raise not_found(f"Request for unknown model: '{name}' version {version} is not found")
        return self.models[name]

    def models_at(self, path: str) -> Mapping[bytes, str]:
        """Return the models of `models` whose own route has this path."""
        return models_at(path, (((name, ""), config) for name, config in self.models.items()))

    async def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return the entries of `statistics` asked for."""
        found = [s for s in self.statistics if name in ("", s.name) and version in ("", s.version)]
        if name and not found:
            raise invalid(f"requested model '{name}' is not available")
        return found

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        return [entry for entry in self.index if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Note the call in `loads`."""
        await asyncio.sleep(0)
        if self.control_error is not None:
            raise self.control_error
        self.loads.append((name, config, files))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Note the call in `unloads`."""
        await asyncio.sleep(0)
        if self.control_error is not None:
            raise self.control_error
        self.unloads.append((name, unload_dependents))


def _output_name(name: str) -> str:
    return "OUTPUT" + name.removeprefix("INPUT") if name.startswith("INPUT") else name


def _select(tensors: dict[str, Tensor], name: str, classes: int, config: ModelConfig) -> Tensor:
    if name not in tensors:
        raise invalid(f"unexpected inference output '{name}' for model '{config.name}'")
    tensor = Tensor(name, tensors[name].datatype, tensors[name].array)
    return classify(tensor, classes, (), config.max_batch_size > 0) if classes else tensor
