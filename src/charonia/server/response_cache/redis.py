"""A response cache in a Redis server, which several servers may share.

Requests do not wait for a Redis that does not respond: a circuit breaker opens after `FAILURES_MAX` failures in a row,
and a task tries to reconnect with exponential back-off. Until then every look-up is a miss.

Namespaces: the first load of a model's content in any server stores a random epoch in Redis, which later loads and
other servers share. A reload stores a new one, so no server that loads the model from then on finds earlier responses.

A response is stored as a magic number of four bytes, the length of a JSON header in four bytes, the header, then the
tensors in their wire form.
"""

import asyncio
import logging
import math
import secrets
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, unsupported
from charonia.install_hint import extra_hint
from charonia.server.metrics.metric_families import Family
from charonia.server.response_cache.api import CacheCounters, CachedResponse, CacheKey, cache_families, remote_families
from charonia.server.response_cache.options import RedisOptions
from charonia.wire.tensors import decode_tensor, encode_tensor

if TYPE_CHECKING:
    from redis.asyncio import Redis


_log = logging.getLogger(__name__)

PREFIX = b"charonia:"

MAGIC = b"CRC2"

FAILURES_MAX = 3
"""Failures in a row after which the circuit breaker opens."""

PAUSE_S = 1.0
"""Pause before the first attempt to reconnect; it doubles with each attempt that fails."""

PAUSE_S_MAX = 30.0

VALUE_BYTES_MAX = 64 * 2**20
"""Largest response that is stored."""

LOOKUPS_MAX = 1024
"""Limit of concurrent look-ups and insertions; others are skipped."""

EPOCH_BYTES = 16
EPOCH_SECS = 30 * 86_400
"""Lifetime of an epoch after the last load that used it; the next load then stores a new one."""

_MS_PER_S = 1000

_START = struct.Struct("<4sI")


def encode(response: CachedResponse) -> bytes | None:
    """Return the bytes of a response, None if a parameter would not survive the round trip."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in response.parameters.values()):
        return None
    bodies = [encode_tensor(tensor) for tensor in response.outputs]
    head = {
        "model": response.model_name,
        "version": response.model_version,
        "parameters": response.parameters,
        "outputs": [
            [tensor.name, tensor.datatype.wire, list(tensor.array.shape), len(body)]
            for tensor, body in zip(response.outputs, bodies, strict=True)
        ],
    }
    try:
        text = orjson.dumps(head)
    except TypeError:  # an integer beyond 64 bits
        return None
    return b"".join([_START.pack(MAGIC, len(text)), text, *bodies])


def decode(data: bytes) -> CachedResponse:
    """Return the response that was encoded.

    Raises:
        ValueError: The bytes are malformed.
    """
    try:
        magic, size = _START.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("wrong magic number")
        position = _START.size + size
        head: dict[str, Any] = orjson.loads(data[_START.size : position])
        outputs = []
        for name, wire, shape, length in head["outputs"]:
            body = memoryview(data)[position : position + length]
            outputs.append(decode_tensor(str(name), BY_WIRE[wire], shape, body))
            outputs[-1].array.flags.writeable = False
            position += length
        if position != len(data):
            raise ValueError(f"expected {position} bytes, got {len(data)}")
        return CachedResponse(str(head["model"]), str(head["version"]), tuple(outputs), dict(head["parameters"]))
    except (struct.error, KeyError, TypeError, OverflowError, ServingError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class CircuitBreaker:
    """Decides whether to use a server that may be down.

    Attributes:
        is_up: Whether to use it.
    """

    def __init__(self) -> None:
        self.is_up = False
        self._failures = 0
        self._pause_s = PAUSE_S

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> bool:
        """An operation failed; return whether the server counts as down from now on."""
        self._failures += 1
        if self.is_up and self._failures >= FAILURES_MAX:
            self.is_up = False
            return True
        return False

    def connected(self) -> None:
        """An attempt to connect has succeeded."""
        self.is_up = True
        self._failures = 0
        self._pause_s = PAUSE_S

    def pause_s(self) -> float:
        """Return the time to wait before the next attempt to connect."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return pause


