"""Readers of the values of options of `charonia serve`: tracing, metrics, response cache, resources, disk caches."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia.cli.command_line import Fields
from charonia.cli.values import FALSE, TRUE, assignment, boolean, choice, filled, integer, path_or_none, path_text
from charonia.config.backends import PYTHON
from charonia.core.errors import ServingError
from charonia.core.trace import TraceLevel
from charonia.server.files.given import named
from charonia.server.model_options import ControlMode, ReadyWhen
from charonia.server.options import ALL_INTERFACES, FRONT_ENDS_AUTO, FRONT_ENDS_MAX, PORT_MAX
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.response_cache.options import cache_options
from charonia.server.tracing.sampling import TraceMode
from charonia.stores.location import is_store, parse_address

CACHE_VARIABLE = "CHARONIA_CACHE"
"""Environment variable: folder of all disk caches of the server."""

KNATIVE_VARIABLE = "K_SERVICE"
"""Environment variable that Knative and Cloud Run set in a service's containers."""

PORT_VARIABLE = "PORT"
"""Environment variable with the port on which they expect HTTP."""

_CACHE_BACKEND, _CACHE_SETTING = PYTHON, "environment-cache"
_PLUGINS = "plugins"
_CERTIFICATES = frozenset({"cert", "key", "cacert", "cacert_dir"})
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+", re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9._-]+")
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")
_LEVELS = {
    **dict.fromkeys(("off", "false"), TraceLevel.OFF),
    **dict.fromkeys(("timestamps", "on", "true", "min", "max"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}

trace_rate = integer(0)
trace_count = integer(-1)
log_frequency = integer(0)


def verbosity(text: str) -> int:
    """Read a level of detail: an integer, or a boolean word for 1 and 0."""
    if text.strip().lower() in (TRUE | FALSE) - {"0", "1"}:
        return int(boolean(text))
    return integer(0, 100)(text)


def negated(text: str) -> bool:
    """Read a boolean for a field with the opposite meaning."""
    return not boolean(text)


def readiness(text: str) -> ReadyWhen:
    """Read which models have to be ready."""
    try:
        return ReadyWhen("true" if boolean(text) else "false")
    except ValueError:
        return choice(ReadyWhen)(text)


def repository(text: str) -> str:
    """Read the path of a model repository or a model, perhaps as `NAME=PATH`, or the URI of a store."""
    if is_store(text):
        try:
            parse_address(text)
        except ServingError as error:
            raise ValueError(error.message) from None
    name, path = named(text)
    return f"{name}={path_text(path)}" if name else path_text(text)


def reloading(text: str) -> Fields:
    """Return the option fields of a server that reloads changed models."""
    if text:
        raise ValueError(f"expected no value, got '{text}'")
    return Fields({"models.control_mode": ControlMode.POLL, "models.poll_secs": 1})


def front_ends(text: str) -> int:
    """Read a number of front ends, or "auto"."""
    if text.strip().lower() == "auto":
        return FRONT_ENDS_AUTO
    try:
        return integer(0, FRONT_ENDS_MAX)(text)
    except ValueError as error:
        raise ValueError(str(error).replace("expected", "expected auto or", 1)) from None


def address(text: str) -> Fields:
    """Read the address of all endpoints."""
    return Fields(dict.fromkeys(("http.address", "grpc.address", "metrics.address"), filled(text)))


def ports(text: str) -> Fields:
    """Read the HTTP port; gRPC and metrics have the next ones."""
    first = integer(0, PORT_MAX - 2)(text)
    return Fields(
        {f"{endpoint}.port": first + at * bool(first) for at, endpoint in enumerate(("http", "grpc", "metrics"))}
    )


def origins(text: str) -> tuple[str, ...]:
    """Read origins of pages, separated by commas, or "*"."""
    given = tuple(part.strip().rstrip("/") for part in text.split(","))
    for origin in given:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"expected * or origins such as https://example.org, got '{origin}'")
    return given


def hosts(text: str) -> tuple[str, ...]:
    """Read names of hosts, separated by commas, or "*"."""
    given = tuple(part.strip().lower() for part in text.split(","))
    for host in given:
        if host != "*" and not _HOST.fullmatch(host):
            raise ValueError(f"expected * or names such as models.example.org, without a port, got '{host}'")
    return given


def load_metrics(text: str) -> tuple[str, ...]:
    """Read names of metrics, separated by commas."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if not _METRIC.fullmatch(name):
            raise ValueError(f"expected names of metrics, got '{name}'")
    return names


def backend_settings(values: Sequence[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Collect `--backend-config` by backend and key; of a key given several times, the last counts."""
    settings: dict[str, dict[str, str]] = {}
    for backend, key, value in values:
        if key == _CACHE_SETTING:
            value = path_or_none(value)
        elif key == _PLUGINS:  # the system finds a library that is named without its folder
            value = ";".join(path_text(part) if os.sep in part else part for part in value.split(";"))
        settings.setdefault(backend, {})[key] = value
    return settings


def trace_level(text: str) -> TraceLevel:
    """Read a level; Triton's older names are accepted too."""
    level = _LEVELS.get(text.strip().lower())
    if level is None:
        raise ValueError(f"expected OFF, TIMESTAMPS or TENSORS, got '{text}'")
    return level


def all_levels(levels: Sequence[TraceLevel]) -> TraceLevel:
    """Return the union of all levels, or OFF if it is among them."""
    total = TraceLevel.OFF
    for level in levels:
        total |= level
    return total if TraceLevel.OFF not in list(levels) else TraceLevel.OFF


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"expected NAME=VALUE, got '{text}'")
    return name, value


