"""The server of a client, or its servers: sends queries and reads the answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

from charonia.client.balancing.addresses import parse_addresses
from charonia.client.balancing.options import Balancing
from charonia.client.balancing.transport import ANYWHERE, BalancedTransport, EndpointStatus, Routing
from charonia.client.errors import ClientError, error_of
from charonia.client.grpc_transport import GrpcTransport
from charonia.client.http_transport import HttpTransport
from charonia.core.errors import Code, ServingError, unsupported
from charonia.wire.answer import Answer, Failure, Handle, OnAnswer
from charonia.wire.grpc_codec import GrpcEncoder
from charonia.wire.grpc_dialect import GrpcDialect
from charonia.wire.http_codec import HttpEncoder
from charonia.wire.http_dialect import HttpDialect
from charonia.wire.query import Dialect, Query, T
from charonia.wire.transport import WireOptions

_NO = frozenset((Code.NOT_FOUND, Code.UNAVAILABLE, Code.INVALID_ARG))
"""Errors that mean "not ready"."""


class Servers:
    """Sends queries.

    Args:
        url: As of `AsyncClient`.
        timeout_s: Default timeout of a request, in seconds.
        options: Headers, TLS, compression, limits.
        balancing: How requests are balanced among several servers.

    Attributes:
        dialect: Makes the queries.
        is_balanced: Whether there are several servers.
    """

    def __init__(self, url: str | Sequence[str], timeout_s: float, options: WireOptions, balancing: Balancing) -> None:
        self._addresses = addresses = parse_addresses(url)
        self._timeout_s = timeout_s
        first = addresses.endpoints[0]
        self._is_http = first.protocol == "http"
        connect: Any = HttpTransport if self._is_http else GrpcTransport
        self.dialect: Dialect[Any]  # of the same protocol as the transports
        if self._is_http:
            self.dialect = HttpDialect(HttpEncoder(first, options))
        else:
            self.dialect = GrpcDialect(GrpcEncoder(first, options))
        self.is_balanced = not addresses.is_single
        self._one: HttpTransport | GrpcTransport | None = None
        self._all: BalancedTransport | None = None
        if self.is_balanced:
            self._all = BalancedTransport(addresses, options, balancing, connect=connect, dialect=self.dialect)
        else:
            self._one = connect(first, options)

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of each server; an empty list for a single server."""
        return self._all.endpoints() if self._all is not None else []

    def queue_timeout_us(self, timeout_s: float | None) -> int:
        """Return the time after which the client no longer waits, where the request has to carry it; 0 otherwise.

        A gRPC call carries its deadline.
        """
        if not (self.is_balanced and self._is_http):
            return 0
        return round((self._timeout_s if timeout_s is None else timeout_s) * 1e6)

    def send(
        self,
        query: Query[Any, T],
        on_answer: OnAnswer,
        timeout_s: float | None = None,
        routing: Routing = ANYWHERE,
    ) -> Handle:
        """Send a query; see `Transport.send`."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._all is not None:
            return self._all.send(query.request, on_answer, timeout_s, keep_body=True, routing=routing)
        assert self._one is not None
        return self._one.send(query.request, on_answer, timeout_s, keep_body=True)

    async def ask(self, query: Query[Any, T], timeout_s: float | None = None, routing: Routing = ANYWHERE) -> T:
        """Send a query and return its parsed answer.

        Raises:
            ClientError: The query failed.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def take(answer: Answer) -> None:
            if not future.done():  # cancelled, and the task that waits for it has not run yet
                future.set_result(answer)

        handle = self.send(query, take, timeout_s, routing)
        try:
            answer = await future
        except asyncio.CancelledError:
            handle.cancel()
            raise
        error = error_of(answer)
        if error is not None:
            raise error
        return read(query, answer)

    async def change(self, query: Query[Any, T], timeout_s: float | None = None) -> T:
        """Send a query that changes the server. Raises as `ask`, and UNSUPPORTED for several servers."""
        if self.is_balanced:
            raise unsupported(
                f"a client of several servers, {self._addresses}, does not change them",
                hint="use a client of each server",
            )
        return await self.ask(query, timeout_s)

    async def holds(self, query: Query[Any, bool]) -> bool:
        """Send a query; an error that means no returns False. Raises as `ask` for others."""
        try:
            return await self.ask(query)
        except ServingError as error:
            if error.code in _NO:
                return False
            raise

    async def close(self) -> None:
        if self._all is not None:
            await self._all.close()
        if self._one is not None:
            await self._one.close()


def read(query: Query[Any, T], answer: Answer) -> T:
    """Parse a successful answer.

    Raises:
        ClientError: It does not follow the protocol.
    """
    try:
        return query.read(answer)
    except ServingError as error:
        raise ClientError(error.code, error.message, Failure.GARBLED, answer.status) from error
