"""Conditions under which a run counts as failed, as a build server needs them: `p99 > 20ms`. Pure."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from charonia.tools.results.records import LevelResult

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_FORM = re.compile(r"\s*([a-z]\w*(?:\.\d+)?)\s*(>=|<=|>|<)\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ%/]*)\s*")
_EXPECTED = (
    "expected FIGURE > VALUE or FIGURE < VALUE; figures: mean, p99 (any percentile) and max with a time such as 20ms, "
    "throughput in infer/s, errors in %"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one figure of a level with a limit.

    Attributes:
        text: As it was written.
        figure: `mean`, `p99`, `p99.9`, ..., `max`, `throughput` or `errors`.
        operator: `>`, `>=`, `<` or `<=`.
        limit: In nanoseconds, inferences per second, or as a share.
    """

    text: str
    figure: str
    operator: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Return the condition that a text describes: `p99 > 20ms`, `throughput < 500`, `errors > 0.1%`.

        Raises:
            ValueError: It describes none; the text says what is expected.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{_EXPECTED}, got '{text}'")
        figure, sign, value, unit = match.groups()
        factors = _units(figure)
        if factors is None:
            raise ValueError(f"{_EXPECTED}, got the figure '{figure}'")
        if unit not in factors:
            units = " or ".join(name or "no unit" for name in factors)
            raise ValueError(f"'{figure}' takes a value in {units}, got '{value}{unit}'")
        return cls(text.strip(), figure, sign, float(value) * factors[unit])

    def value(self, level: LevelResult) -> float:
        """Return the figure of a level."""
        match self.figure:
            case "mean":
                return level.response_times.mean
            case "max":
                return level.response_times.maximum
            case "throughput":
                return level.throughput.value
            case "errors":
                return level.error_share
            case _:
                return level.percentile(float(self.figure[1:]))

    def holds(self, level: LevelResult) -> bool:
        """Whether it is true of a level. Without a successful request, there is no latency to compare."""
        if not level.request_count and self.figure not in ("throughput", "errors"):
            return False
        return _OPERATORS[self.operator](self.value(level), self.limit)


def _units(figure: str) -> dict[str, float] | None:
    if figure == "throughput":
        return {"": 1.0, "/s": 1.0, "infer/s": 1.0, "infer/sec": 1.0}
    if figure == "errors":
        return {"%": 0.01}
    return _NS if figure in ("mean", "max") or _PERCENTILE.fullmatch(figure) else None
