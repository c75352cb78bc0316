"""The models of the OCR pipeline: configurations and Python code of the example, networks from an installed package."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from charonia.core.errors import not_found
from charonia.demo.shipped import is_installed, shipped_file

ENSEMBLE = "ocr"
BLS = "ocr_bls"

DETECTION_PREPROCESSING = "detection_preprocessing"
TEXT_DETECTION = "text_detection"
DETECTION_POSTPROCESSING = "detection_postprocessing"
TEXT_RECOGNITION = "text_recognition"
RECOGNITION_POSTPROCESSING = "recognition_postprocessing"
ANGLE_CLASSIFICATION = "angle_classification"

# A wheel carries a copy of the example; in a checkout it is read where it is.
_TEMPLATES = (Path(__file__).parent / "ocr_models", Path(__file__).parents[3] / "examples" / "ocr" / "models")


@dataclass(frozen=True)
class _Networks:
    """The networks that a distribution ships, as paths in its installation."""

    package: str
    detection: str
    angle: str
    recognition: str


# The second is for Python 3.13, which the first does not support.
_NETWORKS = (
    _Networks(
        package="rapidocr-onnxruntime",
        detection="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        angle="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        recognition="rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    ),
    _Networks(
        package="rapidocr",
        detection="rapidocr/models/PP-OCRv6_det_small.onnx",
        angle="rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        recognition="rapidocr/models/PP-OCRv6_rec_small.onnx",
    ),
)
# The output of each network and its size as the example's configurations have them, which is as they are in PP-OCRv4.
_OUTPUTS = {
    TEXT_DETECTION: ("sigmoid_0.tmp_0", ""),
    ANGLE_CLASSIFICATION: ("save_infer_model/scale_0.tmp_1", ""),
    TEXT_RECOGNITION: ("softmax_11.tmp_0", "6625"),
}


def build_ocr(folder: Path) -> None:
    """Write the models of the OCR pipeline below `folder`; those that are there are written again.

    Raises:
        ServingError: NOT_FOUND when no package that ships the networks is installed.
    """
    networks = network_files()
    shutil.copytree(_templates(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    # An ensemble has nothing in its version, but it has one.
    (folder / ENSEMBLE / "1").mkdir(exist_ok=True)
    for model, file in networks.items():
        (folder / model / "1").mkdir(exist_ok=True)
        shutil.copyfile(file, folder / model / "1" / "model.onnx")
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        _name_output(folder, model, session.get_outputs()[0])
        if model == TEXT_RECOGNITION:
            characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
            file = folder / RECOGNITION_POSTPROCESSING / "1" / "characters.txt"
            file.write_text("\n".join(characters), encoding="utf-8")


def network_files() -> dict[str, Path]:
    """Return the ONNX file of each model that has one, from the package that is installed. Raises as `shipped_file`."""
    networks = next((each for each in _NETWORKS if is_installed(each.package)), _NETWORKS[-1])
    return {
        TEXT_DETECTION: shipped_file(networks.package, networks.detection),
        ANGLE_CLASSIFICATION: shipped_file(networks.package, networks.angle),
        TEXT_RECOGNITION: shipped_file(networks.package, networks.recognition),
    }


def _templates() -> Path:
    for folder in _TEMPLATES:
        if folder.is_dir():
            return folder
    raise not_found(f"the example's models are not in '{_TEMPLATES[0]}'", hint="reinstall charonia")


def _name_output(folder: Path, model: str, output: onnxruntime.NodeArg) -> None:
    """Write a network's output as its file has it into the configurations that name it."""
    name, size = _OUTPUTS[model]
    for user in (model, ENSEMBLE):
        config = folder / user / "config.pbtxt"
        text = config.read_text(encoding="utf-8").replace(name, output.name)
        config.write_text(text.replace(size, str(output.shape[-1])) if size else text, encoding="utf-8")
