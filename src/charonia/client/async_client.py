"""The asynchronous client, its requests and results, and the server or servers that it sends queries to."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from charonia.client.balancing.options import DEFAULT, Balancing
from charonia.client.balancing.transport import (
    ANYWHERE,
    BalancedTransport,
    EndpointStatus,
    Routing,
    parse_addresses,
    prefix_of,
)
from charonia.client.errors import ClientError, error_of, failed
from charonia.client.grpc_transport import GrpcTransport
from charonia.client.http_transport import HttpTransport
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Array
from charonia.wire.answer import Answer, Failure, Handle, OnAnswer
from charonia.wire.grpc_codec import GrpcEncoder
from charonia.wire.grpc_dialect import GrpcDialect
from charonia.wire.http_codec import HttpEncoder
from charonia.wire.http_dialect import HttpDialect
from charonia.wire.python_values import Inputs, Outputs, make_outputs, make_tensors, needs_metadata, readable
from charonia.wire.query import Dialect, Json, Query, SharedMemoryRegion, T, TraceChange
from charonia.wire.transport import WireOptions
from charonia.wire.v2_request import apply_parameters


class InferResult:
    """The result of an inference.

    Attributes:
        outputs: Arrays by output name, read-only. BYTES are object arrays of `bytes`; BF16 are float32.
        datatypes: Datatypes of the protocol, such as "FP32", by output name.
        parameters: Parameters that the model attached.
        model_name: Model that ran.
        model_version: Version that ran.
        id: The request's id, "" for none.
    """

    __slots__ = ("datatypes", "id", "model_name", "model_version", "outputs", "parameters")

    def __init__(self, response: InferResponse) -> None:
        self.outputs: dict[str, Array] = {tensor.name: readable(tensor) for tensor in response.outputs}
        self.datatypes: dict[str, str] = {tensor.name: tensor.datatype.wire for tensor in response.outputs}
        self.parameters: dict[str, ParameterValue] = response.parameters
        self.model_name = response.model_name
        self.model_version = response.model_version
        self.id = response.id

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {self.datatypes[name]} {list(a.shape)}" for name, a in self.outputs.items())
        return f"InferResult({self.model_name!r} v{self.model_version}: {shown})"


METADATA_MAX = 1024
"""Limit of models with cached metadata; beyond it, the cache is cleared."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A request's place in a sequence.

    Attributes:
        id: Sequence id: a number above 0, or a string.
        start: Whether the request begins the sequence.
        end: Whether it ends it.
    """

    id: int | str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class InferArguments:
    """A caller's arguments for an inference."""

    model: str
    inputs: Inputs
    outputs: Outputs | None
    version: str
    request_id: str
    parameters: Mapping[str, ParameterValue] | None
    sequence: SequencePart | None

    def request(self, metadata: ModelMetadata | None) -> InferRequest:
        """Return the request.

        Args:
            metadata: The model's tensors, if inputs use its datatypes.

        Raises:
            ServingError: INVALID_ARG for a value that cannot become a tensor or an invalid parameter, NOT_FOUND for an
                input that the model does not have.
        """
        tensors = make_tensors(self.model, self.inputs, metadata)
        request = InferRequest(
            self.model,
            tensors,
            model_version=self.version,
            id=self.request_id,
            outputs=make_outputs(self.outputs),
        )
        if self.parameters:
            apply_parameters(request, dict(self.parameters))
        if self.sequence is not None:
            request.correlation_id = self.sequence.id
            request.flags = SEQUENCE_START * self.sequence.start | SEQUENCE_END * self.sequence.end
        return request


