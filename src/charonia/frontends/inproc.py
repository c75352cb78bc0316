"""The in-process front end: numpy arrays in, numpy arrays out, no socket."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from charonia.core.calls import Outcome, Ticket
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import ServingError, invalid, unavailable, unsupported
from charonia.core.request import InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.engine.api import Engine
from charonia.frontends.sole import SoleResponse
from charonia.protocol.v2_request import apply_parameters

UNREAD_RESPONSES_MAX = 1024
"""Responses of one request that wait to be taken; with more the request fails: a model cannot be made to wait."""


class ResponseStream:
    """The responses of one request, to be taken one after the other, by one task.

    As an asynchronous iterator it ends after the last response and raises the error of a request that fails, after the
    responses that came before. `close` gives the request up.
    """

    def __init__(self, engine: Engine, request: InferRequest) -> None:
        self._request = request
        self._responses: deque[InferResponse] = deque()
        self._arrived = asyncio.Event()
        self._error: ServingError | None = None
        self._is_over = False
        self._ticket: Ticket | None = None
        ticket = engine.infer(request, self._reply)
        if self._is_over:
            ticket.cancel()
        else:
            self._ticket = ticket

    async def next(self) -> InferResponse | None:
        """Return the next response, None after the last.

        Raises:
            ServingError: The request failed.
        """
        while not self._responses and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()
        if self._responses:
            return self._responses.popleft()
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Cancel the request if it is not over, and drop what was not taken."""
        self._end(None)
        self._responses.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        response = await self.next()
        if response is None:
            raise StopAsyncIteration
        return response

    def _reply(self, outcome: Outcome, final: bool) -> None:
        if self._is_over:
            return
        if isinstance(outcome, ServingError):
            self._error = outcome
        elif outcome is not None:
            if len(self._responses) >= UNREAD_RESPONSES_MAX:
                name = self._request.model_name
                self._end(unavailable(f"{UNREAD_RESPONSES_MAX} responses of model '{name}' were not taken"))
                return
            self._responses.append(outcome)
        if final:
            self._is_over = True
            self._ticket = None
        self._arrived.set()

    def _end(self, error: ServingError | None) -> None:
        ticket, self._ticket = self._ticket, None
        self._is_over = True
        self._error = error
        self._arrived.set()
        if ticket is not None:
            ticket.cancel()


class InProcessFrontend:
    """Calls the engine from code that runs on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request that gets one response. Cancelling the awaiting task cancels the request.

        Raises:
            ServingError: The request failed; UNSUPPORTED where it got no response, or several.
        """
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        sole = SoleResponse(
            unsupported(f"model '{request.model_name}' did not answer exactly once", hint="use stream_infer")
        )

        def reply(outcome: Outcome, final: bool) -> None:
            if future.done():
                return
            answer = sole.take(outcome, final)
            if isinstance(answer, ServingError):
                future.set_exception(answer)
            elif answer is not None:
                future.set_result(answer)

        ticket = self._engine.infer(request, reply)
        try:
            return await future
        except (asyncio.CancelledError, ServingError):
            ticket.cancel()
            raise

    def stream(self, request: InferRequest) -> ResponseStream:
        """Run a request that gets any number of responses. Close the stream when it is not read to its end."""
        return ResponseStream(self._engine, request)


def make_request(
    model: str,
    inputs: Mapping[str, Array],
    *,
    version: str = "",
    request_id: str = "",
    outputs: Sequence[str] = (),
    parameters: Mapping[str, ParameterValue] | None = None,
) -> InferRequest:
    """Return a request with these arrays as inputs.

    Strings and bytes become BYTES; every other dtype its own datatype. Parameters mean what they do over HTTP:
    "priority" and "timeout" (microseconds in the queue) steer the scheduler, others are handed to the model.

    Raises:
        ServingError: INVALID_ARG for a dtype that the protocol does not have, or a parameter that it does not take.
    """
    request = InferRequest(
        model,
        {name: make_tensor(name, np.asarray(array)) for name, array in inputs.items()},
        model_version=version,
        id=request_id,
        outputs=tuple(RequestedOutput(name) for name in outputs),
    )
    if parameters:
        apply_parameters(request, dict(parameters))
    return request


def make_tensor(name: str, array: Array) -> Tensor:
    """Return an array as a tensor, with the datatype of its dtype.

    Raises:
        ServingError: INVALID_ARG for a dtype that the protocol does not have.
    """
    if array.dtype.kind in "OSU":
        elements = np.empty(array.size, object)
        elements[:] = [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist()]
        return Tensor(name, DataType.BYTES, elements.reshape(array.shape))
    datatype = BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise invalid(f"input '{name}': no datatype of the protocol fits numpy dtype {array.dtype}")
    return Tensor(name, datatype, array.astype(datatype.numpy, order="C", copy=False))
