"""The changes that requests make in an engine, so that the next engine has the same state. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.wire.log_settings import LogOptions
from charonia.wire.shared_memory import CudaRegion, SystemRegion
from charonia.wire.trace_settings import Change


@dataclass(frozen=True, slots=True)
class RequestedLoad:
    """A model that was loaded by request.

    Attributes:
        config: The configuration of the request as JSON text, None for the model's own.
        files: Stored files of the request, by path relative to the model's folder; None for the repository.
        is_lost: Whether the files of the request were too large to be kept.
    """

    config: str | None = None
    files: Mapping[str, str] | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class RequestedChange:
    """The latest change of a model by request.

    Attributes:
        number: Sequence number of the change, in the order in which the engines of the server made them. Two loads that
            look alike may have read different files, so only the number says whether an engine has made a change.
        load: How the model was loaded, None for unloaded.
        with_dependents: Whether the models that were loaded only for it were unloaded, too.
    """

    number: int
    load: RequestedLoad | None = None
    with_dependents: bool = False


@dataclass(slots=True)
class ChangeLog:
    """The changes since the server started.

    Attributes:
        number: Sequence number of the latest change of a model.
        models: The latest change of each model, in the order of their numbers.
        log: Settings of the log, None if they were never changed.
        trace: Settings of traces by model, "" for the server's.
        system: The regions of system shared memory.
        cuda: The regions of GPUs' memory.
        traffic: Persistent state of the traffic between versions, by model, as `TrafficService.restore` takes it.
    """

    number: int = 0
    models: dict[str, RequestedChange] = field(default_factory=dict)
    log: LogOptions | None = None
    trace: dict[str, dict[str, int]] = field(default_factory=dict)
    system: tuple[SystemRegion, ...] = ()
    cuda: tuple[CudaRegion, ...] = ()
    traffic: dict[str, str] = field(default_factory=dict)

    def model_loaded(self, name: str, loaded: RequestedLoad, *, is_overridden: bool) -> None:
        """Add the load of a model.

        Args:
            loaded: How.
            is_overridden: Whether it has the configuration of a request: this one's, or that of an earlier one.
        """
        former = self.models[name].load if name in self.models else None
        keeps_config = is_overridden and loaded.config is None and former is not None and former.files is None
        self._model_changed(name, load=former if keeps_config else loaded)

    def model_unloaded(self, name: str, *, with_dependents: bool) -> None:
        self._model_changed(name, with_dependents=with_dependents)

    def since(self, number: int) -> dict[str, RequestedChange]:
        """Return the changes of models after this sequence number, in their order."""
        return {name: change for name, change in self.models.items() if change.number > number}

    def trace_changed(self, model: str, change: Change) -> None:
        """Add a change of the settings of traces."""
        own = {**self.trace.pop(model, {}), **change}
        kept = {name: int(value) for name, value in own.items() if value is not None}
        if kept:
            self.trace[model] = kept

    def traffic_changed(self, model: str, text: str) -> None:
        """Set what to keep of the traffic of a model, "" for nothing."""
        self.traffic.pop(model, None)
        if text:
            self.traffic[model] = text

    def _model_changed(self, name: str, *, load: RequestedLoad | None = None, with_dependents: bool = False) -> None:
        self.number += 1
        self.models.pop(name, None)
        self.models[name] = RequestedChange(self.number, load, with_dependents)
