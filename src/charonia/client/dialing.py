"""Opens connections to a server, with TLS or without, detects dropped ones, and closes them.

The network can drop a connection silently, as a NAT does when its entry expires. The operating system detects this: TCP
probes the other end (keep-alive), and gives up if sent data is not acknowledged in time (user timeout). This works for
HTTP/1.1 and HTTP/2, costs a request nothing, and the other end's operating system replies even while the server
computes. HTTP/2 pings would detect the same, but gRPC servers close connections with more than one ping in five minutes
without data (GOAWAY, `too_many_pings`). By then, most requests have timed out.
"""

import asyncio
import errno
import math
import socket
import ssl
import tempfile
from base64 import encodebytes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar, cast

from charonia.core.errors import invalid
from charonia.wire.answer import Failure
from charonia.wire.endpoint import Endpoint
from charonia.wire.transport import TlsOptions, WireOptions

KEEPALIVE_S_MAX = 32_767
"""Longest time that the operating system accepts."""

PROBES = 4
"""Number of probes without a reply after which a connection is lost, because single packets may be lost."""

_UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_HINT = (
    "a NAT, a firewall or a load balancer may have dropped it: a shorter keepalive_time_s keeps it alive; the next "
    "request opens a new connection"
)


class Keepalive:
    """Enables TCP keep-alive on connections.

    Args:
        time_s: Idle time before the first probe, in seconds; 0 to leave connections unchanged.
        timeout_s: Time for a reply, in seconds.

    Raises:
        ServingError: INVALID_ARG for times that the operating system does not accept.
    """

    def __init__(self, time_s: float, timeout_s: float) -> None:
        if not 0 <= time_s <= KEEPALIVE_S_MAX:
            raise invalid(f"keepalive_time_s: expected 0 to {KEEPALIVE_S_MAX} seconds, got {time_s:g}")
        if not 0 < timeout_s <= KEEPALIVE_S_MAX:
            raise invalid(
                f"keepalive_timeout_s: expected more than 0 and at most {KEEPALIVE_S_MAX} seconds, got {timeout_s:g}",
                hint="keepalive_time_s=0 turns keepalive off",
            )
        self._options = _socket_options(math.ceil(time_s), math.ceil(timeout_s)) if time_s else []

    def watch(self, transport: asyncio.BaseTransport) -> None:
        """Enable keep-alive on a new connection."""
        shown = transport.get_extra_info("socket")
        if not self._options or shown.fileno() < 0:  # already lost, as with an error below; `connection_lost` follows
            return
        # uvloop's object would make a socket for each option.
        connection = socket.socket(shown.family, shown.type, shown.proto, shown.fileno())
        with suppress(OSError):
            for level, option, value in self._options:
                connection.setsockopt(level, option, value)
        connection.detach()


def loss(endpoint: Endpoint, error: Exception | None, progress: str) -> str:
    """Return what happened to a lost connection.

    Args:
        endpoint: The server.
        error: The transport's error.
        progress: How much of the response had arrived.
    """
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return f"the connection to {endpoint} was lost {progress}: the server is unreachable (hint: {_HINT})"
    return f"{endpoint} closed the connection {progress}"


def _socket_options(time_s: int, timeout_s: int) -> list[tuple[int, int, int]]:
    values = {
        "TCP_KEEPIDLE": time_s,
        "TCP_KEEPALIVE": time_s,  # its name on macOS
        "TCP_KEEPINTVL": max(1, timeout_s // PROBES),
        "TCP_KEEPCNT": PROBES,
        # Unacknowledged data counts too: while there is any, the system sends no probes. If set, this timeout also ends
        # probing, so it must not be shorter than idle time and probing together.
        "TCP_USER_TIMEOUT": 1000 * (time_s + timeout_s),
    }
    known = [(getattr(socket, name), value) for name, value in values.items() if hasattr(socket, name)]
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, option, value) for option, value in known),
    ]


RECONNECT_DELAY_FIRST_S = 0.01
RECONNECT_DELAY_MAX_S = 1.0
"""Limit of the back-off after failed connection attempts, which doubles with each failure."""

CLOSE_TIMEOUT_S = 1.0
"""Time for connections to close gracefully before they are aborted."""


class DialedConnection(Protocol):
    """A connection, as the dialer sees it. It is also an `asyncio.Protocol`."""

    def abort(self) -> None: ...

    async def ready(self) -> None:
        """Wait until the server has accepted it, as far as the protocol can report. Raises OSError when it is lost."""


_C = TypeVar("_C", bound=DialedConnection)


