"""`charonia convert`: a model in another form, checked against the original.

Exit status: 0 done, 1 the model cannot be converted or answers differently, 2 misuse.
"""

import shlex
import sys
from collections.abc import Sequence

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.values import integer, names, number
from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import BY_WIRE
from charonia.server.convert.convert import ROWS_MAX, ConvertOptions, OutputDifference, convert
from charonia.tools.report.quantities import in_columns, size

_STEP_COLUMNS = 12


def tensor(text: str) -> SignatureTensor:
    """Read NAME:TYPE:DIMS, as in x:FP32:-1,3,224,224; a name may contain colons."""
    name, _, dims = text.rpartition(":")
    name, _, kind = name.rpartition(":")
    datatype = BY_WIRE.get(kind.upper())
    try:
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
    except ValueError:
        shape = ()
    if not name or datatype is None or not shape or any(dim < -1 or dim == 0 for dim in shape):
        raise ValueError(f"expected NAME:TYPE:DIMS, such as x:FP32:-1,3,224,224, got '{text}'")
    return SignatureTensor(name, datatype, shape)


# fmt: off
LINE = CommandLine(
    command="charonia convert",
    intro="""\
usage: charonia convert [OPTIONS] MODEL

Convert an estimator, a TensorFlow or a PyTorch model to ONNX, and check that it answers like the original.
""",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL", "A file, or the folder of a SavedModel"),
            Option("--output -o", "output", str, "FILE", "File to write", default="MODEL's name, here"),
            Option("--repository", "repository", str, "DIR",
                   "Write NAME/1/model.onnx in this folder instead"),
            Option("--name", "name", str, "NAME", "Name of the model in the repository", default="MODEL's name"),
            flag("--force", "force", True, "Replace an existing file"),
            flag("--trust", "trust", True, "Read files that can run code: pickles, Lambda layers"),
            Option("--trusted-types", "trusted_types", names, "TYPE,...",
                   "Types that a skops file may create, by full name"),
        ),
        "Conversion": (
            Option("--input", "inputs", tensor, "NAME:TYPE:DIMS",
                   "An input, if the file does not declare it; -1 for a dimension of any size; repeatable", tuple),
            Option("--signature", "signature", str, "NAME", "Signature of a SavedModel",
                   default="serving_default, else the first"),
            Option("--opset", "opset", integer(1), "N", "Version of ONNX's operators",
                   default="the converter's"),
        ),
        "Check": (
            Option("--samples", "samples", str, "FILE.npz", "An array for each input, by its name",
                   default="random ones"),
            Option("--rows", "rows", integer(2, ROWS_MAX), "N", "Rows of random samples"),
            Option("--tolerance", "tolerance", number(0), "X",
                   "Largest accepted difference, absolute plus relative"),
        ),
    },
    record=ConvertOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _convert)


def _convert(options: ConvertOptions) -> int:
    done = convert(options, _progress)
    print(f"\n{table(done.differences)}\n")
    if done.path is None:
        apart = ", ".join(f"'{difference.name}'" for difference in done.differences if difference.beyond)
        print(
            f"charonia convert: nothing was written: {apart} differ by more than --tolerance {options.tolerance:g} "
            "(hint: samples of your own say more than random ones: --samples FILE.npz)",
            file=sys.stderr,
        )
        return 1
    alike = [difference.name for difference in done.differences if difference.is_alike]
    if len(alike) == len(done.differences) and alike:
        print("! The original answers all samples alike, so the check says little: give --samples of your data.\n")
    served = options.repository or done.path
    print(f"wrote {done.path}, {size(done.path.stat().st_size)}\ncharonia serve {shlex.quote(str(served))}")
    return 0


def _progress(step: str, text: str) -> None:
    print(f"{step:<{_STEP_COLUMNS}}{text}", flush=True)


_HEADINGS = ("output", "datatype", "shape", "max absolute", "max relative", "beyond tolerance")


def table(differences: Sequence[OutputDifference]) -> str:
    """Return a row for each output."""
    rows = [_HEADINGS, *map(_row, differences)]
    return "\n".join(in_columns(rows))


def _row(difference: OutputDifference) -> tuple[str, ...]:
    dims = ", ".join(map(str, difference.shape))
    beyond = f"{difference.beyond:,} of {difference.elements:,}" if difference.beyond else "none"
    if difference.is_exact:
        apart = ("equal", "") if not difference.beyond else ("differs", "")
    else:
        apart = (f"{difference.absolute:.2g}", f"{difference.relative:.2g}")
    return (difference.name, difference.datatype.wire, f"[{dims}]", *apart, beyond)
