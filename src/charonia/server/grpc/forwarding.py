"""Headers that become request parameters."""

from charonia.core.request import InferRequest
from charonia.server.access.header_forward import HeaderForward
from charonia.wire.grpc_headers import CallHead


def forward_headers(rule: HeaderForward, request: InferRequest, head: CallHead) -> None:
    """Make parameters of the headers that are forwarded. One of a name that the request gives too takes its place.

    Raises:
        ServingError: INVALID_ARG for a header that has a reserved name.
    """
    request.parameters.update(rule.parameters(head.headers))
