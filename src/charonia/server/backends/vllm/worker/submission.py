"""Requests to the engine whose outputs are taken where they arise, without a task that waits for each of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


async def run(
    engine: Any, request_id: str, prompt: Any, params: Any, take: Callable[[Any], bool], **options: Any
) -> None:
    """Run a request to its end; if this is cancelled, the engine works on it no longer.

    Args:
        engine: An `AsyncLLM`.
        request_id: Its id, which no other open request has.
        prompt: What the engine takes as a prompt.
        params: Sampling or pooling parameters.
        take: Called with each output of the engine, in its event loop; returns whether it was the last.
        options: Further arguments of `AsyncLLM.add_request`.

    Raises:
        Exception: The engine's, or that of `take`.
    """
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(output: Any) -> None:
        if over.done():
            return
        if isinstance(output, Exception):
            over.set_exception(output)
            return
        try:
            if take(output):
                over.set_result(None)
        except Exception as error:
            over.set_exception(error)

    try:
        queue = await engine.add_request(request_id, prompt, params, **options)
        # The engine's task hands each output to the queue of its request, which would wake a task for each.
        queue.put = put
        early = queue.get_nowait()
        if early is not None:
            put(early)
        await over
    except BaseException:
        if not engine.errored:
            await engine.abort(request_id)
        raise
