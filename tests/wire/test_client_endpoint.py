"""URLs of servers."""

import pytest

from charonia.core.errors import ServingError
from charonia.wire.endpoint import Endpoint, parse_url


@pytest.mark.parametrize(
    ("url", "endpoint", "text"),
    [
        ("localhost:8000", Endpoint("http", "localhost", 8000, False, ""), "http://localhost:8000"),
        ("localhost", Endpoint("http", "localhost", 8000, False, ""), "http://localhost:8000"),
        ("https://a.b", Endpoint("http", "a.b", 443, True, ""), "https://a.b:443"),
        ("HTTP://a/x/y/", Endpoint("http", "a", 8000, False, "/x/y"), "http://a:8000/x/y"),
        ("grpc://a", Endpoint("grpc", "a", 8001, False, ""), "grpc://a:8001"),
        ("grpcs://a:1", Endpoint("grpc", "a", 1, True, ""), "grpcs://a:1"),
        ("http://[::1]:8000", Endpoint("http", "::1", 8000, False, ""), "http://[::1]:8000"),
    ],
)
def test_a_url_says_how_to_reach_a_server(url: str, endpoint: Endpoint, text: str) -> None:
    assert parse_url(url) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is not the URL of a server"),
        ("http://", "is not the URL of a server"),
        ("http://a:b", "is not the URL of a server"),
        ("::1:8000", "is not the URL of a server"),
        ("a?x", "is not the URL of a server"),
        ("user@a:1", "is not the URL of a server"),
        ("ftp://a", "expected one of the schemes http, https, grpc, grpcs, got 'ftp'"),
        ("a:0", "expected a port from 1 to 65535, got 0"),
        ("grpc://a/x", "a gRPC server has no path"),
    ],
)
def test_anything_else_is_refused_with_the_reason(url: str, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        parse_url(url)
