"""From what a caller gives to an inference request, and what is remembered of models for it. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.client.tensors import Inputs, Outputs, make_outputs, make_tensors
from charonia.core.metadata import ModelMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue
from charonia.protocol.v2_request import apply_parameters

METADATA_MAX = 1024
"""Most models whose metadata a client remembers; at more it starts again."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A request's place in a sequence.

    Attributes:
        id: Sequence id: a number above 0, or text.
        start: Whether the request begins the sequence.
        end: Whether it ends it.
    """

    id: int | str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What a caller asks of a model.

    Attributes:
        model: Model name.
        inputs: Values by input name.
        outputs: Outputs wanted, None for all.
        version: Model version, "" for the newest.
        request_id: Id that the response carries.
        parameters: Request parameters.
        sequence: Place in a sequence.
    """

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
            metadata: The model's tensors, where inputs take their datatype from it.

        Raises:
            ServingError: INVALID_ARG for a value that is no tensor or a parameter that the protocol does not take,
                NOT_FOUND for an input that the model does not have.
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
        """Return what is remembered of a model."""
        return self._known.get((ask.model, ask.version))

    def put(self, ask: Ask, metadata: ModelMetadata) -> None:
        """Remember it."""
        if len(self._known) >= METADATA_MAX:
            self._known.clear()
        self._known[ask.model, ask.version] = metadata

    def forget(self, ask: Ask) -> None:
        """Ask again the next time: the model may have changed."""
        self._known.pop((ask.model, ask.version), None)
