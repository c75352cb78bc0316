"""The parser by itself: the same events however bytes are split, limits, and headers that come again."""

import itertools
import pickle
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.http_memory import request

from charonia.core.errors import invalid
from charonia.server.http.limits import DIRECT_BODY_BYTES, HttpLimits
from charonia.server.http.parser import (
    CACHED_BYTES_MAX,
    RECEIVING,
    TRANSITIONS,
    Event,
    Expectation,
    HeaderCache,
    ParserState,
    Request,
    RequestParser,
)

GET = b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n"
USUAL = request("/x", body=b"0123456789abcdef", headers={"Json": "5"})
CHUNKED = b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n3\r\ncde\r\n0\r\nTrailer: t\r\n\r\n"
UPGRADE = request("/u", body=b"body", headers={"Connection": "Upgrade", "Upgrade": "h2c", "Expect": "100-continue"})
LARGE = request("/large", body=bytes(range(256)) * (2 * DIRECT_BODY_BYTES // 256))
TOO_LARGE = request("/big", body=bytes(HttpLimits().body_bytes_max + 1))

TWICE = b"GET /t HTTP/1.1\r\nJson: 1\r\nX: \ta b \t \r\n%b\r\n"

LIMITS = HttpLimits(body_bytes_max=100, discard_bytes_max=200, header_count_max=8, chunk_count_max=4, url_bytes_max=20)


def feed(parser: RequestParser, data: bytes) -> list[Event]:
    found: list[Event] = []
    rest = memoryview(data)
    while rest:
        if parser.vacant is None:
            found += parser.receive(rest)
            while parser.backlog:
                found += parser.resume()
            return found
        size = min(len(rest), len(parser.vacant))
        parser.vacant[:size] = rest[:size]
        found += parser.filled(size)
        rest = rest[size:]
    return found


def events(pieces: Iterable[bytes], limits: HttpLimits = LIMITS, *, keeps_names: bool = False) -> list[object]:
    """Return the events of a connection in a form that can be compared."""
    parser = RequestParser(limits, keeps_names=keeps_names)
    return [essence(event) for piece in pieces for event in feed(parser, piece)]


def essence(event: Event) -> object:
    if isinstance(event, Expectation):
        return event
    refusal = str(event.refusal) if event.refusal is not None else None
    framing = event.keep_alive, event.knows_chunks, refusal, event.refusal_status
    return event.method, event.url, event.headers, event.names, bytes(event.body), framing


def each_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def test_limits_are_options_of_front_ends_which_get_them_pickled() -> None:
    assert pickle.loads(pickle.dumps(LIMITS)) == LIMITS


def test_a_request_has_its_parts() -> None:
    (found,) = feed(RequestParser(LIMITS), USUAL)

    assert found == Request(
        b"POST", b"/x", {b"host": b"localhost", b"content-length": b"16", b"json": b"5"}, None, b"0123456789abcdef"
    )


def test_names_of_fields_are_kept_where_they_are_wanted() -> None:
    parser = RequestParser(LIMITS, keeps_names=True)

    found = feed(parser, USUAL) + feed(parser, USUAL)

    assert [event.names for event in found if isinstance(event, Request)] == [
        {b"host": b"Host", b"content-length": b"Content-Length", b"json": b"Json"}
    ] * 2


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive", "knows_chunks"),
    [
        ("1.1", "", True, True),
        ("1.1", "close", False, True),
        ("1.0", "", False, False),
        ("1.0", "keep-alive", True, False),
    ],
)
def test_a_request_says_whether_more_may_follow(
    version: str, connection: str, keep_alive: bool, knows_chunks: bool
) -> None:
    headers = {"Connection": connection} if connection else {}
    parser = RequestParser(LIMITS)

    (found,) = feed(parser, request("/", version=version, headers=headers))

    assert isinstance(found, Request)
    assert (found.keep_alive, found.knows_chunks) == (keep_alive, knows_chunks)
    assert parser.state is (ParserState.IDLE if keep_alive else ParserState.ENDED)
    assert len(feed(parser, GET)) == keep_alive


def test_requests_that_come_together_are_told_apart() -> None:
    assert events([GET + USUAL + CHUNKED + UPGRADE + GET]) == [
        event for data in (GET, USUAL, CHUNKED, UPGRADE, GET) for event in events([data])
    ]


SESSIONS = [
    *(GET, USUAL, CHUNKED, UPGRADE, b"\r\n", b"\n", b"\0", USUAL[:-1], USUAL[:40], USUAL[40:]),
    request("/x", body=b"\r\n\r\n0123456789ab", headers={"Json": "5"}),
    request("/x", body=b"POST / HTTP/1.1\r", headers={"Json": "5"}),
    request("/x", body=b"0", headers={"Json": "5"}),
    request("/big", body=bytes(150)),
    request("/huge", body=bytes(300)),
    request("/last", headers={"Connection": "close"}),
    request("/old", version="1.0", headers={"Connection": "keep-alive"}),
    request("/expects", body=b"{}", headers={"Expect": "100-continue"}),
    request("/expects", body=b"{}", headers={"Expect": "much"}),
    request("/" + "x" * 30),
    request("/many", headers={f"X{i}": "" for i in range(10)}),
    request("/short", body=b"\r\n\r\n", headers={"Content-Length": "2"}),
    b"POST /many HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 9 + b"0\r\n\r\n",
    b"POST /large HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    + (b"32\r\n" + bytes(50) + b"\r\n") * 3
    + b"0\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@given(st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=6), st.lists(st.integers(0, 2000), max_size=8))
@example([USUAL, USUAL, USUAL], [])
@example([USUAL, USUAL[:40], USUAL[40:], USUAL], [])
@example([USUAL + b"\r\n", USUAL, request("/x", body=b"\r\n\r\n0123456789ab", headers={"Json": "5"})], [])
def test_events_do_not_depend_on_how_bytes_are_split(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)

    expected = events(each_byte(data))

    assert events([data]) == expected
    assert events(parts) == expected
    assert events(split(data, cuts)) == expected


@given(st.lists(st.integers(0, len(LARGE)), max_size=6))
def test_a_large_body_is_the_same_however_it_is_split(cuts: list[int]) -> None:
    assert events(split(LARGE + GET, cuts), HttpLimits()) == [*events([LARGE], HttpLimits()), *events([GET])]


def test_a_large_body_is_received_where_it_stays_and_its_first_tensor_is_aligned() -> None:
    parser = RequestParser(HttpLimits())
    message = request("/large", body=bytes(2 * DIRECT_BODY_BYTES), headers={"Inference-Header-Content-Length": "100"})

    assert parser.receive(memoryview(message[:1000])) == []
    vacant = parser.vacant
    assert vacant is not None
    (found,) = parser.filled(len(vacant))

    assert isinstance(found, Request)
    assert isinstance(found.body, memoryview)
    assert found.body.obj is vacant.obj
    assert parser.vacant is None


class Lender:
    """Lends memory, and knows what was lent and what is still in use."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kept: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []

    def __call__(self, size: int) -> memoryview:
        memory = np.empty(size, np.uint8)
        self.sizes.append(size)
        self.kept.append(weakref.ref(memory))
        return memory.data

    @property
    def in_use(self) -> int:
        return sum(memory() is not None for memory in self.kept)


SIZE = 2 * DIRECT_BODY_BYTES


def test_a_large_body_with_tensors_is_received_in_lent_memory_until_the_request_is_dropped() -> None:
    lender = Lender()
    parser = RequestParser(HttpLimits(), lend=lender)
    body = bytes(range(256)) * (SIZE // 256)

    (found,) = feed(parser, request("/large", body=body, headers={"Inference-Header-Content-Length": "100"}))

    assert isinstance(found, Request)
    assert found.body == body
    assert np.frombuffer(found.body, np.uint8)[100:].ctypes.data % 64 == 0
    assert lender.sizes == [SIZE + 64]
    assert lender.in_use == 1
    del found
    assert lender.in_use == 0


def test_lent_memory_goes_back_when_the_connection_ends_or_the_request_is_refused() -> None:
    lender = Lender()
    message = request("/large", body=bytes(SIZE), headers={"Inference-Header-Content-Length": "100"})
    leaving, slow = (RequestParser(HttpLimits(), lend=lender) for _ in range(2))
    for parser in (leaving, slow):
        parser.receive(memoryview(message[:1000]))
    assert lender.in_use == 2

    leaving.end()
    slow.refuse(408, invalid("too slow"))

    assert lender.in_use == 0


@pytest.mark.parametrize(
    "headers",
    [{}, {"Inference-Header-Content-Length": "100", "Content-Encoding": "gzip"}],
    ids=["JSON only", "compressed"],
)
def test_a_body_that_holds_no_tensors_as_they_are_takes_no_lent_memory(headers: dict[str, str]) -> None:
    lender = Lender()

    (found,) = feed(RequestParser(HttpLimits(), lend=lender), request("/x", body=bytes(SIZE), headers=headers))

    assert isinstance(found, Request)
    assert len(found.body) == SIZE
    assert lender.sizes == []


def test_a_body_for_which_nothing_is_lent_gets_memory_of_its_own() -> None:
    parser = RequestParser(HttpLimits(), lend=lambda size: None)

    (found,) = feed(parser, request("/x", body=bytes(SIZE), headers={"Inference-Header-Content-Length": "0"}))

    assert isinstance(found, Request)
    assert found.body == bytes(SIZE)


@pytest.mark.parametrize(
    ("data", "status", "sentence"),
    [
        (b"junk\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"GET /v2\r\n\r\n", 505, "not HTTP/1.1 or HTTP/1.0"),
        (request("/" + "x" * 30), 414, "longer than 20 bytes"),
        (request("/", headers={f"X{i}": "" for i in range(10)}), 431, "larger than 8 fields or 65536 bytes"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, 431, "larger than 8 fields or 65536 bytes"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "only transfer encoding is 'chunked'"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 9, 400, "maximum of 4 non-empty"),
        (request("/", headers={"Expect": "much"}), 417, "'100-continue'"),
        (request("/", body=bytes(300)), 0, "size of 300 bytes exceeds the maximum allowed input size of 100 bytes"),
        (request("/", body=bytes(101), headers={"Expect": "100-continue"}), 0, "--http-max-input-size"),
    ],
)
def test_a_violation_cuts_the_connection_off(data: bytes, status: int, sentence: str) -> None:
    parser = RequestParser(LIMITS)

    *before, refused = feed(parser, GET) + feed(parser, data)

    assert len(before) == 1
    assert isinstance(refused, Request)
    assert (refused.refusal_status, refused.keep_alive) == (status, False)
    assert sentence in str(refused.refusal)
    assert parser.state is ParserState.CUT_OFF
    assert feed(parser, GET) == []


def test_a_body_that_is_too_large_is_dropped_and_the_connection_goes_on() -> None:
    parser = RequestParser(LIMITS)

    refused, following = feed(parser, request("/", body=bytes(150)) + GET)

    assert isinstance(refused, Request)
    assert isinstance(following, Request)
    assert (refused.body, refused.keep_alive) == (b"", True)
    assert "150 bytes" in str(refused.refusal)
    assert following.refusal is None


def test_leave_to_send_a_body_is_asked_for_once() -> None:
    assert [event for event in events([UPGRADE]) if isinstance(event, Expectation)] == [Expectation.CONTINUE]


def test_what_is_in_progress_is_dropped_at_the_end() -> None:
    for sent, state in (
        (b"", ParserState.ENDED),
        (USUAL[:30], ParserState.CUT_OFF),
        (LARGE[:1000], ParserState.CUT_OFF),
    ):
        parser = RequestParser(HttpLimits())
        feed(parser, sent)

        parser.end()
        parser.end()

        assert parser.state is state
        assert parser.vacant is None
        assert list(parser.filled(10)) == []
        assert list(parser.receive(memoryview(USUAL))) == []


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b"", "idle"),
        (b"PO", "receiving header"),
        (USUAL[:-4], "receiving body 12/16 bytes"),
        (CHUNKED[:57], "receiving body 2 bytes"),
        (LARGE[:1000], f"receiving body directly {1000 - LARGE.index(bytes(range(256)))}/131072 bytes"),
        (request("/", body=bytes(10 * 2**20))[: 3 * 2**20 + 200], "receiving body directly 3/10 MiB"),
        (TOO_LARGE[: 5 * 2**20], "dropping body 4/64 MiB"),
        (request("/", headers={"Connection": "close"}), "ended"),
        (b"junk\r\n\r\n", "cut off"),
    ],
)
def test_a_parser_says_its_state(sent: bytes, shown: str) -> None:
    parser = RequestParser(HttpLimits())

    feed(parser, sent)

    assert repr(parser) == f"<RequestParser [{shown}]>"


def test_every_state_is_reached_and_left_as_the_table_says() -> None:
    assert set(TRANSITIONS) == set(ParserState)
    assert {state for following in TRANSITIONS.values() for state in following} == set(ParserState)
    assert all(TRANSITIONS[state] >= {ParserState.CUT_OFF} for state in RECEIVING)


def test_a_change_that_is_not_in_the_table_is_a_mistake() -> None:
    parser = RequestParser(LIMITS)
    parser.end()

    with pytest.raises(AssertionError, match="from ENDED to HEADER"):
        parser.on_message_begin()


# Headers that come again.


def cache_after(message: bytes, body_size: int, headers: dict[bytes, bytes] | None = None) -> HeaderCache:
    cache = HeaderCache()
    assert cache.find(memoryview(message)) is None
    cache.store(Request(b"POST", b"/x", headers or {}), body_size)
    return cache


def test_a_header_is_found_again() -> None:
    cache = cache_after(b"POST /x HTTP/1.1\r\nA: b\r\n\r\nbody", 4, {b"a": b"b"})

    again = cache.find(memoryview(b"POST /x HTTP/1.1\r\nA: b\r\n\r\nelse"))

    assert again == Request(b"POST", b"/x", {b"a": b"b"}, None, b"else")


@pytest.mark.parametrize(
    ("message", "body_size", "headers"),
    [
        (b"POST /x HTTP/1.1\r\n\r\n", 0, {}),
        (b"POST /x HTTP/1.1\r\n\r\nbody\r\n", 4, {}),
        (b"\r\n\r\nPOST /x HTTP/1.1\r\n\r\nbody", 4, {}),
        (b"POST /x HTTP/1.1\r\n\r\n\r\ndy\r\n", 4, {}),
        (b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\n\r\nbody", 4, {b"expect": b"100-continue"}),
        (b"POST /x HTTP/1.1\r\nA: " + bytes(CACHED_BYTES_MAX) + b"\r\n\r\nbody", 4, {}),
    ],
    ids=[
        "no body",
        "more behind it",
        "more before it",
        "more behind it, which looks like its end",
        "an expectation",
        "too long",
    ],
)
def test_a_header_is_not_cached(message: bytes, body_size: int, headers: dict[bytes, bytes]) -> None:
    cache = cache_after(message, body_size, headers)

    assert cache.find(memoryview(message)) is None


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1))
def test_each_request_has_its_own_body(bodies: Sequence[bytes]) -> None:
    parser = RequestParser(LIMITS)

    found = [event for body in bodies for event in feed(parser, request("/x", body=body))]

    assert [event.body for event in found if isinstance(event, Request)] == bodies


def test_white_space_around_a_value_is_no_part_of_it() -> None:
    (found,) = feed(RequestParser(LIMITS), TWICE % b"Y: \t\r\n")

    assert isinstance(found, Request)
    assert (found.headers[b"x"], found.headers[b"y"]) == (b"a b", b"")


@pytest.mark.parametrize("more", [b"Host: a\r\nHost: b\r\n", b"Host: a\r\nhOST: a\r\n", b"jSON: 2\r\n"])
def test_a_field_whose_repetition_is_ambiguous_is_refused(more: bytes) -> None:
    (found,) = feed(RequestParser(LIMITS, singular={b"json"}), TWICE % more)

    assert isinstance(found, Request)
    assert found.refusal_status == 400
    assert "more than one" in str(found.refusal)


@pytest.mark.parametrize("more", [b"Json: 1\t\r\n", b"X: c\r\n"])
def test_other_fields_may_be_repeated(more: bytes) -> None:
    (found,) = feed(RequestParser(LIMITS, singular={b"json"}), TWICE % more)

    assert isinstance(found, Request)
    assert found.refusal is None


WEBSOCKET = {"Connection": "Upgrade", "Upgrade": "WebSocket"}


@pytest.mark.parametrize(
    ("sent", "allowed", "is_upgrade"),
    [
        (request("/u", method="GET", headers=WEBSOCKET), True, True),
        (request("/u", method="GET", headers=WEBSOCKET), False, False),
        (request("/u", body=b"body", headers=WEBSOCKET), True, False),
        (request("/u", method="GET", headers={**WEBSOCKET, "Upgrade": "h2c"}), True, False),
        (request("/u", method="GET", headers=WEBSOCKET) + b"early", True, False),
    ],
)
def test_a_websocket_is_the_last_request_where_it_is_allowed(sent: bytes, allowed: bool, is_upgrade: bool) -> None:
    parser = RequestParser(HttpLimits(), allows_websockets=allowed)

    first = parser.receive(memoryview(sent))[0]

    assert isinstance(first, Request)
    assert (first.is_upgrade, first.url) == (is_upgrade, b"/u")
    assert (parser.state is ParserState.ENDED) == is_upgrade
