"""A cache in a real Redis server: shared entries, new namespaces after a reload, and a server that is down."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme
from tests.support.faulty_network import SLOW, FaultyNetwork, Link, broken
from tests.support.ports import free_port
from tests.support.process import until
from tests.support.redis_server import RedisProcess

from charonia.core.dtypes import DataType
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.response_cache.api import CachedResponse, CacheKey
from charonia.server.response_cache.options import RedisOptions
from charonia.server.response_cache.redis import FAILURES_MAX, PREFIX, RedisCache

HOST = "127.0.0.1"
KEY = CacheKey(b"namespace", b"digest")


def response(size: int = 4) -> CachedResponse:
    tensor = Tensor("OUT", DataType.FP32, np.arange(size, dtype="<f4"))
    return CachedResponse.of(InferResponse("m", "1", "id", [tensor], {"p": "v"}))


def options(port: int, **more: object) -> RedisOptions:
    patient = RedisOptions(HOST, port, pool_size=2, socket_timeout=10_000, wait_timeout=10_000)
    return replace(patient, **more)  # type: ignore[arg-type] # fields of the record


@asynccontextmanager
async def connected(given: RedisOptions) -> AsyncIterator[RedisCache]:
    cache = RedisCache(given)
    await cache.connect()
    try:
        yield cache
    finally:
        await cache.aclose()


async def look_up(cache: RedisCache, key: CacheKey = KEY) -> CachedResponse | None:
    done: asyncio.Future[CachedResponse | None] = asyncio.get_running_loop().create_future()
    cache.get(key, done.set_result)
    return await asyncio.wait_for(done, 10)


async def keep(cache: RedisCache, kept: CachedResponse, key: CacheKey = KEY) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cache.put(key, kept, lambda: done.set_result(None))
    await asyncio.wait_for(done, 10)


def values(cache: RedisCache) -> dict[str, float]:
    return {family.name: sample.value for family in cache.families() for sample in family.samples}


async def test_a_response_is_found_again_also_by_another_server_and_not_under_another_key(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as redis:
        async with connected(options(redis.port)) as one, connected(options(redis.port)) as other:
            assert await look_up(one) is None
            await keep(one, response())

            for cache in (one, other):
                found = await look_up(cache)
                assert found is not None
                assert found.outputs[0].array.tolist() == [0, 1, 2, 3]
                assert (found.model_name, found.parameters) == ("m", {"p": "v"})
            assert await look_up(other, CacheKey(b"other", b"digest")) is None
            assert await look_up(other, CacheKey(b"namespace", b"other")) is None
            counted = values(one)
            assert (counted["nv_cache_num_hits"], counted["nv_cache_num_misses"]) == (1, 1)
            assert (counted["charonia_cache_up"], counted["charonia_cache_errors_total"]) == (1, 0)
            assert counted["nv_cache_lookup_duration"] > 0
            one.evict_namespace(b"namespace")


async def test_an_entry_goes_when_its_time_has_come(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as redis:
        async with connected(options(redis.port, ttl=100)) as cache, connected(options(redis.port, ttl=0)) as keeps:
            await keep(cache, response())
            await keep(keeps, response(), CacheKey(b"namespace", b"for ever"))
            name = PREFIX + b"namespace".hex().encode() + b":"

            assert 0 < await cache._client.ttl(name + b"digest".hex().encode()) <= 100
            assert await cache._client.ttl(name + b"for ever".hex().encode()) == -1


async def test_a_first_load_shares_what_others_kept_and_a_reload_begins_anew(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as redis:
        async with connected(options(redis.port)) as one, connected(options(redis.port)) as other:
            first = await one.namespace("m", "1", b"content")

            assert await other.namespace("m", "1", b"content") == first
            assert await one.namespace("m", "2", b"content") != first
            assert await one.namespace("n", "1", b"content") != first
            assert await one.namespace("m", "1", b"changed") != first
            again = await one.namespace("m", "1", b"content")
            assert again != first
        async with connected(options(redis.port)) as restarted:
            assert await restarted.namespace("m", "1", b"content") == again


async def test_a_value_that_is_no_response_is_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisProcess(tmp_path) as redis:
        async with connected(options(redis.port)) as cache:
            await cache._client.set(PREFIX + b"namespace".hex().encode() + b":" + b"digest".hex().encode(), b"rubbish")

            assert await look_up(cache) is None
            assert values(cache)["charonia_cache_errors_total"] == 1
            assert "is not a response" in caplog.text


async def test_what_cannot_be_kept_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisProcess(tmp_path) as redis:
        async with connected(options(redis.port)) as cache:
            monkeypatch.setattr("charonia.server.response_cache.redis.VALUE_BYTES_MAX", 100)
            await keep(cache, response(1000))

            assert await look_up(cache) is None


async def test_without_redis_nothing_waits_and_it_is_used_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("charonia.server.response_cache.redis.PAUSE_S", 0.05)
    monkeypatch.setattr("charonia.server.response_cache.redis.PAUSE_S_MAX", 0.1)
    port = free_port()

    caplog.set_level("INFO")
    async with connected(options(port)) as cache:
        assert await look_up(cache) is None
        await keep(cache, response())
        assert len(await cache.namespace("m", "1", b"content")) == 16
        assert values(cache)["charonia_cache_up"] == 0
        assert values(cache)["charonia_cache_skipped_total"] == 2
        await until(lambda: values(cache)["charonia_cache_errors_total"] >= 3)
        assert caplog.text.count("cannot be reached, requests run without it") == 1  # not at every try

        with RedisProcess(tmp_path, port=port):
            await until(lambda: values(cache)["charonia_cache_up"])
            await keep(cache, response())
            assert await look_up(cache) is not None
    assert "responds again" in caplog.text


@pytest.mark.parametrize("link", SLOW.values(), ids=SLOW)
async def test_a_slow_network_costs_time_only(tmp_path: Path, link: Link) -> None:
    with RedisProcess(tmp_path) as redis, FaultyNetwork(redis.port, to_client=link, to_server=link) as network:
        async with connected(options(network.port, connect_timeout=10_000)) as cache:
            await keep(cache, response())

            found = await look_up(cache)
            assert found is not None
            assert found.outputs[0].array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["cut", "silent"])
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_broken_connection_costs_an_entry_and_the_time_limit_of_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, direction: str, fault: str
) -> None:
    monkeypatch.setattr("charonia.server.response_cache.redis.PAUSE_S", 0.05)
    limit_ms = 50 if fault == "silent" else 10_000
    with RedisProcess(tmp_path) as redis, FaultyNetwork(redis.port) as network:
        async with connected(options(redis.port)) as cache:
            await keep(cache, response(10_000))
        async with connected(options(network.port, socket_timeout=limit_ms)) as cache:
            await until(lambda: values(cache)["charonia_cache_up"])  # connecting has the same time, and is tried again
            setattr(network, direction, broken(5000)[fault])
            for _ in range(FAILURES_MAX):
                assert await (look_up(cache) if direction == "to_client" else keep(cache, response(10_000))) is None
            assert values(cache)["charonia_cache_up"] == 0
            assert values(cache)["charonia_cache_errors_total"] >= FAILURES_MAX
            assert caplog.text.count("does not respond") == 1

            network.to_client = network.to_server = Link()
            await until(lambda: values(cache)["charonia_cache_up"])
            while await look_up(cache) is None:  # a stuttering machine
                await asyncio.sleep(0.02)


async def test_user_password_and_database_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisProcess(tmp_path, "--requirepass", "secret", "--user", *("me", "on", ">mine", "~*", "+@all")) as redis:
        for name, password, up in (("", "secret", 1), ("me", "mine", 1), ("", "wrong", 0), ("", "", 0)):
            async with connected(options(redis.port, user=name, password=password, db=3)) as cache:
                assert values(cache)["charonia_cache_up"] == up
    assert "mine" not in caplog.text
    assert "mine" not in repr(options(1, password="mine"))


async def test_tls_checks_the_server_and_shows_our_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("redis.example", HOST)
    ours = authority.issue_cert("client.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ours.private_key_and_cert_chain_pem.write_to_path(tmp_path / "ours.pem")
    patient = {"connect_timeout": 20_000, "socket_timeout": 20_000}  # handshakes of a busy machine
    trust = {"tls_enabled": True, "cacert": str(tmp_path / "ca.pem"), **patient}
    shown = {"cert": str(tmp_path / "ours.pem"), "key": str(tmp_path / "ours.pem")}

    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)

    with RedisProcess(tmp_path) as redis, FaultyNetwork(redis.port, tls=context) as end:
        async with connected(options(end.port, **trust, **shown, sni="redis.example")) as cache:
            await keep(cache, response())
            assert await look_up(cache) is not None
            assert "redis.example" in names
        async with connected(options(end.port, **trust, **shown)) as cache:
            assert values(cache)["charonia_cache_up"] == 1
        for wrong in (
            {**trust, **shown, "sni": "other.example"},
            trust,  # no certificate of ours
            {"tls_enabled": True, **shown},  # an authority that we do not know
            {},  # plain text
        ):
            async with connected(options(end.port, **wrong)) as cache:
                assert values(cache)["charonia_cache_up"] == 0
