"""Requests from a caller's arguments, results from responses, metadata in between. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.core.metadata import ModelMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Array
from charonia.wire.python_values import Inputs, Outputs, make_outputs, make_tensors, readable
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
class Ask:
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

    def get(self, ask: Ask) -> ModelMetadata | None:
        return self._known.get((ask.model, ask.version))

    def put(self, ask: Ask, metadata: ModelMetadata) -> None:
        """Cache it."""
        if len(self._known) >= METADATA_MAX:
            self._known.clear()
        self._known[ask.model, ask.version] = metadata

    def forget(self, ask: Ask) -> None:
        """Drop the metadata of a model, which may have changed."""
        self._known.pop((ask.model, ask.version), None)
