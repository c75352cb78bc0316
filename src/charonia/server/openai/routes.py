"""The routes of OpenAI's API, on the port of the other HTTP routes.

A request names its model in its body. An engine model (`openai_routes`) gets the body unchanged and answers in the form
of the API; an adapter calls every other model that can answer.

For embeddings, a model with an input `text_input` and one FP32 output gets the texts. A sentence encoder, with inputs
`input_ids`, `attention_mask` and maybe `token_type_ids`, gets their tokens by the `tokenizer.json` in its folder; where
it returns a vector for each token, these are pooled, and vectors are scaled to length 1.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import orjson

from charonia.config.model import ModelConfig
from charonia.config.parameters import (
    EMBEDDING_NORMALIZE,
    EMBEDDING_OUTPUT,
    EMBEDDING_POOLING,
    TEXT_INPUT,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid, not_found, unavailable, unsupported
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import InferResponse, Reply, Ticket
from charonia.core.statistics import TokenUsage
from charonia.core.tensor import Array, Tensor
from charonia.server.facade import Engine, Services, SingleResponse
from charonia.server.http.exchange import CONTENT_ENCODING, Exchange, Reshaped, Submitter, Tasks
from charonia.server.http.limits import HttpLimits
from charonia.server.http.routes import Handler, Route, RouteTarget, route_hint
from charonia.server.openai.events import DONE, EventFlusher, EventStream, StreamedAnswer, WholeAnswer, engine_request
from charonia.server.openai.generation import Generation, TextChoice, model_request, prompts_of
from charonia.server.openai.guided import GUIDED, read_guide
from charonia.server.openai.model_files import TOKENS_MAX, ModelText, ModelTexts
from charonia.wire.json_text import Object, dump, kind_of, parse_object
from charonia.wire.openai_answer import (
    EmbeddingsRequest,
    Floats,
    Text,
    decode_embeddings_request,
    encode_embeddings,
    normalized,
    padded_tokens,
    pooled,
    shortened,
)
from charonia.wire.openai_models import (
    ATTENTION_MASK,
    CHAT,
    EMBEDDINGS,
    INPUT_IDS,
    RESPONSES,
    ROUTES,
    TOKEN_TYPES,
    aliases_of,
    engine_routes,
    float_outputs,
    is_sentence_encoder,
    model_object,
    models_list,
    path_of,
    routes_of,
)
from charonia.wire.openai_request import check_engine_request, decode_text_request
from charonia.wire.openai_responses import ResponseForm, chat_request, input_messages

STORED_BYTES_MAX = 64 * 1024 * 1024
"""Most bytes of the stored conversations of a server; the oldest are dropped."""


class ResponseStore:
    """The conversations that later requests can continue, by the id of their last response."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._bytes = 0
        self._stored: OrderedDict[str, bytes] = OrderedDict()

    def messages(self, id: object) -> list[Object]:
        """Return the messages up to a response.

        Raises:
            ServingError: Nothing is stored, or not this.
        """
        if id is None:
            return []
        if not self._count_max:
            raise unsupported("previous_response_id: the server stores no responses", hint="--stored-responses=1000")
        stored = self._stored.get(str(id))
        if stored is None:
            raise not_found(
                f"previous_response_id: there is no response {id!r:.100}", hint="send its messages as input"
            )
        self._stored.move_to_end(str(id))
        messages: list[Object] = orjson.loads(stored)
        return messages

    def put(self, id: str, messages: list[Object]) -> None:
        """Store a conversation."""
        if not self._count_max:
            return
        self._stored[id] = dump(messages)
        self._bytes += len(self._stored[id])
        while len(self._stored) > self._count_max or self._bytes > STORED_BYTES_MAX:
            _, dropped = self._stored.popitem(last=False)
            self._bytes -= len(dropped)


def as_response(
    exchange: Exchange, document: Object, store: ResponseStore
) -> tuple[Object, Callable[[Exchange, EventFlusher, HttpLimits], EventStream]]:
    """Return the request of the chat, and the class of the stream of its answer."""
    chat = chat_request(document, store.messages(document.get("previous_response_id")))
    form = ResponseForm(document, uuid4().hex, int(time.time()))

    def keep() -> None:
        if document.get("store") is not False:
            first = 1 if document.get("instructions") else 0  # which are not part of the conversation
            store.put(form.id, [*chat["messages"][first:], *(input_messages(form.output) if form.output else ())])

    def reshape(response: Reshaped) -> Reshaped:
        if response.status != 200:
            return response
        body = form.document(orjson.loads(b"".join(response.body)))
        keep()
        return response._replace(body=[body])

    exchange.reshape = reshape
    return chat, partial(ResponseEvents, form=form, keep=keep)


