"""Write the model repository of the OCR example: the models beside this file and the networks of an installed package.

Usage: python examples/ocr/make_repository.py FOLDER
"""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import onnxruntime

import charonia

# The two pipelines, and the models that they run.
ENSEMBLE = "ocr"
BLS = "ocr_bls"
DETECTION_PREPROCESSING = "detection_preprocessing"
TEXT_DETECTION = "text_detection"
DETECTION_POSTPROCESSING = "detection_postprocessing"
ANGLE_CLASSIFICATION = "angle_classification"
TEXT_RECOGNITION = "text_recognition"
RECOGNITION_POSTPROCESSING = "recognition_postprocessing"

# The networks that packages ship. The second package is for Python 3.13, which the first does not support.
NETWORKS = {
    "rapidocr-onnxruntime": {
        TEXT_DETECTION: "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        ANGLE_CLASSIFICATION: "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        TEXT_RECOGNITION: "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    },
    "rapidocr": {
        TEXT_DETECTION: "rapidocr/models/PP-OCRv6_det_small.onnx",
        ANGLE_CLASSIFICATION: "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        TEXT_RECOGNITION: "rapidocr/models/PP-OCRv6_rec_small.onnx",
    },
}
# The output of each network and its size as in the configurations beside this file, for PP-OCRv4.
OUTPUTS = {
    TEXT_DETECTION: ("sigmoid_0.tmp_0", ""),
    ANGLE_CLASSIFICATION: ("save_infer_model/scale_0.tmp_1", ""),
    TEXT_RECOGNITION: ("softmax_11.tmp_0", "6625"),
}


def shipped_file(package: str, path: str) -> Path:
    """Return where a file of an installed package is, without importing the package."""
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise missing(f"the example needs package '{package}'", "pip install 'charonia[demo]'") from None
    if not file.exists():
        hint = "pip install --upgrade 'charonia[demo]'"
        raise missing(f"the example needs '{path}', and the installed '{package}' does not ship it", hint)
    return file


def missing(message: str, hint: str) -> charonia.ServingError:
    return charonia.ServingError(charonia.Code.NOT_FOUND, message, hint=hint)


def is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def place(file: Path, target: Path) -> None:
    """Put a file of a package at `target`: the same file under a second name where the disk can, else a copy."""
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def build_ocr(folder: Path) -> None:
    """Write the models of the OCR pipelines to `folder`, replacing existing ones."""
    package = next(filter(is_installed, NETWORKS), "rapidocr")
    networks = {model: shipped_file(package, path) for model, path in NETWORKS[package].items()}
    templates = Path(__file__).parent / "models"
    shutil.copytree(templates, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ENSEMBLE / "1").mkdir(exist_ok=True)  # a model has a version even where it has no files
    for model, network in networks.items():
        place(network, folder / model / "1" / "model.onnx")
        session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
        name_output(folder, model, session.get_outputs()[0])
        if model == TEXT_RECOGNITION:
            characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
            file = folder / RECOGNITION_POSTPROCESSING / "1" / "characters.txt"
            file.write_text("\n".join(characters), encoding="utf-8")


def name_output(folder: Path, model: str, output: onnxruntime.NodeArg) -> None:
    """Write a network's output as its file has it into the configurations that name it."""
    name, size = OUTPUTS[model]
    for user in (model, ENSEMBLE):
        config = folder / user / "config.pbtxt"
        text = config.read_text(encoding="utf-8").replace(name, output.name)
        config.write_text(text.replace(size, str(output.shape[-1])) if size else text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build_ocr(Path(sys.argv[1]))
    print(f"written; serve it with: charonia serve --model-repository={sys.argv[1]}")
