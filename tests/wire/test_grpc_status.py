from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.wire.grpc_status import (
    MESSAGE_BYTES_MAX,
    STATUS_BY_CODE,
    Status,
    percent_encoded,
    rpc_error,
)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.UNKNOWN, 2),
        (Code.INTERNAL, 13),
        (Code.NOT_FOUND, 5),
        (Code.INVALID_ARG, 3),
        (Code.UNAVAILABLE, 14),
        (Code.UNSUPPORTED, 12),
        (Code.ALREADY_EXISTS, 6),
        (Code.CANCELLED, 1),
    ],
)
def test_each_code_has_its_grpc_status(code: Code, status: int) -> None:
    assert STATUS_BY_CODE[code] == status


def test_the_numbers_are_those_of_grpc() -> None:
    import grpc

    assert {status.name: status.value for status in Status} == {s.name: s.value[0] for s in grpc.StatusCode}


def test_an_error_becomes_a_status_with_message_and_hint() -> None:
    error = rpc_error(ServingError(Code.NOT_FOUND, "no model 'm'", hint="load it"))

    assert (error.status, error.message) == (Status.NOT_FOUND, "no model 'm' (hint: load it)")


def test_plain_text_stays_readable_and_the_rest_is_escaped() -> None:
    assert percent_encoded("input 'x': 100% of [1, 2]\né") == b"input 'x': 100%25 of [1, 2]%0A%C3%A9"


@given(st.text(max_size=200))
def test_a_message_survives_the_header(message: str) -> None:
    encoded = percent_encoded(message)

    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote(encoded.decode("ascii")) == message.encode("utf-8", "replace").decode()


def test_a_long_message_is_cut_between_characters() -> None:
    message = unquote(percent_encoded("é" * MESSAGE_BYTES_MAX + "x").decode())

    assert message == "é" * (MESSAGE_BYTES_MAX // 2) + "..."
    assert unquote(percent_encoded("x" + "é" * MESSAGE_BYTES_MAX).decode()).endswith("é...")
    assert percent_encoded("x" * MESSAGE_BYTES_MAX) == b"x" * MESSAGE_BYTES_MAX