class ResponseEvents(EventStream):
    """Sends the chunks of a chat as the events of a response."""

    __slots__ = ("_form", "_has_begun", "_keep")

    def __init__(
        self, exchange: Exchange, turns: EventFlusher, limits: HttpLimits, form: ResponseForm, keep: Callable[[], None]
    ) -> None:
        """Create a stream; `keep` is called when the answer is complete."""
        super().__init__(exchange, turns, limits)
        self._form = form
        self._keep = keep
        self._has_begun = False

    def send(self, event: bytes) -> None:
        """Send the events of a chunk of the chat."""
        if not self._has_begun:
            self._has_begun = True
            self._send_all(self._form.begin())
        self._send_all(self._form.take(orjson.loads(event)))

    def end(self, last: bytes = DONE) -> None:
        """End the stream with its own event, in place of the chat's."""
        self._send_all(self._form.end())
        self._keep()
        super().end(b"")

    def _send_all(self, events: Iterator[bytes]) -> None:
        for event in events:
            super().send(event)


_REQUEST_ID = b"x-request-id"
_GIVEN_ID = re.compile(rb"[!-~]{1,256}")


class OpenaiHandlers:
    """The routes."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._demand = services.demand
        self._count_tokens = services.count_tokens
        self._counting: set[asyncio.Future[None]] = set()
        self._texts = ModelTexts(services.folders)
        self._limits = limits
        self._responses = ResponseStore(limits.responses_stored_max)
        self._submitter = Submitter(engine, services)
        self._tasks = tasks
        self._turns = EventFlusher()
        self._created_s = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", {b"GET": self._tasks.document(self._models)}),
            Route("/v1/models/{model}", {b"GET": self._model, b"POST": _foreign}),
            Route("/v1/models/{model}/load", {b"POST": self._tasks.document(self._load)}),
            Route("/v1/models/{model}/unload", {b"POST": self._tasks.document(self._unload)}),
            Route("/health", {b"GET": self._health}),
            Route("/version", {b"GET": self._version}),
            *(Route(path_of(route), {b"POST": self._handler(route)}) for route in ROUTES),
        ]

    def _health(self, exchange: Exchange, target: RouteTarget) -> None:
        if not self._engine.is_ready():
            raise unavailable("the server is not ready")
        exchange.respond(200, [dump({"status": "ok"})])

    def _version(self, exchange: Exchange, target: RouteTarget) -> None:
        exchange.respond(200, [dump({"version": self._engine.server_metadata().version})])

    async def _models(self, exchange: Exchange, target: RouteTarget) -> object:
        return models_list(await self._configs(), self._created_s)

    async def _configs(self) -> list[ModelConfig]:
        configs = []
        for name in dict.fromkeys(entry.name for entry in await self._engine.repository_index(ready_only=True)):
            with suppress(ServingError):  # requests could not reach it either
                configs.append(self._engine.model_config(name))
        return configs

    def _model(self, exchange: Exchange, target: RouteTarget) -> None:
        def respond(config: ModelConfig, adapter: str) -> None:
            if not routes_of(config):
                raise not_found(f"model: '{target.model}' has no route of this API", hint=_WHICH)
            exchange.respond(200, [dump(model_object(target.model, config, self._created_s))])

        self._with_model(exchange, target.model, respond)

    def _with_model(self, exchange: Exchange, name: str, act: Callable[[ModelConfig, str], None]) -> None:
        """Act with the configuration of a model and the LoRA adapter, by a client's name or an alias of the model."""
        try:
            found = self._find(name)
        except ServingError as error:
            self._tasks.start(exchange, self._with_aliased(exchange, name, act, error))
        else:
            act(*found)

    async def _with_aliased(
        self, exchange: Exchange, name: str, act: Callable[[ModelConfig, str], None], error: ServingError
    ) -> None:
        for config in await self._configs() if error.code is Code.NOT_FOUND else ():
            if name in aliases_of(config):
                if exchange.is_open:
                    act(config, "")
                return
        raise error

    async def _load(self, exchange: Exchange, target: RouteTarget) -> object:
        if await self._is_loaded(target.model):
            raise invalid(f"Model '{target.model}' is already loaded")
        await self._engine.load_model(target.model)
        return model_object(target.model, self._engine.model_config(target.model), int(time.time()))

    async def _unload(self, exchange: Exchange, target: RouteTarget) -> object:
        if not await self._is_loaded(target.model):
            raise not_found(f"Unknown model: {target.model}")
        await self._engine.unload_model(target.model)
        return {"status": "success", "model": target.model}

    async def _is_loaded(self, model: str) -> bool:
        return model in (entry.name for entry in await self._engine.repository_index(ready_only=True))

    def _handler(self, route: str) -> Handler:
        def handle(exchange: Exchange, target: RouteTarget) -> None:
            request_id = exchange.request.headers.get(_REQUEST_ID, b"")
            exchange.request_id = (
                request_id if _GIVEN_ID.fullmatch(request_id) else b"req_%b" % uuid4().hex.encode()
            ).decode()
            exchange.headers += b"X-Request-Id: %b\r\n" % exchange.request_id.encode()
            if CONTENT_ENCODING in exchange.request.headers:
                self._tasks.start(exchange, self._decompressed(route, exchange))
            else:
                self._post(route, exchange, exchange.request.body)

        return handle

    async def _decompressed(self, route: str, exchange: Exchange) -> None:
        body = await self._tasks.body(exchange.request)
        if exchange.is_open:
            self._post(route, exchange, body)

    def _post(self, route: str, exchange: Exchange, body: bytes | memoryview) -> None:
        document = parse_object(body)
        name = document.get("model")
        if type(name) is not str or not name:
            raise invalid(f"model: expected the name of a model, got {kind_of(name)}", hint="GET /v1/models lists them")
        exchange.model = name
        loaded = self._demand(name.rpartition(":")[0] or name, "") if self._demand is not None else None
        ask = partial(self._with_model, exchange, name, partial(self._ask_model, route, exchange, body, document))
        if loaded is None:
            ask()
        else:
            self._tasks.start(exchange, _after(loaded, exchange, ask))

    def _ask_model(
        self,
        route: str,
        exchange: Exchange,
        body: bytes | memoryview,
        document: Object,
        config: ModelConfig,
        adapter: str,
    ) -> None:
        if route not in routes_of(config):
            raise _no_route(config, route)
        stream: Callable[[Exchange, EventFlusher, HttpLimits], EventStream] = EventStream
        if route == RESPONSES and route not in engine_routes(config):
            document, stream = as_response(exchange, document, self._responses)
            route, body = CHAT, dump(document)
        new_stream = partial(stream, exchange, self._turns, self._limits)
        if route in engine_routes(config):
            is_streamed = check_engine_request(route, document)
            request = engine_request(config, route, adapter, body)
            request.id = exchange.request_id
            if is_streamed:
                answer = StreamedAnswer(new_stream(), route)
                self._submitter.submit(exchange, request, answer.reply)
            else:
                self._submitter.submit(exchange, request, WholeAnswer(exchange).reply)
        elif route == EMBEDDINGS:
            self._tasks.start(exchange, self._embed(exchange, config, document))
        else:
            self._tasks.start(exchange, self._generate(exchange, config, document, new_stream, is_chat=route == CHAT))

    async def _generate(
        self,
        exchange: Exchange,
        config: ModelConfig,
        document: Object,
        new_stream: Callable[[], EventStream],
        *,
        is_chat: bool,
    ) -> None:
        """Ask a language model that is not an engine."""
        guide = None
        if is_chat:
            own = {tensor.name for tensor in config.input}  # which the model meets itself
            guide = await asyncio.to_thread(read_guide, {k: v for k, v in document.items() if k not in own})
            document = {k: v for k, v in document.items() if k in own or k not in GUIDED}
            if guide is not None:
                document["messages"] = guide.messages(document.get("messages"))
        asked = decode_text_request(config, document, is_chat=is_chat)
        text = await self._texts.of(config)
        prompts = prompts_of(asked, text)
        if not exchange.is_open:
            return

        def request_of(prompt: str, index: int) -> InferRequest:
            return model_request(config, asked, prompt, index, self._limits.body_bytes_max)

        def infer(request: InferRequest, answer: TextChoice) -> Ticket:
            request.id = exchange.request_id
            return self._submitter.infer(exchange, request, answer.reply)

        stream = new_stream() if asked.is_streamed else None
        counted = partial(self._count, exchange, config.name)
        Generation(exchange, asked, text, stream, counted, guide).start(prompts, request_of, infer)

    async def _embed(self, exchange: Exchange, config: ModelConfig, document: Object) -> None:
        asked = decode_embeddings_request(document)
        text = await self._texts.of(config)
        embedder = Embedder(config, text, partial(self._submitter.infer, exchange))
        exchange.ticket = embedder
        vectors, exchange.usage = await embedder.embed(asked)
        if exchange.usage is not None:
            self._count(exchange, config.name, exchange.usage)
        body = await asyncio.to_thread(
            encode_embeddings, vectors, exchange.model, as_base64=asked.is_base64, usage=exchange.usage
        )
        exchange.respond(200, [body])

    def _count(self, exchange: Exchange, name: str, usage: TokenUsage) -> None:
        """Count tokens that the model did not report."""
        if self._count_tokens is not None:
            task = asyncio.ensure_future(self._count_tokens(name, usage, self._submitter.flow(exchange)))
            self._counting.add(task)
            task.add_done_callback(self._counting_ended)

    def _counting_ended(self, task: asyncio.Future[None]) -> None:
        self._counting.discard(task)
        if not task.cancelled():
            task.exception()  # of a model, or an engine, that is gone: there is nothing to count

    def _find(self, name: str) -> tuple[ModelConfig, str]:
        """Return the configuration of a model, by a client's name for it, and the LoRA adapter, "" for none."""
        try:
            return self._engine.model_config(name), ""
        except ServingError as error:
            model, _, adapter = name.rpartition(":")
            if model:
                with suppress(ServingError):
                    config = self._engine.model_config(model)
                    if engine_routes(config):
                        return config, adapter
            if error.code is not Code.NOT_FOUND:
                raise
            raise not_found(f"model: '{name:.200}' does not exist", hint="GET /v1/models lists them") from error


