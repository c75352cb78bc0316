"""Write a model repository that classifies images without a line of Python: an image file in, scores of classes out.

python examples/image_pipeline/make_repository.py FOLDER NETWORK.onnx [--labels LABELS.txt] [--set NAME=VALUE ...]

The network has one input, FP32 [batch, 3, height, width], and one output, FP32 [batch, classes]. `--set` gives
a parameter of the image backend. The defaults are the parameters of torchvision's classifiers.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import onnxruntime

BATCH = 8
"""Images that run together."""

TORCHVISION = {
    "resize": "shorter_side",
    "size": "256",
    "crop": "224",
    "mean": "0.485, 0.456, 0.406",
    "std": "0.229, 0.224, 0.225",
}

PREPROCESSING = f"""\
backend: "image"
max_batch_size: {BATCH}
dynamic_batching {{ }}
"""
PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
NETWORK = f"""\
backend: "onnxruntime"
max_batch_size: {BATCH}
input [ {{ name: "%(input)s" data_type: TYPE_FP32 dims: %(dims)s }} ]
output [ {{ name: "%(output)s" data_type: TYPE_FP32 dims: [ %(classes)d ] %(labels)s}} ]
dynamic_batching {{ }}
"""
CLASSIFIER = f"""\
platform: "ensemble"
max_batch_size: {BATCH}
input [ {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "SCORES" data_type: TYPE_FP32 dims: [ %(classes)d ] %(labels)s}} ]
ensemble_scheduling {{
  step [
    {{
      model_name: "preprocessing"
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


def make_repository(
    folder: Path, network: Path, labels: Path | None = None, parameters: Mapping[str, str] = TORCHVISION
) -> None:
    """Write the repository.

    Args:
        folder: Where to.
        network: An ONNX file.
        labels: A file with the name of a class in each line.
        parameters: Parameters of the image backend.
    """
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    (source,), (scores,) = session.get_inputs(), session.get_outputs()
    values = {
        "input": source.name,
        "dims": [dim if isinstance(dim, int) else -1 for dim in source.shape[1:]],
        "output": scores.name,
        "classes": scores.shape[1],
        "labels": 'label_filename: "labels.txt" ' if labels is not None else "",
    }
    preprocessing = PREPROCESSING + "".join(PARAMETER.format(*item) for item in parameters.items())
    configs = {"preprocessing": preprocessing, "network": NETWORK % values, "classifier": CLASSIFIER % values}
    for model, config in configs.items():
        (folder / model / "1").mkdir(parents=True, exist_ok=True)
        (folder / model / "config.pbtxt").write_text(config, encoding="utf-8")
        if labels is not None and model != "preprocessing":
            shutil.copy(labels, folder / model / "labels.txt")
    shutil.copy(network, folder / "network" / "1" / "model.onnx")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("network", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="parameters")
    given = parser.parse_args()
    parameters = dict(item.split("=", 1) for item in given.parameters) or TORCHVISION
    make_repository(given.folder, given.network, given.labels, parameters)
    print(f"written to {given.folder}; next: charonia serve --model-repository={given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