class RedisCache:
    """Responses in Redis. See `ResponseCache`.

    Args:
        options: Its address and limits.

    Raises:
        ServingError: UNSUPPORTED where the client library is not installed.
    """

    is_shared = True

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._client = _client(options)
        self._breaker = CircuitBreaker()
        self._counters = CacheCounters()
        self._errors = 0
        self._skipped = 0
        self._free = asyncio.Semaphore(options.pool_size)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded: set[tuple[str, str]] = set()
        self._is_closed = False
        self._connecting: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Try to connect once; if that fails, keep trying in the background."""
        if not await self._try_to_connect(logging.WARNING):
            self._reconnect_later()

    def get(self, key: CacheKey, found: Callable[[CachedResponse | None], None]) -> None:
        """Look up a response; `found` is called when Redis has responded, or the time limit has passed."""
        if not self._is_usable():
            found(None)
        else:
            self._begin(self._look_up(key, found))

    def put(self, key: CacheKey, response: CachedResponse, done: Callable[[], None]) -> None:
        """Store a response; `done` is called when Redis has it, or the time limit has passed."""
        value = encode(response) if response.byte_size <= VALUE_BYTES_MAX and self._is_usable() else None
        if value is None:
            done()
        else:
            self._begin(self._insert(key, value, done))

    def evict_namespace(self, namespace: bytes) -> None:
        """Do nothing: only a load of the same content uses that namespace again, and entries expire."""

    async def namespace(self, model: str, version: str, content: bytes) -> bytes:
        """Return the namespace of a model's content; a new one if this server reloads the model."""
        is_again = (model, version) in self._loaded
        self._loaded.add((model, version))
        name = PREFIX + b"epoch:" + sha256(f"{model}\0{version}\0".encode() + content).hexdigest().encode()
        fresh = secrets.token_bytes(EPOCH_BYTES)
        epoch = fresh
        if self._breaker.is_up:
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._client.set(name, fresh, ex=EPOCH_SECS, nx=not is_again)
                    stored = await self._client.getex(name, ex=EPOCH_SECS)
                    epoch = stored if isinstance(stored, bytes) else fresh
            except Exception as error:  # an exception of the client library must not fail a load
                self._failed(error)
        return sha256(name + epoch).digest()[:EPOCH_BYTES]

    def families(self) -> list[Family]:
        return [
            *cache_families(self._counters),
            *remote_families(self._breaker.is_up, self._errors, self._skipped),
        ]

    async def aclose(self) -> None:
        """Finish the operations under way, within their time limits, and close the connections."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._client.aclose()

    @property
    def _limit_s(self) -> float:
        return self._options.socket_timeout / _MS_PER_S

    def _is_usable(self) -> bool:
        is_usable = self._breaker.is_up and len(self._tasks) < LOOKUPS_MAX and not self._is_closed
        self._skipped += not is_usable
        return is_usable

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_up(self, key: CacheKey, found: Callable[[CachedResponse | None], None]) -> None:
        start = time.monotonic_ns()
        value = await self._ask(lambda: self._client.get(_name(key)))
        response = None
        if value is not None:
            try:
                response = decode(value)
            except ValueError as error:
                self._errors += 1
                _log.warning("response cache: the value of a key in Redis is not a response: %s", error)
        self._counters.looked_up(response is not None, time.monotonic_ns() - start)
        found(response)

    async def _insert(self, key: CacheKey, value: bytes, done: Callable[[], None]) -> None:
        start = time.monotonic_ns()
        await self._ask(lambda: self._client.set(_name(key), value, ex=self._options.ttl or None))
        self._counters.inserted(time.monotonic_ns() - start)
        done()

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Return the reply of Redis, None if it does not arrive in time."""
        try:
            async with asyncio.timeout(self._options.wait_timeout / _MS_PER_S):
                await self._free.acquire()
        except TimeoutError:  # too many look-ups say nothing about Redis
            self._skipped += 1
            return None
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await call()
        except Exception as error:  # an exception of the client library must not fail a request
            self._failed(error)
            return None
        finally:
            self._free.release()
        self._breaker.succeeded()
        return answer

    def _failed(self, error: Exception) -> None:
        self._errors += 1
        if self._breaker.failed():
            _log.warning(
                "response cache: Redis at %s:%d does not respond (%s: %s), requests run without it",
                self._options.host, self._options.port, type(error).__name__, error,
            )  # fmt: skip
            self._reconnect_later()

    def _reconnect_later(self) -> None:
        if not self._is_closed:
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(self._breaker.pause_s())
            if await self._try_to_connect(logging.DEBUG):
                _log.info("response cache: Redis at %s:%d responds again", self._options.host, self._options.port)
                return

    async def _try_to_connect(self, level: int) -> bool:
        """Open all connections, so that no request waits for one; a failure is logged at this level."""
        try:
            async with asyncio.timeout((self._options.connect_timeout + self._options.socket_timeout) / _MS_PER_S):
                await asyncio.gather(*(self._client.ping() for _ in range(self._options.pool_size)))
        except Exception as error:  # of the client library: another attempt follows
            self._errors += 1
            _log.log(
                level,
                "response cache: Redis at %s:%d cannot be reached, requests run without it: %s: %s",
                self._options.host, self._options.port, type(error).__name__, error,
            )  # fmt: skip
            return False
        self._breaker.connected()
        return True


def _name(key: CacheKey) -> bytes:
    return PREFIX + key.namespace.hex().encode() + b":" + key.digest.hex().encode()


def _client(options: RedisOptions) -> "Redis":
    try:
        from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection  # an extra
    except ImportError as error:
        raise unsupported("--cache-config=redis needs the Python package redis", hint=extra_hint("redis")) from error

    class NamedSslConnection(SSLConnection):
        """A TLS connection that requests and expects a name other than the host's."""

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
