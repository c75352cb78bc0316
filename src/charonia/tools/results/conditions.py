"""Conditions under which a run counts as failed, as a build server needs them: `p99 > 20ms`. Pure."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from charonia.tools.results.language import FIGURES, NAMES, LanguageFigures
from charonia.tools.results.records import LevelResult

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_OF_TOKENS = re.compile(rf"({'|'.join(NAMES)})\.(mean|min|max|p50|p90|p95|p99)")
_FORM = re.compile(r"\s*([a-z]\w*(?:\.\w+)?)\s*(>=|<=|>|<)\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ%/]*)\s*")
_EXPECTED = (
    "expected FIGURE > VALUE or FIGURE < VALUE; figures: mean, p99 (any percentile) and max with a time such as 20ms, "
    "throughput in infer/s, errors in %; of language models ttft.p99 or itl.mean with a time, output_tokens in tokens/s"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one figure of a level with a limit.

    Attributes:
        figure: `mean`, `p99`, `p99.9`, ..., `max`, `throughput` or `errors`; of language models `output_tokens`, a
            rate, or a name of `NAMES` with `mean`, `min`, `max`, `p50`, `p90`, `p95` or `p99`, such as `ttft.p99`.
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
            ValueError: It describes none; the message has the expected form.
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

    @property
    def is_of_language(self) -> bool:
        """Whether only language models have this figure."""
        return self.figure == "output_tokens" or _OF_TOKENS.fullmatch(self.figure) is not None

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
            case _ if self.is_of_language:
                return _of_language(self.figure, level.language)
            case _:
                return level.percentile(float(self.figure[1:]))

    def holds(self, level: LevelResult) -> bool:
        """Whether it is true of a level. Without a successful request, there is no latency to compare."""
        if not level.request_count and self.figure not in ("throughput", "errors"):
            return False
        if math.isnan(self.value(level)):
            return False
        return _OPERATORS[self.operator](self.value(level), self.limit)


_PARTS = {"mean": "mean", "min": "minimum", "max": "maximum"}


def _of_language(figure: str, figures: LanguageFigures | None) -> float:
    """Return a figure of a language model, NaN if the level has none."""
    if figures is None:
        return math.nan
    if figure == "output_tokens":
        return figures.output_rate
    name, _, part = figure.partition(".")
    spread = figures.spread(NAMES[name])
    return math.nan if spread is None else float(getattr(spread, _PARTS.get(part, part)))


def _units(figure: str) -> dict[str, float] | None:
    if figure == "throughput":
        return {"": 1.0, "/s": 1.0, "infer/s": 1.0, "infer/sec": 1.0}
    if figure == "errors":
        return {"%": 0.01}
    if figure == "output_tokens":
        return {"": 1.0, "/s": 1.0, "tokens/s": 1.0}
    found = _OF_TOKENS.fullmatch(figure)
    if found is not None:
        return _NS if FIGURES[NAMES[found[1]]].unit == "ms" else {"": 1.0}
    return _NS if figure in ("mean", "max") or _PERCENTILE.fullmatch(figure) else None
