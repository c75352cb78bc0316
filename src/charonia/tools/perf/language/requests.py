"""The requests of a run: dialogues in the form of an API, the run's `InputSource`; and generated text. Pure.

Generated text is words that the tokenizer takes for one token each, so its length in tokens is that in words. What a
tokenizer counts otherwise is corrected by adding and removing words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, Length, PromptPlan, Tokenizer
from charonia.wire.http_codec import model_path
from charonia.wire.json_text import dump

BLOCK_TOKENS = 512
"""Tokens of a prompt that one number of `hash_ids` stands for, as in Mooncake's traces."""

_WORDS = (
    "about after all also and any back because but can come could day even find first for from get give good have her "
    "here him how into its just know like look make man many more new not now one only other our out people say see "
    "some take tell than that the their them then there these they thing think this time two use very want way well "
    "what when which who will with work would year you your"
)
COMMON_WORDS = tuple(_WORDS.split())
"""Words that are one token to most tokenizers, for generated text without a tokenizer."""

_CORRECTIONS_MAX = 16
_POOL_MAX = 4096
_POOL_MIN = 16
_BEFORE = "the"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a dialogue.

    Attributes:
        text: The user's text, "" if `messages` have it.
        output_tokens: Most tokens of the response, 0 for the limit of the server.
    """

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int = 0
    delay_ms: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order; each follows the response to the previous one.

    Attributes:
        at_ms: When its first request is sent in a replay, None without a time.
    """

    turns: tuple[Turn, ...]
    at_ms: float | None = None


