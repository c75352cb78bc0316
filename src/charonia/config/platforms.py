"""Model formats: file, backend and platform.

Source: Triton's model repository documentation ("Model Files") and the platform names of its older configurations.
"""

from typing import NamedTuple

ENSEMBLE = "ensemble"
"""Platform of a model that is a graph of other models; it has no backend."""


class ModelFormat(NamedTuple):
    """One kind of model file.

    Attributes:
        filename: Name of the file, or folder, in a version's folder.
        backend: Backend that serves it.
        platform: Older name of backend and format together, "" if there is none.
    """

    filename: str
    backend: str
    platform: str

    @property
    def suffix(self) -> str:
        """The suffix that marks such a file: ".onnx"; the whole name where files of any kind have the suffix."""
        return self.filename if self.backend in ("fil", "tensorrtllm", "vllm") else self.filename.removeprefix("model")


FORMATS = (
    ModelFormat("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    ModelFormat("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    ModelFormat("model.keras", "tensorflow", ""),
    ModelFormat("model.plan", "tensorrt", "tensorrt_plan"),
    ModelFormat("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    ModelFormat("model.xml", "openvino", ""),
    ModelFormat("model.pt", "pytorch", "pytorch_libtorch"),
    ModelFormat("model.pt2", "pytorch", "torch_aoti"),
    ModelFormat("model.py", "python", ""),
    ModelFormat("xgboost.json", "fil", ""),
    ModelFormat("xgboost.ubj", "fil", ""),
    ModelFormat("model.txt", "fil", ""),
    ModelFormat("checkpoint.tl", "fil", ""),
    ModelFormat("xgboost.model", "fil", ""),
    ModelFormat("model.tflite", "tflite", ""),
    ModelFormat("model.pdmodel", "openvino", ""),
    ModelFormat("model.onnx", "openvino", ""),
    ModelFormat("model.tflite", "openvino", ""),
    ModelFormat("model.gguf", "llama_cpp", ""),
    ModelFormat("model.skops", "sklearn", ""),
    ModelFormat("model.joblib", "sklearn", ""),
    ModelFormat("model.pkl", "sklearn", ""),
    ModelFormat("model.json", "vllm", ""),
    ModelFormat("model.yaml", "tensorrtllm", ""),
)
"""The formats, in the order in which a version's files are searched for them; the first backend of a file is used."""

REFUSED_FILES = frozenset({"model.graphdef"})
"""Files in this table that their backend refuses, with a way out."""

BACKEND_OF_PLATFORM = {entry.platform: entry.backend for entry in FORMATS if entry.platform}
"""Backend by platform."""
