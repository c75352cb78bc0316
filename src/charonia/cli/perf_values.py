"""Values of the options of `charonia perf`: from the text of an argument to what it means.

Each reader raises ValueError with what it expected and what came, which the parser puts behind the option's name.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

from charonia.cli.values import INTEGER_MAX, filled, integer
from charonia.core.trace import TraceLevel
from charonia.tools.perf.api import SharedMemory
from charonia.tools.perf.options import SEQUENCE_ID_MAX, FloatRange, IntRange

RATE_MAX = 1e9
_UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|m)?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

INTERVALS_MAX = 10_000_000
"""Most lines of a file of intervals."""


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Return a reader of finite numbers from `low` to `high`; `above` leaves `low` itself out."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high and not (above and value == low):
            return value
        least = f"a number above {low:g}" if above else f"a number of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"expected {least}{most}, got '{text}'")

    return read


def duration(default_unit: str) -> Callable[[str], int]:
    """Return a reader of times such as `50ms` or `1.5s` into ns; a number alone is in `default_unit`."""

    def read(text: str) -> int:
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"expected a time such as 50ms or 2s, got '{text}'")
        return round(float(match[1]) * _UNITS_NS[match[2] or default_unit])

    return read


def concurrency_range(text: str) -> IntRange:
    """Read `start[:end[:step]]`; without an end it is one level, with 0 it has none."""
    parts = text.split(":")
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"expected START, START:END or START:END:STEP, got '{text}'")
    start = integer(1)(parts[0])
    end = integer(0)(parts[1]) if len(parts) > 1 else start
    return IntRange(start, end, integer(1)(parts[2]) if len(parts) > 2 else 1)


def periodic_range(text: str) -> IntRange:
    """Read `start:end[:step]`, whose end is mandatory."""
    if ":" not in text:
        raise ValueError(f"expected START:END or START:END:STEP, got '{text}'")
    levels = concurrency_range(text)
    if levels.end == 0:
        raise ValueError(f"expected an END of at least 1, got '{text}'")
    return levels


def rate_range(text: str) -> FloatRange:
    """Read `start[:end[:step]]` in requests/s; without an end it is one level, with 0 it has none."""
    parts = text.split(":")
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"expected START, START:END or START:END:STEP, got '{text}'")
    rate = number(0, RATE_MAX, above=True)
    start = rate(parts[0])
    end = number(0, RATE_MAX)(parts[1]) if len(parts) > 1 else start
    return FloatRange(start, end, rate(parts[2]) if len(parts) > 2 else 1.0)


def id_range(text: str) -> tuple[int, int]:
    """Read `start[:end]` of correlation ids; the end is not one of them."""
    start_text, colon, end_text = text.partition(":")
    start = integer(1, SEQUENCE_ID_MAX)(start_text)
    end = integer(1, SEQUENCE_ID_MAX)(end_text) if colon else SEQUENCE_ID_MAX
    if end <= start:
        raise ValueError(f"expected an end above {start}, got '{text}'")
    return start, end


def percentile(text: str) -> float | None:
    """Read a percentile, -1 for the mean."""
    if text.strip() == "-1":
        return None
    value = number(0, 100, above=True)(text)
    if value == 100:
        raise ValueError(f"expected a number below 100, or -1 for the mean, got '{text}'")
    return value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `name:d1,d2,...`; the name may hold colons."""
    name, _, dimensions = text.rpartition(":")
    try:
        sizes = tuple(int(size) for size in dimensions.split(","))
    except ValueError:
        sizes = ()
    if not name or not sizes or min(sizes) < 1 or max(sizes) > INTEGER_MAX:
        raise ValueError(f"expected NAME:D1,D2,... with dimensions of at least 1, got '{text}'")
    return name, sizes


def value_range(text: str) -> tuple[str, float, float]:
    """Read `name:low:high`; the name may hold colons."""
    name, _, high_text = text.rpartition(":")
    name, _, low_text = name.rpartition(":")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low = high = math.nan
    if not name or not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"expected NAME:LOW:HIGH with LOW not above HIGH, got '{text}'")
    return name, low, high


