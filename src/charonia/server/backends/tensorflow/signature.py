"""What a SavedModel takes and gives, from what its worker tells. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from charonia.config.complete import Signature, SignatureTensor, check_signature
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import invalid, unsupported

_DATATYPES = {str(dtype): datatype for dtype, datatype in BY_NUMPY.items()} | {"string": DataType.BYTES}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """An input or output.

    Attributes:
        name: Its name in the signature.
        dtype: Datatype as TensorFlow writes it.
        shape: Its full shape, -1 for a variable dimension; None where the model tells no rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class SavedSignature:
    """A signature of a SavedModel.

    Attributes:
        folder: The SavedModel.
        tags: Tags of its graph.
        name: Name of the signature.
        inputs: Its inputs.
        outputs: Its outputs.
    """

    folder: str
    tags: tuple[str, ...]
    name: str
    inputs: tuple[SavedTensor, ...]
    outputs: tuple[SavedTensor, ...]

    def for_config(self, config: ModelConfig) -> Signature:
        """Return the signature for a configuration, which decides the shapes that the model leaves open.

        Raises:
            ServingError: A tensor has a datatype that requests cannot have, or no rank, and the configuration has not
                got it.
        """
        return Signature(
            tuple(_known(config, "input", tensor, config.input) for tensor in self.inputs),
            tuple(
                _known(config, "output", tensor, config.output)
                for tensor in self.outputs
                if not config.output or any(output.name == tensor.name for output in config.output)
            ),
        )


def read_signature(model: str, answer: Mapping[str, Any]) -> SavedSignature:
    """Return the signature that a worker describes.

    Raises:
        ServingError: INVALID_ARG, the model cannot be served.
    """
    if "refused" in answer:
        raise invalid(f"model '{model}': {answer['refused']}", hint=answer["hint"])

    def tensors(given: Sequence[Mapping[str, Any]]) -> tuple[SavedTensor, ...]:
        return tuple(
            SavedTensor(each["name"], each["dtype"], None if each["dims"] is None else tuple(each["dims"]))
            for each in given
        )

    return SavedSignature(
        answer["folder"],
        tuple(answer["tags"]),
        answer["signature"],
        tensors(answer["inputs"]),
        tensors(answer["outputs"]),
    )


def signature_problems(config: ModelConfig, saved: SavedSignature) -> Iterator[Problem]:
    """Yield each difference between a complete configuration and the model that matters."""
    signature = saved.for_config(config)
    if not config.output:
        yield Problem("output", f"none is configured; the model provides {', '.join(t.name for t in saved.outputs)}")
    names = {tensor.name for tensor in saved.outputs}
    for index, output in enumerate(config.output):
        if output.name not in names:
            message = f"unexpected inference output '{output.name}', allowed outputs are: {', '.join(sorted(names))}"
            yield Problem(f"output[{index}].name", message)
    yield from check_signature(replace(config, output=tuple(o for o in config.output if o.name in names)), signature)


def _known(
    config: ModelConfig, kind: str, tensor: SavedTensor, configured: Sequence[ModelInput | ModelOutput]
) -> SignatureTensor:
    datatype = _DATATYPES.get(tensor.dtype)
    if datatype is None:
        raise unsupported(
            f"model '{config.name}': {kind} '{tensor.name}' is {tensor.dtype}, a datatype that requests cannot have",
            hint="cast it in the model: export a signature with tf.cast, for example to float32",
        )
    shape = tensor.shape
    if shape is None:
        given = next((each for each in configured if each.name == tensor.name), None)
        if given is None:
            raise invalid(
                f"model '{config.name}': {kind} '{tensor.name}' has no rank in the model: its shape must be configured",
                hint=f'config.pbtxt: {kind} [ {{ name: "{tensor.name}" data_type: {datatype.config} dims: [ ... ] }} ]',
            )
        dims = given.dims if given.reshape is None else given.reshape.shape
        shape = (-1, *dims) if config.max_batch_size > 0 else dims
    return SignatureTensor(tensor.name, datatype, shape)