class Dialer:
    """Opens connections and tracks the open ones.

    Attributes:
        failures: Number of failures by kind, including failures of the users of the connections.
        dialing: Number of pending connection attempts.
    """

    def __init__(self, endpoint: Endpoint, options: WireOptions, *, http2: bool) -> None:
        """Create a dialer; call it on the event loop. Raises INVALID_ARG for invalid options."""
        self.failures = dict.fromkeys(Failure, 0)
        self._endpoint = endpoint
        self._timeout_s = options.connect_timeout_s
        self._keepalive = Keepalive(options.keepalive_time_s, options.keepalive_timeout_s)
        self._tls: ssl.SSLContext | None = tls_context(options.tls, http2=http2) if endpoint.tls else None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[DialedConnection] = set()
        self._all_closed = asyncio.Event()
        self._backoff = Backoff()

    @property
    def dialing(self) -> int:
        return len(self._tasks)

    def dial(self, make: Callable[[], _C], on_made: Callable[[_C], None], on_failed: Callable[[str], None]) -> None:
        """Start to open a connection; one of the callbacks gets it, or the reason for the failure."""
        task = self._loop.create_task(self._dial(make, on_made, on_failed))
        self._tasks.add(task)

    async def settle(self) -> None:
        """Wait until no connection attempt is pending."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def opened(self, connection: DialedConnection, transport: asyncio.BaseTransport) -> None:
        """A connection was made."""
        self._keepalive.watch(transport)
        self._open.add(connection)

    def closed(self, connection: DialedConnection) -> None:
        """A connection was closed."""
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    async def close(self) -> None:
        """Open no more connections, and wait until all open ones have closed."""
        for task in tuple(self._tasks):
            task.cancel()
        await self.settle()
        for _ in range(2):
            if not self._open:
                return
            self._all_closed.clear()
            try:
                await asyncio.wait_for(self._all_closed.wait(), CLOSE_TIMEOUT_S)
            except TimeoutError:
                for connection in tuple(self._open):
                    connection.abort()

    async def _dial(
        self, make: Callable[[], _C], on_made: Callable[[_C], None], on_failed: Callable[[str], None]
    ) -> None:
        endpoint = self._endpoint
        wait_s = self._backoff.wait_s(self._loop.time())
        if wait_s:
            await asyncio.sleep(wait_s)
        failures_before = self._backoff.failures
        message = ""
        made = make()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._loop.create_connection(
                    lambda: cast(asyncio.Protocol, made),
                    endpoint.host,
                    endpoint.port,
                    ssl=self._tls,
                    server_hostname=(endpoint.name or endpoint.host) if self._tls is not None else None,
                )
                await made.ready()
        except (OSError, ssl.SSLError, UnicodeError) as error:  # TimeoutError is an OSError
            message = _reason(endpoint, error)
        finally:
            # Here and not in a callback, so that the caller sees the correct number.
            task = asyncio.current_task()
            if task is not None:
                self._tasks.discard(task)
        if message:
            if made in self._open:  # the server has not greeted in time
                made.abort()
            self._backoff.failed(self._loop.time(), failures_before)
            on_failed(message)
        else:
            self._backoff.succeeded()
            on_made(made)


class Backoff:
    """Exponential back-off of connection attempts.

    Attributes:
        failures: How often the delay has grown.
    """

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._not_before_s = 0.0
        self.failures = 0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next attempt may start."""
        return max(self._not_before_s - now_s, 0.0)

    def failed(self, now_s: float, failures_before: int) -> None:
        """An attempt failed that started at this value of `failures`. Concurrent attempts count as one."""
        if failures_before == self.failures:
            self.failures += 1
            self._delay_s = min(max(2 * self._delay_s, RECONNECT_DELAY_FIRST_S), RECONNECT_DELAY_MAX_S)
            self._not_before_s = now_s + self._delay_s

    def succeeded(self) -> None:
        self._delay_s = self._not_before_s = 0.0


def _reason(endpoint: Endpoint, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection to {endpoint}: timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"no connection to {endpoint}: its certificate is not trusted: {error.verify_message}"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"no connection to {endpoint}: {reason}"


_KEY_LABELS = ("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY")


def tls_context(options: TlsOptions, *, http2: bool) -> ssl.SSLContext:
    """Return the context that the options describe.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read or used.
    """
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except (OSError, ValueError) as error:
        raise invalid(f"TLS: certificates to trust cannot be read from '{options.ca_file}': {error}") from error
    context.check_hostname = options.verify_peer and options.verify_host
    context.verify_mode = ssl.CERT_REQUIRED if options.verify_peer else ssl.CERT_NONE
    context.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
    if options.certificate_file:
        _load_certificate(context, options)
    elif options.key_file:
        raise invalid(f"TLS: key '{options.key_file}' has no certificate", hint="name its certificate too")
    return context


def _load_certificate(context: ssl.SSLContext, options: TlsOptions) -> None:
    try:
        if not (options.certificate_is_der or options.key_is_der):
            context.load_cert_chain(options.certificate_file, options.key_file or None)
            return
        certificate = Path(options.certificate_file).read_bytes()
        key = Path(options.key_file).read_bytes() if options.key_file else b""
        if options.certificate_is_der:
            certificate = ssl.DER_cert_to_PEM_cert(certificate).encode()
        _load_pem(context, certificate, _pem_keys(key) if options.key_is_der else [key])
    except (OSError, ValueError) as error:
        raise invalid(
            f"TLS: certificate '{options.certificate_file}' with key '{options.key_file}' cannot be used: {error}"
        ) from error


def _pem_keys(key: bytes) -> list[bytes]:
    """Return a DER key as PEM, once with each possible label."""
    body = encodebytes(key).decode()
    return [f"-----BEGIN {label}-----\n{body}-----END {label}-----\n".encode() for label in _KEY_LABELS]


def _load_pem(context: ssl.SSLContext, certificate: bytes, keys: list[bytes]) -> None:
    # The standard library reads certificates and keys from files only.
    for key in keys:
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner only
            file.write(certificate + b"\n" + key)
            file.flush()
            try:
                context.load_cert_chain(file.name)
            except ssl.SSLError:
                if key is keys[-1]:
                    raise
            else:
                return
