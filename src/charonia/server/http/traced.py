"""Traces of requests over HTTP."""

import time

from charonia.core.calls import Reply
from charonia.core.request import InferRequest
from charonia.server.http.connection import HttpConnection
from charonia.server.http.exchange import Exchange
from charonia.server.tracing import requests as tracing

EVENTS = tracing.EventNames("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")


class TimedConnection(HttpConnection):
    """A connection of a server that may trace: it notes when a request begins to arrive."""

    remembers = False  # only the parser tells it

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._begun_ns = time.monotonic_ns()

    def _exchange(self) -> Exchange:
        exchange = super()._exchange()
        exchange.begun_ns = self._begun_ns
        return exchange


def begin(tracer: tracing.Tracing, request: InferRequest, reply: Reply, exchange: Exchange) -> Reply:
    """Begin the trace of a request, if it is picked, and return the reply to hand to the engine."""
    return tracing.begin(
        tracer, request, reply, names=EVENTS, received_ns=exchange.begun_ns, headers=exchange.headers.get
    )
