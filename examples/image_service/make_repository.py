"""Write the model repository of the image service: an image file in, the scores of its classes out.

python examples/image_service/make_repository.py FOLDER NETWORK.onnx [--labels LABELS.txt] [--decoders N]

The network takes one input, FP32 [batch, 3, 224, 224], and returns one output, FP32 [batch, classes].
"""

import argparse
import shutil
import sys
from pathlib import Path

import onnxruntime

MODELS = Path(__file__).parent / "models"
BATCH = 8
"""Images that run together."""

DECODE = f"""\
backend: "python"
max_batch_size: {BATCH}
input [ {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }} ]  # an image file
output [ {{ name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }} ]
instance_group [ {{ kind: KIND_CPU count: %(decoders)d }} ]  # processes
"""
NETWORK = f"""\
backend: "onnxruntime"
max_batch_size: {BATCH}
input [ {{ name: "%(input)s" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }} ]
output [ {{ name: "%(output)s" data_type: TYPE_FP32 dims: [ %(classes)d ] %(labels)s}} ]
dynamic_batching {{ }}
"""
SERVICE = f"""\
platform: "ensemble"
max_batch_size: {BATCH}
input [ {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "SCORES" data_type: TYPE_FP32 dims: [ %(classes)d ] %(labels)s}} ]
ensemble_scheduling {{
  step [
    {{
      model_name: "decode"
      input_map {{ key: "IMAGE" value: "IMAGE" }}
      output_map {{ key: "PIXELS" value: "pixels" }}
    }},
    {{
      model_name: "network"
      input_map {{ key: "%(input)s" value: "pixels" }}
      output_map {{ key: "%(output)s" value: "SCORES" }}
    }}
  ]
}}
"""


def make_repository(folder: Path, network: Path, labels: Path | None = None, decoders: int = 2) -> None:
    """Write the repository.

    Args:
        folder: Where to.
        network: An ONNX file.
        labels: A file with the name of a class in each line.
        decoders: Number of processes that decode images.
    """
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    (source,), (scores,) = session.get_inputs(), session.get_outputs()
    values = {
        "decoders": decoders,
        "input": source.name,
        "output": scores.name,
        "classes": scores.shape[1],
        "labels": 'label_filename: "labels.txt" ' if labels is not None else "",
    }
    for model, config in (("decode", DECODE), ("network", NETWORK), ("image_service", SERVICE)):
        (folder / model / "1").mkdir(parents=True, exist_ok=True)
        (folder / model / "config.pbtxt").write_text(config % values, encoding="utf-8")
        if labels is not None and model != "decode":
            shutil.copy(labels, folder / model / "labels.txt")
    shutil.copy(network, folder / "network" / "1" / "model.onnx")
    for name in ("model.py", "pixels.py"):
        shutil.copy(MODELS / "decode" / "1" / name, folder / "decode" / "1" / name)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("network", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--decoders", type=int, default=2)
    given = parser.parse_args()
    make_repository(given.folder, given.network, given.labels, given.decoders)
    print(f"written to {given.folder}; next: charonia serve --model-repository={given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
