"""How a language model is measured: its API, and the prompts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class LanguageEndpoint(Enum):
    """The API that requests use. Values as for `--endpoint`."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    COMPLETIONS = "completions"
    """OpenAI's completions."""
    EMBEDDINGS = "embeddings"
    """OpenAI's embeddings: the responses have no tokens."""
    GENERATE = "generate"
    """Triton's generate extension: `text_input` and `text_output` as JSON."""
    INFER = "infer"
    """Inference of KServe v2 with `text_input` and `text_output`: ModelStreamInfer, or an event stream over HTTP."""

    @property
    def is_openai(self) -> bool:
        return self in (LanguageEndpoint.CHAT, LanguageEndpoint.COMPLETIONS, LanguageEndpoint.EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Length:
    """A normally distributed number of tokens, or of turns."""

    mean: float
    deviation: float = 0.0


@dataclass(frozen=True, slots=True)
class LanguagePlan:
    """How a run measures a language model.

    Attributes:
        tokenizer: `tokenizer.json`, or a folder with one, that counts tokens; "" for the counts of the server.
    """

    endpoint: LanguageEndpoint = LanguageEndpoint.CHAT
    streaming: bool = True
    tokenizer: str = ""

    def asks_for_events(self, protocol: str) -> bool:
        """Whether the headers of requests accept an event stream."""
        return self.endpoint is LanguageEndpoint.INFER and protocol == "http" and self.streaming


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of a run.

    Attributes:
        file: JSON lines with prompts, "" for generated ones.
        input_tokens: Length of a generated prompt, without its prefix.
        output_tokens: Most tokens of a response; None for the limit of the server or of the file.
        prefix_count: Number of prefixes that generated prompts share.
        turns: Turns of a generated session; a mean of 1 is a single request.
        turn_delay_ms: Time between a response and the next turn of its session.
        ignore_eos: Whether responses have exactly the requested number of tokens (`ignore_eos`).
        is_replay: Whether requests are sent at the timestamps of the file.
        fields: Additional members of every request, by name.
    """

    file: str = ""
    count: int = 100
    input_tokens: Length = Length(550.0)
    output_tokens: Length | None = None
    prefix_count: int = 0
    prefix_tokens: int = 0
    turns: Length = Length(1.0)
    turn_delay_ms: Length = Length(0.0)
    ignore_eos: bool = False
    is_replay: bool = False
    fields: tuple[tuple[str, bool | int | float | str], ...] = ()

    @property
    def is_generated(self) -> bool:
        """Whether any option requires generated prompts."""
        names = ("count", "input_tokens", "prefix_count", "turns", "turn_delay_ms")
        return any(getattr(self, name) != getattr(PromptPlan(), name) for name in names)


class Tokenizer(Protocol):
    """Counts tokens."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without tokens that a model adds, such as a first one."""

    def words(self) -> list[str]:
        """Return the tokens that are words of plain letters, in the order of the vocabulary."""
