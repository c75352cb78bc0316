"""Values of `--metrics-config`."""

from collections.abc import Callable

from charonia.cli.values import assignment, boolean


def quantiles(text: str) -> tuple[float, ...]:
    """Read `<quantile>:<error>,...`; the errors are not needed: a quantile is exact to 0.4 % of its value."""
    return tuple(_quantile(pair) for pair in text.split(","))


def _quantile(text: str) -> float:
    quantile, _, error = text.partition(":")
    try:
        values = float(quantile), float(error)
    except ValueError:
        values = None
    if values is None or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"expected QUANTILE:ERROR, both from 0 to 1, got '{text}'")
    return values[0]


METRICS_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "counter_latencies": ("metrics.counter_latencies", boolean),
    "histogram_latencies": ("metrics.histogram_latencies", boolean),
    "summary_latencies": ("metrics.summary_latencies", boolean),
    "summary_quantiles": ("metrics.summary_quantiles", quantiles),
}
"""The field of `ServerOptions`, and the reader of its value, by key."""


def metrics_setting(text: str) -> tuple[str, object]:
    """Read one `--metrics-config`: the field of `ServerOptions` that it sets, and the value."""
    owner, key, value = assignment(text)
    known = METRICS_SETTINGS.get(key) if not owner else None
    if known is None:
        raise ValueError(f"expected one of {', '.join(METRICS_SETTINGS)}, got '{text}'")
    field, read = known
    try:
        return field, read(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
