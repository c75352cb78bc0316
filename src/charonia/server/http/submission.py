"""The way of inference requests from the HTTP front end into the engine: forwarded headers, and traces."""

from charonia.core.request import InferRequest
from charonia.core.response import Reply, Ticket
from charonia.server.facade import Engine, Services
from charonia.server.http.exchange import Exchange
from charonia.server.tracing.requests import EventNames, begin

TRACED = EventNames("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")


class Submitter:
    """Passes the inference requests of exchanges to the engine."""

    def __init__(self, engine: Engine, services: Services) -> None:
        """Make a submitter.

        Args:
            engine: The engine.
            services: Services besides the engine.
        """
        self._engine = engine
        self._tracer = services.tracer
        self._forward = services.http_headers
        self._services = services
        self._traffic = services.traffic
        self._names_flows = services.has_named_flows

    def submit(self, exchange: Exchange, request: InferRequest, reply: Reply) -> None:
        """Pass on the only request of an exchange. `reply` keeps `exchange.is_over` up to date."""
        ticket = self.infer(exchange, request, reply)
        if exchange.is_open:
            exchange.ticket = ticket
        elif not exchange.is_over:
            ticket.cancel()

    def infer(self, exchange: Exchange, request: InferRequest, reply: Reply) -> Ticket:
        """Pass on one of the requests of an exchange."""
        if self._forward is not None:
            names = exchange.request.names or {}
            fields = exchange.request.headers.items()
            request.parameters.update(self._forward.parameters((names.get(key, key), value) for key, value in fields))
        if self._traffic is not None and self._traffic.sticky:
            request.affinity = self._services.affinity(request.model_name, exchange.request.headers.get)
        request.flow = exchange.peer
        if self._names_flows:
            request.flow = self._services.flow(request.flow, self._services.http_gate, exchange.request.headers.get)
        exchange.request_id = request.id
        if self._tracer is not None:
            headers = exchange.request.headers.get
            reply = begin(self._tracer, request, reply, names=TRACED, received_ns=exchange.begun_ns, headers=headers)
        return self._engine.infer(request, reply)