class MetadataCache:
    """Metadata of models, by name and version."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], ModelMetadata] = {}

    def get(self, ask: InferArguments) -> ModelMetadata | None:
        return self._known.get((ask.model, ask.version))

    def put(self, ask: InferArguments, metadata: ModelMetadata) -> None:
        """Cache it."""
        if len(self._known) >= METADATA_MAX:
            self._known.clear()
        self._known[ask.model, ask.version] = metadata

    def invalidate(self, ask: InferArguments) -> None:
        """Drop the metadata of a model, which may have changed."""
        self._known.pop((ask.model, ask.version), None)


class AsyncTraffic:
    """The traffic of models. All methods raise `ClientError`, and return the traffic as the server documents it."""

    def __init__(self, servers: "Servers") -> None:
        self._servers = servers

    async def get(self, model: str) -> Json:
        """Return the settings, with the figures of each version, the canary plan and the history."""
        return await self._servers.ask(self._servers.dialect.traffic(model, {}))

    async def update(self, model: str, change: Mapping[str, object]) -> Json:
        """Change the settings: any of `weights`, `sticky`, `shadow`, and `canary` or `action`."""
        if not change:
            raise invalid("traffic: expected a change, got none", hint="reset() goes back to the configuration")
        return await self._servers.change(self._servers.dialect.traffic(model, change))

    async def reset(self, model: str) -> Json:
        """Forget what requests have changed."""
        return await self._servers.change(self._servers.dialect.reset_traffic(model))


_NO = frozenset((Code.NOT_FOUND, Code.UNAVAILABLE, Code.INVALID_ARG))
"""Errors that mean "not ready"."""


class Servers:
    """Sends queries."""

    def __init__(self, url: str | Sequence[str], timeout_s: float, options: WireOptions, balancing: Balancing) -> None:
        self._addresses = addresses = parse_addresses(url)
        self._timeout_s = timeout_s
        first = addresses.endpoints[0]
        self._is_http = first.protocol == "http"
        connect: Any = HttpTransport if self._is_http else GrpcTransport
        self.dialect: Dialect[Any]  # of the same protocol as the transports
        if self._is_http:
            self.dialect = HttpDialect(HttpEncoder(first, options))
        else:
            self.dialect = GrpcDialect(GrpcEncoder(first, options))
        self.is_balanced = not addresses.is_single
        self._one: HttpTransport | GrpcTransport | None = None
        self._all: BalancedTransport | None = None
        if self.is_balanced:
            self._all = BalancedTransport(addresses, options, balancing, connect=connect, dialect=self.dialect)
        else:
            self._one = connect(first, options)

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of each server; an empty list for a single server."""
        return self._all.endpoints() if self._all is not None else []

    def queue_timeout_us(self, timeout_s: float | None) -> int:
        """Return the time after which the client no longer waits, where the request has to carry it; 0 otherwise.

        A gRPC call carries its deadline.
        """
        if not (self.is_balanced and self._is_http):
            return 0
        return round((self._timeout_s if timeout_s is None else timeout_s) * 1e6)

    def send(
        self,
        query: Query[Any, T],
        on_answer: OnAnswer,
        timeout_s: float | None = None,
        routing: Routing = ANYWHERE,
    ) -> Handle:
        """Send a query; see `Transport.send`."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._all is not None:
            return self._all.send(query.request, on_answer, timeout_s, keep_body=True, routing=routing)
        assert self._one is not None
        return self._one.send(query.request, on_answer, timeout_s, keep_body=True)

    async def ask(self, query: Query[Any, T], timeout_s: float | None = None, routing: Routing = ANYWHERE) -> T:
        """Send a query and return its parsed answer.

        Raises:
            ClientError: The query failed.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def take(answer: Answer) -> None:
            if not future.done():  # cancelled, and the task that waits for it has not run yet
                future.set_result(answer)

        handle = self.send(query, take, timeout_s, routing)
        try:
            answer = await future
        except asyncio.CancelledError:
            handle.cancel()
            raise
        error = error_of(answer)
        if error is not None:
            raise error
        return read(query, answer)

    async def change(self, query: Query[Any, T], timeout_s: float | None = None) -> T:
        """Send a query that changes the server. Raises as `ask`, and UNSUPPORTED for several servers."""
        if self.is_balanced:
            raise unsupported(
                f"a client of several servers, {self._addresses}, does not change them",
                hint="use a client of each server",
            )
        return await self.ask(query, timeout_s)

    async def holds(self, query: Query[Any, bool]) -> bool:
        """Send a query; an error that means no returns False. Raises as `ask` for others."""
        try:
            return await self.ask(query)
        except ServingError as error:
            if error.code in _NO:
                return False
            raise

    async def close(self) -> None:
        if self._all is not None:
            await self._all.close()
        if self._one is not None:
            await self._one.close()


def read(query: Query[Any, T], answer: Answer) -> T:
    """Parse a successful answer.

    Raises:
        ClientError: It does not follow the protocol.
    """
    try:
        return query.read(answer)
    except ServingError as error:
        raise ClientError(error.code, error.message, Failure.GARBLED, answer.status) from error


TIMEOUT_S = 60.0
"""Default timeout of a request, in seconds."""

LOAD_TIMEOUT_S = 600.0
"""Default timeout of loading a model, in seconds."""

UNREAD_RESPONSES_MAX = 4096
"""Limit of buffered responses of a stream; beyond it the request is cancelled, as there is no back-pressure."""

_DEFAULT_OPTIONS = WireOptions()


