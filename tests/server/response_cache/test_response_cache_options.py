"""Options of the response cache."""

import pytest

from charonia.core.errors import ServingError
from charonia.server.options import ServerOptions
from charonia.server.response_cache.options import (
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    CacheOptions,
    RedisOptions,
    cache_options,
)


def refusal(name: str, **settings: str) -> str:
    with pytest.raises(ServingError) as caught:
        cache_options(name, settings, {})
    return caught.value.message


def test_a_local_cache_has_a_size() -> None:
    assert cache_options("local", {"size": "1048576"}, {}) == CacheOptions(local_bytes=1048576)
    assert CacheOptions(byte_size=5).size == CacheOptions(local_bytes=5).size == 5


def test_every_setting_of_redis_is_read() -> None:
    text = {
        "host": "h",
        "port": "1",
        "user": "u",
        "password": "p,=",
        "db": "2",
        "connect_timeout": "3",
        "socket_timeout": "4",
        "pool_size": "5",
        "wait_timeout": "6",
        "ttl": "7",
        "tls_enabled": "true",
        "cert": "c",
        "key": "k",
        "cacert": "a",
        "cacert_dir": "d",
        "sni": "n",
    }

    assert cache_options("redis", text, {}).redis == RedisOptions(
        *("h", 1, "u", "p,=", 2, 3, 4, 5, 6, 7, True, "c", "k", "a", "d", "n")
    )


def test_defaults_of_redis_have_limits_and_0_means_the_default() -> None:
    text = {"host": "h", "connect_timeout": "0", "socket_timeout": "0", "wait_timeout": "0"}

    assert cache_options("redis", text, {}).redis == RedisOptions("h")


def test_user_and_password_may_come_from_the_environment() -> None:
    environment = {USER_VARIABLE: "u", PASSWORD_VARIABLE: "p"}

    from_there = cache_options("redis", {"host": "h"}, environment).redis
    given = cache_options("redis", {"host": "h", "username": "v", "password": "q"}, environment).redis

    assert from_there == RedisOptions("h", user="u", password="p")
    assert given == RedisOptions("h", user="v", password="q")


def test_everything_that_is_wrong_is_said_at_once_and_never_the_password() -> None:
    message = refusal("redis", prot="1", port="0", tls_enabled="maybe", cert="c", password="secret", ttl="-1")

    for part in (
        "--cache-config=redis,prot: unknown setting, expected one of host, port",
        "--cache-config=redis,host: must be given",
        "--cache-config=redis,port: expected an integer from 1 to 65535, got '0'",
        "--cache-config=redis,tls_enabled: expected true or false, got 'maybe'",
        "--cache-config=redis: cert and key belong together",
        "--cache-config=redis,ttl: expected an integer",
    ):
        assert part in message
    assert "secret" not in message
    assert "secret" not in repr(RedisOptions("h", password="secret"))


@pytest.mark.parametrize("settings", [{}, {"size": "0"}, {"size": "x"}, {"size": "1", "host": "h"}])
def test_a_local_cache_without_a_size_or_with_another_setting_is_refused(settings: dict[str, str]) -> None:
    assert refusal("local", **settings).startswith("--cache-config=local,")


def test_an_unknown_cache_is_refused() -> None:
    assert "expected the cache local or redis" in refusal("memcached", host="h")


def test_the_old_and_the_new_form_together_are_refused() -> None:
    with pytest.raises(ServingError, match="give only one of them"):
        ServerOptions(cache=CacheOptions(local_bytes=1, byte_size=1))
    with pytest.raises(ServingError, match="give only one of them"):
        ServerOptions(cache=CacheOptions(redis=RedisOptions("h"), byte_size=1))
