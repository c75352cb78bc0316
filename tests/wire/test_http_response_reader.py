"""Responses of HTTP/1.1 from bytes in any pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.wire.http_response import (
    CACHED_HEADS_MAX,
    HEAD_BYTES_MAX,
    INTERIMS_MAX,
    BadResponseError,
    Heads,
    ResponseReader,
)

LIMIT = 1000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
BINARY = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nInference-Header-Content-Length: 2\r\n\r\n{}data"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + OK
ERROR = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\n{"error":"x"}'
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
TRUNCATED = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"
TOO_LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhello"
TOO_LARGE = b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"
GARBAGE = b"220 mail.example.org ESMTP\r\n\r\n"
TWO_LENGTHS = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"
BAD_CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"
ALL = [OK, BINARY, CHUNKED, INTERIM, ERROR, EMPTY, TRUNCATED, TOO_LONG, TOO_LARGE, GARBAGE, TWO_LENGTHS, BAD_CHUNK]


def outcome(pieces: list[bytes], *, keeps: bool = True, heads: Heads | None = None) -> tuple[object, ...]:
    reader = ResponseReader(heads if heads is not None else {}, LIMIT)
    reader.begin(keep_body=keeps)
    is_complete = False
    try:
        for piece in pieces:
            is_complete = reader.feed(piece)
    except BadResponseError as error:
        return ("bad", error.is_oversize)
    head = reader.head
    if head is None:
        return ("nothing", is_complete)
    return (is_complete, head.status, head.json_bytes, head.keep_alive, reader.received, reader.body)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (OK, (True, 200, -1, True, 5, b"hello")),
        (BINARY, (True, 200, 2, True, 6, b"{}data")),
        (CHUNKED, (True, 200, -1, True, 5, b"hello")),
        (INTERIM, (True, 200, -1, True, 5, b"hello")),
        (ERROR, (True, 400, -1, True, 13, b'{"error":"x"}')),
        (EMPTY, (True, 204, -1, True, 0, b"")),
        (TRUNCATED, (False, 200, -1, True, 5, b"hello")),
        (TOO_LONG, ("bad", False)),
        (TOO_LARGE, ("bad", True)),
        (GARBAGE, ("bad", False)),
        (TWO_LENGTHS, ("bad", False)),
        (BAD_CHUNK, ("bad", False)),
    ],
)
def test_a_response_is_read_as_http_says(data: bytes, expected: tuple[object, ...]) -> None:
    assert outcome([data]) == expected


@pytest.mark.parametrize(("line", "is_unexecuted"), [(b"", False), (b"Charonia-Executed: no\r\n", True)])
def test_a_server_may_say_that_no_model_has_seen_the_request(line: bytes, is_unexecuted: bool) -> None:
    reader = ResponseReader({}, LIMIT)
    reader.begin(keep_body=True)

    assert reader.feed(ERROR.replace(b"Content", line + b"Content"))
    assert reader.head is not None
    assert reader.head.is_unexecuted is is_unexecuted


@given(st.sampled_from(ALL), st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_outcome_does_not_depend_on_how_the_bytes_are_split(data: bytes, draw: st.DataObject, seen: bool) -> None:
    heads: Heads = {}
    whole = outcome([data], heads=heads)
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(data) - 1), max_size=12)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    assert outcome(pieces, heads=heads if seen else None) == whole


@given(st.binary(max_size=200), st.sampled_from(ALL), st.integers(0, 80))
@settings(max_examples=300, deadline=None)
def test_nothing_but_a_bad_response_comes_of_garbage(noise: bytes, data: bytes, at: int) -> None:
    spoiled = data[:at] + noise + data[at:]

    assert outcome([spoiled])
    assert outcome([spoiled[i : i + 1] for i in range(len(spoiled))]) is not None


def test_a_body_that_is_not_kept_is_counted() -> None:
    heads: Heads = {}

    first, second = (outcome([OK], keeps=False, heads=heads) for _ in range(2))

    assert first == second == (True, 200, -1, True, 5, b"")


def test_the_body_of_an_error_is_kept_in_any_case() -> None:
    assert outcome([ERROR], keeps=False)[-1] == b'{"error":"x"}'


def test_a_connection_carries_one_response_after_another() -> None:
    reader = ResponseReader({}, LIMIT)
    bodies = []

    for data in (OK, CHUNKED, BINARY, OK):
        reader.begin(keep_body=True)
        assert reader.feed(data)
        bodies.append(reader.body)

    assert bodies == [b"hello", b"hello", b"{}data", b"hello"]


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = ResponseReader({}, LIMIT)
    reader.begin(keep_body=True)

    assert not reader.feed(b"HTTP/1.1 200 OK\r\n\r\nhel")
    assert not reader.feed(b"lo")

    assert reader.feed_eof()
    assert reader.body == b"hello"
    assert reader.head is not None
    assert not reader.head.keep_alive


def test_a_connection_that_ends_early_leaves_the_response_incomplete() -> None:
    reader = ResponseReader({}, LIMIT)
    reader.feed(TRUNCATED)

    assert not reader.feed_eof()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * HEAD_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * HEAD_BYTES_MAX + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (LIMIT + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3ff\r\n" + b"a" * 1023 + b"\r\n",
    ],
)
def test_what_is_over_a_limit_is_refused(data: bytes) -> None:
    assert outcome([data]) == ("bad", True)


def test_interim_responses_have_a_limit() -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"

    assert outcome([interim * INTERIMS_MAX + OK])[1] == 200
    assert outcome([interim * (INTERIMS_MAX + 1) + OK]) == ("bad", False)


def test_a_connection_that_is_to_be_closed_is_said_so() -> None:
    assert outcome([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"])[3] is False
    assert outcome([b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"])[3] is False


def test_the_heads_that_are_remembered_have_a_limit() -> None:
    heads: Heads = {}

    for number in range(CACHED_HEADS_MAX + 1):
        outcome([b"HTTP/1.1 200 OK\r\nX: %d\r\nContent-Length: 0\r\n\r\n" % number], heads=heads)

    assert len(heads) == 1
