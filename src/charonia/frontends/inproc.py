"""The in-process front end: numpy arrays in, numpy arrays out, no socket."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from charonia.core.calls import Outcome
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import ServingError, internal, invalid
from charonia.core.request import InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.engine.api import Engine
from charonia.protocol.v2_request import apply_parameters


class InProcessFrontend:
    """Calls the engine from code that runs on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request of a model that answers once. Cancelling the awaiting task cancels the request.

        Raises:
            ServingError: The request failed.
        """
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

        def reply(outcome: Outcome, final: bool) -> None:
            if future.done():
                return
            if isinstance(outcome, ServingError):
                future.set_exception(outcome)
            elif outcome is None or not final:
                future.set_exception(internal(f"model '{request.model_name}' did not answer exactly once"))
            else:
                future.set_result(outcome)

        ticket = self._engine.infer(request, reply)
        try:
            return await future
        except asyncio.CancelledError:
            ticket.cancel()
            raise


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
