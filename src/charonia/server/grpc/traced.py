"""Traces of requests over gRPC."""

from charonia.core.calls import Reply
from charonia.core.request import InferRequest
from charonia.server.tracing import requests as tracing
from charonia.wire.grpc_headers import CallHead

EVENTS = tracing.EventNames("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")


def begin(tracer: tracing.Tracing, request: InferRequest, reply: Reply, *, head: CallHead, received_ns: int) -> Reply:
    """Begin the trace of a request, if it is picked, and return the reply to hand to the engine.

    Args:
        tracer: Tracing of the server.
        request: The request.
        reply: Sends outcomes to the caller.
        head: The headers of its call.
        received_ns: When its message was complete.
    """
    return tracing.begin(tracer, request, reply, names=EVENTS, received_ns=received_ns, headers=head.header)
