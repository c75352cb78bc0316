"""What a model answers: the result of a batch, and a response as the engine hands it to every front end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from charonia.core.errors import ServingError
from charonia.core.request import ParameterValue
from charonia.core.tensor import Tensor

REPEATED_PARAMETERS_MAX: Final = 4
"""Most parameters that responses are expected to repeat."""

ParametersKey = tuple[tuple[str, type, object], ...]
"""Name, type and value of each parameter: True and 1 are equal, and not the same."""

_REPEATED: Final = frozenset({bool, int})


def parameters_key(parameters: Mapping[str, object]) -> ParametersKey | None:
    """Return parameters as a key for caches; None if other responses are unlikely to have the same.

    Parameters of sequences and ensembles are a few integers and booleans, and mostly the same.
    """
    if len(parameters) > REPEATED_PARAMETERS_MAX:
        return None
    key = []
    for name, value in parameters.items():
        if type(value) not in _REPEATED:
            return None
        key.append((name, type(value), value))
    return tuple(key)


class Outputs:
    """A model's answer to one request.

    Attributes:
        tensors: Output tensors. The engine drops those that were not asked for.
    """

    __slots__ = ("parameters", "tensors")

    def __init__(self, tensors: list[Tensor], parameters: dict[str, ParameterValue] | None = None) -> None:
        self.tensors = tensors
        self.parameters = parameters


Result = Outputs | ServingError
"""The answer to one request of a batch: outputs, or an error of this request alone."""


class Execution:
    """A finished batch.

    Attributes:
        results: One for each request, in the order of the requests.
        input_end_ns: Monotonic time at which the inputs were in place and computing began.
        output_start_ns: Monotonic time at which computing ended and handling of outputs began.
    """

    __slots__ = ("input_end_ns", "output_start_ns", "results")

    def __init__(self, results: Sequence[Result], input_end_ns: int, output_start_ns: int) -> None:
        self.results = results
        self.input_end_ns = input_end_ns
        self.output_start_ns = output_start_ns


class ExecutionRecord:
    """The execution of one batch, as the access log and traces report it for each request in it.

    Attributes:
        instance: Name of the instance that ran it.
        batch_size: Sum of the batch sizes of the requests that ran together.
        queue_ns: Time this request waited before the batch started, in ns.
        compute_ns: Time the batch took, input and output handling included, in ns.
    """

    __slots__ = ("batch_size", "compute_ns", "instance", "queue_ns")

    def __init__(self, instance: str, batch_size: int, queue_ns: int, compute_ns: int) -> None:
        self.instance = instance
        self.batch_size = batch_size
        self.queue_ns = queue_ns
        self.compute_ns = compute_ns


class InferResponse:
    """A plain record of one response.

    Attributes:
        model_name: Model that ran.
        model_version: Version that ran, as text.
        id: The request's id, "" for none.
        outputs: Output tensors, in the order of the request, or of the configuration.
        parameters: Parameters that the model attached.
        execution: How it was run, or None when no instance ran (e.g. an empty final response).
    """

    __slots__ = ("execution", "id", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,
        outputs: list[Tensor],
        parameters: dict[str, ParameterValue] | None = None,
        execution: ExecutionRecord | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.parameters: dict[str, ParameterValue] = parameters if parameters is not None else {}
        self.execution = execution

    def __repr__(self) -> str:
        return f"InferResponse({self.model_name!r} v{self.model_version}, id={self.id!r}, outputs={self.outputs})"


Outcome = InferResponse | ServingError | None
"""One outcome. None comes only with `final`: the request ends without a response, or without another one."""

Reply = Callable[[Outcome, bool], None]
"""Called with each outcome and whether it is the last. May be called before `infer` has returned."""


class Ticket(Protocol):
    """A request in flight."""

    def cancel(self) -> None:
        """Drop the request wherever it is; the reply gets a CANCELLED error or no more calls.

        Safe at any time, even after the last outcome.
        """


class _Answered:
    """The ticket of a request that had its last outcome before it could be cancelled."""

    def cancel(self) -> None:
        """Do nothing: the request has its answer."""


ANSWERED: Final = _Answered()
