"""Files of forests: which one is read, and those that cannot be."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import lightgbm
import numpy as np
import pytest
import treelite
import xgboost
from tests.support import backends
from tests.support.backends import version_of
from tests.support.forests import LEGACY, LEGACY_ROWS, LEGACY_SCORES, MadeForest, of_lightgbm, of_sklearn, of_xgboost

from charonia.config.complete import derive_backend
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs, Placement
from charonia.server.backends.fil.backend import INPUT, SCORES, FilBackend, library_of
from charonia.server.backends.fil.forest import START_BYTES, format_of, read_forest, structure_problem
from charonia.server.backends.fil.options import LIBRARY, MODEL_TYPES, ForestPlan


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each format, by `model_type`."""
    folder = tmp_path_factory.mktemp("forests")
    made: dict[str, MadeForest] = {
        "xgboost_json": of_xgboost("binary"),
        "xgboost_ubj": of_xgboost("binary", "ubj"),
        "lightgbm": of_lightgbm("binary"),
        "treelite_checkpoint": of_sklearn("regression"),
    }
    legacy = folder / "xgboost.model"
    legacy.write_bytes(LEGACY)
    return {name: forest.write(folder) for name, forest in made.items()} | {"xgboost": legacy}


def load(files: ModelFiles, filename: str = "", **parameters: str) -> list[tuple[str, tuple[int, ...]]]:
    """Complete and load a model as the server does, run it, and return its outputs."""

    async def run() -> list[tuple[str, tuple[int, ...]]]:
        backend = FilBackend()
        group = InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1)
        config = ModelConfig(
            name="m", default_model_filename=filename, instance_group=(group,), parameters={"x": "", **parameters}
        )
        completed = (await backend.complete(files, config, BackendSettings())).config
        model = await backend.load(files, completed, BackendSettings())
        instance = await model.create_instance(Placement("m_0", InstanceKind.KIND_CPU))
        batch = np.zeros((2, *completed.input[0].dims), np.float32)
        [result] = instance.execute([InferRequest("m", {INPUT: Tensor(INPUT, DataType.FP32, batch)})]).results
        assert isinstance(result, Outputs)
        assert [usage.byte_size > 0 for usage in model.memory()] == [True]
        instance.close()
        await model.aclose()
        await backend.aclose()
        return [(tensor.name, tensor.shape) for tensor in result.tensors]

    return asyncio.run(run())


def refusal(files: ModelFiles, filename: str = "", **parameters: str) -> ServingError:
    with pytest.raises(ServingError) as caught:
        load(files, filename, **parameters)
    return caught.value


@pytest.mark.parametrize("model_type", list(MODEL_TYPES))
def test_the_format_of_a_file_is_known_by_its_beginning(saved: dict[str, Path], model_type: str) -> None:
    assert format_of(saved[model_type].read_bytes()[:START_BYTES]) == model_type


@pytest.mark.parametrize("start", [b"", b"\x00\x01\x02", b"PK\x03\x04", b"treehouse", b"\x08\x0bonnx"])
def test_other_beginnings_tell_nothing(start: bytes) -> None:
    assert format_of(start) == ""


@pytest.mark.parametrize("model_type", list(MODEL_TYPES))
def test_every_format_is_found_under_its_default_name(saved: dict[str, Path], tmp_path: Path, model_type: str) -> None:
    files = version_of(tmp_path, **{MODEL_TYPES[model_type].replace(".", "_"): saved[model_type]})
    names = [path.name for path in files.version_dir.iterdir()]

    derived, notes = derive_backend(ModelConfig(), "m", names)

    assert (derived.backend, derived.default_model_filename) == ("fil", "")
    assert notes == [f"backend: fil, from the file '{MODEL_TYPES[model_type]}'"]
    assert load(files) == load(files, model_type=model_type) == [(SCORES, (2, 1))]


