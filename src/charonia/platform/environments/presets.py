"""Environments that are ready to choose. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """An environment to start from.

    Attributes:
        name: The name that it gets.
        title: As pages show it.
        about: One sentence.
        requirements: Its lines.
        imports: Modules that it is tested with.
    """

    name: str
    title: str
    about: str
    requirements: str
    imports: tuple[str, ...]


# fmt: off
PRESETS = (
    Preset("onnx", "ONNX Runtime", "Models in ONNX, and nothing else.", "", ("onnxruntime",)),
    Preset("pytorch-2", "PyTorch 2", "TorchScript, exported programs, safetensors.", "charonia[torch]", ("torch",)),
    Preset("tensorflow-2", "TensorFlow 2", "SavedModels and Keras.", "charonia[tensorflow]", ("tensorflow",)),
    Preset("tflite", "LiteRT", "TensorFlow Lite models.", "charonia[tflite]", ("ai_edge_litert",)),
    Preset("openvino", "OpenVINO", "OpenVINO's IR, and ONNX on Intel.", "charonia[openvino]", ("openvino",)),
    Preset("scikit-learn", "scikit-learn", "Estimators of scikit-learn.", "charonia[sklearn]", ("sklearn",)),
    Preset("forests", "Forests", "XGBoost, LightGBM and treelite.", "charonia[fil]", ("xgboost", "lightgbm")),
    Preset("llama-cpp", "llama.cpp", "Language models in GGUF, on any CPU.", "charonia[llama,openai]", ("xllamacpp",)),
    Preset("vllm", "vLLM", "Language models on GPUs.", "charonia[vllm,openai]", ("vllm",)),
)
# fmt: on
"""In the order of pages."""
