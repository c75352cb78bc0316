"""Calls before a gate."""

from charonia.core.access import Gate
from charonia.protocol.grpc_headers import CallHead
from charonia.protocol.grpc_status import REFUSED, RpcError
from charonia.protocol.operations import METHODS


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
