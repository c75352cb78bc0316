"""Literals mean what they mean to protobuf's C++ parser. The expected values are its."""

import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import Code, ServingError


def refusal(text: str) -> ServingError:
    with pytest.raises(ServingError) as caught:
        parse(text)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        (r'"\\?"', r"\?"),
        (r'"\x41\x4"', "A\x04"),
        (r'"\101\7\1234"', "A\x07S4"),
        (r'"\303\251 \xc3\xa9 \u00e9 é"', "é é é é"),
        (r'"\U0001f600"', "\U0001f600"),
        (r'"\U0010ffff\U0000d7ff\ue000"', "\U0010ffff\ud7ff\ue000"),
        (r'"\a\b\f\n\r\t\v\\\'\""', "\a\b\f\n\r\t\v\\'\""),
        (r"""'a\"b' "c'd" # "\q" '""", "a\"bc'd"),
    ],
)
def test_an_escape_means_what_it_means_to_triton(literal: str, expected: str) -> None:
    assert parse(f"name: {literal}") == ModelConfig(name=expected)


@pytest.mark.parametrize(
    "escape",
    [
        r"\m",
        r"\?",
        r"\X41",
        r"\ud83d\ude00",
        r"\8",
        r"\x",
        r"\u12",
        r"\ud83d",
        r"\ude00",
        r"\ud83d\n",
        r"\U0000d800",
        r"\U00110000",
        r"\400",
        r"\N{DASH}",
    ],
)
def test_an_escape_that_triton_refuses_or_reads_otherwise_is_refused_with_its_place(escape: str) -> None:
    error = refusal(f'\nname: "m"\nbackend: "é\\n{escape}"')

    assert error.message.startswith("config.pbtxt line 3, column 14: a text cannot have the escape \\")
    assert error.hint == "a backslash itself is written twice: \\\\"


def test_a_text_that_ends_in_a_backslash_is_refused_with_a_hint() -> None:
    error = refusal('backend: "C:\\models\\"\nname: "m"')

    assert error.message == "config.pbtxt line 1, column 10: a text has no quote at its end"
    assert error.hint == '\\" is a quote within the text; a backslash itself is written twice: \\\\'


def test_bytes_that_are_no_text_are_refused_without_words_of_python() -> None:
    assert refusal(r'name: "\xff"').message.endswith(": the bytes of a text are not UTF-8")


def test_a_number_of_thousands_of_digits_is_out_of_range() -> None:
    assert refusal("max_batch_size: 0x" + "f" * 10_000).message.endswith("column 17: value out of range")


@pytest.mark.parametrize("text", ["max_batch_size: - 1", "max_batch_size: -- 1", "max_batch_size: - {}", 'name: - "1"'])
def test_a_minus_before_anything_but_a_digit_is_refused(text: str) -> None:
    assert refusal(text).message.startswith("config.pbtxt line 1, column ")


def test_comments_and_texts_are_no_literals_of_another_kind() -> None:
    assert parse("# don't \\q - 1\nname: \"- 1 # \\'\" # it's\n") == ModelConfig(name="- 1 # '")


def test_a_comment_may_be_in_another_encoding() -> None:
    content = "# 你好\nmax_batch_size: -4 # é\n".encode("gbk", errors="ignore") + b" # \xff"

    assert parse(content.decode(errors="surrogateescape")) == ModelConfig(max_batch_size=-4)


def test_a_text_may_not_be_in_another_encoding() -> None:
    content = b"# fine\nname: '\xc4'"

    assert refusal(content.decode(errors="surrogateescape")).message == "config.pbtxt line 2: byte 0xc4 is not UTF-8"
