"""The quick path: streamed answers with one choice of plain text.

vLLM checks the request, renders its prompt and makes its sampling parameters, as for its own server. The engine's
outputs are taken where they arise, without a task that waits for each of them, and become chunks without an object and
a serialiser for each.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import typing
from typing import TYPE_CHECKING

from ...language.worker.text_stream import CHAT, COMPLETIONS, TextStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    TakeText = Callable[[str, int, str | None, "int | str | None", int, int], bool]


async def run_request(
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
        request_id: Its id, which no other open request has.
        take: Called with each output of the engine, in its event loop; returns whether it was the last.
        take_text: Called in place of it, where this version of vLLM allows for that, with text, number of tokens, and
            for the last one why it ends, what ended it, else None; tokens of the prompt and those of them that came
            from a cache. It saves vLLM's objects around each text; not for requests with more than one choice.
        options: Other arguments of `AsyncLLM.add_request`.

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


_MEMBERS = frozenset((
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "skip_special_tokens", "response_format", "user", "chat_template_kwargs", "priority",
))  # fmt: skip
"""Members of a request that leave the form of its chunks as it is."""

_ERROR = "error"
"""Reason to finish of a request that failed in the engine."""


def is_plain(route: str, body: Any) -> bool:
    """Return whether the answer is a stream with one choice of plain text."""
    if route not in (CHAT, COMPLETIONS) or not isinstance(body, dict) or body.get("stream") is not True:
        return False
    options = body.get("stream_options") or {}
    return (
        body.keys() <= _MEMBERS
        and body.get("n") in (None, 1)
        and isinstance(options, dict)
        and options.keys() <= {"include_usage"}
        and (route == CHAT or isinstance(body.get("prompt"), str))
    )


class PlainStreams:
    """Answers plain streams.

    Args:
        state: State of vLLM's application, which has its serving objects.
    """

    def __init__(self, engine: Any, state: Any) -> None:
        self._engine = engine
        self._servings = {
            route: serving
            for route, serving in (
                (CHAT, getattr(state, "openai_serving_chat", None)),
                (COMPLETIONS, getattr(state, "openai_serving_completion", None)),
            )
            # A parser of reasoning or tools would take the text apart.
            if serving is not None and getattr(serving, "parser_cls", None) is None
        }

    async def answer(self, request: Any, body: dict[str, Any], client_name: str) -> bool:
        """Answer a request; return False for one that vLLM's application must answer, with its error for example.

        Args:
            body: Its JSON document, with a model's name that vLLM knows.
        """
        serving = self._servings.get(request.route)
        if serving is None:
            return False
        prepared = await _prepare(serving, request.route, body)
        if prepared is None:
            return False
        take, take_text = _takers(TextStream(request, prepared.request_id, client_name, body))
        asked = (prepared.request_id, prepared.prompt, prepared.params)
        await run_request(self._engine, *asked, take, take_text=take_text, **prepared.options)
        return True


def _takers(stream: TextStream) -> tuple[Callable[[Any], bool], TakeText]:
    """Return what turns the outputs of one request into chunks, and what does so with its texts."""

    def take_text(
        text: str, tokens: int, reason: str | None, stop_reason: int | str | None, prompt: int, cached: int
    ) -> bool:
        if reason == _ERROR:
            raise RuntimeError("the engine failed while it worked on the request")
        if reason is None:
            stream.take(text, tokens)
            return False
        stream.end(text, tokens, reason, stop_reason, prompt, cached)
        return True

    def take(output: Any) -> bool:
        part = output.outputs[0]
        counts = (len(output.prompt_token_ids or ()), output.num_cached_tokens or 0)
        return take_text(part.text, len(part.token_ids), part.finish_reason, part.stop_reason, *counts)

    return take, take_text


class _Prepared:
    """What vLLM's serving would hand to the engine, and under which id.

    It takes the place of the engine in a copy of a serving object, and of what the engine and the serving return.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.prompt: Any = None
        self.params: Any = None
        self.request_id = ""
        self.options: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.prompt, self.params, self.request_id = prompt, sampling_params, request_id
        self.options = {name: value for name, value in options.items() if value is not None}
        return _nothing()


async def _nothing() -> AsyncIterator[Any]:
    nothing: tuple[Any, ...] = ()
    for output in nothing:
        yield output


async def _prepare(serving: Any, route: str, body: dict[str, Any]) -> _Prepared | None:
    """Have vLLM check and render a request; return None for one that it refuses."""
    prepared = _Prepared(serving.engine_client)
    own = copy.copy(serving)
    own.engine_client = prepared
    name = "create_chat_completion" if route == CHAT else "create_completion"
    create = getattr(own, name)
    cls: Any = type(serving)
    own.chat_completion_stream_generator = own.completion_stream_generator = lambda *_, **__: prepared
    try:
        request = _request_class(cls, name).model_validate(body)
        answer = await create(request)
    except Exception as error:
        if type(error).__name__ == "EngineDeadError":
            raise
        return None  # vLLM's application says what is wrong with it
    return prepared if answer is prepared and prepared.request_id else None


@functools.cache
def _request_class(cls: type, name: str) -> Any:
    """Return the class of the requests of a method of a serving class, which its signature names."""
    return typing.get_type_hints(getattr(cls, name))["request"]
