"""A response cache in a Redis server, which several servers may share.

Requests do not wait for a Redis that does not answer: after `FAILURES_MAX` failures in a row nobody asks it any more,
and a task tries to reach it again from time to time. Until then requests run as if nothing had been found.

Key spaces: the first load of a model's content in any server notes a random epoch in Redis, which later loads and
other servers use, too. A reload notes a new one, so nothing that was kept before is found again by whoever loads from
then on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from charonia.cache.api import KeptResponse, Key
from charonia.cache.circuit import Circuit
from charonia.cache.codec import decode, encode
from charonia.config.cache import RedisOptions
from charonia.core.errors import unsupported
from charonia.stats.cache import CacheCounters, cache_families, remote_families
from charonia.stats.families import Family

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger(__name__)

PREFIX = b"charonia:"

VALUE_BYTES_MAX = 64 * 2**20
"""Largest response that is kept."""

LOOKUPS_MAX = 1024
"""Look-ups and insertions under way at once; what comes beyond that is not tried."""

EPOCH_BYTES = 16
EPOCH_SECS = 30 * 86_400
"""How long an epoch is remembered after the last load that used it; then the next load begins anew."""

_MS_PER_S = 1000


class RedisCache:
    """Responses in Redis. See `ResponseCache`.

    Args:
        options: Where it is, and its limits.

    Raises:
        ServingError: UNSUPPORTED where the client library is not installed.
    """

    is_shared = True

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._client = _client(options)
        self._circuit = Circuit()
        self._counters = CacheCounters()
        self._errors = 0
        self._skipped = 0
        self._free = asyncio.Semaphore(options.pool_size)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded: set[tuple[str, str]] = set()
        self._is_closed = False
        self._connecting: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Try to reach Redis once; where that fails, go on trying beside everything else."""
        if not await self._try_to_connect(logging.WARNING):
            self._reconnect_later()

    def get(self, key: Key, found: Callable[[KeptResponse | None], None]) -> None:
        """Look a response up; `found` is called when Redis has answered, or the time is up."""
        if not self._is_possible():
            found(None)
        else:
            self._begin(self._look_up(key, found))

    def put(self, key: Key, response: KeptResponse, done: Callable[[], None]) -> None:
        """Keep a response; `done` is called when Redis has it, or the time is up."""
        value = encode(response) if response.byte_size <= VALUE_BYTES_MAX and self._is_possible() else None
        if value is None:
            done()
        else:
            self._begin(self._insert(key, value, done))

    def forget(self, space: bytes) -> None:
        """Do nothing: nobody asks for that space again unless it loads the same content, and entries expire."""

    async def space(self, model: str, version: str, content: bytes) -> bytes:
        """Return the space of a content; a new one where this server loads it again."""
        is_again = (model, version) in self._loaded
        self._loaded.add((model, version))
        name = PREFIX + b"epoch:" + sha256(f"{model}\0{version}\0".encode() + content).hexdigest().encode()
        fresh = secrets.token_bytes(EPOCH_BYTES)
        epoch = fresh
        if self._circuit.is_up:
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._client.set(name, fresh, ex=EPOCH_SECS, nx=not is_again)
                    noted = await self._client.getex(name, ex=EPOCH_SECS)
                    epoch = noted if isinstance(noted, bytes) else fresh
            except Exception as error:  # whatever a client library raises must not fail a load
                self._failed(error)
        return sha256(name + epoch).digest()[:EPOCH_BYTES]

    def families(self) -> list[Family]:
        """Return its metrics."""
        return [
            *cache_families(self._counters),
            *remote_families(self._circuit.is_up, self._errors, self._skipped),
        ]

    async def aclose(self) -> None:
        """Finish what is under way, within its limits, and close the connections."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._client.aclose()

    @property
    def _limit_s(self) -> float:
        return self._options.socket_timeout / _MS_PER_S

    def _is_possible(self) -> bool:
        is_possible = self._circuit.is_up and len(self._tasks) < LOOKUPS_MAX and not self._is_closed
        self._skipped += not is_possible
        return is_possible

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_up(self, key: Key, found: Callable[[KeptResponse | None], None]) -> None:
        start = time.monotonic_ns()
        value = await self._ask(lambda: self._client.get(_name(key)))
        response = None
        if value is not None:
            try:
                response = decode(value)
            except ValueError as error:
                self._errors += 1
                _log.warning("response cache: what Redis has for a key is no response: %s", error)
        self._counters.looked_up(response is not None, time.monotonic_ns() - start)
        found(response)

    async def _insert(self, key: Key, value: bytes, done: Callable[[], None]) -> None:
        start = time.monotonic_ns()
        await self._ask(lambda: self._client.set(_name(key), value, ex=self._options.ttl or None))
        self._counters.inserted(time.monotonic_ns() - start)
        done()

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Return Redis' answer, None where there is none in time."""
        try:
            async with asyncio.timeout(self._options.wait_timeout / _MS_PER_S):
                await self._free.acquire()
        except TimeoutError:  # too many at once says nothing about Redis
            self._skipped += 1
            return None
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await call()
        except Exception as error:  # whatever a client library raises must not fail a request
            self._failed(error)
            return None
        finally:
            self._free.release()
        self._circuit.succeeded()
        return answer

    def _failed(self, error: Exception) -> None:
        self._errors += 1
        if self._circuit.failed():
            _log.warning(
                "response cache: Redis at %s:%d does not answer (%s: %s), requests run without it",
                *(self._options.host, self._options.port, type(error).__name__, error),
            )
            self._reconnect_later()

    def _reconnect_later(self) -> None:
        if not self._is_closed:
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(self._circuit.pause_s())
            if await self._try_to_connect(logging.DEBUG):
                _log.info("response cache: Redis at %s:%d answers", self._options.host, self._options.port)
                return

    async def _try_to_connect(self, level: int) -> bool:
        """Open every connection, so that no request waits for one; a failure is logged at this level."""
        try:
            async with asyncio.timeout((self._options.connect_timeout + self._options.socket_timeout) / _MS_PER_S):
                await asyncio.gather(*(self._client.ping() for _ in range(self._options.pool_size)))
        except Exception as error:  # whatever a client library raises: it is tried again
            self._errors += 1
            _log.log(
                level,
                "response cache: Redis at %s:%d cannot be reached, requests run without it: %s: %s",
                *(self._options.host, self._options.port, type(error).__name__, error),
            )
            return False
        self._circuit.connected()
        return True


