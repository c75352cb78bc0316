"""Server options of the response cache. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from charonia.core.errors import invalid

CACHE_BYTES_MAX = 2**44
REDIS_PORT = 6379

USER_VARIABLE = "TRITONCACHE_REDIS_USERNAME"
PASSWORD_VARIABLE = "TRITONCACHE_REDIS_PASSWORD"

LOCAL = "local"
REDIS = "redis"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """A cache in a Redis server. Times are in ms, as on the command line.

    Attributes:
        host: Host of the server.
        port: Port of the server.
        user: User name, "" for the default user.
        password: Password, "" for none.
        db: Number of the database.
        connect_timeout: Longest time to connect.
        socket_timeout: Time limit of a look-up.
        pool_size: Number of connections in the pool.
        wait_timeout: Longest wait for a free connection.
        ttl: Lifetime of an entry in seconds, 0 for as long as Redis keeps it.
        tls_enabled: Whether to use TLS.
        cert: Path of the client certificate, PEM.
        key: Path of its private key, PEM.
        cacert: Path of the certificates to verify Redis, PEM.
        cacert_dir: Folder of such certificates.
        sni: Name to request and to expect, "" for the host's.
    """

    host: str
    port: int = REDIS_PORT
    user: str = ""
    password: str = ""
    db: int = 0
    connect_timeout: int = 1000
    socket_timeout: int = 100
    pool_size: int = 8
    wait_timeout: int = 100
    ttl: int = 86_400
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""

    def __repr__(self) -> str:  # without the password
        return f"RedisOptions({self.host!r}, {self.port}, user={self.user!r}, tls={self.tls_enabled})"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The response cache.

    Attributes:
        local_bytes: Size of a cache in the server's memory, 0 for none.
        redis: A cache in a Redis server, None for none.
        byte_size: Old form of `local_bytes`.
    """

    local_bytes: int = 0
    redis: RedisOptions | None = None
    byte_size: int = 0

    @property
    def size(self) -> int:
        """Bytes of the cache in the server's memory, 0 for none."""
        return self.local_bytes or self.byte_size

    def problems(self) -> Iterator[str]:
        if self.byte_size and (self.local_bytes or self.redis is not None):
            yield "--response-cache-byte-size is the old form of --cache-config=local,size: give only one of them"


def cache_options(name: str, settings: Mapping[str, str], environment: Mapping[str, str]) -> CacheOptions:
    """Return the cache that `--cache-config` describes.

    Args:
        name: "local" or "redis".
        settings: Its settings, as text.
        environment: Environment variables, which may hold user and password of Redis.

    Raises:
        ServingError: INVALID_ARG with all problems; it never contains a value of `password`.
    """
    problems: list[str] = []
    if name == LOCAL:
        size = _Settings({"size": "0", **settings}, ("size",), LOCAL, problems).integer("size", 1, CACHE_BYTES_MAX)
        options = CacheOptions(local_bytes=size)
    elif name == REDIS:
        options = CacheOptions(redis=_redis(settings, environment, problems))
    else:
        raise invalid(f"--cache-config={name}: expected the cache local or redis")
    if problems:
        raise invalid("\n".join(problems))
    return options


def _redis(settings: Mapping[str, str], environment: Mapping[str, str], problems: list[str]) -> RedisOptions:
    known = tuple(name for name in RedisOptions.__dataclass_fields__)
    reader = _Settings(settings, (*known, "username"), REDIS, problems)
    default = RedisOptions("")
    host = reader.text("host")
    if not host:
        problems.append("--cache-config=redis,host: must be given")
    if bool(reader.text("cert")) != bool(reader.text("key")):
        problems.append("--cache-config=redis: cert and key belong together")
    return RedisOptions(
        host=host,
        port=reader.integer("port", 1, 65535, default.port),
        user=reader.text("user") or reader.text("username") or environment.get(USER_VARIABLE, ""),
        password=reader.text("password") or environment.get(PASSWORD_VARIABLE, ""),
        db=reader.integer("db", 0, 2**31 - 1, default.db),
        connect_timeout=reader.integer("connect_timeout", 0, 60_000, 0) or default.connect_timeout,
        socket_timeout=reader.integer("socket_timeout", 0, 60_000, 0) or default.socket_timeout,
        pool_size=reader.integer("pool_size", 1, 1024, default.pool_size),
        wait_timeout=reader.integer("wait_timeout", 0, 60_000, 0) or default.wait_timeout,
        ttl=reader.integer("ttl", 0, 2**31 - 1, default.ttl),
        tls_enabled=reader.boolean("tls_enabled"),
        cert=reader.text("cert"),
        key=reader.text("key"),
        cacert=reader.text("cacert"),
        cacert_dir=reader.text("cacert_dir"),
        sni=reader.text("sni"),
    )


class _Settings:
    """Parses settings and collects their problems."""

    def __init__(self, values: Mapping[str, str], known: tuple[str, ...], cache: str, problems: list[str]) -> None:
        self._values = values
        self._prefix = f"--cache-config={cache},"
        self._problems = problems
        expected = f"unknown setting, expected one of {', '.join(known)}"
        problems.extend(f"{self._prefix}{name}: {expected}" for name in values if name not in known)

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def integer(self, name: str, low: int, high: int, default: int = 0) -> int:
        text = self._values.get(name)
        if text is None:
            return default
        if text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        self._problems.append(f"{self._prefix}{name}: expected an integer from {low} to {high}, got '{text}'")
        return default

    def boolean(self, name: str) -> bool:
        text = self._values.get(name, "false").lower()
        if text not in ("true", "false", "1", "0"):
            self._problems.append(f"{self._prefix}{name}: expected true or false, got '{text}'")
        return text in ("true", "1")
