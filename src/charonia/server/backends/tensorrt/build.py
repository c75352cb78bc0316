"""Builds a plan from an ONNX model, and says what a machine lacks for that."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from charonia.core.errors import ServingError, invalid, unsupported
from charonia.install_hint import extra_hint, package_hint
from charonia.server.backends.tensorrt.options import Shape
from charonia.server.backends.tensorrt.plan import Range, library, make_logger, started
from charonia.server.channel.cuda_driver import CudaError, driver

BATCHES = (1, 8, 32)
"""Smallest, best and largest batch of a plan whose shapes nothing else says."""

PRECISIONS = {"fp32": "", "fp16": "FP16"}
"""Precisions, with TensorRT's flag of each."""

_INSTALL_DRIVER = (
    "sudo apt-get install nvidia-driver` (Debian), `sudo ubuntu-drivers install` (Ubuntu), then `nvidia-smi"
)
_NVIDIA = "0x10de"
_DISPLAY = "0x03"


def check_machine(folder: Path = Path("/sys/bus/pci/devices")) -> None:
    """Check that plans can be built here.

    Raises:
        ServingError: UNSUPPORTED with everything that is missing, and the commands that lead to it.
    """
    missing = list(_missing(folder))
    if missing:
        raise unsupported(
            "a TensorRT plan is built on the kind of GPU that runs it. This machine lacks:\n" + "\n".join(missing)
        )


def _missing(folder: Path) -> Iterator[str]:
    try:
        gpus, reason = driver().device_count(), "CUDA_VISIBLE_DEVICES hides it"
    except CudaError as error:
        gpus, reason = 0, str(error)
    if not gpus and not _has_hardware(folder):
        yield "- an NVIDIA GPU: none is attached; in a container, `docker run --gpus all` (NVIDIA Container Toolkit)"
    if not gpus:
        yield f"- a driver that works ({reason}): `{_INSTALL_DRIVER}`"
    try:
        library()
    except ServingError as error:
        yield f"- TensorRT ({error.message}): `{extra_hint('tensorrt')}`, with its libraries"


def _has_hardware(folder: Path) -> bool:
    def begins(device: Path, file: str, start: str) -> bool:
        try:
            return (device / file).read_text().startswith(start)
        except OSError:
            return False

    return any(begins(d, "vendor", _NVIDIA) and begins(d, "class", _DISPLAY) for d in folder.glob("*"))


def build(model: Path, output: Path, *, precision: str, shapes: Mapping[str, Range]) -> None:
    """Build a plan for GPU 0, which takes minutes.

    Args:
        model: The ONNX model.
        output: The file to write.
        precision: A key of `PRECISIONS`.
        shapes: Smallest, best and largest shape of inputs of variable shape. Without it, a variable first dimension is
            the batch, see `BATCHES`.

    Raises:
        ServingError: TensorRT does not take the model, or a shape is missing.
    """
    trt = library()
    logger = make_logger(trt)
    try:
        with driver().current(driver().context(0)):
            plan = _built(trt, logger, model, precision, shapes)
    except CudaError as error:
        raise unsupported(f"GPU 0 cannot be used: {error}") from error
    output.write_bytes(plan)


def _built(trt: Any, logger: Any, model: Path, precision: str, shapes: Mapping[str, Range]) -> Any:
    builder = started(trt.Builder, logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        reasons = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise invalid(
            f"TensorRT {trt.__version__} cannot read {model.name}: {reasons or logger.reasons()}",
            hint="ONNX Runtime leaves what TensorRT lacks to CUDA: execution_accelerators, docs/onnx_models.md",
        )
    config = builder.create_builder_config()
    flag = PRECISIONS[precision]
    if flag and not hasattr(trt.BuilderFlag, flag):
        raise unsupported(
            f"TensorRT {trt.__version__} takes the precision from the model",
            hint=f"convert the model to {precision} first, or use an older one: {package_hint('tensorrt<11')}",
        )
    if flag:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    profile = builder.create_optimization_profile()
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    unknown = shapes.keys() - {tensor.name for tensor in inputs}
    if unknown:
        raise invalid(f"--shapes: the model has no input {', '.join(sorted(unknown))}")
    for tensor in inputs:
        low, best, high = shapes.get(tensor.name) or _default(tensor.name, tuple(tensor.shape))
        (profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape)(tensor.name, low, best, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise invalid(f"TensorRT {trt.__version__} cannot build a plan of {model.name}: {logger.reasons()}")
    return plan


def _default(name: str, shape: Shape) -> Range:
    if -1 in shape[1:]:
        example = "x".join("64" if size == -1 else str(size) for size in shape[1:])
        raise invalid(
            f"input '{name}' {list(shape)} has variable dimensions besides the batch",
            hint=f"say its smallest, best and largest shape: --shapes {name}:1x{example},8x{example},32x{example}",
        )
    low, best, high = ((batch, *shape[1:]) if shape[:1] == (-1,) else shape for batch in BATCHES)
    return low, best, high