class _BufferedResponses:
    """The buffered answers to a request."""

    def __init__(self) -> None:
        self._waiting: deque[Answer] = deque()
        self._arrived = asyncio.Event()
        self._is_full = False

    def put(self, answer: Answer) -> None:
        if self._is_full:
            return
        if len(self._waiting) >= UNREAD_RESPONSES_MAX:
            self._is_full = True
            text = f"{UNREAD_RESPONSES_MAX} responses were not taken"
            answer = failed(Answer(answer.sent_ns), Failure.OVERSIZE, text)
        self._waiting.append(answer)
        self._arrived.set()

    async def next(self) -> Answer:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()


class AsyncClient:
    """A client of one server, or of several alike, for asyncio. Use it as an asynchronous context manager.

    Every method raises `ClientError`, which is a `ServingError`, when the server refuses, does not respond in time,
    cannot be reached, or disconnects. Only requests that no model has seen are retried.

    Args:
        url: `HOST:PORT` or `http://HOST:PORT` for HTTP, `grpc://HOST:PORT` for gRPC; `https://`, `grpcs://` with TLS.
            Several servers: a list, or one text with commas; or `dns+grpc://NAME:PORT`, where each address of the name
            is a server.
        timeout_s: Default timeout of a request, in seconds.
        options: Headers, TLS, compression, limits.
        balancing: How requests are balanced among several servers.

    Attributes:
        traffic: How requests without a version are split among the versions of models.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        options: WireOptions = _DEFAULT_OPTIONS,
        balancing: Balancing = DEFAULT,
    ) -> None:
        self._timeout_s = timeout_s
        self._servers = servers = Servers(url, timeout_s, options, balancing)
        self._dialect = servers.dialect
        self._metadata = MetadataCache()
        self.traffic = AsyncTraffic(servers)

    async def __aenter__(self) -> Self:
        """Do nothing: connections are opened on demand."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        await self._servers.close()

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of each server; an empty list for a client of a single server."""
        return self._servers.endpoints()

    async def server_live(self) -> bool:
        """Whether the server responds."""
        return await self._servers.holds(self._dialect.live())

    async def server_ready(self) -> bool:
        """Whether the server accepts inference requests."""
        return await self._servers.holds(self._dialect.ready())

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Whether a model accepts inference requests; also False if the model does not exist."""
        return await self._servers.holds(self._dialect.model_ready(model, version))

    async def server_metadata(self) -> ServerMetadata:
        """Return the server's name, version and extensions."""
        return await self._servers.ask(self._dialect.server_metadata())

    async def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Return a model's versions and tensors."""
        return await self._servers.ask(self._dialect.model_metadata(model, version))

    async def model_config(self, model: str, version: str = "") -> Json:
        """Return a model's configuration as a JSON object."""
        return await self._servers.ask(self._dialect.model_config(model, version))

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the server's statistics, a JSON object for each model and version."""
        return await self._servers.ask(self._dialect.statistics(model, version))

    async def repository_index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Return the models of the repositories, or only the ready ones."""
        return await self._servers.ask(self._dialect.index(ready))

    async def load_model(
        self,
        model: str,
        *,
        config: str | Mapping[str, object] = "",
        files: Mapping[str, bytes] | None = None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Load or reload a model.

        Args:
            model: Model name.
            config: Configuration, as JSON, to use instead of the model's own.
            files: Files by path, such as "1/model.onnx", to use instead of the model's folder; they need a `config`.
            timeout_s: Longest time to wait, in seconds.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        await self._servers.change(self._dialect.load(model, text, files or {}), timeout_s)

    async def unload_model(
        self, model: str, *, unload_dependents: bool = False, timeout_s: float = LOAD_TIMEOUT_S
    ) -> None:
        """Unload a model, and optionally the models of an ensemble."""
        await self._servers.change(self._dialect.unload(model, unload_dependents), timeout_s)

    async def register_shared_memory(self, region: SharedMemoryRegion) -> None:
        """Register a region of system shared memory."""
        await self._servers.change(self._dialect.register(region))

    async def unregister_shared_memory(self, name: str = "") -> None:
        """Unregister a region of system shared memory, or all regions of all clients if no name is given."""
        await self._servers.change(self._dialect.unregister(name))

    async def shared_memory_regions(self, name: str = "") -> list[SharedMemoryRegion]:
        """Return the registered regions of system shared memory, or the one of this name."""
        return await self._servers.ask(self._dialect.regions(name))

    async def trace_settings(self, model: str = "") -> Json:
        """Return the trace settings of a model or of the server: strings, for `trace_level` a list of strings."""
        return await self._servers.ask(self._dialect.trace_settings(model, {}))

    async def update_trace_settings(self, change: TraceChange, model: str = "") -> Json:
        """Change trace settings of a model or of the server, and return all settings then in effect.

        Args:
            change: New values of "trace_level" (one or a list of OFF, TIMESTAMPS, TENSORS), "trace_rate",
                "trace_count" and "log_frequency"; None resets a setting to that of the server or its command line.
            model: Model name, "" for the server.
        """
        return await self._servers.change(self._dialect.trace_settings(model, change))

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs | None = None,
        *,
        version: str = "",
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        sequence: SequencePart | None = None,
        timeout_s: float | None = None,
    ) -> InferResult:
        """Run a model. For asyncio, cancelling the awaiting task cancels the request.

        Args:
            model: Model name.
            inputs: By name: an array, whose dtype determines the datatype; a pair of an array and a datatype, such as
                `(x, "BF16")`; a list or a single element, which use the datatype in the model's metadata.
            outputs: Names of the outputs to return, None for all; a mapping also says how many top classes to return
                instead of an output, 0 for the output itself.
            version: Model version, "" for the latest that is ready.
            request_id: Id that the response carries.
            parameters: Request parameters; "priority" and "timeout" (microseconds in the queue) control the scheduler.
            sequence: The request's place in a sequence.
            timeout_s: Longest time to wait, in seconds; None for the client's default.

        Raises:
            ClientError: There is no result.
            ServingError: INVALID_ARG or NOT_FOUND for inputs that cannot be sent.
        """
        ask = InferArguments(model, inputs, outputs, version, request_id, parameters, sequence)
        metadata, timeout_s = await self._metadata_for(ask, timeout_s)
        request = ask.request(metadata)
        queue_timeout_us = 0 if request.timeout_us else self._servers.queue_timeout_us(timeout_s)
        request.timeout_us = request.timeout_us or queue_timeout_us
        routing = _routing(ask, passes_timeout=bool(queue_timeout_us))
        query = self._dialect.infer(request)
        try:
            return InferResult(await self._servers.ask(query, timeout_s, routing))
        except ClientError as error:
            if error.code is Code.INVALID_ARG:
                self._metadata.invalidate(ask)
            raise

    async def stream_infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs | None = None,
        *,
        version: str = "",
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        sequence: SequencePart | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[InferResult, None]:
        """Run a model that sends any number of responses, over gRPC only; iterate over them.

        The first step sends the request. Closing the iterator (`aclose`), or cancelling the task in it, cancels the
        request. It accepts the arguments of `infer`; `timeout_s` is the time until the last response.

        Raises:
            ClientError: The request failed; raised after the preceding responses.
            ServingError: UNSUPPORTED over HTTP; INVALID_ARG or NOT_FOUND for inputs that cannot be sent.
        """
        ask = InferArguments(model, inputs, outputs, version, request_id, parameters, sequence)
        metadata, timeout_s = await self._metadata_for(ask, timeout_s)
        query = self._dialect.stream(ask.request(metadata))
        answers = _BufferedResponses()
        handle = self._servers.send(query, answers.put, timeout_s, _routing(ask, is_stream=True))
        try:
            while not (answer := await answers.next()).is_empty:
                error = error_of(answer)
                if error is not None:
                    raise error
                yield InferResult(read(query, answer))
        finally:
            handle.cancel()

    async def _metadata_for(
        self, ask: InferArguments, timeout_s: float | None
    ) -> tuple[ModelMetadata | None, float | None]:
        """Return a model's tensors if the inputs need them, and the rest of the timeout."""
        if not needs_metadata(ask.inputs):
            return None, timeout_s
        known = self._metadata.get(ask)
        if known is None:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            begun_s = time.monotonic()
            known = await self._servers.ask(self._dialect.model_metadata(ask.model, ask.version), timeout_s)
            self._metadata.put(ask, known)
            if timeout_s:
                timeout_s = max(timeout_s - (time.monotonic() - begun_s), 1e-6)
        return known, timeout_s


def _routing(ask: InferArguments, *, is_stream: bool = False, passes_timeout: bool = False) -> Routing:
    part = ask.sequence
    if part is None:
        prefix = prefix_of(ask.inputs.get("text_input"))
        return Routing(ask.model, is_stream=is_stream, passes_timeout=passes_timeout, prefix=prefix)
    return Routing(ask.model, part.id, part.start, part.end, is_stream, passes_timeout)
