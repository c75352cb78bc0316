"""The gRPC front end: a listening socket and its connections."""

import asyncio
import ssl as tls

from charonia.server.access_log import AccessLog
from charonia.server.facade import NO_SERVICES, Engine, Services
from charonia.server.grpc.connection import GrpcConnection
from charonia.server.grpc.limits import GrpcLimits, Offenders
from charonia.server.grpc.methods import method_table
from charonia.server.listening import cannot_listen, drain

__all__ = ["GrpcFrontend", "GrpcLimits"]

LISTEN_BACKLOG = 1024
"""Connections that wait to be accepted."""


class GrpcFrontend:
    """Serves the inference, health and reflection services on one port.

    Attributes:
        engine: The engine.
        limits: The limits.
        access_log: The access log, None for none.
        services: Services besides the engine.
        tracer: Traces requests, None where tracing is off.
        loop: The event loop.
        offenders: Addresses whose connections were closed for abuse.
        port: Listening port, once started.
        accepted_count: Connections accepted.
        request_count: Calls received, and messages of streams.
    """

    def __init__(
        self,
        engine: Engine,
        limits: GrpcLimits | None = None,
        *,
        access_log: AccessLog | None = None,
        services: Services = NO_SERVICES,
    ) -> None:
        """Make a front end. Must be called on the event loop."""
        self.engine = engine
        self.limits = limits if limits is not None else GrpcLimits()
        self.access_log = access_log
        self.services = services
        self.tracer = services.tracer
        self.loop = asyncio.get_running_loop()
        self.offenders = Offenders(self.limits.offence_kept_s)
        self.port = 0
        self.accepted_count = 0
        self.request_count = 0
        self._methods = method_table()
        self._connections: set[GrpcConnection] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, ssl: tls.SSLContext | None = None, reuse_port: bool = False) -> None:
        """Listen; `port` 0 takes a free one. With `ssl`, clients negotiate "h2" by ALPN.

        Raises:
            ServingError: UNAVAILABLE when the address is not available.
        """
        if ssl is not None:
            ssl.set_alpn_protocols(["h2"])
        # None rather than False: Windows does not have this option.
        try:
            self._server = await self.loop.create_server(
                self.connect, host, port, ssl=ssl, backlog=LISTEN_BACKLOG, reuse_port=reuse_port or None
            )
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def connect(self) -> GrpcConnection:
        """Return the protocol of a new connection, for any transport."""
        return GrpcConnection(self, self._methods, self)

    def stop_accepting(self) -> None:
        """Accept no new connections, and ask clients of the open ones to reconnect."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.wind_down()

    def recheck(self) -> None:
        """End the streaming calls that are no longer permitted: keys have changed."""
        for connection in list(self._connections):
            connection.recheck()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for clients to receive their responses, up to a limit; return whether all did."""
        is_done = await drain(self._connections, timeout_s)
        await self.close()
        return is_done

    async def close(self) -> None:
        """Close everything at once."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.abort()
        # Transports call `connection_lost` in later iterations of the loop.
        await self._is_empty.wait()

    @property
    def open_count(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def opened(self, connection: GrpcConnection) -> None:
        """A connection has been accepted."""
        self._connections.add(connection)
        self.accepted_count += 1
        self._is_empty.clear()

    def closed(self, connection: GrpcConnection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()
