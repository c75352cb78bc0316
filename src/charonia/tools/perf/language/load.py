"""The requests of a language model's run, and the decoder of its responses, with tokenizers on this machine.

Files of prompts are JSON lines with texts, messages, sessions, or the lengths of a trace.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import orjson

from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.metadata import ModelMetadata
from charonia.install_hint import extra_hint
from charonia.tools.perf.api import RunSettings, SequencePlan
from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, PromptPlan
from charonia.tools.perf.language.replies import ReplyReader
from charonia.tools.perf.language.requests import (
    Conversation,
    LanguageSource,
    ModelInputs,
    TextGenerator,
    Turn,
    blocks,
    generated,
    output_tokens,
)
from charonia.tools.perf.options import PerfOptions, WireProtocol, replayed
from charonia.tools.perf.run import Subject
from charonia.tools.perf.schedule import gaps_between

LINES_MAX = 1_000_000
"""Limit of lines of a file."""

TOKENS_MAX = 10_000_000
"""Largest number of tokens that a line may request."""

_TEXTS = ("text", "prompt", "text_input")
_OUTPUT_LENGTHS = ("output_length", "max_tokens", "max_completion_tokens")
_OTHERS = ("messages", "input_length", "hash_ids", "timestamp", "delay", "session_id", "extra")
_MEMBERS = (*_TEXTS, *_OUTPUT_LENGTHS, *_OTHERS)
_EXPECTED = "expected 'text', 'messages', 'turns' or 'input_length'"


def read_prompts(plan: PromptPlan, generator: Callable[[], TextGenerator], seed: int) -> list[Conversation]:
    """Return the dialogues of a file.

    Args:
        generator: Makes the generator of texts for lines with a length only.

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

    def read(self, path: Path) -> list[Conversation]:
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
        found = [Conversation(tuple(turns), at_ms) for at_ms, turns in sessions.values()]
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


def _in_time(found: list[Conversation], path: Path) -> list[Conversation]:
    missing = [number for number, each in enumerate(found, 1) if each.at_ms is None]
    if missing:
        raise invalid(
            f"{path}: --fixed-schedule: expected 'timestamp' in milliseconds in each line or session, got none in "
            f"number {missing[0]}"
        )
    return sorted(found, key=lambda each: each.at_ms or 0.0)


TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"


class LanguageRun:
    """The requests, and the decoder of their responses.

    Args:
        model: Model name and version, "" for the server's choice.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read, UNSUPPORTED if a package is missing.
    """

    def __init__(
        self,
        model: tuple[str, str],
        plan: LanguagePlan,
        prompts: PromptPlan,
        seed: int,
        inputs: ModelInputs,
        is_grpc: bool,
    ) -> None:
        tokenizer = FileTokenizer(plan.tokenizer) if plan.tokenizer else None

        def generator() -> TextGenerator:
            return TextGenerator(tokenizer, seed)

        if prompts.file:
            self._conversations = read_prompts(prompts, generator, seed)
        else:
            self._conversations = generated(prompts, generator(), seed)
        self._is_replay = prompts.is_replay
        self.source = LanguageSource(model, plan, prompts, self._conversations, inputs)
        self.replies = ReplyReader(self.source, plan.endpoint, tokenizer, is_grpc)

    def settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run with what follows from the prompts: sessions, and the times of a replay."""
        if self.source.has_sessions:
            settings = replace(settings, sequences=SequencePlan(length_from_data=True))
        if not self._is_replay:
            return settings
        times_s = [(conversation.at_ms or 0.0) / 1000 for conversation in self._conversations]
        return replayed(settings, gaps_between(times_s, "--fixed-schedule"))


def language_run(options: PerfOptions, subject: Subject) -> LanguageRun:
    """Return the requests that the options describe.

    Raises:
        ServingError: As `LanguageRun`, and INVALID_ARG if the model is not a language model.
    """
    target, plan = options.target, options.language
    inputs = model_inputs(plan, subject.metadata, subject.config)
    prompts = replace(options.prompts, fields=target.parameters)
    is_grpc = target.protocol is WireProtocol.GRPC
    return LanguageRun((target.model, target.version), plan, prompts, options.load.seed, inputs, is_grpc)


def model_inputs(plan: LanguagePlan, metadata: ModelMetadata, config: Mapping[str, Any]) -> ModelInputs:
    """Return the inputs of a model.

    Raises:
        ServingError: INVALID_ARG if the KServe protocol is requested, and it is not a language model.
    """
    names = frozenset(tensor.name for tensor in metadata.inputs)
    outputs = {tensor.name for tensor in metadata.outputs}
    if not plan.endpoint.is_openai and (TEXT_INPUT not in names or TEXT_OUTPUT not in outputs):
        got = f"{', '.join(sorted(names)) or 'none'} and {', '.join(sorted(outputs)) or 'none'}"
        raise invalid(
            f"model '{metadata.name}': --endpoint {plan.endpoint.value}: expected an input '{TEXT_INPUT}' and an "
            f"output '{TEXT_OUTPUT}', got {got}",
        )
    batches = bool(config.get("max_batch_size", 0)) and plan.endpoint is LanguageEndpoint.INFER
    return ModelInputs(names, batches)


TOKENIZER_FILE = "tokenizer.json"


class FileTokenizer:
    """A tokenizer in the form of Hugging Face.

    Args:
        place: `tokenizer.json`, or a folder with one.

    Raises:
        ServingError: INVALID_ARG for another file, UNSUPPORTED without the package.
    """

    def __init__(self, place: str) -> None:
        path = Path(place)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if path.suffix == ".gguf":
            raise invalid(
                f"tokenizer '{path}': expected {TOKENIZER_FILE}, got a GGUF file",
                hint="the folder of the original model has one; without a tokenizer, the server's counts are used",
            )
        if not path.is_file():
            raise invalid(f"tokenizer '{place}': expected {TOKENIZER_FILE} or a folder with one, got neither")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            library = import_module("tokenizers")
        except ImportError:
            raise unsupported("the package 'tokenizers' is not installed", hint=extra_hint("llm")) from None
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise invalid(f"tokenizer '{path}': cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [len(each.ids) for each in encoded]

    def words(self) -> list[str]:
        """Return the tokens that are words of plain letters."""
        found = (self._tokenizer.decode([number]).strip() for number in range(self._tokenizer.get_vocab_size()))
        return list(dict.fromkeys(word for word in found if word.isascii() and word.isalpha() and word.islower()))
