"""Which models run code of their own."""

from dataclasses import replace

import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.platform.models.code import (
    backend_of,
    code_in,
    code_in_onnx,
    dependencies,
    examined_files,
    is_inert_start,
    may_make_code,
    needed_package,
    trusting,
)
from charonia.server.backends.registry import installed_backends

NONE = ModelConfig()


@pytest.mark.parametrize(
    "paths",
    [
        ["1/model.onnx", "1/model.onnx.data", "labels.txt"],
        ["1/model.pdmodel", "1/model.pdiparams"],
        ["1/model.xml", "1/model.bin"],
        ["1/model.tflite"],
        ["1/model.txt"],
        ["1/model.gguf"],
        ["1/xgboost.ubj"],
        ["1/xgboost.json", "labels.txt"],
        ["1/model.onnx", "warmup/sample.tensor", "initial_state/zeros.fp32", "tokenizer.json"],
        ["1/model.onnx", "1/weights.safetensors"],
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
        ("warmup/sample.so", "machine code"),
        ("1/model.pt", "TorchScript, a program that can read and write files"),
        ("1/model.plan", "a TensorRT plan, which holds machine code"),
        ("1/model.keras", "a Keras model, which may hold Python code"),
        ("1/model.skops", "Python objects, which are created when it is loaded"),
        ("1/checkpoint.tl", "a dump of memory, which its reader does not check"),
        ("1/xgboost.model", "a dump of memory, which its reader does not check"),
        ("1/model.savedmodel/saved_model.pb", "a TensorFlow graph, a program that can read and write files"),
        ("1/model.ort", "a file of an unknown kind"),
        ("1/table.npy", "a file of an unknown kind"),
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
        ('backend: "sklearn"', "backend sklearn: its models are code"),
        ('backend: "pytorch"', "backend pytorch: its models are code"),
        ('backend: "tensorrt"', "backend tensorrt: its models are code"),
        (
            'backend: "onnxruntime" default_model_filename: "weights.bin"',
            "1/weights.bin: not a file that the backend onnxruntime reads as data",
        ),
        (
            'backend: "openvino" parameters { key: "CACHE_DIR" value { string_value: "/tmp/x" } }',
            "parameter CACHE_DIR: it names a folder to write",
        ),
        (
            'backend: "onnxruntime" parameters { key: "session.optimized_model_filepath" value { string_value: "x" } }',
            "not on the list of harmless parameters",
        ),
        (
            'backend: "onnxruntime" parameters { key: "ep.context_file_path" value { string_value: "x" } }',
            "not on the list of harmless parameters",
        ),
        (
            'backend: "onnxruntime" optimization { execution_accelerators { gpu_execution_accelerator '
            '{ name: "tensorrt" parameters { key: "trt_engine_cache_path" value: "/x" } } } }',
            "not on the list of harmless parameters",
        ),
        (
            'backend: "fil" parameters { key: "model_type" value { string_value: "treelite_checkpoint" } }',
            "treelite_checkpoint is a dump of memory",
        ),
        (
            'backend: "onnxruntime" parameters { key: "model_type" value { string_value: "lightgbm" } }',
            "not on the list of harmless parameters",
        ),
        (
            'backend: "llama_cpp" parameters { key: "mmproj" value { string_value: "../../x.gguf" } }',
            "not on the list of harmless parameters",
        ),
        ('backend: "onnxruntime" runtime: "libother.so"', "runtime: it names a library"),
        ('backend: "onnxruntime" cc_model_filenames { key: "7.0" value: "x" }', "cc_model_filenames: not on the list"),
        (
            'backend: "onnxruntime" model_repository_agents { agents { name: "own" } }',
            "agents other than checksum are programs",
        ),
        (
            'backend: "onnxruntime" output { name: "y" label_filename: "../../owner.key" }',
            "a file outside of the model's folder",
        ),
        (
            'backend: "onnxruntime" model_warmup { inputs { key: "x" value { input_data_file: "/etc/passwd" } } }',
            "a file outside of the model's folder",
        ),
        (
            'backend: "openvino" parameters { key: "CPU_EXTENSION_PATH" value { string_value: "x" } }',
            "it names a library",
        ),
        (
            'backend: "onnxruntime" optimization { execution_accelerators { cpu_execution_accelerator '
            '{ name: "openvino" parameters { key: "CPU_EXTENSION_PATH" value: "x" } } } }',
            "it names a library",
        ),
        (
            'backend: "onnxruntime" optimization { execution_accelerators { gpu_execution_accelerator '
            '{ name: "tensorrt" parameters { key: "trt_extra_plugin_lib_paths" value: "x" } } } }',
            "it names a library",
        ),
        (
            'backend: "onnxruntime" model_operations { op_library_filename: "ops" }',
            "model_operations: it names a library",
        ),
        (
            'backend: "onnxruntime" parameters { key: "BATCHING_STRATEGY" value { string_value: "x" } }',
            "it names a batching strategy",
        ),
    ],
)
def test_a_configuration_cannot_hide_code(config: str, why: str) -> None:
    (found,) = code_in("m", ["1/weights.bin"], parse(config))

    assert why in found