@pytest.mark.parametrize("model_type", list(MODEL_TYPES))
def test_a_file_with_another_name_is_told_by_its_content(
    saved: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    files = version_of(tmp_path, forest_bin=saved[model_type])

    assert load(files, "forest.bin") == [(SCORES, (2, 1))]


def test_a_model_type_chooses_among_several_files(saved: dict[str, Path], tmp_path: Path) -> None:
    files = version_of(tmp_path, xgboost_json=saved["xgboost_json"], model_txt=saved["lightgbm"])

    assert load(files, model_type="lightgbm") == load(files, model_type="xgboost_json") == [(SCORES, (2, 1))]
    error = refusal(files)
    assert "found xgboost.json and model.txt" in error.message
    assert "model_type" in error.hint


def test_a_version_without_a_forest_says_how_they_are_called(tmp_path: Path) -> None:
    files = version_of(tmp_path, notes_md=b"")

    assert "found none of xgboost.json, xgboost.ubj, model.txt, checkpoint.tl" in refusal(files).message
    assert "no file 1/xgboost.ubj" in refusal(files, model_type="xgboost_ubj").message


def test_a_python_model_beside_a_forest_loads_the_forest_itself() -> None:
    derived, _ = derive_backend(ModelConfig(), "m", ["xgboost.json", "model.py"])

    assert derived.backend == "python"


def test_the_binary_format_of_xgboost_is_read_by_treelite(tmp_path: Path) -> None:
    files = version_of(tmp_path, xgboost_model=LEGACY)

    [array] = backends.load(FilBackend, files, backends.complete(FilBackend, files).config).run(
        [SCORES], {INPUT: LEGACY_ROWS}
    )

    np.testing.assert_allclose(array.ravel(), LEGACY_SCORES, rtol=1e-6)
    error = refusal(files, predictor="library")
    assert error.code is Code.UNSUPPORTED
    assert "only treelite can run a forest of model_type xgboost" in error.message


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.85])
@pytest.mark.parametrize("model_type", list(MODEL_TYPES))
def test_a_file_that_is_cut_off_is_refused(
    saved: dict[str, Path], tmp_path: Path, model_type: str, share: float
) -> None:
    content = saved[model_type].read_bytes()
    if model_type == "lightgbm":  # what follows the trees is for people
        content = content[: content.index(b"end of trees")]
    files = version_of(tmp_path, file_bin=content[: int(len(content) * share)])

    error = refusal(files, "file.bin", model_type=model_type)

    assert error.code is Code.INVALID_ARG
    assert f"model 'm': 'file.bin' cannot be read as {model_type}: " in error.message
    assert "\n" not in error.message
    assert ".cc:" not in error.message
    assert error.hint


@pytest.mark.parametrize("content", [b"\xff" * 500, b"no forest at all\n" * 30, bytes(500)])
@pytest.mark.parametrize("model_type", list(MODEL_TYPES))
def test_a_file_of_something_else_is_refused(tmp_path: Path, model_type: str, content: bytes) -> None:
    files = version_of(tmp_path, file_bin=content)

    assert "cannot be read as" in refusal(files, "file.bin", model_type=model_type).message


def test_a_file_of_another_format_is_refused_with_its_name(saved: dict[str, Path], tmp_path: Path) -> None:
    files = version_of(tmp_path, xgboost_model=saved["xgboost_ubj"])

    error = refusal(files, model_type="xgboost")

    assert "expected 'xgboost.model' to be of model_type xgboost, but it has the format of xgboost_ubj" in error.message
    assert error.hint == 'model_type: "xgboost_ubj"'


