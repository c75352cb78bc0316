"""The gRPC front end as the server sees it."""

import asyncio
import ssl as tls

from charonia.server.access_log import AccessLog
from charonia.server.facade import NO_SERVICES, Engine, Services
from charonia.server.grpc.connection import GrpcConnection
from charonia.server.grpc.limits import GrpcLimits
from charonia.server.grpc.methods import method_table
from charonia.server.listening import cannot_listen, drain

__all__ = ["GrpcFrontend", "GrpcLimits"]

LISTEN_BACKLOG = 1024
"""Connections that wait to be accepted."""


class GrpcFrontend:
    """Serves the inference, health and reflection services on one port.

    Attributes:
        engine: What answers.
        limits: The limits.
        access_log: Where each request gets its line, or None.
        services: What is offered beside the engine.
        tracer: What traces requests, None where none can be traced.
        loop: The event loop.
        port: The port that is listened on, from `start` on.
    """

    def __init__(
        self,
        engine: Engine,
        limits: GrpcLimits | None = None,
        *,
        access_log: AccessLog | None = None,
        services: Services = NO_SERVICES,
    ) -> None:
        """Make a front end. To be called on the event loop."""
        self.engine = engine
        self.limits = limits if limits is not None else GrpcLimits()
        self.access_log = access_log
        self.services = services
        self.tracer = services.tracer
        self.loop = asyncio.get_running_loop()
        self.port = 0
        self._methods = method_table()
        self._connections: set[GrpcConnection] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, ssl: tls.SSLContext | None = None, reuse_port: bool = False) -> None:
        """Listen; `port` 0 takes any free one. With `ssl`, clients negotiate "h2" by ALPN.

        Raises:
            ServingError: UNAVAILABLE when the address cannot be listened on.
        """
        if ssl is not None:
            ssl.set_alpn_protocols(["h2"])
        # None rather than False: Windows has no such option to turn off.
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
        """Take no new connections, and ask the clients of the others to go elsewhere."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.wind_down()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until clients have their answers, at most so long; whether none was cut off while it took one."""
        is_done = await drain(self._connections, timeout_s)
        await self.close()
        return is_done

    async def close(self) -> None:
        """Close everything now."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.abort()
        # The transports report the loss of their connections in the next rounds of the loop.
        await self._is_empty.wait()

    def opened(self, connection: GrpcConnection) -> None:
        """A connection has been accepted."""
        self._connections.add(connection)
        self._is_empty.clear()

    def closed(self, connection: GrpcConnection) -> None:
        """It is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()
