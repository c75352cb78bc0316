"""The forms of models that are recognised, and the lines that lead to something that is served."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from charonia.config.backends import Form
from charonia.config.forms import RECOGNISED, advice, form_of, model_name
from charonia.server.backends.python.worker.runner import PythonModelRunner

HERE_DOCUMENT = re.compile(r"<<'EOF'\n(.*?)\nEOF\n", re.DOTALL)


def test_what_is_only_recognised_has_no_backend() -> None:
    assert not any(form.filename or form.backend for form in RECOGNISED)


@pytest.mark.parametrize(
    ("name", "entries", "start", "title"),
    [
        ("a.onnx", None, b"", "an ONNX model"),
        ("A.ONNX", None, b"", "an ONNX model"),
        ("a.pt", None, b"", "a PyTorch model"),
        ("a.pth", None, b"", "a PyTorch model"),
        ("a.jit", None, b"", "a PyTorch model"),
        ("a.pt2", None, b"", "a PyTorch program"),
        ("a.py", None, b"", "a Python file"),
        ("a", ["saved_model.pb", "variables"], b"", "a TensorFlow SavedModel"),
        ("a", ["config.json", "model-00001-of-00002.safetensors"], b"", "a Hugging Face model"),
        ("a", ["config.json", "pytorch_model.bin"], b"", "a Hugging Face model"),
        ("a", ["MLmodel"], b"", "an MLflow model"),
        ("a.gguf", None, b"GGUF", "a GGUF model"),
        ("a.tflite", None, b"", "a TensorFlow Lite model"),
        ("a.xml", None, b"<?xml", "an OpenVINO model"),
        ("a.pdmodel", None, b"", "a PaddlePaddle model"),
        ("a.keras", None, b"", "a Keras model"),
        ("a.h5", None, b"", "a Keras model of an earlier version"),
        ("a.graphdef", None, b"", "a TensorFlow graph"),
        ("a.skops", None, b"", "an estimator"),
        ("a.joblib", None, b"", "an estimator"),
        ("a.pkl", None, b"", "an estimator"),
        ("a.ubj", None, b"", "an XGBoost model"),
        ("a.txt", None, b"tree\nversion=v4", "a LightGBM model"),
        ("a.lgb", None, b"tree\nversion=v4", "a LightGBM model"),
        ("a.txt", None, b"hello", ""),
        ("a.json", None, b'{"learner":{"attributes"', "an XGBoost model"),
        ("a.json", None, b'{"architectures"', ""),
        ("a.tl", None, b"", "a checkpoint of treelite"),
        ("a.safetensors", None, b"", "weights without their model"),
        ("a.ckpt", None, b"", "a checkpoint of PyTorch"),
        ("a.plan", None, b"", "a TensorRT plan"),
        ("a.xyz", None, b"", ""),
        ("a", ["resnet", "bert"], b"", ""),
        ("a.onnx", ["1"], b"", ""),
    ],
)
def test_a_form_is_recognised_by_name_content_and_start(
    name: str, entries: list[str] | None, start: bytes, title: str
) -> None:
    form = form_of(name, entries, start)

    assert (form.title if form is not None else "") == title


@pytest.mark.parametrize("form", RECOGNISED, ids=lambda form: form.title)
def test_the_lines_for_a_form_can_be_pasted(form: Form) -> None:
    path = f"my models/it's-a b{form.suffixes[0] if form.suffixes else ''}"

    lines = advice(form, path, '{"architectures": ["ViTForImageClassification"]}')

    assert subprocess.run(["bash", "-n"], input=lines, text=True, check=False).returncode == 0
    assert re.search(r"\{\w+\}", lines.replace("{example}", "")) is None, "a placeholder is left"
    assert re.search(r"^charonia serve \S+(\s+#.*)?$", lines.splitlines()[-1])
    for script in HERE_DOCUMENT.findall(lines):
        ast.parse(script)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("LlamaForCausalLM", "text-generation"),
        ("BertModel", "feature-extraction"),
    ],
)
def test_the_task_of_a_hugging_face_model_is_that_of_its_architecture(architecture: str, task: str) -> None:
    form = form_of("a", ["config.json", "model.safetensors"])
    assert form is not None

    assert f'pipeline("{task}", model=' in advice(form, "a", f'{{"architectures": ["{architecture}"]}}')


@pytest.mark.parametrize(
    ("architecture", "dependencies"),
    [("BertModel", '["transformers", "torch"]'), ("ViTForImageClassification", '["transformers", "torch", "pillow"]')],
)
def test_a_hugging_face_model_needs_pillow_for_pictures_only(architecture: str, dependencies: str) -> None:
    form = form_of("a", ["config.json", "model.safetensors"])
    assert form is not None

    lines = advice(form, "a", f'{{"architectures": ["{architecture}"]}}')

    assert f"# dependencies = {dependencies}\n" in lines
    assert ("PIL" in lines) == ("pillow" in dependencies)


@pytest.mark.parametrize(
    ("path", "config", "tensors"),
    [
        ("bert", '{"architectures": ["BertModel"]}', "text STRING [1] -> output FP64 [-1, -1, -1]"),
        ("bert", '{"architectures": ["BertForMaskedLM"]}', "text STRING [1] -> output STRING [1]"),
        ("vit", '{"architectures": ["ViTForImageClassification"]}', "image STRING [1] -> output STRING [1]"),
        ("whisper", '{"architectures": ["Wav2Vec2ForCTC"]}', "audio STRING [1] -> output STRING [1]"),
        ("a.safetensors", "", "x FP32 [3, 224, 224] -> output FP32 [1000]"),
        ("a.ckpt", "", "x FP32 [3, 224, 224] -> output FP32 [1000]"),
    ],
)
def test_the_service_files_that_can_be_pasted_define_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, config: str, tensors: str
) -> None:
    for library in ("mymodel", "safetensors", "safetensors.torch", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, MagicMock())
    form = form_of(path, None if "." in path else ["config.json", "model.safetensors"])
    assert form is not None
    (script,) = HERE_DOCUMENT.findall(advice(form, path, config))
    (tmp_path / "service.py").write_text(script)

    runner = PythonModelRunner(MagicMock(), shares_process=True)
    (described,) = json.loads(runner.describe(str(tmp_path / "service.py"), "{}")).values()

    def shown(side: str) -> str:
        ports = described[side]
        return ", ".join(f"{each['name']} {each['data_type'].removeprefix('TYPE_')} {each['dims']}" for each in ports)

    assert f"{shown('input')} -> {shown('output')}" == tensors


@pytest.mark.parametrize("config", ["", "no JSON", "[]", '{"architectures": []}', '{"architectures": null}'])
def test_a_config_that_says_no_architecture_is_for_features(config: str) -> None:
    form = form_of("a", ["config.json", "model.safetensors"])
    assert form is not None

    assert 'pipeline("feature-extraction"' in advice(form, "a", config)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("dir/model.onnx", "model"),
        ("yolo v8 (n).onnx", "yolo_v8_n"),
        ("resnet50-v1.5", "resnet50-v1.5"),
        ("ch_v2.0_cls.onnx", "ch_v2.0_cls"),
        ("(.onnx", "model"),
    ],
)
def test_a_model_is_called_as_its_file(path: str, name: str) -> None:
    assert model_name(path) == name
