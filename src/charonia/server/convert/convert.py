"""The procedure: read, convert, check, write; and what to convert."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from charonia.config.complete import SignatureTensor
from charonia.config.forms import model_name
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, conflict, invalid, not_found
from charonia.core.tensor import Array
from charonia.server.backends.conversion import Converted, Original, ReadOptions, random_samples, require


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How far the answers for one output are apart.

    Attributes:
        shape: Its shape, with -1 for variable dimensions.
        absolute: Greatest absolute difference of numbers with a fraction.
        relative: Greatest difference relative to the original's number, or to the tolerance where that is greater.
        beyond: Elements that differ by more than the tolerance, or at all where they are no numbers with a fraction.
        is_alike: Whether the original answered every row of several the same, so that little was compared.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    absolute: float
    relative: float
    beyond: int
    elements: int
    is_alike: bool

    @property
    def is_exact(self) -> bool:
        """Whether elements are equal or not, with nothing between."""
        return self.datatype.numpy.kind not in "f"


def given_samples(inputs: Sequence[SignatureTensor], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a file in the datatypes of the inputs.

    Raises:
        ServingError: INVALID_ARG when an array is missing or does not fit.
    """
    feed: dict[str, Array] = {}
    for tensor in inputs:
        array = arrays.get(tensor.name)
        if array is None:
            known = ", ".join(arrays) or "none"
            raise invalid(f"--samples: expected an array for input '{tensor.name}', got {known}")
        array = np.asarray(array)
        fits = len(array.shape) == len(tensor.shape) and all(
            dim in (-1, size) for dim, size in zip(tensor.shape, array.shape, strict=True)
        )
        if not fits or (array.dtype.kind in "OSUT") != (tensor.datatype is DataType.BYTES):
            raise invalid(
                f"--samples: input '{tensor.name}' takes {tensor.datatype.wire} {list(tensor.shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
        if tensor.datatype is DataType.BYTES:
            texts = [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist()]
            array = np.array([*texts, None], object)[:-1].reshape(array.shape)
        feed[tensor.name] = array.astype(tensor.datatype.numpy, copy=False)
    return feed


def batches_of(inputs: Sequence[SignatureTensor], feed: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the samples as one batch, and where the batch dimension is variable, its first row as a batch of one."""
    sizes = {array.shape[0] if array.ndim else 0 for array in feed.values()}
    whole = dict(feed)
    if len(sizes) != 1 or sizes <= {0, 1} or any(tensor.shape[:1] != (-1,) for tensor in inputs):
        return [whole]
    return [{name: array[:1] for name, array in feed.items()}, whole]


def compare(
    tensor: SignatureTensor, expected: Sequence[Array], got: Sequence[Array], tolerance: float
) -> OutputDifference:
    """Return how far an output's answers to all batches are apart.

    A number with a fraction may differ by the tolerance plus the tolerance times the original's magnitude; what is not
    finite in one is the same in the other.

    Args:
        tolerance: Absolute and relative.

    Raises:
        ServingError: INVALID_ARG when they have different numbers of elements.
    """
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.size != other.size:
            raise invalid(
                f"output '{tensor.name}': the original answers batch {index + 1} with shape {list(one.shape)}, "
                f"the converted model with {list(other.shape)}"
            )
    one, other = (np.concatenate([array.ravel() for array in arrays]) for arrays in (expected, got))
    rows = expected[-1].reshape(len(expected[-1]), -1) if expected[-1].ndim else expected[-1].reshape(1, -1)
    is_alike = len(rows) > 1 and bool((_texts(rows) == _texts(rows[:1])).all())
    absolute = relative = 0.0
    if tensor.datatype.numpy.kind == "f":
        real, near = one.astype(np.float64), other.astype(np.float64)
        same = (real == near) | (np.isnan(real) & np.isnan(near))
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.where(same, 0.0, np.abs(real - near))
            ratio = np.where(same, 0.0, apart / np.maximum(np.abs(real), tolerance))
            beyond = ~same & ~(np.isfinite(apart) & (apart <= tolerance + tolerance * np.abs(real)))
        absolute, relative = float(apart.max(initial=0.0)), float(ratio.max(initial=0.0))
    else:
        beyond = _texts(one) != _texts(other)
    return OutputDifference(
        tensor.name, tensor.datatype, tensor.shape, absolute, relative,
        int(beyond.sum()), one.size, is_alike,
    )  # fmt: skip


def _texts(array: Array) -> Array:
    """Return an array whose elements can be compared: texts as text."""
    if array.dtype.kind != "O":
        return array
    texts = [e.decode(errors="replace") if isinstance(e, bytes) else str(e) for e in array.ravel().tolist()]
    return np.array(texts, np.str_).reshape(array.shape)


TOLERANCE = 1e-4
ROWS = 16
ROWS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ConvertOptions(ReadOptions):
    """A conversion, and how the model is read.

    Attributes:
        output: Path of the file to write, "" for the model's name in the current folder.
        repository: Folder of a repository to write the model to, "" for none.
        name: Name of the model, "" for that of the file.
        force: Whether a file that is there already is replaced.
        opset: Version of ONNX's operators, 0 for what the converter has.
        samples: Path of an .npz file with an array for each input, "" for random ones.
    """

    model: str = ""
    output: str = ""
    repository: str = ""
    name: str = ""
    force: bool = False
    opset: int = 0
    samples: str = ""
    rows: int = ROWS
    tolerance: float = TOLERANCE

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        if self.output and self.repository:
            yield "--output, --repository: expected one of them"
        if self.name and not self.repository:
            yield "--name: is the name of a model in a --repository, and none is given"


@dataclass(frozen=True, slots=True)
class SourceForm:
    """One form.

    Attributes:
        member: A file in its folder, for forms that are folders.
        extra: Extra of this package that reads it.
        original: Where the backends have its `Original`: "module:class".
    """

    title: str
    suffixes: tuple[str, ...]
    member: str
    extra: str
    modules: tuple[str, ...]
    original: str


SOURCES = (
    SourceForm(
        "an estimator of scikit-learn", (".skops", ".joblib", ".pkl", ".pickle"), "",
        "convert,sklearn", ("sklearn", "skops", "skl2onnx", "onnx"),
        "sklearn.original:EstimatorOriginal",
    ),
    SourceForm(
        "a PyTorch model", (".pt", ".pth", ".jit", ".torchscript", ".pt2"), "",
        "convert,torch", ("torch", "onnx", "onnxscript"),
        "pytorch.original:PyTorchOriginal",
    ),
    SourceForm(
        "a TensorFlow model", (".keras", ".h5", ".tflite"), "saved_model.pb",
        "convert,tensorflow", ("tensorflow", "tf2onnx", "onnx"),
        "tensorflow.original:TensorFlowOriginal",
    ),
)  # fmt: skip
"""The forms, each with what reads it."""


def form_of(path: Path) -> SourceForm:
    """Return the form of a file or folder.

    Raises:
        ServingError: It is missing, or of a form that cannot be converted.
    """
    if not path.exists():
        raise not_found(f"there is no file or folder '{path}'")
    for form in SOURCES:
        if path.is_dir() and form.member and (path / form.member).is_file():
            return form
        if path.is_file() and path.suffix.lower() in form.suffixes:
            return form
    suffixes = ", ".join(suffix for form in SOURCES for suffix in form.suffixes)
    if path.suffix.lower() == ".onnx":
        raise invalid(f"'{path}' is an ONNX model already", hint=f"charonia serve {shlex.quote(str(path))}")
    raise invalid(
        f"'{path}' is of no form that can be converted",
        hint=f"expected a file that ends with one of {suffixes}, or the folder of a SavedModel",
    )


def _of_backend(name: str) -> Any:
    """Import what a backend has for conversions; its library is not needed before."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"charonia.server.backends.{module}"), attribute)


Progress = Callable[[str, str], None]
"""Is told of each step before it begins: "reading", "converting", "checking" or "note", and a text."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came of it.

    Attributes:
        differences: How far the answers are apart, by output.
        path: The file that was written, None where the model differs too much.
    """

    differences: tuple[OutputDifference, ...]
    path: Path | None


def convert(options: ConvertOptions, progress: Progress) -> Conversion:
    """Convert a model, check it, and write it if its answers are those of the original. Takes seconds to minutes.

    Raises:
        ServingError: A library is missing, the file cannot be read or converted, or the samples do not fit.
    """
    problems = list(options.problems())
    if problems:
        raise invalid("\n".join(problems))
    path = Path(options.model).expanduser()
    form = form_of(path)
    output = _output(options, path)
    samples = _read_samples(options.samples) if options.samples else None
    progress("reading", f"{path}, {form.title}")
    require(form.extra, *form.modules)
    original: Original = _of_backend(form.original)(path, options)
    try:
        with tempfile.TemporaryDirectory(prefix="charonia-convert-") as folder:
            for warning in original.warnings:
                progress("note", warning)
            progress("converting", f"{original.title} with {original.converter}")
            # Under its own name, by which it names the file of its weights.
            model = Path(folder, f"{output.stem}.onnx")
            original.to_onnx(model, options.opset)
            converted: Converted = _of_backend("onnxruntime.backend:ConvertedOnnx")(model)
            differences = _check(original, converted, options, samples, progress)
            if any(difference.beyond for difference in differences):
                return Conversion(differences, None)
            return Conversion(differences, _written(model, output))
    finally:
        original.close()


def _written(model: Path, output: Path) -> Path:
    """Copy the converted model, with the file of its weights where that is apart."""
    output.parent.mkdir(parents=True, exist_ok=True)
    for part in (model, *model.parent.glob(f"{model.name}.*")):
        shutil.copyfile(part, output.parent / (output.name if part == model else part.name))
    return output


def _output(options: ConvertOptions, path: Path) -> Path:
    """Return where the converted model belongs."""
    name = options.name or model_name(path.name)
    output = Path(options.output or f"{name}.onnx")
    if options.repository:
        output = Path(options.repository, name, "1", "model.onnx")
    if output.exists() and not options.force:
        raise conflict(f"'{output}' is there already", hint="--force replaces it")
    return output


def _read_samples(path: str) -> Mapping[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise invalid(f"--samples: expected a file of several arrays, as numpy.savez writes it, got '{path}'")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise invalid(
            f"--samples: cannot read '{path}': {getattr(error, 'strerror', None) or error}",
            hint="numpy.savez writes it, with an array for each input; texts as numpy.str_, not as objects",
        ) from error


def _check(
    original: Original,
    converted: Converted,
    options: ConvertOptions,
    samples: Mapping[str, Array] | None,
    progress: Progress,
) -> tuple[OutputDifference, ...]:
    """Return how far the answers of original and converted model are apart."""
    signature = converted.signature
    inputs = [tensor for tensor in signature.inputs if not tensor.optional]
    if samples is None:
        feed = random_samples(inputs, options.rows, original.texts, original.scale)
    else:
        feed = given_samples(inputs, samples)
    batches = batches_of(inputs, feed)
    fixed = [tensor for tensor in signature.fixed if tensor.shape]
    if fixed:
        named = ", ".join(f"'{tensor.name}' {list(tensor.shape)}" for tensor in fixed)
        progress("note", f"the first dimension is fixed, so the model cannot batch: {named}")
    sizes = " and ".join(str(len(next(iter(batch.values())))) for batch in batches)
    kind = "samples of the file" if samples is not None else "random samples"
    progress("checking", f"{kind} against the original, in batches of {sizes}")
    expected = [_original_answers(original, batch) for batch in batches]
    got = [converted.run(batch) for batch in batches]
    return tuple(
        compare(
            tensor,
            [_of(answers, tensor.name) for answers in expected],
            [answers[tensor.name] for answers in got],
            options.tolerance,
        )
        for tensor in signature.outputs
    )


def _of(answers: Mapping[str, Array], name: str) -> Array:
    if name not in answers:
        raise invalid(f"the converted model has an output '{name}', the original has {', '.join(answers)}")
    return answers[name]


def _original_answers(original: Original, feed: Mapping[str, Array]) -> Mapping[str, Array]:
    try:
        return original.run(feed)
    except ServingError:
        raise
    except Exception as error:  # the libraries raise what they like
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise invalid(
            f"the original fails on the samples ({shapes}): {text}",
            hint="give samples that it accepts: --samples FILE.npz",
        ) from error
