"""The procedure: read, convert, check, write."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.forms import model_name
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, conflict, invalid, not_found
from charonia.core.tensor import Array
from charonia.server.backends.onnxruntime.instance import to_bytes, to_text
from charonia.server.backends.onnxruntime.options import CPU, SessionPlan
from charonia.server.backends.onnxruntime.session import Session, open_session, plain_error, signature_of
from charonia.server.backends.tensorrt.build import build, check_machine
from charonia.server.convert.check import OutputDifference, batches_of, compare, given_samples, random_samples
from charonia.server.convert.options import ConvertOptions
from charonia.server.convert.original import Original, require


@dataclass(frozen=True, slots=True)
class Target:
    """One form.

    Attributes:
        name: Its name on the command line.
        filename: Its name in a version's folder.
        write: Writes it: takes the path of the ONNX model, that of the file to write and the options; raises
            ServingError.
        check: Checks that this machine can write it; raises ServingError.
    """

    name: str
    filename: str
    write: Callable[[Path, Path, ConvertOptions], None]
    check: Callable[[], None] = lambda: None


def _copy(model: Path, output: Path, options: ConvertOptions) -> None:
    """Copy an ONNX model, with the file of its weights where that is apart."""
    for beside in model.parent.glob(f"{model.name}.*"):
        shutil.copyfile(beside, output.parent / beside.name)
    shutil.copyfile(model, output)


def _plan(model: Path, output: Path, options: ConvertOptions) -> None:
    build(model, output, precision=options.precision, shapes=dict(options.shapes))


TARGETS = (Target("onnx", "model.onnx", _copy), Target("tensorrt", "model.plan", _plan, check_machine))
"""The forms; `TARGET_NAMES` of the options has the same names."""


def target_called(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


@dataclass(frozen=True, slots=True)
class SourceForm:
    """One form.

    Attributes:
        title: What it is.
        suffixes: Suffixes of its files.
        member: A file in its folder, for forms that are folders.
        extra: Extra of this package that reads it.
        modules: The libraries that it needs.
        original: Where its `Original` is: "module:class".
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
        "charonia.server.convert.estimators:EstimatorOriginal",
    ),
    SourceForm(
        "a PyTorch model", (".pt", ".pth", ".jit", ".torchscript", ".pt2"), "",
        "convert,torch", ("torch", "onnx", "onnxscript"),
        "charonia.server.convert.pytorch:PyTorchOriginal",
    ),
    SourceForm(
        "a TensorFlow model", (".keras", ".h5", ".tflite"), "saved_model.pb",
        "convert,tensorflow", ("tensorflow", "tf2onnx", "onnx"),
        "charonia.server.convert.tensorflow:TensorFlowOriginal",
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


def open_original(form: SourceForm, path: Path, options: ConvertOptions) -> Original:
    """Read a model.

    Raises:
        ServingError: A library is missing, or the file cannot be read.
    """
    require(form.extra, *form.modules)
    module, _, name = form.original.partition(":")
    make = cast(Callable[[Path, ConvertOptions], Original], getattr(import_module(module), name))
    return make(path, options)


class Progress(Protocol):
    """Is told of each step, before it begins."""

    def __call__(self, step: str, text: str) -> None:
        """Take a step: "reading", "converting", "checking", or "note"."""
        ...


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came of it.

    Attributes:
        differences: How far the answers are apart, by output; of nothing for an ONNX model in another form.
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
    target = target_called(options.target)
    target.check()
    if path.suffix.lower() == ".onnx" and path.is_file() and target.name != "onnx":
        output = _output(options, path, target.filename)
        progress("converting", f"{path} to {target.name}, which takes minutes")
        return Conversion((), _written(target, path, output, options))
    form = form_of(path)
    output = _output(options, path, target.filename)
    samples = _read_samples(options.samples) if options.samples else None
    progress("reading", f"{path}, {form.title}")
    original = open_original(form, path, options)
    try:
        with tempfile.TemporaryDirectory(prefix="charonia-convert-") as folder:
            for warning in original.warnings:
                progress("note", warning)
            progress("converting", f"{original.title} with {original.converter}")
            # Under its own name, by which it names the file of its weights.
            model = Path(folder, f"{output.stem}.onnx")
            original.to_onnx(model, options.opset)
            session, signature = _open(model)
            differences = _check(original, session, signature, options, samples, progress)
            if any(difference.beyond for difference in differences):
                return Conversion(differences, None)
            return Conversion(differences, _written(target, model, output, options))
    finally:
        original.close()


def _written(target: Target, model: Path, output: Path, options: ConvertOptions) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    target.write(model, output, options)
    return output


def _output(options: ConvertOptions, path: Path, filename: str) -> Path:
    """Return where the converted model belongs.

    Raises:
        ServingError: Something is there.
    """
    name = options.name or model_name(path.name)
    output = Path(options.output or f"{name}{Path(filename).suffix}")
    if options.repository:
        output = Path(options.repository, name, "1", filename)
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
            f"--samples: cannot read '{path}': {error}",
            hint="numpy.savez writes it, with an array for each input; texts as numpy.str_, not as objects",
        ) from error


def _open(path: Path) -> tuple[Session, Signature]:
    session = open_session(path, SessionPlan(), threads=1, providers=[(CPU, {})])
    signature, _ = signature_of(session, path.stem)
    return session, signature


def _check(
    original: Original,
    session: Session,
    signature: Signature,
    options: ConvertOptions,
    samples: Mapping[str, Array] | None,
    progress: Progress,
) -> tuple[OutputDifference, ...]:
    """Return how far the answers of original and converted model are apart."""
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
    got = [_answers(session, inputs, signature.outputs, batch) for batch in batches]
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


def _answers(
    session: Session, inputs: Sequence[SignatureTensor], outputs: Sequence[SignatureTensor], feed: Mapping[str, Array]
) -> dict[str, Array]:
    texts = {tensor.name for tensor in inputs if tensor.datatype is DataType.BYTES}
    given = {name: to_text(name, array) if name in texts else array for name, array in feed.items()}
    names = [tensor.name for tensor in outputs]
    try:
        arrays = session.run(names, given)
    except Exception as error:  # ONNX Runtime's errors have no common base class
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        raise plain_error(f"the converted model fails on the samples ({shapes})", error) from error
    return {
        tensor.name: to_bytes(array) if tensor.datatype is DataType.BYTES else array
        for tensor, array in zip(outputs, arrays, strict=True)
    }
