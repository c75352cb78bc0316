"""The tracing service of a server: the current settings, the sampler that follows from them, and the writer."""

import asyncio
import itertools
import random

from charonia.core.errors import invalid
from charonia.core.trace import TraceTree
from charonia.server.tracing.files import TraceFiles, TraceWriter
from charonia.server.tracing.otel import OtelExport
from charonia.server.tracing.sampling import RequestSampler, Sampling, TraceMode, TraceOptions
from charonia.wire.trace_settings import Change, SettingsTable, TraceSettings, level_names


class _Ids:
    """Generates ids of traces, and of spans where traces are exported as spans."""

    def __init__(self, *, has_spans: bool) -> None:
        self._numbers = itertools.count(1)
        self._random = random.Random() if has_spans else None

    def trace_id(self) -> int:
        return next(self._numbers)

    def span_id(self) -> int:
        return self._random.getrandbits(64) or 1 if self._random is not None else 0


class TracingService:
    """Tracing of a server. Everything except `aclose` runs on the event loop's thread and never blocks.

    Args:
        options: The server's options.

    Attributes:
        sampler: Picks the requests to trace; None while it would pick none.

    Raises:
        ServingError: The options are invalid, or need a package that is not installed.
    """

    def __init__(self, options: TraceOptions) -> None:
        self.sampler: RequestSampler | None = None
        self._options = options
        self._is_otel = options.mode is TraceMode.OPENTELEMETRY
        self._ids = _Ids(has_spans=self._is_otel)
        self._table = SettingsTable(options)
        self._samplings: dict[str, Sampling] = {}  # "" is that of the server
        self._writer: TraceWriter | None = None
        self._check(self._table.of_server())
        if self._is_otel:
            self._writer = TraceWriter(OtelExport(options.otel))
        elif options.file:
            self._writer = TraceWriter(TraceFiles(options.file))
        self._follow(renewed={""})

    @property
    def can_trace(self) -> bool:
        return self._writer is not None

    @property
    def dropped(self) -> int:
        """Traces that were dropped because the writer could not keep up."""
        return self._writer.dropped if self._writer is not None else 0

    async def settings(self, model: str = "") -> dict[str, list[str]]:
        settings = self._table.of_model(model) if model else self._table.of_server()
        sampling = self._samplings.get(model, self._samplings[""])
        shown = {
            "trace_level": level_names(settings.level),
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(sampling.count_left)],
        }
        if self._is_otel:
            shown["trace_mode"] = [TraceMode.OPENTELEMETRY.value]
            shown |= {name: [value] for name, value in self._options.otel.explicit()}
        else:
            shown["log_frequency"] = [str(settings.log_frequency)]
            shown["trace_file"] = [self._options.file]
            shown["trace_mode"] = [TraceMode.TRITON.value]
        return shown

    async def change(self, model: str, change: Change) -> None:
        if not change:
            return
        table = self._table.copy()
        table.change(model, change)
        for settings in (table.of_server(), *(table.of_model(name) for name in table.models)):
            self._check(settings)
        self._table = table
        # Each setting counts its own requests, so settings that follow the server's start again with it.
        self._follow(renewed={model} if model else {"", *table.models})

    async def aclose(self) -> None:
        """Write the remaining traces, for a limited time."""
        self.sampler = None
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    def _check(self, settings: TraceSettings) -> None:
        reason = ""
        if settings.level:
            if not settings.rate and not self._is_otel:
                reason = "sample rate must be non-zero"
            elif not self._is_otel and not self._options.file:
                reason = "trace file name is not given"
        if reason:
            raise invalid(
                f"Attempting to set invalid trace setting :{reason}",
                hint="start the server with --trace-config triton,file=PATH" if "file" in reason else "",
            )

    def _follow(self, renewed: set[str]) -> None:
        """Update the samplings after a change of the settings."""
        for name in list(self._samplings):
            if name and name not in self._table.models:
                self._retire(self._samplings.pop(name))
        for name in ("", *self._table.models):
            if name in renewed:
                old = self._samplings.get(name)
                if old is not None:
                    self._retire(old)
                settings = self._table.of_model(name) if name else self._table.of_server()
                self._samplings[name] = Sampling(settings, allows_remote=self._is_otel)
        self._refresh()

    def _retire(self, sampling: Sampling) -> None:
        if self._writer is not None:
            self._writer.retire(sampling)

    def _refresh(self) -> None:
        """Set the sampler, or None while it could pick no request."""
        if not self.can_trace or not any(sampling.is_active for sampling in self._samplings.values()):
            self.sampler = None
        else:
            models = {name: sampling for name, sampling in self._samplings.items() if name}
            self.sampler = RequestSampler(self._samplings[""], models, self._ids, self._done)

    def _done(self, sampling: Sampling, tree: TraceTree) -> None:
        if self._writer is not None:
            self._writer.add(sampling, tree)
        if not sampling.count_left:
            self._refresh()
