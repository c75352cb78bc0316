"""Headers that become request parameters."""

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.access.options import (
    NAME_BYTES_MAX,
    PATTERN_LENGTH_MAX,
    REMEMBERED_MAX,
    RESERVED,
    HeaderForward,
)

SENT = [(b"X-User", b"ann"), (b"x-trace", b"1"), (b"Host", b"h")]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x-user", ["X-User"]),
        ("^x-", ["X-User", "x-trace"]),
        ("(?-i)^x-", ["x-trace"]),
        ("user|race", ["X-User", "x-trace"]),
        ("nothing", []),
        ("", ["X-User", "x-trace", "Host"]),
    ],
)
def test_a_pattern_is_looked_for_anywhere_in_a_name_in_any_case(pattern: str, names: list[str]) -> None:
    rule = HeaderForward(pattern)

    assert list(rule.parameters(SENT)) == names
    assert list(rule.parameters(SENT)) == names  # by what it remembers


def test_values_are_text_and_names_are_as_they_were_sent() -> None:
    rule = HeaderForward("x-")

    assert rule.parameters([(b"X-A", "\u00e4".encode()), (b"x-b", b"\xff")]) == {"X-A": "\u00e4", "x-b": "\ufffd"}


@pytest.mark.parametrize("name", [*sorted(RESERVED), "Priority", "triton_x", "Triton_grpc_error"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ServingError, match=f"header '{name}' is reserved for Triton usage") as caught:
        HeaderForward(".*").parameters([(name.encode(), b"1")])

    assert caught.value.code is Code.INVALID_ARG


def test_a_reserved_name_that_does_not_match_is_none_of_ours() -> None:
    assert HeaderForward("^x-").parameters([(b"priority", b"u=1")]) == {}


def test_pseudo_headers_and_very_long_names_are_not_forwarded() -> None:
    long = b"x" * (NAME_BYTES_MAX + 1)

    assert HeaderForward(".*").parameters([(b":path", b"/"), (long, b"1"), (long[1:], b"2")]) == {
        long[1:].decode(): "2"
    }


def test_many_names_do_not_pile_up() -> None:
    rule = HeaderForward("^x")

    for number in range(REMEMBERED_MAX + 10):
        assert rule.parameters([(b"x%d" % number, b"v")]) == {f"x{number}": "v"}


@pytest.mark.parametrize(
    "pattern", ["((", "[[:alpha:]]", "[^[:digit:]]", "x" * (PATTERN_LENGTH_MAX + 1), "\\pN", "a{9999999999}"]
)
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        HeaderForward(pattern)
