"""Write the model repository of the voice activity example, with the network of the installed package silero-vad.

The network takes its memory, a bit of the audio before and the sample rate as inputs. Here it gets them in the form in
which a server can keep them for many streams: the batch is the first dimension of everything, the last samples
come out as what to put before the next ones, and the sample rate is 16 kHz.

Usage: python examples/voice_activity/make_repository.py FOLDER
"""

import shutil
import sys
from importlib.metadata import files
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS = Path(__file__).parent / "models"
NETWORK = "silero_vad/data/silero_vad_16k_op15.onnx"
SAMPLE_RATE = 16_000
PIECE, CONTEXT = 512, 64


def build(repository: Path) -> None:
    """Write the repository.

    Raises:
        SystemExit: The package silero-vad is not installed.
    """
    shipped = [file for file in files("silero-vad") or () if file.as_posix() == NETWORK]
    if not shipped:
        sys.exit(f"{NETWORK} is not there: pip install silero-vad")
    shutil.copytree(MODELS, repository, dirs_exist_ok=True)
    version = repository / "voice_activity" / "1"
    version.mkdir(exist_ok=True)
    onnx.save(for_streams(onnx.load(str(shipped[0].locate()))), version / "model.onnx")


def for_streams(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the network with its memory as separate inputs and outputs, batch first."""
    graph = model.graph
    before = [
        helper.make_node("Concat", ["CONTEXT", "AUDIO"], ["input"], axis=1),
        helper.make_node("Transpose", ["MEMORY"], ["state"], perm=[1, 0, 2]),
    ]
    after = [
        helper.make_node("Identity", ["output"], ["SPEECH"]),
        helper.make_node("Transpose", ["stateN"], ["NEXT_MEMORY"], perm=[1, 0, 2]),
        helper.make_node("Slice", ["input", "context_begin", "context_end", "context_axis"], ["NEXT_CONTEXT"]),
    ]
    constants = {
        "sr": np.array(SAMPLE_RATE, np.int64),
        "context_begin": np.array([-CONTEXT], np.int64),
        "context_end": np.array([PIECE + CONTEXT], np.int64),
        "context_axis": np.array([1], np.int64),
    }
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    graph.input.extend([_tensor("AUDIO", PIECE), _tensor("MEMORY", 2, 128), _tensor("CONTEXT", CONTEXT)])
    graph.output.extend([_tensor("SPEECH", 1), _tensor("NEXT_MEMORY", 2, 128), _tensor("NEXT_CONTEXT", CONTEXT)])
    onnx.checker.check_model(model)
    return model


def _tensor(name: str, *dims: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *dims])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
    print(f"written; serve it with: charonia serve --model-repository={sys.argv[1]}")
