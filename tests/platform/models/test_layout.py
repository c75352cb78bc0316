"""Finding the model in what was sent."""

from collections.abc import Mapping, Sequence

import pytest

from charonia.config.backends import served
from charonia.core.errors import Code, ServingError
from charonia.platform.models.layout import arrange, model_root

FOREST = b'{"learner":{}}'


def laid_out(paths: Sequence[str], starts: Mapping[str, bytes] | None = None, *, take: int = 0) -> dict[str, str]:
    return dict(arrange(paths, lambda path: (starts or {}).get(path, b""), take=take).files)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("resnet.onnx", "1/model.onnx"),
        ("a/b/ResNet.ONNX", "1/model.onnx"),
        ("net.pth", "1/model.pt"),
        ("net.pt2", "1/model.pt2"),
        ("net.keras", "1/model.keras"),
        ("net.tflite", "1/model.tflite"),
        ("greet.py", "1/model.py"),
        ("forest.ubj", "1/xgboost.ubj"),
        ("rows.skops", "1/model.skops"),
        ("rows.pickle", "1/model.pkl"),
        ("words.gguf", "1/model.gguf"),
    ],
)
def test_a_file_goes_where_its_backend_looks_for_it(path: str, target: str) -> None:
    assert laid_out([path]) == {target: path}


def test_each_form_that_is_served_can_be_sent() -> None:
    for form in served():
        for suffix in form.suffixes:
            assert laid_out([f"a{suffix}"], {f"a{suffix}": form.start}) == {f"1/{form.filename}": f"a{suffix}"}


def test_content_tells_where_the_suffix_does_not() -> None:
    assert laid_out(["forest.json"], {"forest.json": FOREST}) == {"1/xgboost.json": "forest.json"}
    with pytest.raises(ServingError, match="unsupported file type"):
        laid_out(["config.json"], {"config.json": b"{}"})


def test_weights_beside_a_file_keep_its_name() -> None:
    assert laid_out(["d/net.xml", "d/net.bin"]) == {"1/model.xml": "d/net.xml", "1/model.bin": "d/net.bin"}


def test_external_weights_keep_their_own_name() -> None:
    assert laid_out(["net.onnx", "net.onnx.data"]) == {"1/model.onnx": "net.onnx", "1/net.onnx.data": "net.onnx.data"}


def test_the_content_of_a_version_stays_as_it_is() -> None:
    assert laid_out(["v/model.py", "v/words.txt", "v/lib/x.py"]) == {
        "1/model.py": "v/model.py",
        "1/words.txt": "v/words.txt",
        "1/lib/x.py": "v/lib/x.py",
    }


def test_a_saved_model_is_a_folder() -> None:
    paths = ["net/saved_model.pb", "net/variables/variables.index"]

    assert laid_out(paths) == {
        "1/model.savedmodel/saved_model.pb": paths[0],
        "1/model.savedmodel/variables/variables.index": paths[1],
    }


def test_a_model_folder_keeps_its_configuration_and_its_highest_version() -> None:
    paths = ["m/config.pbtxt", "m/labels.txt", "m/1/model.onnx", "m/2/model.onnx", "m/10/model.onnx", "m/.git/HEAD"]

    found = arrange(paths, lambda _: b"")

    assert found.files == {
        "config.pbtxt": "m/config.pbtxt",
        "labels.txt": "m/labels.txt",
        "1/model.onnx": "m/10/model.onnx",
    }
    assert found.left_out == ("m/1/model.onnx", "m/2/model.onnx", "m/.git/HEAD")


def test_another_version_can_be_taken() -> None:
    assert laid_out(["m/1/model.onnx", "m/2/model.onnx"], take=1) == {"1/model.onnx": "m/1/model.onnx"}
    with pytest.raises(ServingError, match="version 3 does not exist") as caught:
        laid_out(["m/1/model.onnx", "m/2/model.onnx"], take=3)
    assert caught.value.hint == "there is 1, 2"


def test_a_lone_version_folder_is_not_mistaken_for_one_around_the_model() -> None:
    assert laid_out(["7/model.onnx"]) == {"1/model.onnx": "7/model.onnx"}
    assert model_root(["a/b/1/model.onnx"]) == "a/b/"
    assert model_root([]) == ""


def test_an_ensemble_has_a_configuration_only() -> None:
    assert laid_out(["pipeline/config.pbtxt"]) == {"config.pbtxt": "pipeline/config.pbtxt"}