def header(text: str) -> tuple[str, str]:
    """Read `Name:Value`."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise ValueError(f"expected Name:Value, got '{text}'")
    return name.strip(), value.strip()


def parameter(text: str) -> tuple[str, bool | int | str]:
    """Read `name:value:type` with a type of bool, int or string; the value may hold colons."""
    name, _, rest = text.partition(":")
    value, _, kind = rest.rpartition(":")
    match kind:
        case "string" if name:
            return name, value
        case "bool" if name and value.lower() in _BOOLEANS:
            return name, _BOOLEANS[value.lower()]
        case "int" if name and re.fullmatch(r"[+-]?\d{1,19}", value):
            return name, int(value)
    raise ValueError(f"expected NAME:VALUE:TYPE with a TYPE of bool, int or string, got '{text}'")


def composing_models(text: str) -> tuple[tuple[str, str], ...]:
    """Read `name[:version],...`."""
    models = []
    for part in text.replace(" ", "").split(","):
        name, _, version = part.partition(":")
        models.append((filled(name), version))
    return tuple(models)


def objective(text: str) -> int:
    """Read `latency:TIME` into ns; a number alone is in milliseconds."""
    metric, _, limit = text.partition(":")
    if metric.strip() not in ("latency", "request_latency"):
        raise ValueError(f"expected latency:TIME, e.g. latency:50ms, got '{text}'")
    limit_ns = duration("ms")(limit)
    if limit_ns == 0:
        raise ValueError(f"expected a time above 0, got '{text}'")
    return limit_ns


def shared_memory(text: str) -> SharedMemory:
    """Read the kind of shared memory."""
    word = text.strip().lower()
    if word == "cuda":
        raise ValueError("expected none or system, got 'cuda': memory of GPUs is not offered")
    if word not in ("none", "system"):
        raise ValueError(f"expected none or system, got '{text}'")
    return SharedMemory(word)


def service_kind(text: str) -> str:
    """Read the kind of service, of which there is one."""
    if text.strip().lower() != "triton":
        raise ValueError(f"expected triton, got '{text}': only servers of the KServe v2 protocol are measured")
    return "triton"


def present_file(text: str) -> Path:
    """Read the path of a file that is there."""
    path = Path(filled(text))
    if not path.is_file():
        raise ValueError(f"expected a file, got '{text}', which is none")
    return path


def output_file(text: str) -> Path:
    """Read the path of a file to write, in a folder that is there."""
    path = Path(filled(text))
    if not path.parent.is_dir():
        raise ValueError(f"expected a file in a folder that exists, got '{text}'")
    if path.is_dir():
        raise ValueError(f"expected a file, got the folder '{text}'")
    return path


def new_file(text: str) -> Path:
    """Read the path of a file to write that is not there yet."""
    path = output_file(text)
    if path.exists():
        raise ValueError(f"expected a file that does not exist yet, got '{text}'")
    return path


def data_source(text: str) -> str:
    """Read random, zero, a folder or a file."""
    if text in ("random", "zero") or Path(text).exists():
        return filled(text)
    raise ValueError(f"expected random, zero, a folder or a JSON file, got '{text}', which does not exist")


def intervals(text: str) -> tuple[int, ...]:
    """Read a file of one integer a line, microseconds between requests."""
    path = present_file(text)
    gaps = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for row, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                gaps.append(integer(0)(line.strip()))
            except ValueError as error:
                raise ValueError(f"{path}: line {row}: {error}") from None
            if len(gaps) > INTERVALS_MAX:
                raise ValueError(f"{path}: expected at most {INTERVALS_MAX} lines")
    if not any(gaps):
        raise ValueError(f"{path}: expected a line with the microseconds to the next request, got none above 0")
    return tuple(gaps)


def trace_level(text: str) -> str:
    """Read a level of tracing."""
    word = text.strip().upper()
    if word not in TraceLevel.__members__:
        raise ValueError(f"expected {' or '.join(TraceLevel.__members__)}, got '{text}'")
    return word
