"""Load reports apart from requests: one at once, and another one after each interval."""

import asyncio

from charonia.core.errors import ServingError, unsupported
from charonia.server.grpc.streams import StreamCall
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_status import RpcError, Status, rpc_error
from charonia.wire.orca import decode_load_request, encode_load

UNREAD_BYTES_MAX = 64 * 1024
"""Reports that a caller has not read; beyond it, none are sent until it reads."""


class LoadStream:
    """One call for load reports. It ends with the server, or when the caller cancels it."""

    __slots__ = ("_call", "_task")

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._task: asyncio.Task[None] | None = None

    def in_flight(self) -> int:
        """Return 1, which keeps the call open; 0 before the request, and when the server shuts down."""
        return int(self._task is not None and not self._call.table.service.engine.is_exiting())

    def start(self, message: Buffer) -> None:
        """Begin to send reports. Raises as `Conversation.start`."""
        if self._task is not None:
            raise RpcError(Status.UNIMPLEMENTED, f"{self._call.name}: expected exactly one request message")
        interval_s = decode_load_request(message)
        self._task = self._call.table.service.loop.create_task(self._send(interval_s))

    def drop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _send(self, interval_s: float) -> None:
        call = self._call
        load = call.table.service.services.load
        try:
            if load is None:
                raise unsupported("the load of this server is not reported here")
            while not call.is_over:
                if call.table.unsent_bytes(call) <= UNREAD_BYTES_MAX:
                    call.send([encode_load(await load.report())])
                await asyncio.sleep(interval_s)
        except ServingError as error:
            call.fail(rpc_error(error))
        except Exception:
            call.table.fault(call)
