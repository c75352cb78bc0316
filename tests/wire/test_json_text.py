import json
import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError, invalid
from charonia.wire.json_text import (
    NESTING_MAX,
    boolean,
    dump,
    encode_error,
    kind_of,
    parse_object,
    string_at,
    unsigned,
)


def nested(levels: int) -> bytes:
    """An object that holds arrays, nested to so many levels in all."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_the_literals_that_json_lacks_are_read() -> None:
    document = parse_object(b'{"a": [NaN, Infinity, -Infinity, 1]}')

    values = document["a"]
    assert isinstance(values, list)
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1} x',
        b'{"a": NaN',
        b'{"a": nan}',
        b'{"a": [NaN, "\\ud800"]}',
        b'{"a": "\\ud800"}',
        b'{"NaN": "\xff"}',
        b'{"a": "\xff"}',
        b'{"NaN":' * 100_000,
        b"[" * 100_000,
        b'{"a": [NaN, ' + b"1" * 5000 + b"]}",
        b"\xef\xbb\xbf" * 100_000,
    ],
    ids=range(14),
)
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ServingError, match="failed to parse the request JSON buffer") as caught:
        parse_object(text)
    assert caught.value.code is Code.INVALID_ARG


def test_a_byte_order_mark_is_passed_over() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_object(b'\xef\xbb\xbf{"a": Infinity}') == {"a": math.inf}


def test_text_beside_a_literal_may_hold_escapes() -> None:
    assert parse_object(b'{"a": "\\u00e9 NaN", "b": NaN}')["a"] == "\u00e9 NaN"


def test_nesting_is_accepted_up_to_its_limit() -> None:
    assert "a" in parse_object(nested(NESTING_MAX))


@pytest.mark.parametrize("text", [nested(NESTING_MAX + 1), b'{"a":' * 101 + b"NaN" + b"}" * 101])
def test_nesting_beyond_its_limit_is_refused(text: bytes) -> None:
    with pytest.raises(ServingError, match="nesting depth exceeds maximum allowed limit"):
        parse_object(text)


def test_many_shallow_arrays_are_not_taken_for_deep_ones() -> None:
    assert len(parse_object(b'{"a": [' + b",".join([b"[1]"] * 200) + b"]}")) == 1


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.integers(-9, 9) | st.text(max_size=5), st.lists, max_leaves=9))
)
def test_any_object_is_read_as_the_standard_library_reads_it(document: dict[str, object]) -> None:
    assert parse_object(orjson.dumps(document)) == document


def test_arrays_are_written_in_their_own_precision() -> None:
    assert dump({"a": np.array([0.1, 2], "<f4")}) == b'{"a":[0.1,2.0]}'


def test_literals_are_written_where_asked_for() -> None:
    text = dump({"a": np.array([np.nan, -np.inf, 1.5], "<f4"), "b": math.inf}, literals=True)

    assert text == b'{"a":[NaN,-Infinity,1.5],"b":Infinity}'


def test_text_that_is_no_unicode_is_written_as_escapes() -> None:
    assert encode_error(invalid("bad \ud800")) == b'{"error":"bad \\ud800"}'


def test_an_error_is_written_with_its_hint() -> None:
    assert json.loads(encode_error(invalid("no", hint="try"))) == {"error": "no (hint: try)"}


def test_members_are_checked_for_their_type() -> None:
    assert string_at({"a": "x"}, "a") == "x"
    assert string_at({}, "a") == ""
    assert boolean("k", True) is True
    assert unsigned("k", 2**64 - 1) == 2**64 - 1
    assert kind_of(()) == "tuple"


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, "1", None])
def test_what_is_no_unsigned_integer_is_refused(value: object) -> None:
    with pytest.raises(ServingError, match="parameter 'k': expected a non-negative integer"):
        unsigned("k", value)


def test_wrong_members_are_refused() -> None:
    with pytest.raises(ServingError, match="'a': expected a string, got nothing"):
        string_at({}, "a", required=True)
    with pytest.raises(ServingError, match="'a': expected a string, got a number"):
        string_at({"a": 1}, "a")
    with pytest.raises(ServingError, match="parameter 'k': expected a boolean, got a number"):
        boolean("k", 1)
