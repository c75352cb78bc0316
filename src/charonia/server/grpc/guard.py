"""Calls before a gate."""

from charonia.server.access.operations import METHODS
from charonia.server.access.rules import Gate
from charonia.wire.grpc_headers import CallHead
from charonia.wire.grpc_status import REFUSED, RpcError


def admit(gate: Gate, method: str, head: CallHead) -> None:
    """Let a call pass.

    Args:
        gate: The gate.
        method: Name of the method, without its service.
        head: What the headers of the call say.

    Raises:
        RpcError: The call may not be made.
    """
    refusal = gate.check(METHODS[method], head.header)
    if refusal is not None:
        raise RpcError(REFUSED[refusal.kind], refusal.message)
