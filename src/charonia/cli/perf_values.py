"""Readers of the values of options of `charonia perf`.

A reader raises ValueError with the expected and the actual value; the parser puts the option's name before it.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from charonia.cli.command_line import Fields
from charonia.cli.values import INTEGER_MAX, duration, fetched, filled, integer, number, path, path_text, word
from charonia.core.trace import TraceLevel
from charonia.tools.perf.api import ServiceObjective, SharedMemory
from charonia.tools.perf.language.plan import LanguageEndpoint, Length
from charonia.tools.results.language import NAMES
from charonia.tools.results.records import LoadMode

RATE_MAX = 1e9
LENGTH_MAX = 1e7
"""Limit of the length of a generated prompt or response, in tokens, and of a delay, in milliseconds."""

PREFIXES_MAX = 100_000
INTERVALS_MAX = 10_000_000
"""Limit of lines in a file of intervals."""

SEQUENCE_ID_MAX = 2**32 - 1
"""Largest correlation id if `--sequence-id-range` has no end."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def share(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a reader of percentages, as shares of one."""
    return lambda text: number(low, high)(text) / 100


def levels(mode: LoadMode, first: Callable[[str], float], final: Callable[[str], float]) -> Callable[[str], Fields]:
    """Return a reader of `start[:end[:step]]`; without an end it is one level, an end of 0 means no limit."""

    def read(text: str) -> Fields:
        parts = text.split(":")
        if not 1 <= len(parts) <= 3:
            raise ValueError(f"expected START, START:END or START:END:STEP, got '{text}'")
        start = float(first(parts[0]))
        end = float(final(parts[1])) if len(parts) > 1 else start
        step = float(first(parts[2])) if len(parts) > 2 else 1.0
        fields = {"mode": mode, "start": start, "end": end or math.inf, "step": step}
        return Fields({f"load.{name}": value for name, value in fields.items()})

    return read


concurrency_range = levels(LoadMode.CONCURRENCY, integer(1), integer(0))
rate_range = levels(LoadMode.REQUEST_RATE, number(0, RATE_MAX, above=True), number(0, RATE_MAX))


def periodic_range(text: str) -> Fields:
    """Read `start:end[:step]`, whose end is mandatory."""
    if ":" not in text:
        raise ValueError(f"expected START:END or START:END:STEP, got '{text}'")
    fields = levels(LoadMode.PERIODIC, integer(1), integer(0))(text)
    if fields["load.end"] == math.inf:
        raise ValueError(f"expected an END of at least 1, got '{text}'")
    return fields


def id_range(text: str) -> Fields:
    """Read `start[:end]` of correlation ids, excluding the end."""
    start_text, colon, end_text = text.partition(":")
    start = integer(1, SEQUENCE_ID_MAX)(start_text)
    end = integer(1, SEQUENCE_ID_MAX)(end_text) if colon else SEQUENCE_ID_MAX
    if end <= start:
        raise ValueError(f"expected an end above {start}, got '{text}'")
    return Fields({"sequences.first_id": start, "sequences.id_count": end - start})


def sequence_length(text: str) -> Fields:
    """Read the length of sequences, which overrides that of the data."""
    return Fields({"sequences.length": integer(1)(text), "sequences.length_from_data": False})


