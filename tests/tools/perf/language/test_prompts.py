"""Generated prompts, files of prompts, and the requests that they become."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from charonia.core.errors import ServingError
from charonia.tools.perf.language.load import FileTokenizer, read_prompts
from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, Length, PromptPlan
from charonia.tools.perf.language.requests import (
    Conversation,
    LanguageSource,
    ModelInputs,
    TextGenerator,
    Turn,
    blocks,
    generated,
    word_pool,
)


class Syllables:
    """A tokenizer whose tokens are pieces of up to three letters; words of a list are whole."""

    def __init__(self, whole: Sequence[str]) -> None:
        self._whole = whole

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [sum(1 if word in self._whole else -(-len(word) // 3) for word in text.split()) for text in texts]

    def words(self) -> list[str]:
        return [*self._whole, "unusually", "longwinded"]


WORDS = [f"word{chr(97 + first)}{chr(97 + second)}" for first in range(6) for second in range(6)]


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_generated_text_has_exactly_its_tokens(tokens: int) -> None:
    tokenizer = Syllables(WORDS)

    text = TextGenerator(tokenizer, seed=3).text(tokens, "key")

    assert tokenizer.counts([text]) == [tokens]


def test_texts_are_exact_where_words_join_into_other_tokens() -> None:
    class Joining(Syllables):
        def counts(self, texts: Sequence[str]) -> list[int]:
            return [count - count // 10 for count in super().counts(texts)]

    tokenizer = Joining(WORDS)

    assert tokenizer.counts([TextGenerator(tokenizer, 0).text(100, "key")]) == [100]


def test_only_words_of_one_token_are_used() -> None:
    assert set(word_pool(Syllables(WORDS))) == set(WORDS)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ServingError, match="words of small letters, got 2"):
        word_pool(Syllables(WORDS[:2]))


def test_a_pool_of_few_words_is_enough() -> None:
    assert len(word_pool(Syllables(WORDS[:16]))) == 16


def test_a_single_request_of_a_dialogue_waits_for_nothing() -> None:
    assert (Turn("a").delay_ms, Turn("a").output_tokens) == (0, 0)


def test_the_seed_decides_on_the_text() -> None:
    plan = PromptPlan(count=3, input_tokens=Length(20, 5))

    texts = [[each.turns[0].text for each in generated(plan, TextGenerator(None, seed), seed)] for seed in (1, 1, 2)]

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_lengths_follow_their_distribution() -> None:
    plan = PromptPlan(count=400, input_tokens=Length(100, 10), output_tokens=Length(50, 5))

    found = generated(plan, TextGenerator(None, 0), 0)

    lengths = np.array([len(each.turns[0].text.split()) for each in found])
    outputs = np.array([each.turns[0].output_tokens for each in found])
    assert (lengths.mean(), lengths.std()) == (pytest.approx(100, abs=2), pytest.approx(10, abs=1.5))
    assert (outputs.mean(), outputs.std()) == (pytest.approx(50, abs=1), pytest.approx(5, abs=1))


def test_prompts_share_prefixes() -> None:
    plan = PromptPlan(count=50, input_tokens=Length(5), prefix_count=3, prefix_tokens=40)

    found = generated(plan, TextGenerator(None, 0), 0)

    prefixes = {tuple(each.turns[0].text.split()[:40]) for each in found}
    assert len(prefixes) == 3
    assert {len(each.turns[0].text.split()) for each in found} == {45}


def test_sessions_have_turns_with_delays() -> None:
    plan = PromptPlan(count=2, turns=Length(3), turn_delay_ms=Length(200))

    delays = [[turn.delay_ms for turn in each.turns] for each in generated(plan, TextGenerator(None, 0), 0)]

    assert delays == [[0, 200, 200], [0, 200, 200]]


def test_equal_hash_ids_are_equal_text() -> None:
    generator = TextGenerator(None, 0)

    first, second = blocks(1100, [1, 2, 3], generator).split(), blocks(1100, [1, 9, 3], generator).split()

    assert (len(first), len(second)) == (1100, 1100)
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
    assert first[1024:] == second[1024:]


def read(path: Path, lines: Sequence[object], **plan: Any) -> list[Conversation]:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return read_prompts(PromptPlan(file=str(path), **plan), lambda: TextGenerator(None, 0), 0)


def test_a_file_has_texts_messages_and_lengths(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    lines = [
        {"text": "one", "output_length": 4},
        "",
        {"prompt": "two"},
        {"messages": messages, "max_tokens": 9, "extra": {"temperature": 0}},
        {"input_length": 12},
    ]

    found = [each.turns for each in read(tmp_path / "p.jsonl", lines, output_tokens=Length(7))]

    assert found[0] == (Turn("one", output_tokens=4),)
    assert found[1] == (Turn("two", output_tokens=7),)
    assert found[2] == (Turn(messages=tuple(messages), output_tokens=9, fields={"temperature": 0}),)
    assert len(found[3][0].text.split()) == 12


def test_lines_of_a_session_are_its_turns(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "text": "1"},
        {"text": "alone"},
        {"session_id": "a", "text": "2", "delay": 30},
        {"turns": [{"text": "x"}, {"text": "y", "delay": 5}]},
    ]

    found = [[(turn.text, turn.delay_ms) for turn in each.turns] for each in read(tmp_path / "p.jsonl", lines)]

    assert found == [[("1", 0), ("2", 30)], [("alone", 0)], [("x", 0), ("y", 5)]]


def test_a_replay_is_in_the_order_of_time_and_begins_at_once(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "text": str(at)} for at in (700, 500, 501.5)]

    found = read(tmp_path / "p.jsonl", lines, is_replay=True)

    assert [each.turns[0].text for each in found] == ["500", "501.5", "700"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: expected a JSON object, got list"),
        ("{", "line 2: expected a JSON object"),
        ({}, "line 2: expected 'text', 'messages', 'turns' or 'input_length', got none"),
        ({"text": 5}, "line 2: 'text': expected a text"),
        ({"text": "a", "output_length": 0}, "'output_length': expected a number of at least 1, got 0"),
        ({"text": "a", "temperature": 0}, "'temperature': expected one of"),
        ({"input_length": 5, "hash_ids": "x"}, "'hash_ids': expected a list of integers"),
        ({"messages": ["a"]}, "'messages': expected a list of objects"),
        ({"turns": []}, "'turns': expected a list of objects, at least one"),
        ({"text": "a", "delay": -1}, "'delay': expected a number of at least 0"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        read(tmp_path / "p.jsonl", [{"text": "fine"}, line])


def test_a_replay_needs_times(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="--fixed-schedule: expected 'timestamp'"):
        read(tmp_path / "p.jsonl", [{"text": "a"}], is_replay=True)


def source(endpoint: LanguageEndpoint, turns: Sequence[Turn], names: Sequence[str] = (), **plan: Any) -> LanguageSource:
    inputs = ModelInputs(frozenset(names))
    return LanguageSource(("m", ""), LanguagePlan(endpoint), PromptPlan(**plan), [Conversation(tuple(turns))], inputs)


def test_a_chat_repeats_what_was_said() -> None:
    chat = source(LanguageEndpoint.CHAT, [Turn("a"), Turn("b", output_tokens=5)], ignore_eos=True)

    body = json.loads(chat.body(0, 1, ("reply",)))

    assert [(each["role"], each["content"]) for each in body["messages"]] == [
        ("user", "a"),
        ("assistant", "reply"),
        ("user", "b"),
    ]
    assert (body["max_tokens"], body["ignore_eos"]) == (5, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert chat.texts(0, 1, ("reply",)) == "a reply b"


def test_a_url_that_ends_with_v1_is_not_doubled() -> None:
    chat = source(LanguageEndpoint.CHAT, [Turn("a")])

    assert (chat.path(""), chat.path("/v1")) == ("/v1/chat/completions", "/chat/completions")


def test_a_model_gets_its_sampling_parameters_as_it_takes_them() -> None:
    turn = Turn("a", output_tokens=5, fields={"top_k": 2})
    whole = source(LanguageEndpoint.INFER, [turn], ["text_input", "sampling_parameters", "stream"])
    single = source(LanguageEndpoint.INFER, [turn], ["text_input", "max_tokens"])
    generate = source(LanguageEndpoint.GENERATE, [turn])

    sampling = whole.request(0, 0).inputs["sampling_parameters"].array[0]

    assert json.loads(sampling) == {"max_tokens": 5, "top_k": 2}
    assert whole.request(0, 0).inputs["stream"].array.tolist() == [True]
    assert single.request(0, 0).inputs.keys() == {"text_input", "max_tokens"}
    assert json.loads(generate.body(0, 0)) == {"text_input": "a", "max_tokens": 5, "top_k": 2}


def tokenizer_file(folder: Path) -> Path:
    vocabulary = {word: number for number, word in enumerate([*WORDS, "the", "[UNK]"])}
    tokenizer = LibraryTokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_is_read_from_a_folder(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(str(tokenizer_file(tmp_path)))

    assert tokenizer.counts(["the wordaa other", ""]) == [3, 0]
    assert set(word_pool(tokenizer)) == {*WORDS, "the"}


@pytest.mark.parametrize(("name", "message"), [("m.gguf", "got a GGUF file"), ("none", "expected tokenizer.json")])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        FileTokenizer(str(tmp_path / name))


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ServingError, match="cannot be read"):
        FileTokenizer(str(tmp_path))
