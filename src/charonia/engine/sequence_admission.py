"""Checks the requests of sequences before they are queued."""

from collections.abc import Callable, Hashable

from charonia.config.kinds import ControlKind
from charonia.config.model import ModelConfig
from charonia.config.sequences import control_type, controls
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.engine.admission import Admission, with_request_id
from charonia.sched.sequence_api import SequencePart

_RANGES = {
    DataType.UINT64: (0, 2**64 - 1),
    DataType.INT64: (-(2**63), 2**64 - 1),  # unsigned ids beyond it go in as the number of the same bits
    DataType.UINT32: (0, 2**32 - 1),
    DataType.INT32: (-(2**31), 2**31 - 1),
}
"""What each datatype of a correlation id can hold."""


class SequenceAdmission:
    """The checks of one model version that works on sequences, prepared once.

    Args:
        config: A validated configuration with `sequence_batching`.
        is_taken: Whether an id is that of a sequence that is not over; ids that are made up are none of those.
    """

    def __init__(self, config: ModelConfig, is_taken: Callable[[int], bool]) -> None:
        self._inner = Admission(config)
        self._model = config.name
        self._is_taken = is_taken
        self._is_iterative = config.sequence_batching is not None and config.sequence_batching.iterative_sequence
        self._made_up = 0
        found = controls(config).get(ControlKind.CONTROL_SEQUENCE_CORRID)
        self._id_name = found[0].name if found else ""
        self._id_type = control_type(found[1]) if found else None

    def check(self, request: InferRequest) -> tuple[int, Hashable]:
        """Return batch size 1 and the request's `SequencePart`. A request of an iterative model is a whole sequence.

        Raises:
            ServingError: INVALID_ARG; the message starts with the request's id.
        """
        batch_size, shape_key = self._inner.check(request)
        if batch_size != 1:
            raise self._refusal(
                request,
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, got {batch_size}",
            )
        key = request.correlation_id
        if not key and not self._is_iterative:
            raise self._refusal(
                request,
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID",
                hint="send sequence_id, and sequence_start with the first request of the sequence",
            )
        if not key:
            key = request.correlation_id = self._make_up()
        self._check_type(request)
        if self._is_iterative:
            return 1, SequencePart(key, True, True, shape_key)
        flags = request.flags
        return 1, SequencePart(key, bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END), shape_key)

    def _make_up(self) -> int:
        self._made_up += 1
        while self._is_taken(self._made_up):
            self._made_up += 1
        return self._made_up

    def _check_type(self, request: InferRequest) -> None:
        """Refuse an id that the model cannot be told."""
        key, datatype = request.correlation_id, self._id_type
        if datatype is None or datatype is DataType.BYTES:
            return
        lowest, highest = _RANGES[datatype]
        if isinstance(key, str) or not lowest <= key <= highest:
            raise self._refusal(
                request,
                f"inference request for sequence {key} to model '{self._model}': the model takes correlation IDs as "
                f"{datatype.config}, from {lowest} to {highest}",
                hint=f"data_type of control input '{self._id_name}' in its configuration says so",
            )

    def _refusal(self, request: InferRequest, message: str, hint: str = "") -> ServingError:
        return with_request_id(invalid(message, hint=hint), request)
