"""How a server traces requests, as it is told at start. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from charonia.core.trace import TraceLevel
from charonia.wire.trace_settings import UNLIMITED, TraceSettings

OTEL_URL = "http://localhost:4318/v1/traces"


class TraceMode(Enum):
    """Where traces go."""

    TRITON = "triton"
    """Into JSON files, in Triton's format."""

    OPENTELEMETRY = "opentelemetry"
    """To an OpenTelemetry collector."""


@dataclass(frozen=True, slots=True)
class OtelOptions:
    """Export to an OpenTelemetry collector. What is None is as the environment variables OTEL_BSP_* say.

    Attributes:
        url: Where the collector takes OTLP over HTTP.
        resource: Attributes of the server, name and value.
        queue_size: Most spans that wait to be sent; more are dropped. None for 2048.
        delay_ms: Time between two exports in ms. None for 5000.
        batch_size: Most spans of one export. None for 512.
    """

    url: str = OTEL_URL
    resource: tuple[tuple[str, str], ...] = ()
    queue_size: int | None = None
    delay_ms: int | None = None
    batch_size: int | None = None

    def given(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of what was set, as the protocol shows them."""
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
        mode: Where traces go.
        level: What is noted of a request; OFF to trace none.
        rate: One of so many requests is traced.
        count: So many traces are made in all, -1 for no end.
        file: Path of the trace file, "" where there is none: then nothing can be traced in mode TRITON.
        log_frequency: So many traces go into a file of their own, 0 for one file of all.
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
        """What may be changed at run time."""
        return TraceSettings(self.level, self.rate, self.count, self.log_frequency)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        if self.mode is TraceMode.TRITON and self.level:
            if not self.file:
                yield "--trace-config level: no file to write to is given, e.g. --trace-config triton,file=trace.json"
            if not self.rate:
                yield "--trace-config rate: expected at least 1, got 0"
        queue_size, batch_size = self.otel.queue_size, self.otel.batch_size
        if batch_size is not None and batch_size > (queue_size if queue_size is not None else 2048):
            yield "--trace-config opentelemetry,bsp_max_export_batch_size: expected at most bsp_max_queue_size"