def _foreign(exchange: Exchange, target: RouteTarget) -> None:
    """Refuse the inference requests of clients of other servers, which have this path."""
    path = f"/v1/models/{target.model}"
    raise not_found(f"there is nothing to POST to at {path:.200}", hint=route_hint(path))


_WHICH = "language models have a BYTES input text_input and a BYTES output text_output"


def _no_route(config: ModelConfig, route: str) -> ServingError:
    offered = ", ".join(path_of(each) for each in routes_of(config))
    hint = f"it answers {offered}" if offered else _WHICH
    return invalid(f"model: '{config.name}' does not answer {path_of(route)}", hint=hint)


async def _after(loaded: Awaitable[None], exchange: Exchange, ask: Callable[[], None]) -> None:
    await loaded
    if exchange.is_open:
        ask()


TEXTS_AT_ONCE = 32
"""Most texts of an inference request."""

POOLINGS = ("mean", "cls")

Infer = Callable[[InferRequest, Reply], Ticket]

_NOT_ONE = internal("the model sent no embedding, or more than one response")


class Embedder:
    """Asks a model for embeddings.

    Args:
        config: Its configuration.
        text: Its tokenizer.
        infer: Passes a request on.
    """

    def __init__(self, config: ModelConfig, text: ModelText, infer: Infer) -> None:
        self._config = config
        self._text = text
        self._infer = infer
        self._tickets: list[Ticket] = []
        self._output = config.parameters.get(EMBEDDING_OUTPUT) or float_outputs(config)[0]

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    async def embed(self, asked: EmbeddingsRequest) -> tuple[Floats, TokenUsage | None]:
        """Return a vector a text, and the tokens of all, None where they are not known.

        Raises:
            ServingError: The request does not fit the model, or the model fails.
        """
        embed = self._of_tokens if is_sentence_encoder(self._config) else self._of_texts
        vectors, usage = await embed(asked.texts)
        return shortened(vectors, asked.dimensions), usage

    async def _of_texts(self, texts: Sequence[Text]) -> tuple[Floats, TokenUsage | None]:
        strings = [self._text.text_of("input", text, keeps_special=False) for text in texts]
        parts = []
        for some in _parts(strings, self._at_once(TEXT_INPUT)):
            elements = np.array([text.encode() for text in some], object)
            shape = (len(some), 1) if self._is_batched else (len(some),)
            parts.append({TEXT_INPUT: Tensor(TEXT_INPUT, DataType.BYTES, elements.reshape(shape))})
        vectors = [_rows(output) for output in await self._run(parts)]
        counts = [self._text.count(text) for text in strings]
        known = [count for count in counts if count is not None]
        return np.concatenate(vectors), TokenUsage(sum(known)) if len(known) == len(counts) else None

    async def _of_tokens(self, texts: Sequence[Text]) -> tuple[Floats, TokenUsage]:
        parameters = self._config.parameters
        pooling = parameters.get(EMBEDDING_POOLING, POOLINGS[0])
        if pooling not in POOLINGS:
            raise internal(f"model '{self._config.name}': {EMBEDDING_POOLING}: expected mean or cls, got '{pooling}'")
        rows = await asyncio.to_thread(self._tokens, texts)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # so that little is padded
        parts, masks = [], []
        for some in _parts(order, self._at_once(INPUT_IDS)):
            ids, mask = padded_tokens([rows[number] for number in some])
            masks.append(mask)
            values = {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPES: np.zeros_like(ids)}
            types = {each.name: each.data_type for each in self._config.input}
            parts.append({name: _integers(name, types[name], value) for name, value in values.items() if name in types})
        outputs = await self._run(parts)
        found = np.concatenate([pooled(output, mask, pooling) for output, mask in zip(outputs, masks, strict=True)])
        vectors = np.empty_like(found)
        vectors[order] = found
        if parameters.get(EMBEDDING_NORMALIZE, "true") != "false":
            vectors = normalized(vectors)
        return vectors, TokenUsage(sum(map(len, rows)))

    def _tokens(self, texts: Sequence[Text]) -> list[Sequence[int]]:
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            raise invalid(
                f"model '{self._config.name}' takes tokens", hint="put its tokenizer.json into the model's folder"
            )
        most = int((tokenizer.truncation or {}).get("max_length", TOKENS_MAX))
        strings = [text for text in texts if isinstance(text, str)]
        found = iter(tokenizer.encode_batch_fast(strings) if strings else ())
        rows: list[Sequence[int]] = []
        for text in texts:
            if isinstance(text, str):
                rows.append(next(found).ids)
            elif min(text) < 0 or max(text) >= tokenizer.get_vocab_size():
                raise invalid(f"input: expected tokens from 0 to {tokenizer.get_vocab_size() - 1}")
            elif len(text) > most:
                raise invalid(f"input: expected at most {most} tokens, got {len(text)}")
            else:
                rows.append(text)
        return rows

    @property
    def _is_batched(self) -> bool:
        return self._config.max_batch_size > 0

    def _at_once(self, name: str) -> int:
        if self._is_batched:
            return min(TEXTS_AT_ONCE, self._config.max_batch_size)
        dims = next(tensor.dims for tensor in self._config.input if tensor.name == name)
        return TEXTS_AT_ONCE if dims[:1] == (-1,) and (name == INPUT_IDS or len(dims) == 1) else 1

    async def _run(self, parts: Sequence[dict[str, Tensor]]) -> list[Floats]:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[InferResponse]] = []
        for inputs in parts:
            request = InferRequest(self._config.name, inputs, outputs=(RequestedOutput(self._output),))
            answer: asyncio.Future[InferResponse] = loop.create_future()
            answers.append(answer)
            self._tickets.append(self._infer(request, partial(SingleResponse(_NOT_ONE).settle, answer)))
        try:
            responses = await asyncio.gather(*answers)
        except BaseException:
            self.cancel()
            raise
        return [np.asarray(response.outputs[0].array, np.float32) for response in responses]


def _rows(output: Array) -> Floats:
    """Return the vectors of texts, each of which has all numbers of a row."""
    array = np.asarray(output, np.float32)
    return array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)


def _integers(name: str, datatype: DataType | None, values: Array) -> Tensor:
    datatype = datatype or DataType.INT64
    return Tensor(name, datatype, values.astype(datatype.numpy, copy=False))


def _parts(values: Sequence[Text] | Sequence[int], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
