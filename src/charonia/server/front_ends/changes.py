"""What requests have changed in an engine, so that the engine that follows it is as it was. Pure."""

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
        files: Where the files of the request are kept, by path relative to the model's folder; None for the repository.
        is_lost: Whether the files of the request were too large to be kept.
    """

    config: str | None = None
    files: Mapping[str, str] | None = None
    is_lost: bool = False


@dataclass(slots=True)
class ChangeLog:
    """The changes since the server started.

    Attributes:
        models: The models that were loaded or unloaded by request, None for unloaded, in the order of the requests.
        log: Settings of the log, None if they were never changed.
        trace: Settings of traces by model, "" for those of the server.
        system: The regions of system shared memory.
        cuda: The regions of GPUs' memory.
        traffic: What to keep of the traffic between versions, by model, as `TrafficService.restore` takes it.
    """

    models: dict[str, RequestedLoad | None] = field(default_factory=dict)
    log: LogOptions | None = None
    trace: dict[str, dict[str, int]] = field(default_factory=dict)
    system: tuple[SystemRegion, ...] = ()
    cuda: tuple[CudaRegion, ...] = ()
    traffic: dict[str, str] = field(default_factory=dict)

    def model_loaded(self, name: str, loaded: RequestedLoad, *, is_overridden: bool) -> None:
        """Note that a model was loaded.

        Args:
            name: Its name.
            loaded: How.
            is_overridden: Whether it has the configuration of a request: this one's, or that of one before.
        """
        former = self.models.pop(name, None)
        keeps_config = is_overridden and loaded.config is None and former is not None and former.files is None
        self.models[name] = former if keeps_config else loaded

    def model_unloaded(self, name: str) -> None:
        """Note that a model was unloaded."""
        self.models.pop(name, None)
        self.models[name] = None

    def trace_changed(self, model: str, change: Change) -> None:
        """Note a change of the settings of traces."""
        own = {**self.trace.pop(model, {}), **change}
        kept = {name: int(value) for name, value in own.items() if value is not None}
        if kept:
            self.trace[model] = kept

    def traffic_changed(self, model: str, text: str) -> None:
        """Note what to keep of the traffic of a model, "" for nothing."""
        self.traffic.pop(model, None)
        if text:
            self.traffic[model] = text
