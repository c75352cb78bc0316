"""Prompts: dialogues of one turn or several, and generated text of a given number of tokens. Pure.

Generated text is words that the tokenizer takes for one token each, so its length in tokens is that in words. What a
tokenizer counts otherwise is corrected by adding and removing words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from charonia.core.errors import invalid
from charonia.tools.perf.language.plan import Length, PromptPlan, Tokenizer

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
        messages: OpenAI messages, verbatim.
        output_tokens: Most tokens of the response, 0 for the limit of the server.
        delay_ms: Time between the previous response and this request.
        fields: Additional members of the request.
    """

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int = 0
    delay_ms: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns in their order; each follows the response to the previous one.

    Attributes:
        turns: At least one.
        at_ms: When its first request is sent in a replay, None without a time.
    """

    turns: tuple[Turn, ...]
    at_ms: float | None = None


class TextGenerator:
    """Generates text of a given number of tokens; the same seed gives the same texts.

    Args:
        tokenizer: Counts the tokens, None to count words.
        seed: Seed of the choice of words.
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


def drawn(length: Length, random: Random, least: float = 1.0) -> float:
    """Return a value of a normal distribution, at least `least`."""
    if not length.deviation:
        return max(length.mean, least)
    return max(random.gauss(length.mean, length.deviation), least)


def generated(plan: PromptPlan, generator: TextGenerator, seed: int) -> list[Dialogue]:
    """Return generated dialogues."""
    random = Random(seed)
    prefixes = [generator.text(plan.prefix_tokens, f"prefix {number}") for number in range(plan.prefix_count)]
    dialogues = []
    for number in range(plan.count):
        turns = []
        for turn in range(round(drawn(plan.turns, random))):
            text = generator.text(round(drawn(plan.input_tokens, random)), f"{number} {turn}")
            if prefixes and not turn:
                text = f"{random.choice(prefixes)} {text}"
            delay_ms = drawn(plan.turn_delay_ms, random, 0.0) if turn else 0.0
            turns.append(Turn(text, output_tokens=output_tokens(plan, random), delay_ms=delay_ms))
        dialogues.append(Dialogue(tuple(turns)))
    return dialogues


def output_tokens(plan: PromptPlan, random: Random) -> int:
    """Return the most tokens of a response, 0 for the limit of the server."""
    return 0 if plan.output_tokens is None else round(drawn(plan.output_tokens, random))


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