def _quantile(text: str) -> float:
    quantile, _, error = text.partition(":")
    try:
        values = float(quantile), float(error)
    except ValueError:
        values = None
    if values is None or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"expected QUANTILE:ERROR, both from 0 to 1, got '{text}'")
    return values[0]


def _quantiles(text: str) -> tuple[float, ...]:
    """Read `<quantile>:<error>,...`; the errors are ignored: a quantile is exact to 0.4 % of its value."""
    return tuple(_quantile(pair) for pair in text.split(","))


Settings = Mapping[tuple[str, str], tuple[str, Callable[[str], object]]]
"""The field of `ServerOptions`, and the reader of its value, by mode and key."""

METRICS_SETTINGS: Settings = {
    ("", "counter_latencies"): ("metrics.counter_latencies", boolean),
    ("", "histogram_latencies"): ("metrics.histogram_latencies", boolean),
    ("", "summary_latencies"): ("metrics.summary_latencies", boolean),
    ("", "summary_quantiles"): ("metrics.summary_quantiles", _quantiles),
}

TRACE_SETTINGS: Settings = {
    ("", "mode"): ("trace.mode", choice(TraceMode)),
    ("", "level"): ("trace.level", trace_level),
    ("", "rate"): ("trace.rate", trace_rate),
    ("", "count"): ("trace.count", trace_count),
    ("triton", "file"): ("trace.file", path_text),
    ("triton", "log-frequency"): ("trace.log_frequency", log_frequency),
    ("opentelemetry", "url"): ("trace.otel.url", filled),
    ("opentelemetry", "resource"): ("trace.otel.resource", _attribute),
    ("opentelemetry", "bsp_max_queue_size"): ("trace.otel.queue_size", integer(1)),
    ("opentelemetry", "bsp_schedule_delay"): ("trace.otel.delay_ms", integer(1)),
    ("opentelemetry", "bsp_max_export_batch_size"): ("trace.otel.batch_size", integer(1)),
}


def setting(known: Settings) -> Callable[[str], tuple[str, object]]:
    """Return a reader of `[<mode>,]<key>=<value>`: the field that it sets, and the value."""

    def read(text: str) -> tuple[str, object]:
        mode, key, value = assignment(text)
        field, read_value = known.get((mode.strip().lower(), key), ("", filled))
        if not field:
            names = ", ".join(f"{mode},{key}" if mode else key for mode, key in known)
            raise ValueError(f"expected one of {names}, got '{text}'")
        try:
            return field, read_value(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    return read


def trace_fields(settings: Sequence[tuple[str, Any]]) -> Fields:
    """Return the settings by field: levels and resources accumulate, of others the last counts."""
    fields = Fields(settings)
    levels = [value for field, value in settings if field == "trace.level"]
    if levels:
        fields["trace.level"] = all_levels(levels)
    resource = tuple(value for field, value in settings if field == "trace.otel.resource")
    if resource:
        fields["trace.otel.resource"] = resource
    return fields


def cache_setting(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read `<cache>,<key>=<value>`, with any number of `<key>=<value>`."""
    cache, comma, rest = text.partition(",")
    pairs = [pair.partition("=") for pair in _NEXT_SETTING.split(rest)]
    if not cache or not comma or not all(equals and key for key, equals, _ in pairs):
        raise ValueError("expected <cache>,<key>=<value>, e.g. local,size=1048576")
    return cache, tuple((key, value) for key, _, value in pairs)


def cache_fields(values: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> Fields:
    """Combine the settings of the response cache; of one given several times, the last counts."""
    if len({cache for cache, _ in values}) > 1:
        raise ValueError("found multiple cache configurations, but only a single cache is supported")
    settings = {
        key: path_or_none(value) if key in _CERTIFICATES else value for _, pairs in values for key, value in pairs
    }
    try:
        options = cache_options(values[0][0], settings, os.environ)
    except ServingError as error:
        raise ValueError(error.message) from error
    return Fields({"cache.local_bytes": options.local_bytes, "cache.redis": options.redis})


def resource_limit(text: str) -> ResourceLimit:
    """Read `<name>:<count>` or `<name>:<count>:<device>`."""
    name, *rest = text.split(":")
    if not name or not 1 <= len(rest) <= 2:
        raise ValueError(f"expected <name>:<count> or <name>:<count>:<device>, got '{text}'")
    return ResourceLimit(name, integer(0)(rest[0]), integer(0)(rest[1]) if len(rest) == 2 else None)


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of all disk caches, None for the default of each.

    Args:
        environment: Environment variables; `CACHE_VARIABLE` takes precedence over XDG's.
    """
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"], "charonia")
    return None


def with_cache(
    backends: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> Mapping[str, Mapping[str, str]]:
    """Return backend settings with the cache of environments of Python models, unless they set it.

    Args:
        backends: Settings by backend and key.
        environment: Environment variables.
    """
    cache = cache_folder(environment)
    if cache is None or any(_CACHE_SETTING in backends.get(name, ()) for name in ("", _CACHE_BACKEND)):
        return backends
    settings = {**backends.get(_CACHE_BACKEND, {}), _CACHE_SETTING: str(cache / "environments")}
    return {**backends, _CACHE_BACKEND: settings}


def knative_port(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that the environment of a service of Knative, or Cloud Run, sets: where HTTP is expected.

    Raises:
        ValueError: It is not a port.
    """
    text = environment.get(PORT_VARIABLE, "")
    if not text or not environment.get(KNATIVE_VARIABLE):
        return {}
    try:
        return {"http.port": integer(1, PORT_MAX)(text), "http.address": ALL_INTERFACES}
    except ValueError as error:
        raise ValueError(f"environment variable {PORT_VARIABLE}: {error}") from error
