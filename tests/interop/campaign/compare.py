"""Which answers are the same: all that a program can tell, but for what naturally differs. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.interop.campaign.calls import Call, Http, Scenario

MEASURED = {"ns", "last_inference", "memory_usage"}
"""Keys of times and memory: that they are there is compared, not their values."""
ERRORS = ("error", "error_message", "reason")
COUNTERS = re.compile(r"^(nv_inference_(?:request_success|request_failure|count|exec_count)\{.*\}) (\S+)$", re.M)
FIXED_BEGINNINGS = ("[request id: ", "Request for unknown model: ", "failed to load '")
"""Beginnings of errors that programs look for."""


@dataclass(frozen=True)
class Rule:
    """A difference that is on purpose.

    Attributes:
        row: The row of docs/compatibility.md that says so: its first cell.
        covers: Whether it explains this difference; gets the call and both answers, in plain form.
    """

    row: str
    covers: Callable[[Call, Any, Any], bool]


RULES: Sequence[Rule] = ()


@dataclass(frozen=True)
class Difference:
    """What both said to the same call.

    Attributes:
        call: The call.
        ours: Charonia's answer, in comparable form.
        theirs: Triton's.
        texts: Sentences of errors in both answers.
        rule: What explains it; None if nothing does.
    """

    call: Call
    ours: Any
    theirs: Any
    texts: tuple[Sequence[str], Sequence[str]]
    rule: Rule | None

    def __str__(self) -> str:
        lines = [_shortened(self.call)]
        for path, ours, theirs in _parts("", self.ours, self.theirs):
            lines.append(f"  {path or 'answer'}\n    Charonia {_shortened(ours)}\n    Triton   {_shortened(theirs)}")
        for text in zip(("Charonia", "Triton"), self.texts, strict=True):
            lines += [f"  {text[0]}: {_shortened(sentence)}" for sentence in text[1]]
        return "\n".join(lines)


def difference(scenario: Scenario, call: Call, ours: Any, theirs: Any) -> Difference | None:
    """Return the difference between two answers, or None if a program cannot tell."""
    texts = (list(_errors(ours)), list(_errors(theirs)))
    ours, theirs = (comparable(scenario, call, answer) for answer in (ours, theirs))
    if _text(ours) == _text(theirs):
        return None
    rule = next((rule for rule in RULES if rule.covers(call, ours, theirs)), None)
    return Difference(call, ours, theirs, texts, rule)


def comparable(scenario: Scenario, call: Call, answer: Any) -> Any:
    """Return the answer without what naturally differs."""
    if isinstance(call, Http) and call.metrics:
        own = [found for found in COUNTERS.findall(answer["body"]) if f'model="s{scenario.seed}_' in found[0]]
        return sorted([name, float(count)] for name, count in own if float(count))
    if isinstance(call, Http) and call.path.endswith("/index"):
        own = [entry for entry in answer["body"] if entry["name"].startswith(f"s{scenario.seed}_")]
        return sorted((_bare(entry) for entry in own), key=_text)
    if isinstance(call, Http) and call.path.endswith("generate_stream") and answer["status"] == 200:
        return [_bare(json.loads(frame.removeprefix("data: "))) for frame in answer["body"].split("\n\n")[:-1]]
    if isinstance(call, Http) and (answer["status"] != 200 or not answer["body"]):
        return {"status": answer["status"], "body": _bare(answer["body"])}
    return _bare(answer)


def _parts(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two answers differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key in ours:
            yield from _parts(f"{path}.{key}", ours[key], theirs[key])
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _parts(f"{path}[{index}]", *pair)
    elif _text(ours) != _text(theirs):
        yield path, ours, theirs


def _shortened(value: Any) -> str:
    return re.sub(r"x{9,}|(?:78){9,}", "x…", re.sub(r"\s+", " ", str(value)))[:1500]


def _errors(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            if key in ERRORS and value:
                yield str(value)
            yield from _errors(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from _errors(value)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare_value(key, item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1 and 1.0 are the same in JSON
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _bare_value(key: str, value: Any) -> Any:
    if key in MEASURED:
        return "..."
    if key in ERRORS and value:
        return next((begin for begin in FIXED_BEGINNINGS if str(value).startswith(begin)), "") + "..."
    return _bare(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
