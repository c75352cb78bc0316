"""The demo's models, as folders that are sent, and inputs for them: files to tell apart, a page with text."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from ..demo.repository import CONTENT_TYPE, MAGIKA
from ..demo.what_is_it import detection_input
from ..ocr.make_repository import NETWORKS, TEXT_DETECTION, is_installed, place, shipped_file

EXAMPLES = Path(__file__).parents[1]

# The detection reads pictures whose sides are multiples of 32.
PAGE_SIZE = (768, 384)
TEXT_PROBABILITY = 0.3


def content_type(folder: Path) -> Path:
    """Write the network of magika, with the names of its classes, and return the model's folder."""
    model = fresh(folder / CONTENT_TYPE)
    shutil.copy(EXAMPLES / "demo" / "models" / CONTENT_TYPE / "config.pbtxt", model)
    description = json.loads(shipped_file("magika", f"{MAGIKA}/config.min.json").read_text(encoding="utf-8"))
    labels = "".join(label + "\n" for label in description["target_labels_space"])
    (model / "labels.txt").write_text(labels, encoding="utf-8")
    place(shipped_file("magika", f"{MAGIKA}/model.onnx"), model / "1" / "model.onnx")
    return model


def folded_content_type(folder: Path) -> Path:
    """Write the same model with a simpler graph: ONNX Runtime folds constants and removes unused parts."""
    model = content_type(folder)
    file = model / "1" / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(model / "folded.onnx")
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (model / "folded.onnx").replace(file)
    return model


def text_detection(folder: Path) -> Path:
    """Write the text detection of PP-OCR, and return the model's folder. Its configuration is completed on arrival."""
    model = fresh(folder / TEXT_DETECTION)
    package = next(filter(is_installed, NETWORKS), "rapidocr")
    place(shipped_file(package, NETWORKS[package][TEXT_DETECTION]), model / "1" / "model.onnx")
    return model


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def files() -> dict[str, NDArray[np.int32]]:
    """Return files that are here by name, as the model of content types takes them."""
    page = shipped_file("scikit-image", "skimage/data/page.png")
    found = [Path(__file__), EXAMPLES / "demo" / "README.md", EXAMPLES / "kubernetes" / "tune-job.yaml", page]
    return {file.name: detection_input(file.read_bytes()) for file in found}


def page() -> NDArray[np.float32]:
    """Return a scanned page, as the text detection takes it: FP32 [1, 3, rows, columns] in [-1, 1]."""
    picture = Image.open(shipped_file("scikit-image", "skimage/data/page.png")).convert("RGB").resize(PAGE_SIZE)
    pixels: NDArray[np.float32] = np.asarray(picture, np.float32).transpose(2, 0, 1)[np.newaxis] / 127.5 - 1
    return np.ascontiguousarray(pixels)


def line_count(probability: NDArray[Any]) -> int:
    """Return how many lines of text there are below one another, from the probability that a pixel belongs to one."""
    has_text = (probability[0, 0] > TEXT_PROBABILITY).mean(axis=1) > 0.05
    return int(np.count_nonzero(has_text[1:] & ~has_text[:-1]) + has_text[0])
