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
        """The file name's suffix: ".onnx"."""
        return self.filename.removeprefix("model")


FORMATS = (
    ModelFormat("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    ModelFormat("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    ModelFormat("model.plan", "tensorrt", "tensorrt_plan"),
    ModelFormat("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    ModelFormat("model.xml", "openvino", ""),
    ModelFormat("model.pt", "pytorch", "pytorch_libtorch"),
    ModelFormat("model.pt2", "pytorch", "torch_aoti"),
    ModelFormat("model.py", "python", ""),
)
"""The formats, in the order in which a version's files are searched for them."""

FOREIGN_BACKENDS = frozenset({"tensorflow", "openvino"})
"""Backends in this table that this server does not include."""

BACKEND_OF_PLATFORM = {entry.platform: entry.backend for entry in FORMATS if entry.platform}
"""Backend by platform."""
