import pytest

from charonia.wire.grpc_headers import (
    RESPONSE_HEAD,
    CallHead,
    Headers,
    NotGrpcError,
    error_head,
    error_trailers,
    parse_timeout,
)
from charonia.wire.grpc_headers import parse_head as parse_head_within
from charonia.wire.grpc_status import RpcError, Status


def parse_head(headers: Headers) -> CallHead:
    return parse_head_within(headers, 16_384)


def headers(**changes: bytes | None) -> Headers:
    fields: dict[str, bytes | None] = {":method": b"POST", ":path": b"/s/M", "content-type": b"application/grpc"}
    fields.update({name.replace("_", "-"): value for name, value in changes.items()})
    return tuple((name.encode(), value) for name, value in fields.items() if value is not None)


def test_the_headers_of_a_call_are_understood() -> None:
    head = parse_head(
        (
            *headers(grpc_timeout=b"250m", grpc_encoding=b"gzip", grpc_accept_encoding=b"identity, gzip"),
            (b"triton_grpc_error", b"true"),
            (b"user-agent", b"x"),
        )
    )

    assert (head.path, head.timeout_ns, head.encoding) == (b"/s/M", 250_000_000, b"gzip")
    assert head.accepts == (b"identity", b"gzip")
    assert head.wants_grpc_errors


def test_a_call_without_extras_has_no_limit_and_no_encoding() -> None:
    head = parse_head(headers())

    assert (head.timeout_ns, head.encoding, head.accepts, head.wants_grpc_errors) == (0, b"identity", (), False)


@pytest.mark.parametrize(
    "content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc; charset=utf-8"]
)
def test_a_grpc_content_type_is_accepted(content_type: bytes) -> None:
    assert parse_head(headers(content_type=content_type)).path == b"/s/M"


@pytest.mark.parametrize("content_type", [None, b"application/json", b"application/grpc-web", b"application/grpc+json"])
def test_another_content_type_is_refused_with_415(content_type: bytes | None) -> None:
    with pytest.raises(NotGrpcError) as caught:
        parse_head(headers(content_type=content_type))

    assert caught.value.headers == ((b":status", b"415"), (b"accept-post", b"application/grpc"))


def test_another_method_is_refused_with_405() -> None:
    with pytest.raises(NotGrpcError) as caught:
        parse_head((*headers()[1:], (b":method", b"GET")))

    assert caught.value.headers == ((b":status", b"405"), (b"allow", b"POST"))


@pytest.mark.parametrize(
    ("value", "expected_ns"),
    [
        (b"1H", 3_600_000_000_000),
        (b"2M", 120_000_000_000),
        (b"3S", 3_000_000_000),
        (b"4m", 4_000_000),
        (b"5u", 5_000),
        (b"6n", 6),
        (b"0n", 1),
        (b"99999999H", 99_999_999 * 3_600_000_000_000),
    ],
)
def test_a_timeout_is_digits_and_a_unit(value: bytes, expected_ns: int) -> None:
    assert parse_timeout(value) == expected_ns


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b"\xff\xff"])
def test_any_other_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        parse_timeout(value)

    assert caught.value.status is Status.INVALID_ARGUMENT


def test_an_unknown_encoding_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(RpcError) as caught:
        parse_head(headers(grpc_encoding=b"zstd"))

    assert caught.value.status is Status.UNIMPLEMENTED
    assert (b"grpc-accept-encoding", b"identity,deflate,gzip") in error_head(caught.value)


def test_an_error_before_the_response_is_headers_and_trailers_in_one() -> None:
    assert error_head(RpcError(Status.NOT_FOUND, "no")) == (
        *RESPONSE_HEAD[b"identity"],
        (b"grpc-status", b"5"),
        (b"grpc-message", b"no"),
    )
    assert error_trailers(RpcError(Status.NOT_FOUND, "no")) == ((b"grpc-status", b"5"), (b"grpc-message", b"no"))


def test_compressed_responses_name_their_encoding() -> None:
    assert RESPONSE_HEAD[b"gzip"][-1] == (b"grpc-encoding", b"gzip")
    assert RESPONSE_HEAD[b"deflate"][-1] == (b"grpc-encoding", b"deflate")


def test_headers_count_as_http2_counts_them() -> None:
    size = sum(len(name) + len(value) + 32 for name, value in headers())

    assert parse_head_within(headers(), size).path == b"/s/M"
    with pytest.raises(RpcError, match=f"at most {size - 1} bytes are accepted, got {size}") as caught:
        parse_head_within(headers(), size - 1)
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
