"""The gRPC front end: a listening socket and its connections."""

import asyncio
import logging
import ssl as tls
from collections.abc import Sequence

from charonia.server.access_log import AccessLog
from charonia.server.facade import NO_SERVICES, Engine, Services
from charonia.server.grpc.calls import Service
from charonia.server.grpc.connection import GrpcConnection
from charonia.server.grpc.limits import AbusiveAddresses, GrpcLimits
from charonia.server.grpc.methods import method_table
from charonia.server.listening import QUIET_S, drain, drain_gradually, listen, port_of

__all__ = ["GrpcFrontend", "GrpcLimits"]

_log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Interval between checks of what clients take too long for."""

UNREAD_NOTICE_S = 20.0
"""Time for which a front end that hands on serves new calls of a client that does not read that it should reconnect."""

FIRST_CALL_S = 1.0
"""Time that a new connection has for its first call before a front end that hands on asks its client to reconnect.

gRPC's core fails a call, unless retries are on, whose connection gets the request to reconnect after the call has
chosen it and before it has sent it: soon after the server's settings, that is likely.
"""

QUIET_STREAM_S = 10.0
"""Time without a request after which a front end that hands on ends a stream."""


class GrpcFrontend:
    """Serves the inference, health and reflection services on one port.

    Attributes:
        service: State that all calls share.
        abusers: Addresses whose connections were closed for abuse.
        port: Listening port, once started.
        accepted_count: Connections accepted.
    """

    def __init__(
        self,
        engine: Engine,
        limits: GrpcLimits | None = None,
        *,
        access_log: AccessLog | None = None,
        services: Services = NO_SERVICES,
    ) -> None:
        """Create a front end. Must be called on the event loop."""
        limits = limits if limits is not None else GrpcLimits()
        self.service = Service(engine, limits, access_log, services)
        self.abusers = AbusiveAddresses(limits.abuser_kept_s)
        self.port = 0
        self.accepted_count = 0
        self._methods = method_table()
        self._connections: set[GrpcConnection] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._servers: list[asyncio.AbstractServer] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(
        self,
        host: str,
        port: int,
        ssl: tls.SSLContext | None = None,
        reuse_port: bool = False,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Listen. With `ssl`, clients negotiate "h2" by ALPN. See `listening.listen`."""
        if ssl is not None:
            ssl.set_alpn_protocols(["h2"])
        self._servers = await listen(self.connect, host, port, ssl=ssl, reuse_port=reuse_port, descriptors=descriptors)
        self.port = port_of(self._servers[0])

    def connect(self) -> GrpcConnection:
        return GrpcConnection(self.service, self._methods, self)

    def stop_accepting(self) -> None:
        """Accept no new connections, and ask clients of the open ones to reconnect."""
        self.release_sockets()
        for connection in list(self._connections):
            connection.wind_down()

    async def drain_gradually(self, timeout_s: float) -> None:
        """Leave the listening sockets to others, and serve the connections. See `listening.drain_gradually`."""
        self.release_sockets()
        await drain_gradually(self._connections, _ask_to_close, QUIET_STREAM_S, timeout_s)

    async def ask_to_reconnect(self, timeout_s: float) -> None:
        """Serve as before for a while, and ask clients to reconnect."""
        await drain_gradually(self._connections, _ask_to_close, QUIET_STREAM_S, timeout_s, least_s=timeout_s)

    def release_sockets(self) -> None:
        while self._servers:
            self._servers.pop().close()

    def recheck(self) -> None:
        for connection in list(self._connections):
            connection.recheck()

    async def drain(self, timeout_s: float) -> bool:
        is_done = await drain(self._connections, timeout_s)
        await self.close()
        return is_done

    async def close(self) -> None:
        self.stop_accepting()
        for connection in list(self._connections):
            connection.abort()
        # Transports call `connection_lost` in later iterations of the loop.
        await self._is_empty.wait()

    @property
    def open_count(self) -> int:
        return len(self._connections)

    @property
    def request_count(self) -> int:
        """Calls received, and messages of streams."""
        return self.service.request_count

    def opened(self, connection: GrpcConnection) -> None:
        """A connection has been accepted; one too many is reset: after a GOAWAY, clients reconnect without a pause."""
        self._connections.add(connection)
        self.accepted_count += 1
        self._is_empty.clear()
        if self._sweeper is None:
            self._sweeper = self.service.loop.call_later(SWEEP_S, self._sweep)
        if len(self._connections) > self.service.limits.connections_max:
            connection.abort()

    def closed(self, connection: GrpcConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()

    def _sweep(self) -> None:
        self._sweeper = self.service.loop.call_later(SWEEP_S, self._sweep) if self._connections else None
        now_s = self.service.loop.time()
        for connection in list(self._connections):
            try:
                connection.check_time(now_s)
            except Exception:  # a bug: it must not stop the sweep
                _log.exception("%r is closed after a fault", connection)
                connection.abort()


def _ask_to_close(connection: GrpcConnection) -> int | None:
    """Retire a connection, unless its first call may be on the way. It then ends with its last call."""
    return connection.retire(0.0, notice_s=UNREAD_NOTICE_S, read_s=QUIET_S, first_call_s=FIRST_CALL_S)
