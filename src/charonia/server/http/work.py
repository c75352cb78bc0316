"""What a handler cannot do at once: tasks that answer an exchange, and bodies that are compressed."""

import asyncio
import logging
from collections.abc import Coroutine

from charonia.core.errors import ServingError, internal
from charonia.server.http.exchange import Exchange
from charonia.wire.compression import decompress

_log = logging.getLogger(__name__)

CONTENT_ENCODING = b"content-encoding"


class Work:
    """The tasks of an endpoint's handlers."""

    def __init__(self, body_bytes_max: int) -> None:
        """Make an empty set of tasks.

        Args:
            body_bytes_max: Most bytes of a body after decompression.
        """
        self._body_bytes_max = body_bytes_max
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, work: Coroutine[object, object, None]) -> None:
        """Run what answers an exchange, as a task; an exception fails the exchange and nothing else."""
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def body(self, exchange: Exchange) -> bytes | memoryview:
        """Return the body of a request, decompressed.

        Raises:
            ServingError: It is too large, or its compression is not known.
        """
        coding = exchange.headers.get(CONTENT_ENCODING)
        if coding is None:
            return exchange.body
        return await asyncio.to_thread(decompress, exchange.body, coding.decode("latin-1"), self._body_bytes_max)


async def _guarded(exchange: Exchange, work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except ServingError as error:
        exchange.fail(error)
    except Exception as error:  # our own fault: this request fails, the server lives on
        _log.exception("%s failed", exchange.url.decode("latin-1"))
        exchange.fail(internal(f"the request failed: {type(error).__name__}"))
