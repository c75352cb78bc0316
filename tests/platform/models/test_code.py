"""Which models run code of their own."""

from dataclasses import replace

import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.platform.models.code import (
    backend_of,
    code_in,
    dependencies,
    is_pickled_estimator,
    is_program,
    may_make_code,
    needed_package,
)
from charonia.server.backends.registry import installed_backends

NONE = ModelConfig()


@pytest.mark.parametrize(
    "paths",
    [
        ["1/model.onnx", "1/model.onnx.data", "labels.txt"],
        ["1/model.savedmodel/saved_model.pb"],
        ["1/model.xml", "1/model.bin"],
        ["1/model.tflite"],
        ["1/model.txt"],
        ["1/model.gguf"],
        ["1/model.skops"],
        ["1/model.pt"],
        ["config.pbtxt"],
    ],
)
def test_data_runs_no_code(paths: list[str]) -> None:
    assert code_in("m", paths, NONE) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("1/model.py", "Python code"),
        ("1/lib/more.PY", "Python code"),
        ("1/model.pkl", "a pickle"),
        ("1/model.joblib", "a pickle"),
        ("1/model.pt2", "a program of PyTorch, which may hold machine code"),
        ("1/ops.so", "machine code"),
        ("strategy.py", "Python code"),
    ],
)
def test_files_that_run_are_named(path: str, why: str) -> None:
    assert code_in("m", [path, "1/model.onnx"], NONE) == [f"{path}: {why}"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('backend: "python" default_model_filename: "weights.bin"', "backend python: its models are code"),
        ('backend: "vllm"', "backend vllm: its models are code"),
        ('backend: "of_a_package"', "backend of_a_package: its models are code"),
        ('backend: "sklearn" parameters { key: "TRUSTED" value { string_value: "true" } }', "parameter TRUSTED"),
        (
            'backend: "pytorch" parameters { key: "ALLOW_UNPICKLING" value { string_value: "1" } }',
            "files are unpickled",
        ),
        (
            'backend: "openvino" parameters { key: "CPU_EXTENSION_PATH" value { string_value: "x" } }',
            "it brings a library",
        ),
        (
            'backend: "onnxruntime" optimization { execution_accelerators { cpu_execution_accelerator '
            '{ name: "openvino" parameters { key: "CPU_EXTENSION_PATH" value: "x" } } } }',
            "it brings a library",
        ),
        (
            'backend: "onnxruntime" optimization { execution_accelerators { gpu_execution_accelerator '
            '{ name: "tensorrt" parameters { key: "trt_extra_plugin_lib_paths" value: "x" } } } }',
            "it brings a library",
        ),
        (
            'backend: "onnxruntime" model_operations { op_library_filename: "ops" }',
            "model_operations: it brings a library",
        ),
        (
            'backend: "onnxruntime" parameters { key: "BATCHING_STRATEGY" value { string_value: "x" } }',
            "it brings a batching strategy",
        ),
    ],
)
def test_a_configuration_cannot_hide_code(config: str, why: str) -> None:
    (found,) = code_in("m", ["1/weights.bin"], parse(config))

    assert why in found


def test_a_name_cannot_hide_code() -> None:
    config = parse('default_model_filename: "weights.bin"')

    assert code_in("words.python", ["1/weights.bin"], config) == ["backend python: its models are code"]
    assert code_in("words.v2", ["1/model.onnx"], NONE) == []


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({"backend": "python"}, True),
        ({"default_model_filename": "weights.bin"}, True),
        ({"parameters": {"TRUSTED": {"string_value": "true"}}}, True),
        ({"model_operations": {}}, True),
        (
            {"optimization": {"execution_accelerators": {"cpu": [{"parameters": {"CPU_EXTENSION_PATH": "x"}}]}}},
            True,
        ),
        ({"max_batch_size": 8, "parameters": {"intra_op_thread_count": {"string_value": "2"}}}, False),
        ({"parameters": None}, False),
        ({}, False),
    ],
)
def test_changes_that_decide_what_reads_the_files_may_make_code(changes: dict[str, object], may: bool) -> None:
    assert may_make_code(changes) is may


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["m/version", "m/data/aotinductor/model/a.so"], True),
        (["data/aotinductor/model/a.so", "version"], True),
        (["m/archive_format", "m/models/model.json"], True),
        (["serialized_exported_program.json", "version"], True),
        (["m/constants.pkl", "m/code/__torch__/models/net.py", "m/data.pkl"], False),
        (["m/data.pkl", "m/data/0"], False),
        (["config.json", "metadata.json", "model.weights.h5"], False),
        ([], False),
    ],
)
def test_a_program_of_pytorch_is_told_by_what_its_archive_holds(names: list[str], found: bool) -> None:
    assert is_program(names) is found


def test_every_backend_of_the_server_is_data_or_code() -> None:
    code = {name for name in installed_backends() if code_in("m", ["1/x"], ModelConfig(backend=name))}

    assert code >= {"python", "vllm", "tensorrtllm"}
    assert not code & {"onnxruntime", "openvino", "tflite", "tensorflow", "fil", "llama_cpp", "image", "identity"}


def test_the_backend_is_that_of_the_configuration_or_of_the_file() -> None:
    assert backend_of("m", ["1/model.onnx"], NONE) == "onnxruntime"
    assert backend_of("m", ["1/model.savedmodel/saved_model.pb"], NONE) == "tensorflow"
    assert backend_of("m", ["1/model.onnx"], replace(NONE, backend="openvino")) == "openvino"
    assert backend_of("m", ["1/x"], replace(NONE, platform="pytorch_libtorch")) == "pytorch"
    assert backend_of("m", [], replace(NONE, platform="ensemble")) == "ensemble"
    assert backend_of("m", ["labels.txt"], NONE) == ""
    assert backend_of("m.python", ["1/x"], NONE) == "python"


def test_frameworks_are_packages() -> None:
    found = needed_package("pytorch")

    assert found is not None
    assert (found.name, found.module, found.extra) == ("torch", "torch", "torch")
    assert needed_package("onnxruntime") is None


def test_an_estimator_in_a_pickle_is_known() -> None:
    assert is_pickled_estimator(["1/model.pkl"])
    assert is_pickled_estimator(["1/model.joblib"])
    assert not is_pickled_estimator(["1/model.skops", "model.pkl"])


HEADER = """\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=2",
#     'pandas; python_version > "3"',
# ]
# ///
import numpy
"""


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"1/model.py": HEADER}, 'numpy>=2\npandas; python_version > "3"'),
        ({"1/model.py": "import numpy"}, ""),
        ({"1/model.py": "# /// script\n# dependencies = [\n# ///\n"}, ""),
        ({"1/model.py": "# /// script\n# dependencies = 5\n# ///\n"}, ""),
        ({"1/model.onnx": "", "requirements.txt": "mlflow==3\nscikit-learn\n"}, "mlflow==3\nscikit-learn"),
        ({"1/model.onnx": ""}, ""),
    ],
)
def test_packages_that_a_model_names_are_found(files: dict[str, str], found: str) -> None:
    assert dependencies(lambda path: files[path], files) == found
