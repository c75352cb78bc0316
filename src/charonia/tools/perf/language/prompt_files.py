"""Files of prompts: JSON lines with texts, messages, sessions, or the lengths of a trace."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import orjson

from charonia.core.errors import ServingError, invalid
from charonia.tools.perf.language.plan import PromptPlan
from charonia.tools.perf.language.prompts import Dialogue, TextGenerator, Turn, blocks, output_tokens

LINES_MAX = 1_000_000
"""Limit of lines of a file."""

TOKENS_MAX = 10_000_000
"""Largest number of tokens that a line may request."""

_TEXTS = ("text", "prompt", "text_input")
_OUTPUT_LENGTHS = ("output_length", "max_tokens", "max_completion_tokens")
_OTHERS = ("messages", "input_length", "hash_ids", "timestamp", "delay", "session_id", "extra")
_MEMBERS = (*_TEXTS, *_OUTPUT_LENGTHS, *_OTHERS)
_EXPECTED = "expected 'text', 'messages', 'turns' or 'input_length'"


def read_prompts(plan: PromptPlan, generator: Callable[[], TextGenerator], seed: int) -> list[Dialogue]:
    """Return the dialogues of a file.

    Args:
        plan: The file, and the default length of responses.
        generator: Makes the generator of texts for lines with a length only.
        seed: Seed of these lengths.

    Raises:
        ServingError: INVALID_ARG, with file and line.
    """
    return _Reader(plan, generator, seed).read(Path(plan.file))


class _Reader:
    def __init__(self, plan: PromptPlan, generator: Callable[[], TextGenerator], seed: int) -> None:
        self._plan = plan
        self._make = generator
        self._generator: TextGenerator | None = None
        self._random = Random(seed)
        self._line = 0

    def read(self, path: Path) -> list[Dialogue]:
        sessions: dict[str, tuple[float | None, list[Turn]]] = {}
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if number > LINES_MAX:
                        raise invalid(f"expected at most {LINES_MAX} lines")
                    if line.strip():
                        self._line = number
                        self._add(_object(line), sessions)
        except OSError as error:
            raise invalid(f"{path}: cannot be read: {error.strerror}") from None
        except ServingError as error:
            raise invalid(f"{path}: line {self._line}: {error.message}", hint=error.hint) from None
        if not sessions:
            raise invalid(f"{path}: {_EXPECTED} in each line, got no line")
        found = [Dialogue(tuple(turns), at_ms) for at_ms, turns in sessions.values()]
        return _in_time(found, path) if self._plan.is_replay else found

    def _add(self, line: Mapping[str, Any], sessions: dict[str, tuple[float | None, list[Turn]]]) -> None:
        session = str(line["session_id"]) if "session_id" in line else f"\0{self._line}"
        at_ms = _number(line, "timestamp", 0.0) if "timestamp" in line else None
        turns = line.get("turns")
        if turns is None:
            sessions.setdefault(session, (at_ms, []))[1].append(self._turn(line))
            return
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise invalid("'turns': expected a list of objects, at least one")
        sessions.setdefault(session, (at_ms, []))[1].extend(map(self._turn, turns))

    def _turn(self, line: Mapping[str, Any]) -> Turn:
        unknown = sorted(line.keys() - {*_MEMBERS, "turns"})
        if unknown:
            raise invalid(f"'{unknown[0]}': expected one of {', '.join(_MEMBERS)}, turns", hint="'extra' takes others")
        length = next((int(_number(line, name, 1, TOKENS_MAX)) for name in _OUTPUT_LENGTHS if name in line), None)
        extra = line.get("extra", {})
        if not isinstance(extra, dict):
            raise invalid("'extra': expected an object")
        messages = line.get("messages", [])
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise invalid("'messages': expected a list of objects with 'role' and 'content'")
        return Turn(
            text="" if messages else self._text(line),
            messages=tuple(messages),
            output_tokens=output_tokens(self._plan, self._random) if length is None else length,
            delay_ms=_number(line, "delay", 0.0) if "delay" in line else 0.0,
            fields=extra,
        )

    def _text(self, line: Mapping[str, Any]) -> str:
        for name in _TEXTS:
            if name in line:
                if not isinstance(line[name], str) or not line[name]:
                    raise invalid(f"'{name}': expected a text")
                return str(line[name])
        if "input_length" not in line:
            raise invalid(f"{_EXPECTED}, got none of them")
        tokens = int(_number(line, "input_length", 1, TOKENS_MAX))
        hash_ids = line.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(isinstance(each, int) for each in hash_ids):
            raise invalid("'hash_ids': expected a list of integers")
        if self._generator is None:
            self._generator = self._make()
        if hash_ids:
            return blocks(tokens, hash_ids, self._generator)
        return self._generator.text(tokens, f"line {self._line}")


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise invalid(f"expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise invalid(f"expected a JSON object, got {type(found).__name__}")
    return found


def _number(line: Mapping[str, Any], name: str, low: float, high: float = math.inf) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"'{name}': expected a number of at least {low:g}, got {value!r:.40}")
    return float(value)


def _in_time(found: list[Dialogue], path: Path) -> list[Dialogue]:
    missing = [number for number, each in enumerate(found, 1) if each.at_ms is None]
    if missing:
        raise invalid(
            f"{path}: --fixed-schedule: expected 'timestamp' in milliseconds in each line or session, got none in "
            f"number {missing[0]}"
        )
    return sorted(found, key=lambda each: each.at_ms or 0.0)