def traced(name: str, low: int) -> Callable[[str], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return a reader of a number in the server's trace settings, of at least `low`."""
    return lambda text: ((name, (str(integer(low)(text)),)),)


def trace_levels(values: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the trace setting of all given levels."""
    return (("trace_level", tuple(values)),)


def percentile(text: str) -> float | None:
    """Read a percentile, -1 for the mean."""
    if text.strip() == "-1":
        return None
    value = number(0, 100, above=True)(text)
    if value == 100:
        raise ValueError(f"expected a number below 100, or -1 for the mean, got '{text}'")
    return value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `name:d1,d2,...`; the name may contain colons."""
    name, _, dimensions = text.rpartition(":")
    try:
        sizes = tuple(int(size) for size in dimensions.split(","))
    except ValueError:
        sizes = ()
    if not name or not sizes or min(sizes) < 1 or max(sizes) > INTEGER_MAX:
        raise ValueError(f"expected NAME:D1,D2,... with dimensions of at least 1, got '{text}'")
    return name, sizes


def shapes(value: object) -> tuple[str, ...]:
    """Read one or a list of `name:d1,d2,...`, and return their texts."""
    texts = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    for text in texts:
        shape(text)
    return texts


def value_range(text: str) -> tuple[str, float, float]:
    """Read `name:low:high`; the name may contain colons."""
    name, _, high_text = text.rpartition(":")
    name, _, low_text = name.rpartition(":")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low = high = math.nan
    if not name or not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"expected NAME:LOW:HIGH with LOW not above HIGH, got '{text}'")
    return name, low, high


def parameter(text: str) -> tuple[str, bool | int | str]:
    """Read `name:value:type` with a type of bool, int or string; the value may contain colons."""
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


def objectives(text: str) -> tuple[ServiceObjective, ...]:
    """Read `latency:TIME`, of language models also others such as `ttft:200ms itl:30ms`; numbers are milliseconds."""
    return tuple(_objective(part) for part in filled(text).replace(",", " ").split())


_LIMITED = ("latency", "first_token", "second_token", "inter_token", "user_rate")


def _objective(text: str) -> ServiceObjective:
    name, _, limit = text.partition(":")
    figure = NAMES.get(name, "")
    if figure not in _LIMITED:
        raise ValueError(f"expected latency:TIME, e.g. latency:50ms, or ttft:TIME, itl:TIME, got '{text}'")
    if figure == "user_rate":
        return ServiceObjective(text, number(0, above=True)(limit), figure)
    limit_ns = duration("ms")(limit)
    if limit_ns == 0:
        raise ValueError(f"expected a time above 0, got '{text}'")
    shown = figure if figure == "latency" else name
    return ServiceObjective(f"{shown}:{limit_ns / 1e6:g}ms", limit_ns, figure)


def length(least: float) -> Callable[[str], Length]:
    """Return a reader of `mean[:deviation]`."""

    def read(text: str) -> Length:
        mean, _, deviation = text.partition(":")
        return Length(number(least, LENGTH_MAX)(mean), number(0, LENGTH_MAX)(deviation) if deviation else 0.0)

    return read


def prefixes(text: str) -> Fields:
    """Read `count:tokens` of shared prefixes."""
    count, colon, tokens = text.partition(":")
    if not colon:
        raise ValueError(f"expected COUNT:TOKENS, got '{text}'")
    return Fields(
        {
            "prompts.prefix_count": integer(1, PREFIXES_MAX)(count),
            "prompts.prefix_tokens": integer(1, int(LENGTH_MAX))(tokens),
        }
    )


def endpoint(text: str) -> LanguageEndpoint:
    """Read the API of a language model: its name, or the path of one of OpenAI's."""
    word = text.strip().strip("/").removeprefix("v1/").lower()
    word = "chat" if word == "chat/completions" else word
    try:
        return LanguageEndpoint(word)
    except ValueError:
        names = ", ".join(each.value for each in LanguageEndpoint)
        raise ValueError(f"expected one of {names}, got '{text}'") from None


def shared_memory(text: str) -> SharedMemory:
    """Read the kind of shared memory."""
    word = text.strip().lower()
    if word == "cuda":
        raise ValueError("expected none or system, got 'cuda': GPU memory is not supported")
    if word not in ("none", "system"):
        raise ValueError(f"expected none or system, got '{text}'")
    return SharedMemory(word)


service_kind = word({"triton": Fields({}), "openai": Fields({"is_language": True})})
"""Reads the kind of service: triton, or openai, which is the same as `--llm`."""


def present_place(text: str) -> str:
    """Read the path of an existing file or folder."""
    if not path(text).exists():
        raise ValueError(f"expected a file or a folder, got '{text}', which does not exist")
    return path_text(text)


def present_file(text: str) -> str:
    """Read the path of an existing file."""
    if not path(text).is_file():
        raise ValueError(f"expected a file, got '{text}', which is not one")
    return path_text(text)


def output_file(text: str) -> Path:
    """Read the path of a file to write, in an existing folder."""
    found = path(text)
    if not found.parent.is_dir():
        raise ValueError(f"expected a file in a folder that exists, got '{text}'")
    if found.is_dir():
        raise ValueError(f"expected a file, got the folder '{text}'")
    return found


def new_file(text: str) -> Path:
    """Read the path of a file to write that does not exist yet."""
    found = output_file(text)
    if found.exists():
        raise ValueError(f"expected a file that does not exist yet, got '{text}'")
    return found


def data_source(text: str) -> str:
    """Read random, zero, a folder or a file, also of a store."""
    if text in ("random", "zero"):
        return text
    if (found := fetched(text)).exists():
        return str(found)
    raise ValueError(f"expected random, zero, a folder or a JSON file, got '{text}', which does not exist")


def intervals(text: str) -> Fields:
    """Read a file with one integer per line, microseconds between requests."""
    file, gaps = path(present_file(text)), []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for row, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                gaps.append(integer(0)(line.strip()) * 1000)
            except ValueError as error:
                raise ValueError(f"{file}: line {row}: {error}") from None
            if len(gaps) > INTERVALS_MAX:
                raise ValueError(f"{file}: expected at most {INTERVALS_MAX} lines")
    if not any(gaps):
        raise ValueError(f"{file}: expected a line with the microseconds to the next request, got none above 0")
    return Fields({"load.mode": LoadMode.INTERVALS, "load.intervals_ns": tuple(gaps)})


trace_level = word({name: name for name in TraceLevel.__members__})
"""Reads the name of a level of tracing."""