class TextGenerator:
    """Generates text of a given number of tokens; the same seed gives the same texts.

    Args:
        tokenizer: Counts the tokens, None to count words.
    """

    def __init__(self, tokenizer: Tokenizer | None, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = COMMON_WORDS if tokenizer is None else word_pool(tokenizer)

    def text(self, tokens: int, key: object) -> str:
        """Return a text; the same key gives the same words."""
        random = Random(f"{self._seed}:{key}")
        words = random.choices(self._words, k=max(tokens, 1))
        if self._tokenizer is None:
            return " ".join(words)
        for _ in range(_CORRECTIONS_MAX):
            missing = tokens - self._tokenizer.counts([" ".join(words)])[0]
            if not missing:
                break
            if missing > 0:
                words += random.choices(self._words, k=missing)
            else:
                del words[max(1, len(words) + missing) :]
        return " ".join(words)


def word_pool(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return words that are one token each, wherever they are in a text.

    Raises:
        ServingError: INVALID_ARG for a tokenizer without such words.
    """
    words = tokenizer.words()
    alone = tokenizer.counts(words)
    following = tokenizer.counts([f"{_BEFORE} {word}" for word in words])
    base = tokenizer.counts([_BEFORE])[0]
    found = [word for word, one, two in zip(words, alone, following, strict=True) if one == 1 and two == base + 1]
    if len(found) < _POOL_MIN:
        raise invalid(
            f"the tokenizer: expected at least {_POOL_MIN} tokens that are words of small letters, got {len(found)}",
            hint="prompts of such a language come from a file",
        )
    # Spread over the vocabulary, whose first tokens are the shortest.
    return tuple(found[:: -(-len(found) // _POOL_MAX)])


def draw(length: Length, random: Random, least: float = 1.0) -> float:
    """Return a value of a normal distribution, at least `least`."""
    if not length.deviation:
        return max(length.mean, least)
    return max(random.gauss(length.mean, length.deviation), least)


def generated(plan: PromptPlan, generator: TextGenerator, seed: int) -> list[Conversation]:
    """Return generated dialogues."""
    random = Random(seed)
    prefixes = [generator.text(plan.prefix_tokens, f"prefix {number}") for number in range(plan.prefix_count)]
    conversations = []
    for number in range(plan.count):
        turns = []
        for turn in range(round(draw(plan.turns, random))):
            text = generator.text(round(draw(plan.input_tokens, random)), f"{number} {turn}")
            if prefixes and not turn:
                text = f"{random.choice(prefixes)} {text}"
            delay_ms = draw(plan.turn_delay_ms, random, 0.0) if turn else 0.0
            turns.append(Turn(text, output_tokens=output_tokens(plan, random), delay_ms=delay_ms))
        conversations.append(Conversation(tuple(turns)))
    return conversations


def output_tokens(plan: PromptPlan, random: Random) -> int:
    """Return the most tokens of a response, 0 for the limit of the server."""
    return 0 if plan.output_tokens is None else round(draw(plan.output_tokens, random))


def blocks(input_tokens: int, hash_ids: Sequence[int], generator: TextGenerator) -> str:
    """Return the text of a line of a trace: equal hash ids stand for equal text of `BLOCK_TOKENS` tokens."""
    texts, left = [], input_tokens
    for hash_id in hash_ids:
        if left <= 0:
            break
        texts.append(generator.text(min(left, BLOCK_TOKENS), f"block {hash_id} {min(left, BLOCK_TOKENS)}"))
        left -= BLOCK_TOKENS
    if left > 0:
        texts.append(generator.text(left, f"rest {input_tokens} {list(hash_ids)}"))
    return " ".join(texts)


_PATHS = {
    LanguageEndpoint.CHAT: "/v1/chat/completions",
    LanguageEndpoint.COMPLETIONS: "/v1/completions",
    LanguageEndpoint.EMBEDDINGS: "/v1/embeddings",
}
_JOINT = " "


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The inputs of a model of the KServe protocol.

    Attributes:
        names: Names of its inputs; empty if it is unknown.
        batches: Whether they have a batch dimension.
    """

    names: frozenset[str] = frozenset()
    batches: bool = False


class LanguageSource:
    """Dialogues as requests. A stream is a dialogue, a step one of its turns.

    Args:
        model: Model name and version, "" for the server's choice.

    Attributes:
        batch_size: Items in a request: one.
    """

    def __init__(
        self,
        model: tuple[str, str],
        plan: LanguagePlan,
        prompts: PromptPlan,
        conversations: Sequence[Conversation],
        inputs: ModelInputs = ModelInputs(),
    ) -> None:
        self.batch_size = 1
        self.stream_count = len(conversations)
        self._name, self._version = model
        self._plan = plan
        self._prompts = prompts
        self._conversations = conversations
        self._inputs = inputs

    @property
    def has_sessions(self) -> bool:
        """Whether a dialogue has several turns."""
        return any(len(conversation.turns) > 1 for conversation in self._conversations)

    def step_count(self, stream: int) -> int:
        """Return the number of turns of a dialogue."""
        return len(self._conversations[stream].turns)

    def delay_s(self, stream: int, step: int) -> float:
        return self._conversations[stream].turns[step].delay_ms / 1000

    def expected(self, stream: int, step: int) -> Mapping[str, Tensor] | None:
        """Return None: answers are not checked."""
        return None

    def texts(self, stream: int, step: int, history: Sequence[str] = ()) -> str:
        """Return all texts of a request, joined by spaces, for counting its tokens."""
        if self._plan.endpoint is LanguageEndpoint.CHAT:
            return _JOINT.join(_content(message) for message in self._messages(stream, step, history))
        return self._prompt(stream, step, history)

    def path(self, prefix: str) -> str:
        """Return the path of requests over HTTP.

        Args:
            prefix: Path of the server's URL, which may already end with `/v1`.
        """
        endpoint = self._plan.endpoint
        if endpoint in _PATHS:
            path = _PATHS[endpoint]
            return path.removeprefix("/v1") if prefix.endswith("/v1") else path
        if endpoint is LanguageEndpoint.INFER:
            call = "infer"
        else:
            call = "generate_stream" if self._plan.streaming else "generate"
        return f"{model_path(self._name, self._version)}/{call}"

    def body(self, stream: int, step: int, history: Sequence[str] = ()) -> bytes:
        """Return the body of a request over HTTP."""
        endpoint = self._plan.endpoint
        if endpoint is LanguageEndpoint.INFER:
            values = self._values(stream, step, history)
            shape = [1, 1] if self._inputs.batches else [1]
            inputs = [
                {"name": name, "shape": shape, "datatype": _datatype(value).wire, "data": [value]}
                for name, value in values.items()
            ]
            return dump({"inputs": inputs})
        if endpoint is LanguageEndpoint.GENERATE:
            return dump(self._values(stream, step, history))
        return dump(self._openai(stream, step, history))

    def request(self, stream: int, step: int, history: Sequence[str] = ()) -> InferRequest:
        """Return a request over gRPC."""
        shape = (1, 1) if self._inputs.batches else (1,)
        tensors = {}
        for name, value in self._values(stream, step, history).items():
            datatype = _datatype(value)
            element = value.encode() if isinstance(value, str) else value
            array = np.empty(shape, datatype.numpy)
            array.fill(element)
            tensors[name] = Tensor(name, datatype, array)
        return InferRequest(self._name, tensors, model_version=self._version)

    def _openai(self, stream: int, step: int, history: Sequence[str]) -> dict[str, Any]:
        turn = self._turn(stream, step)
        document: dict[str, Any] = {"model": self._name}
        if self._plan.endpoint is LanguageEndpoint.EMBEDDINGS:
            return {**document, "input": self._prompt(stream, step, ()), **self._fields(turn)}
        if self._plan.endpoint is LanguageEndpoint.CHAT:
            document["messages"] = self._messages(stream, step, history)
        else:
            document["prompt"] = self._prompt(stream, step, history)
        document |= self._limits(turn)
        if self._plan.streaming:
            document |= {"stream": True, "stream_options": {"include_usage": True}}
        return document | self._fields(turn)

    def _values(self, stream: int, step: int, history: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of a model of the KServe protocol."""
        turn, names = self._turn(stream, step), self._inputs.names
        values: dict[str, Any] = {"text_input": self._prompt(stream, step, history)}
        if "stream" in names:
            values["stream"] = self._plan.streaming
        parameters = self._limits(turn) | self._fields(turn)
        if "sampling_parameters" in names:
            values["sampling_parameters"] = dump(parameters).decode()
        elif self._plan.endpoint is LanguageEndpoint.GENERATE:
            values |= parameters  # the server treats members that are not inputs as parameters
        else:
            values |= {name: value for name, value in parameters.items() if name in names}
        if not self._plan.tokenizer:
            counts = ("return_num_input_tokens", "return_num_output_tokens")
            values |= {name: True for name in counts if name in names}
        return values

    def _limits(self, turn: Turn) -> dict[str, Any]:
        limits: dict[str, Any] = {"max_tokens": turn.output_tokens} if turn.output_tokens else {}
        if self._prompts.ignore_eos:
            limits["ignore_eos"] = True
        return limits

    def _fields(self, turn: Turn) -> dict[str, Any]:
        return {**dict(self._prompts.fields), **turn.fields}

    def _turn(self, stream: int, step: int) -> Turn:
        return self._conversations[stream].turns[step]

    def _messages(self, stream: int, step: int, history: Sequence[str]) -> list[Mapping[str, Any]]:
        messages: list[Mapping[str, Any]] = []
        for place, turn in enumerate(self._conversations[stream].turns[: step + 1]):
            messages += turn.messages or ({"role": "user", "content": turn.text},)
            if place < len(history) and place < step:
                messages.append({"role": "assistant", "content": history[place]})
        return messages

    def _prompt(self, stream: int, step: int, history: Sequence[str]) -> str:
        parts = []
        for place, turn in enumerate(self._conversations[stream].turns[: step + 1]):
            parts.append(turn.text or _JOINT.join(map(_content, turn.messages)))
            if place < len(history) and place < step:
                parts.append(history[place])
        return _JOINT.join(parts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return _JOINT.join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _datatype(value: bool | int | float | str) -> DataType:
    if isinstance(value, bool):
        return DataType.BOOL
    if isinstance(value, str):
        return DataType.BYTES
    return DataType.INT32 if isinstance(value, int) else DataType.FP32
