"""From the options to the requests that a run sends."""

from pathlib import Path

from charonia.core.errors import invalid
from charonia.perf.data.files import read_path
from charonia.perf.data.generate import Generator
from charonia.perf.data.source import Inputs
from charonia.perf.data.spec import ModelSpec, check_batch_size, names, with_shapes
from charonia.perf.data.steps import Step, Stream
from charonia.perf.options import DataOptions, PerfOptions


def load_inputs(spec: ModelSpec, options: PerfOptions) -> Inputs:
    """Return the requests that the options ask for.

    Raises:
        ServingError: INVALID_ARG when the data cannot be read or do not fit the model.
    """
    batch_size = options.target.batch_size
    check_batch_size(spec, batch_size)
    spec = with_shapes(spec, options.data.shapes)
    if options.data.is_from_files:
        streams = [stream for source in options.data.sources for stream in read_path(Path(source), spec)]
    else:
        streams = [_generate(spec, options.data.sources[0], options.data, options.load.seed, batch_size)]
    return Inputs(spec, streams, batch_size, dict(options.target.parameters))


def _generate(spec: ModelSpec, kind: str, options: DataOptions, seed: int, count: int) -> Stream:
    if not spec.inputs:
        raise invalid(f"model '{spec.name}': expected inputs, got {names(spec.inputs)}")
    generator = Generator(
        spec,
        seed=seed,
        string_length=options.string_length,
        string_data=options.string_data,
        ranges={name: (low, high) for name, low, high in options.ranges},
    )
    if kind == "zero":
        return [Step(generator.zero())]
    # The items of a batch differ.
    return [Step(generator.random()) for _ in range(count)]
