"""Values of `--trace-config` and of the options that it took the place of."""

from collections.abc import Callable, Sequence
from typing import Any

from charonia.cli.values import assignment, choice, filled, integer
from charonia.core.trace import TraceLevel
from charonia.server.tracing.options import TraceMode

_LEVELS = {
    **dict.fromkeys(("off", "false"), TraceLevel.OFF),
    **dict.fromkeys(("timestamps", "on", "true", "min", "max"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}

trace_rate = integer(0)
trace_count = integer(-1)
log_frequency = integer(0)
_positive = integer(1)


def trace_level(text: str) -> TraceLevel:
    """Read a level; Triton's older words for one are known too."""
    level = _LEVELS.get(text.strip().lower())
    if level is None:
        raise ValueError(f"expected OFF, TIMESTAMPS or TENSORS, got '{text}'")
    return level


def all_levels(levels: Sequence[TraceLevel]) -> TraceLevel:
    """Return all levels together; OFF among them turns all off."""
    total = TraceLevel.OFF
    for level in levels:
        total |= level
    return total if TraceLevel.OFF not in list(levels) else TraceLevel.OFF


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"expected NAME=VALUE, got '{text}'")
    return name, value


SETTINGS: dict[tuple[str, str], tuple[str, Callable[[str], object]]] = {
    ("", "mode"): ("trace.mode", choice(TraceMode)),
    ("", "level"): ("trace.level", trace_level),
    ("", "rate"): ("trace.rate", trace_rate),
    ("", "count"): ("trace.count", trace_count),
    ("triton", "file"): ("trace.file", filled),
    ("triton", "log-frequency"): ("trace.log_frequency", log_frequency),
    ("opentelemetry", "url"): ("trace.otel.url", filled),
    ("opentelemetry", "resource"): ("trace.otel.resource", _attribute),
    ("opentelemetry", "bsp_max_queue_size"): ("trace.otel.queue_size", _positive),
    ("opentelemetry", "bsp_schedule_delay"): ("trace.otel.delay_ms", _positive),
    ("opentelemetry", "bsp_max_export_batch_size"): ("trace.otel.batch_size", _positive),
}
"""The field of `ServerOptions`, and the reader of its value, by mode and key."""


def trace_setting(text: str) -> tuple[str, object]:
    """Read one `--trace-config`: the field of `ServerOptions` that it sets, and the value."""
    mode, key, value = assignment(text)
    known = SETTINGS.get((mode.strip().lower(), key))
    if known is None:
        names = ", ".join(f"{mode},{key}" if mode else key for mode, key in SETTINGS)
        raise ValueError(f"expected one of {names}, got '{text}'")
    field, read = known
    try:
        return field, read(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def trace_fields(settings: Sequence[tuple[str, Any]]) -> dict[str, object]:
    """Return all settings by field: levels and resources add up, of others the last counts."""
    fields: dict[str, object] = dict(settings)
    levels = [value for field, value in settings if field == "trace.level"]
    if levels:
        fields["trace.level"] = all_levels(levels)
    resource = tuple(value for field, value in settings if field == "trace.otel.resource")
    if resource:
        fields["trace.otel.resource"] = resource
    return fields
