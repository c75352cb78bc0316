import pytest

from charonia.client.balancing.options import Balancing
from charonia.client.balancing.pool import SERVERS_MAX
from charonia.client.balancing.transport import parse_addresses
from charonia.core.errors import ServingError
from charonia.wire.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("a:8000", "http://a:8000"),
        ("a:8000,b:8001", "http://a:8000, http://b:8001"),
        ("grpc://a:1, b:2 ,grpc://c", "grpc://a:1, grpc://b:2, grpc://c:8001"),
        (["https://a", "https://b"], "https://a:443, https://b:443"),
        (["a:1", "a:1", "b:1"], "http://a:1, http://b:1"),
        ("dns+grpc://models:8001", "dns+grpc://models:8001"),
        ("http://a:1/base,b:1/base", "http://a:1/base, http://b:1/base"),
    ],
)
def test_addresses_are_read(url: str | list[str], text: str) -> None:
    assert str(parse_addresses(url)) == text


def test_a_name_that_is_looked_up_is_never_a_single_server() -> None:
    assert parse_addresses("a:1").is_single
    assert parse_addresses(["a:1", "a:1"]).is_single
    assert not parse_addresses("a:1,b:1").is_single
    assert not parse_addresses("dns+http://a:1").is_single


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ([], "expected the URL of a server, got none"),
        ("a:1,", "'' is not the URL of a server|is not the URL"),
        (["http://a:1", "grpc://b:1"], "differ in host and port only: got http://a:1 and grpc://b:1"),
        (["http://a:1", "https://b:1"], "differ in host and port only"),
        ("http://a:1/x,http://b:1/y", "differ in host and port only"),
        (["dns+http://a", "dns+http://b"], "expected a single URL with 'dns\\+'"),
        ([f"a{n}:1" for n in range(SERVERS_MAX + 1)], "at most 1024 servers, got 1025"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(url: str | list[str], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        parse_addresses(url)


def test_an_address_of_a_name_keeps_the_name_in_requests_and_shows_itself_in_messages() -> None:
    endpoint = Endpoint("http", "::1", 8000, False, "", name="models")

    assert endpoint.authority == "models:8000"
    assert str(endpoint) == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolve_s": 0}, "resolve_s: expected a number of seconds above 0, got 0"),
        ({"eject_s": float("nan")}, "eject_s"),
        ({"tries_max": 0}, "tries_max: expected at least 1, got 0"),
        ({"retry_ratio": 1.5}, "retry_ratio: expected 0 to 1"),
        ({"slow_factor": 1}, "slow_factor: expected more than 1, or 0 for never"),
        ({"hedge_after_s": 1.0}, "expected models whose requests may run twice in idempotent_models, got none"),
        ({"idempotent_models": "m"}, "idempotent_models: expected a list of names, got 'm'"),
        (
            {"hedge_after_s": "p99", "idempotent_models": ["m"]},
            "hedge_after_s: expected a number of seconds, 'p95' or None, got 'p99'",
        ),
        ({"hedge_after_s": -1, "idempotent_models": ["m"]}, "hedge_after_s"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        Balancing(**options)  # type: ignore[arg-type]