def test_fields_that_treelite_does_not_know_are_skipped_on_request(saved: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(saved["xgboost_json"].read_text())
    document["learner"]["invented"] = 1
    files = version_of(tmp_path, xgboost_json=json.dumps(document).encode())

    assert "xgboost_allow_unknown_field" in refusal(files).hint
    assert load(files, xgboost_allow_unknown_field="true") == [(SCORES, (2, 1))]


@pytest.mark.filterwarnings("ignore:.*gblinear", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_linear_booster_is_no_forest(tmp_path: Path) -> None:
    data = xgboost.DMatrix(np.zeros((4, 2), np.float32), np.arange(4))
    booster = xgboost.train({"booster": "gblinear", "nthread": 1}, data, 1)
    files = version_of(tmp_path, xgboost_json=bytes(booster.save_raw("json")))

    assert "boosters of linear models are not" in refusal(files).hint


def test_linear_trees_are_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    data = lightgbm.Dataset(random.random((200, 2)), random.random(200))
    booster = lightgbm.train({"linear_tree": True, "verbose": -1, "num_threads": 1}, data, 2)
    files = version_of(tmp_path, model_txt=booster.model_to_string().encode())

    assert "linear trees" in refusal(files).message


def test_a_forest_that_leads_out_of_its_memory_is_refused(tmp_path: Path) -> None:
    model = treelite.Model.deserialize(of_sklearn("regression").write(tmp_path))
    spoil(model, "split_index", 0, 10**9)
    model.serialize(path := tmp_path / "beyond.tl")

    with pytest.raises(ServingError, match="tree 0: a test is of a feature that a row does not have") as caught:
        read_forest(path, "treelite_checkpoint", ForestPlan(), "m")

    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith("model 'm': 'beyond.tl' cannot be read as treelite_checkpoint: ")
    assert caught.value.hint == "the file is damaged: export it again"


@pytest.mark.parametrize("damage", [b"[boosting gbdt]", b"[]", b"\xff\xff"])
def test_what_follows_the_trees_of_lightgbm_may_be_damaged(tmp_path: Path, damage: bytes) -> None:
    path = of_lightgbm("binary").write(tmp_path)
    content = path.read_bytes()
    assert b"[boosting: gbdt]" in content
    path.write_bytes(content.replace(b"[boosting: gbdt]", damage))

    library_of(path, "lightgbm", read_forest(path, "lightgbm", ForestPlan(predictor=LIBRARY), "m"))


def spoil(model: treelite.Model, name: str, node: int, value: int) -> None:
    tree = model.get_tree_accessor(0)
    values = tree.get_field(name).copy()
    values[node] = value
    tree.set_field(name, values)


def of_header(name: str, values: list[int] | list[float], kind: type[np.generic]) -> Callable[[treelite.Model], None]:
    return lambda model: model.get_header_accessor().set_field(name, np.array(values, kind))


def of_node(name: str, node: int, value: int) -> Callable[[treelite.Model], None]:
    return lambda model: spoil(model, name, node, value)


# A forest of three classes, with leaf vectors. In its trees, node 0 is the root, and the last node a leaf.
UNSOUND = [
    (of_header("num_feature", [0], np.int32), "it has 0 features"),
    (of_header("num_target", [2], np.int32), "2 targets, and classes [3]"),
    (of_header("num_class", [-3], np.int32), "classes [-3]"),
    (of_header("base_scores", [0.0], np.float64), "base scores"),
    (of_header("leaf_vector_shape", [1, 7], np.int32), "its leaves have the shape [1, 7]"),
    (of_header("target_id", [0], np.int32), "a target_id that is missing"),
    (of_header("class_id", [3, 0, 0, 0], np.int32), "a class_id that is missing or out of range"),
    (of_node("cleft", 0, 999), "tree 0: a child is no node"),
    (of_node("cright", 0, -7), "tree 0: a child is no node"),
    (of_node("cright", 0, 0), "tree 0: a child is no node"),
    (of_node("cright", 0, 1), "tree 0: a node has two parents"),
    (of_node("split_index", 0, 6), "a feature that a row does not have"),
    (of_node("split_index", 0, -1), "a feature that a row does not have"),
    (of_node("node_type", 0, 3), "a type that does not exist"),
    (of_node("cmp", 0, 0), "a comparison does not exist"),
    (of_node("leaf_vector_begin", -1, 10**9), "a leaf_vector is out of range"),
    (of_node("leaf_vector_end", -1, 10**9), "a leaf_vector is out of range"),
    (of_node("leaf_vector_begin", -1, 0), "a leaf has another size"),
]


@pytest.mark.parametrize(("damage", "expected"), UNSOUND, ids=[expected for _, expected in UNSOUND])
def test_what_is_wrong_with_a_forest_is_said(
    tmp_path: Path, damage: Callable[[treelite.Model], None], expected: str
) -> None:
    model = treelite.Model.deserialize(of_sklearn("multi").write(tmp_path))
    assert structure_problem(model) == ""

    damage(model)

    assert expected in structure_problem(model)


def test_categories_beyond_their_list_are_said(tmp_path: Path) -> None:
    model = treelite.Model.deserialize(of_sklearn("multi").write(tmp_path))
    spoil(model, "node_type", 0, 2)
    assert structure_problem(model) == ""

    spoil(model, "category_list_end", 0, 5)

    assert "a category_list is out of range" in structure_problem(model)


def test_a_field_that_is_too_short_is_said(tmp_path: Path) -> None:
    model = treelite.Model.deserialize(of_sklearn("multi").write(tmp_path))
    tree = model.get_tree_accessor(0)

    tree.set_field("threshold", tree.get_field("threshold")[:-1].copy())

    assert "one value for each node" in structure_problem(model)