def _name(key: Key) -> bytes:
    return PREFIX + key.space.hex().encode() + b":" + key.digest.hex().encode()


def _client(options: RedisOptions) -> "Redis":
    try:
        from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection  # an extra
    except ImportError as error:
        raise unsupported(
            "--cache-config=redis needs the Python package redis", hint="pip install 'charonia[redis]'"
        ) from error

    class NamedSslConnection(SSLConnection):
        """A TLS connection that asks for, and expects, a name other than the host's."""

        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "server_hostname": options.sni or options.host}

    tls: dict[str, Any] = {}
    if options.tls_enabled:
        tls = {
            "ssl_certfile": options.cert or None,
            "ssl_keyfile": options.key or None,
            "ssl_ca_certs": options.cacert or None,
            "ssl_ca_path": options.cacert_dir or None,
            "ssl_check_hostname": True,
        }
    pool = BlockingConnectionPool(
        max_connections=options.pool_size + 1,  # one to note epochs
        timeout=options.wait_timeout / _MS_PER_S,
        connection_class=NamedSslConnection if options.tls_enabled else Connection,
        host=options.host,
        port=options.port,
        username=options.user or None,
        password=options.password or None,
        db=options.db,
        socket_connect_timeout=options.connect_timeout / _MS_PER_S,
        socket_timeout=options.socket_timeout / _MS_PER_S,
        retry=None,
        **tls,
    )
    return Redis.from_pool(pool)
