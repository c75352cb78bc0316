"""The demo's model repository, from files that installed packages ship."""

import json
import shutil
from pathlib import Path

from charonia.demo.ocr import build_ocr
from charonia.demo.shipped import shipped_file

CONTENT_TYPE = "content_type"
ADD_SUB = "add_sub"

_MAGIKA = "magika/models/standard_v3_3"

_CONTENT_TYPE_CONFIG = """\
# The input and the backend are completed from model.onnx; what is written here is what the file cannot know.
max_batch_size: 16
dynamic_batching {{ }}
output [ {{ name: "target_label" data_type: TYPE_FP32 dims: [ {count} ] label_filename: "labels.txt" }} ]
"""

_ADD_SUB_CONFIG = """\
backend: "python"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
"""

_ADD_SUB_MODEL = '''\
"""Sum and difference of two tensors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
'''


def build_repository(folder: Path) -> None:
    """Write the demo's models below `folder`; those that are there are written again.

    - those of the OCR pipeline, see `ocr.build_ocr`.
    - `content_type`: an ONNX model with a few lines of configuration: dynamic batching and the names of its classes.
    - `add_sub`: a Python model.

    Raises:
        ServingError: NOT_FOUND when a package that ships a model is not installed.
    """
    build_ocr(folder)

    magika = shipped_file("magika", f"{_MAGIKA}/model.onnx")
    labels = content_type_labels()
    (folder / CONTENT_TYPE / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(magika, folder / CONTENT_TYPE / "1" / "model.onnx")
    (folder / CONTENT_TYPE / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")
    (folder / CONTENT_TYPE / "config.pbtxt").write_text(
        _CONTENT_TYPE_CONFIG.format(count=len(labels)), encoding="utf-8"
    )

    (folder / ADD_SUB / "1").mkdir(parents=True, exist_ok=True)
    (folder / ADD_SUB / "config.pbtxt").write_text(_ADD_SUB_CONFIG, encoding="utf-8")
    (folder / ADD_SUB / "1" / "model.py").write_text(_ADD_SUB_MODEL, encoding="utf-8")


def content_type_labels() -> list[str]:
    """Return the names of the classes of `content_type`, in order. Raises as `shipped_file`."""
    description = shipped_file("magika", f"{_MAGIKA}/config.min.json")
    labels: list[str] = json.loads(description.read_text(encoding="utf-8"))["target_labels_space"]
    return labels
