"""The demo's model repository: the OCR pipelines, an ONNX model with the names of its classes, a Python model."""

import json
import shutil
from pathlib import Path

from ..ocr.make_repository import build_ocr, place, shipped_file

CONTENT_TYPE = "content_type"
ADD_SUB = "add_sub"

MAGIKA = "magika/models/standard_v3_3"


def build_repository(folder: Path) -> None:
    """Write the demo's models to `folder`, replacing earlier ones."""
    build_ocr(folder)
    templates = Path(__file__).parent / "models"
    shutil.copytree(templates, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    content_type = folder / CONTENT_TYPE
    place(shipped_file("magika", f"{MAGIKA}/model.onnx"), content_type / "1" / "model.onnx")
    description = json.loads(shipped_file("magika", f"{MAGIKA}/config.min.json").read_text(encoding="utf-8"))
    labels = "".join(label + "\n" for label in description["target_labels_space"])
    (content_type / "labels.txt").write_text(labels, encoding="utf-8")
