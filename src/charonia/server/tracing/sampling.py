"""Picks the requests that are traced. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from charonia.core.trace import RemoteParent, TraceIds, TraceLevel, TraceTree
from charonia.wire.trace_settings import TraceSettings


class Sampling:
    """The sampling under one setting. A changed setting gets a new object.

    Args:
        settings: The setting.
        allows_remote: Whether a request with a trace of its sender is traced regardless of rate and count.

    Attributes:
        settings: The setting.
        count_left: Traces that may still begin, -1 for no limit.
        is_retired: Whether a new setting has replaced this one, and its traces until then were written.
        open: Traces that have begun and are not written.
        collected: Traces that were handed over to be written.
    """

    def __init__(self, settings: TraceSettings, *, allows_remote: bool) -> None:
        self.settings = settings
        self.count_left = settings.count
        self.is_retired = False
        self.open = 0
        self.collected = 0
        self._allows_remote = allows_remote
        self._seen = 0

    @property
    def is_active(self) -> bool:
        """Whether it can still pick a request."""
        settings = self.settings
        if settings.level == TraceLevel.OFF:
            return False
        return self._allows_remote or (settings.rate > 0 and self.count_left != 0)

    @property
    def is_complete(self) -> bool:
        return self.count_left == 0 and not self.open

    def pick(self, remote: RemoteParent | None) -> bool:
        """Whether to trace the next request."""
        settings = self.settings
        if settings.level == TraceLevel.OFF:
            return False
        is_due = False
        if settings.rate and self.count_left:
            self._seen += 1
            is_due = self._seen % settings.rate == 0
            if is_due and self.count_left > 0:
                self.count_left -= 1
        return is_due or (remote is not None and self._allows_remote)


class RequestSampler:
    """Begins the traces of requests.

    Args:
        server: The setting of models without their own.
        models: Settings by model.
        ids: Generates the ids of traces and spans.
        done: Takes a finished tree, and the setting under which it began.
    """

    def __init__(
        self,
        server: Sampling,
        models: dict[str, Sampling],
        ids: TraceIds,
        done: Callable[[Sampling, TraceTree], None],
    ) -> None:
        self._server = server
        self._models = models
        self._ids = ids
        self._done = done

    def sample(self, model: str, remote: RemoteParent | None = None) -> TraceTree | None:
        """Return the beginning of a trace of a request, None where it is not traced.

        Args:
            model: The model that the request is for.
            remote: The trace of its sender, None where there is none.
        """
        sampling = self._models.get(model, self._server)
        if not sampling.pick(remote):
            return None
        sampling.open += 1

        def done(tree: TraceTree) -> None:
            sampling.open -= 1
            sampling.collected += 1
            self._done(sampling, tree)

        return TraceTree(sampling.settings.level, self._ids, done, remote if sampling._allows_remote else None)


OTEL_URL = "http://localhost:4318/v1/traces"


class TraceMode(Enum):
    """The destination of traces."""

    TRITON = "triton"
    """Into JSON files, in Triton's format."""

    OPENTELEMETRY = "opentelemetry"
    """To an OpenTelemetry collector."""


@dataclass(frozen=True, slots=True)
class OtelOptions:
    """Export to an OpenTelemetry collector. Values of None come from the environment (OTEL_BSP_*).

    Attributes:
        url: The collector's endpoint for OTLP over HTTP.
        resource: Attributes of the server, name and value.
        queue_size: Limit of spans that wait to be sent; later ones are dropped. None for 2048.
        delay_ms: Time between two exports in ms. None for 5000.
        batch_size: Limit of spans in one export. None for 512.
    """

    url: str = OTEL_URL
    resource: tuple[tuple[str, str], ...] = ()
    queue_size: int | None = None
    delay_ms: int | None = None
    batch_size: int | None = None

    def explicit(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of the given settings, as the protocol shows them."""
        if self.url != OTEL_URL:
            yield "url", self.url
        if self.resource:
            yield "resource", ",".join(f"{name}={value}" for name, value in self.resource)
        for name, value in (
            ("bsp_max_queue_size", self.queue_size),
            ("bsp_schedule_delay", self.delay_ms),
            ("bsp_max_export_batch_size", self.batch_size),
        ):
            if value is not None:
                yield name, str(value)


@dataclass(frozen=True, slots=True)
class TraceOptions(TraceSettings):
    """Tracing, with the settings that clients may change.

    Attributes:
        mode: The destination of traces.
        file: Path of the trace file, "" for none: then nothing can be traced in mode TRITON.
        otel: Export, in mode OPENTELEMETRY.
    """

    mode: TraceMode = TraceMode.TRITON
    file: str = ""
    otel: OtelOptions = OtelOptions()

    def problems(self) -> Iterator[str]:
        if self.mode is TraceMode.TRITON and self.level:
            if not self.file:
                yield "--trace-config level: no file to write to is given, e.g. --trace-config triton,file=trace.json"
            if not self.rate:
                yield "--trace-config rate: expected at least 1, got 0"
        queue_size, batch_size = self.otel.queue_size, self.otel.batch_size
        if batch_size is not None and batch_size > (queue_size if queue_size is not None else 2048):
            yield "--trace-config opentelemetry,bsp_max_export_batch_size: expected at most bsp_max_queue_size"
