"""Finds the models that a model calls, and arranges a pipeline in stages.

The steps of an ensemble are in its configuration. A Python model calls others by name: constant names are found in its
source, read as tokens, so that no source can crash or exhaust the platform.
"""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from charonia.config.model import ModelConfig
from charonia.platform.models.records import VersionReport

SOURCE_CHARS_MAX = 256 * 1024
"""Source of a model that is searched for calls, in all its files."""

CALLS_MAX = 100
"""Most models that a model is known to call."""

LOOKED_AT_MAX = 1_000_000
"""Tokens of a file that are looked at, each time counted: what is nested is looked at again and again."""

CALL = "InferenceRequest"
"""The class whose instances are calls of other models."""

_ARGUMENT = "model_name"
_NAME = re.compile(r"""["']([A-Za-z0-9][A-Za-z0-9_.-]*)["']""")
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A model of a pipeline.

    Attributes:
        number: Its version, 0 if the project has none that is ready.
    """

    name: str
    number: int = 0
    report: VersionReport = field(default_factory=VersionReport)


def calls_of(config: ModelConfig, sources: Iterable[str]) -> list[str]:
    """Return the models that a model calls: the steps of an ensemble, or constant names in the source of its files."""
    ensemble = config.ensemble_scheduling
    found = [step.model_name for step in ensemble.step] if ensemble is not None else []
    left = SOURCE_CHARS_MAX
    for source in sources:
        if CALL in source and len(source) <= left:
            left -= len(source)
            found += _Source(source).calls()
    return list(dict.fromkeys(name for name in found if name))[:CALLS_MAX]


class _Source:
    """The tokens of a Python file."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._left = LOOKED_AT_MAX
        try:
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type not in _SKIPPED:
                    self._tokens.append(token.string)
        except (tokenize.TokenError, SyntaxError):  # the part before the error counts
            pass
        self._constants = {
            before: text
            for before, equals, text, after in zip(*(self._tokens[n:] for n in range(4)), strict=False)
            if equals == "=" and _NAME.fullmatch(text) and after in ("\n", "\r\n", "", ";")
        }

    def calls(self) -> Iterator[str]:
        """Yield the names of called models, also those passed to a function that makes the call with its argument."""
        passed_on = dict[tuple[str, str, int], None]()
        for at in self._places(CALL):
            given = self._arguments(at + 1).get(_ARGUMENT, [])
            yield from self._names(given)
            function, parameters = self._function(at)
            order = [name for name in parameters if name not in ("self", "cls")]
            if len(given) == 1 and given[0] in order:
                passed_on[function, given[0], order.index(given[0])] = None
        for function, name, position in passed_on:
            for at in self._places(function):
                arguments = self._arguments(at + 1)
                yield from self._names(arguments.get(name) or arguments.get(position, []))

    def _places(self, name: str) -> list[int]:
        """Return where a name is called or defined."""
        self._left -= len(self._tokens)
        return (
            []
            if self._left < 0
            else [n for n in range(len(self._tokens) - 1) if self._tokens[n] == name and self._tokens[n + 1] == "("]
        )

    def _names(self, expression: Sequence[str]) -> Iterator[str]:
        """Yield the text that an expression is: a literal, or a name such as `self.detector` with a constant value."""
        if expression:
            literal = expression[0] if len(expression) == 1 else ""
            found = _NAME.fullmatch(literal) or _NAME.fullmatch(self._constants.get(expression[-1], ""))
            if found is not None:
                yield found[1]

    def _arguments(self, start: int) -> dict[str | int, list[str]]:
        """Return the tokens of each argument by its name or position, from the bracket at `start`."""
        found: dict[str | int, list[str]] = {}
        depth, count = 0, 0
        name: str | int = 0
        for n in range(start, len(self._tokens)):
            token = self._tokens[n]
            self._left -= 1
            depth += (token in "([{") - (token in ")]}") if token else 0
            if depth == 0 or self._left < 0:
                break
            if depth == 1 and token == ",":
                count += 1
                name = count
            elif depth == 1 and token == "=":
                name = found.pop(name, [""])[0]
            elif n > start:
                found.setdefault(name, []).append(token)
        return found

    def _function(self, at: int) -> tuple[str, list[str]]:
        """Return name and parameters of the function around a token."""
        for n in range(at, -1, -1):
            self._left -= 1
            if self._left < 0:
                break
            if self._tokens[n] == "def":
                parameters = self._arguments(n + 2)
                return self._tokens[n + 1], [str(p[0] if isinstance(k, int) else k) for k, p in parameters.items() if p]
        return "", []


def diagrams(models: Mapping[str, PipelineModel]) -> list[tuple[PipelineModel, list[list[PipelineModel]]]]:
    """Return the models that no other one calls, each with the models that it calls, in stages."""
    called = {name for model in models.values() for name in model.report.calls}
    tops = [model for model in models.values() if model.report.calls and model.name not in called]
    return [(top, [[models[name] for name in stage if name in models] for stage in stages(top.report)]) for top in tops]


def stages(report: VersionReport) -> list[list[str]]:
    """Return the called models in stages: a step of an ensemble is in a stage after those whose tensors it takes."""
    steps = report.config.get("ensemble_scheduling", {}).get("step", [])
    known = {tensor["name"] for tensor in report.config.get("input", ())}
    found = [] if steps else [report.calls]
    while steps:
        ready = [step for step in steps if set(step.get("input_map", {}).values()) <= known] or steps
        found.append(list(dict.fromkeys(step["model_name"] for step in ready)))
        known |= {tensor for step in ready for tensor in step.get("output_map", {}).values()}
        steps = [step for step in steps if step not in ready]
    return found


def as_one(models: Mapping[str, PipelineModel]) -> VersionReport:
    """Return a report with what all models of a pipeline need; its backend is of the first that lacks a package."""
    reports = [model.report for model in models.values()]
    lacking = [each for each in reports if any(not need.is_here for need in each.needs)]
    return VersionReport(
        backend=next((each.backend for each in [*lacking, *reports]), ""),
        checked_with=next((each.checked_with for each in reports if each.checked_with), ""),
        needs=[need for each in reports for need in each.needs],
        requirements="\n".join(each.requirements for each in reports if each.requirements),
    )