@pytest.mark.parametrize(
    "config",
    [
        'backend: "openvino" parameters { key: "NUM_STREAMS" value { string_value: "2" } }',
        'backend: "onnxruntime" parameters { key: "intra_op_thread_count" value { string_value: "2" } }',
        'backend: "onnxruntime" parameters { key: "EXECUTION_ENV_PATH" value { string_value: "" } }',
        'backend: "onnxruntime" model_repository_agents { agents { name: "checksum" } }',
        'backend: "onnxruntime" max_batch_size: 8 dynamic_batching {} instance_group { count: 2 }',
        'backend: "llama_cpp" parameters { key: "mmproj" value { string_value: "eye.gguf" } }',
    ],
)
def test_a_harmless_configuration_leaves_data_data(config: str) -> None:
    assert code_in("m", ["1/eye.gguf", "1/labels.txt"], parse(config)) == []


def test_weights_may_have_any_name_but_that_of_code() -> None:
    paths = ["1/model.onnx", "1/layer.0.kernel", "1/layer.py"]

    assert code_in("m", paths, NONE, weights=paths[1:]) == ["1/layer.py: Python code"]


@pytest.mark.parametrize("file", ["../owner.key", "/etc/passwd", "a/../../b", "*/_ORT_MEM_ADDR_/*"])
def test_weights_outside_of_the_folder_are_not_data(file: str) -> None:
    assert code_in_onnx("1/model.onnx", [file, "inside.data"], ["Conv"]) == [
        f"1/model.onnx: weights outside of the model's folder: '{file}'"
    ]


def test_an_engine_within_an_onnx_file_is_code() -> None:
    assert code_in_onnx("1/model.onnx", [], ["EPContext"]) == ["1/model.onnx: EPContext holds machine code"]


@pytest.mark.parametrize(
    ("start", "is_text"),
    [(b'{"learner"', True), (b"\n {L", True), (b"tree\nversion", True), (b"binf", False), (b"\x04\0\0\0", False)],
)
def test_forests_in_text_are_told_by_their_beginning(start: bytes, is_text: bool) -> None:
    assert is_inert_start("fil", start) is is_text


def test_the_forest_is_a_file_that_the_backend_may_read() -> None:
    named = parse('backend: "fil" default_model_filename: "trees.txt"')

    assert examined_files("m", ["1/xgboost.json", "1/labels.txt"], NONE) == ["1/xgboost.json"]
    assert examined_files("m", ["1/trees.txt", "1/labels.txt"], named) == ["1/trees.txt"]
    assert examined_files("m", ["1/model.onnx", "1/model.txt"], NONE) == []


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
        ({"modelOperations": {}}, True),
        ({"optimization": {"executionAccelerators": {}}}, True),
        ({"optimization": ["x"]}, True),
        ({"parameters": {"model_type": {"string_value": "treelite_checkpoint"}}}, True),
        ({"parameters": {"CACHE_DIR": {"string_value": "/tmp"}}}, True),
        ({"model_repository_agents": {}}, True),
        ({"optimization": {"graph": {"level": 1}}}, False),
        ({"dynamic_batching": {}, "instance_group": [{"count": 2}]}, False),
        ({"max_batch_size": 8, "parameters": {"intra_op_thread_count": {"string_value": "2"}}}, False),
        ({"parameters": None}, False),
        ({}, False),
    ],
)
def test_changes_that_decide_what_reads_the_files_may_make_code(changes: dict[str, object], may: bool) -> None:
    assert may_make_code(changes) is may


def test_every_backend_of_the_server_is_data_or_code() -> None:
    code = {name for name in installed_backends() if code_in("m", ["1/x"], ModelConfig(backend=name))}

    assert installed_backends().keys() - code == {
        *("armnn_tflite", "fil", "identity", "image", "llama_cpp", "onnxruntime", "openvino", "tflite")
    }


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
    config = ModelConfig(backend="sklearn", parameters={"TRUSTED": "true"})

    assert trusting(["1/model.pkl"]) == config
    assert trusting(["1/model.joblib"]) == config
    assert trusting(["1/model.skops", "model.pkl"]) is None


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
