"""Server options of tracing. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from charonia.core.trace import TraceLevel
from charonia.wire.trace_settings import UNLIMITED, TraceSettings

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

    def given(self) -> Iterator[tuple[str, str]]:
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
class TraceOptions:
    """Tracing.

    Attributes:
        mode: The destination of traces.
        level: Recorded events of a request; OFF to trace none.
        rate: One of this number of requests is traced.
        count: Total number of traces, -1 for no limit.
        file: Path of the trace file, "" for none: then nothing can be traced in mode TRITON.
        log_frequency: Number of traces in each file, 0 for all in one file.
        otel: Export, in mode OPENTELEMETRY.
    """

    mode: TraceMode = TraceMode.TRITON
    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = UNLIMITED
    file: str = ""
    log_frequency: int = 0
    otel: OtelOptions = OtelOptions()

    @property
    def settings(self) -> TraceSettings:
        return TraceSettings(self.level, self.rate, self.count, self.log_frequency)

    def problems(self) -> Iterator[str]:
        if self.mode is TraceMode.TRITON and self.level:
            if not self.file:
                yield "--trace-config level: no file to write to is given, e.g. --trace-config triton,file=trace.json"
            if not self.rate:
                yield "--trace-config rate: expected at least 1, got 0"
        queue_size, batch_size = self.otel.queue_size, self.otel.batch_size
        if batch_size is not None and batch_size > (queue_size if queue_size is not None else 2048):
            yield "--trace-config opentelemetry,bsp_max_export_batch_size: expected at most bsp_max_queue_size"