def test_what_systems_leave_behind_does_not_count() -> None:
    paths = ["m/.DS_Store", "__MACOSX/m/._net.onnx", "m/net.onnx", "m/__pycache__/x.pyc"]

    assert laid_out(paths) == {"1/model.onnx": "m/net.onnx"}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "got no files"),
        ([".hidden"], "got no files"),
        (["a.onnx", "b.onnx"], "expected one model, got 'a.onnx', 'b.onnx'"),
        (["r/a/1/model.onnx", "r/b/1/model.onnx"], "got a repository with 'a', 'b'"),
        (["readme.md"], "unsupported file type"),
        (["a", "a/b"], "'a' is a file and also the folder"),
    ],
)
def test_what_is_no_model_or_several_is_refused(paths: list[str], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        laid_out(paths)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["m/config.json", "m/model.safetensors"], "'m' is a Hugging Face model"),
        (["net.h5"], "'net.h5' is a Keras model of an earlier version"),
        (["weights.safetensors"], "'weights.safetensors' is weights without their model"),
    ],
)
def test_what_is_known_and_not_served_comes_with_a_way_out(paths: list[str], message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        laid_out(paths)

    assert caught.value.code is Code.UNSUPPORTED
    assert "charonia serve" in caught.value.hint


MLFLOW = ["m/MLmodel", "m/conda.yaml", "m/requirements.txt", "m/python_env.yaml"]


@pytest.mark.parametrize(
    ("flavours", "files", "model"),
    [
        ({"onnx": {"data": "model.onnx"}}, ["model.onnx"], {"1/model.onnx": "model.onnx"}),
        (
            {"onnx": {"data": "model.onnx"}},
            ["model.onnx", "model.onnx.data"],
            {"1/model.onnx": "model.onnx", "1/model.onnx.data": "model.onnx.data"},
        ),
        ({"sklearn": {"pickled_model": "model.pkl"}}, ["model.pkl"], {"1/model.pkl": "model.pkl"}),
        ({"sklearn": {"pickled_model": "model.skops"}}, ["model.skops"], {"1/model.skops": "model.skops"}),
        ({"xgboost": {"data": "model.ubj"}}, ["model.ubj"], {"1/xgboost.ubj": "model.ubj"}),
        ({"lightgbm": {"data": "model.lgb"}}, ["model.lgb"], {"1/model.txt": "model.lgb"}),
        ({"keras": {"data": "data/model.keras"}}, ["data/model.keras"], {"1/model.keras": "data/model.keras"}),
        (
            {"tensorflow": {"data": "data", "model_type": "keras"}},
            ["data/model.keras", "data/keras_module.txt", "data/save_format.txt"],
            {"1/model.keras": "data/model.keras"},
        ),
        (
            {"tensorflow": {"saved_model_dir": "tfmodel"}},
            ["tfmodel/saved_model.pb", "tfmodel/variables/variables.index"],
            {
                "1/model.savedmodel/saved_model.pb": "tfmodel/saved_model.pb",
                "1/model.savedmodel/variables/variables.index": "tfmodel/variables/variables.index",
            },
        ),
        (
            {"pytorch": {"model_data": "data"}},
            ["data/model.pth", "data/pickle_module_info.txt"],
            {"1/model.pt": "data/model.pth"},
        ),
    ],
)
def test_a_flavour_of_mlflow_is_taken(flavours: dict[str, object], files: list[str], model: dict[str, str]) -> None:
    paths = [*MLFLOW, *(f"m/{path}" for path in files)]
    every = {**flavours, "python_function": {"loader_module": "mlflow.x"}}

    found = arrange(paths, lambda path: b"tree\n" if path.endswith(".lgb") else b"", flavours=every)

    assert found.files == {
        **{target: f"m/{path}" for target, path in model.items()},
        "requirements.txt": "m/requirements.txt",
    }


def test_a_flavour_whose_file_is_something_else_is_refused() -> None:
    with pytest.raises(ServingError, match="has the flavours 'lightgbm'"):
        arrange([*MLFLOW, "m/model.lgb"], lambda _: b"PK", flavours={"lightgbm": {"data": "model.lgb"}})


def test_a_model_of_mlflow_without_a_flavour_that_is_served_is_refused() -> None:
    with pytest.raises(ServingError, match="has the flavours 'prophet', 'python_function'") as caught:
        arrange(MLFLOW, lambda _: b"", flavours={"prophet": {"data": "x"}, "python_function": {}})

    assert "mlflow.pyfunc.load_model" in caught.value.hint
