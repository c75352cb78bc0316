"""Requests to the engine whose outputs are taken where they arise, without a task that waits for each of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    TakeText = Callable[[str, int, str | None, "int | str | None", int, int], bool]


async def run(
    engine: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    take: Callable[[Any], bool],
    take_text: TakeText | None = None,
    **options: Any,
) -> None:
    """Run a request to its end; if this is cancelled, the engine works on it no longer.

    Args:
        engine: An `AsyncLLM`.
        request_id: Its id, which no other open request has.
        prompt: What the engine takes as a prompt.
        params: Sampling or pooling parameters.
        take: Called with each output of the engine, in its event loop; returns whether it was the last.
        take_text: Called in place of it, where this version of vLLM allows for that, with text, number of tokens, and
            for the last one why it ends, what ended it, else None; tokens of the prompt and those of them that came
            from a cache. It saves vLLM's objects around each text; not for requests with more than one choice.
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
        if take_text is not None:
            _take_texts(engine, queue, take_text, over)
        await over
    except BaseException:
        if not engine.errored:
            await engine.abort(request_id)
        raise


def _take_texts(engine: Any, queue: Any, take_text: TakeText, over: asyncio.Future[None]) -> None:
    """Take the texts of an open request before vLLM makes outputs of them, unless this version is made otherwise."""
    states: dict[Any, Any] = getattr(getattr(engine, "output_processor", None), "request_states", {})
    state: Any = states.get(getattr(queue, "request_id", None))
    next_text = getattr(getattr(state, "detokenizer", None), "get_next_output_text", None)
    if next_text is None or not callable(getattr(state, "make_request_output", None)) or state.stream_interval != 1:
        return

    def take(new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *_: Any, **__: Any) -> None:
        if over.done():
            return
        reason = None if finish_reason is None else str(finish_reason)
        text = next_text(reason is not None, True)
        try:
            if take_text(text, len(new_token_ids), reason, stop_reason, state.prompt_len, state.num_cached_tokens or 0):
                over.set_result(None)
        except Exception as error:
            over.set_exception(error)

    state.make_request_output = take
