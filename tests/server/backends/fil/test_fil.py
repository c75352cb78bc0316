import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.backends import CPU, ask, load, version_of
from tests.support.forests import CLASSES, FEATURES, MadeForest, Rows, of_lightgbm, of_sklearn, of_xgboost, rows

from charonia.config.complete import ROWS_BATCH_SIZE
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.fil import backend
from charonia.server.backends.fil.backend import (
    CONTRIBUTIONS,
    INPUT,
    SCORES,
    FilBackend,
    FilInstance,
    LightGBMPredictor,
    TreelitePredictor,
)
from charonia.testing.backend_suite import BackendCase, BackendSuite
from charonia.wire.v1_predict import decode_predict

FP32 = DataType.FP32
MAKERS: dict[str, Callable[[str], MadeForest]] = {"xgboost": of_xgboost, "lightgbm": of_lightgbm, "sklearn": of_sklearn}
TASKS = ("regression", "binary", "multi")
Place = Callable[[str, str], ModelFiles]


@cache
def made(library: str, task: str) -> MadeForest:
    return MAKERS[library](task)


def files_of(folder: Path, forest: MadeForest) -> ModelFiles:
    forest.write(folder / "1")
    return version_of(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return what writes a forest into a model's folder."""
    return lambda library, task: files_of(tmp_path, made(library, task))


def config_of(outputs: Mapping[str, tuple[int, ...]], **parameters: str) -> ModelConfig:
    return sized(64, outputs, **parameters)


def opened(files: ModelFiles, config: ModelConfig, threads: int = 1) -> FilInstance:
    instance: FilInstance = load(FilBackend, files, config, place=replace(CPU, threads=threads))
    return instance


def sized(max_batch_size: int, outputs: Mapping[str, tuple[int, ...]], /, **parameters: str) -> ModelConfig:
    lead = () if max_batch_size else (-1,)
    return ModelConfig(
        name="m",
        backend="fil",
        max_batch_size=max_batch_size,
        input=(ModelInput(INPUT, FP32, dims=(*lead, FEATURES)),),
        output=tuple(ModelOutput(name, FP32, (*lead, *dims)) for name, dims in outputs.items()),
        instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1),),
        parameters=parameters,
    )


def request(data: Rows, *outputs: str) -> InferRequest:
    return InferRequest("m", {INPUT: Tensor(INPUT, FP32, data)}, outputs=tuple(map(RequestedOutput, outputs)))


def scores_of(instance: FilInstance, data: Rows) -> NDArray[Any]:
    return ask(instance, request(data))[SCORES]


def refusal(files: ModelFiles, config: ModelConfig) -> ServingError:
    with pytest.raises(ServingError) as caught:
        opened(files, config)
    return caught.value


def complete(files: ModelFiles, config: ModelConfig, default: int = 4) -> Completion:
    return asyncio.run(FilBackend().complete(files, config, BackendSettings(default_max_batch_size=default)))


CASES: dict[str, tuple[str, str, dict[str, tuple[int, ...]], dict[str, str]]] = {
    "xgboost": ("xgboost", "multi", {SCORES: (3,), CONTRIBUTIONS: (3, FEATURES + 1)}, {"predict_proba": "true"}),
    "lightgbm": ("lightgbm", "binary", {SCORES: (1,), CONTRIBUTIONS: (FEATURES + 1,)}, {"is_classifier": "true"}),
    "checkpoint": ("sklearn", "regression", {SCORES: (1,)}, {"model_type": "treelite_checkpoint"}),
}


class TestFil(BackendSuite):
    @pytest.fixture(params=list(CASES))
    def backend_case(self, request: pytest.FixtureRequest, place: Place) -> BackendCase:
        library, task, outputs, parameters = CASES[request.param]
        files = place(library, task)
        bad = _infinite_request if request.param == "xgboost" else None
        return BackendCase(FilBackend, files, config_of(outputs, **parameters), _numbered_request, bad)


def _numbered_request(seed: int, size: int) -> InferRequest:
    return request(rows(size, seed))


def _infinite_request() -> InferRequest:
    return request(np.full((1, FEATURES), np.inf, np.float32))


PREDICTORS = [
    (library, predictor) for library in ("xgboost", "lightgbm") for predictor in ("auto", "treelite", "library")
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("library", "predictor"), [*PREDICTORS, ("sklearn", "auto")])
def test_scores_are_those_of_the_library(place: Place, library: str, task: str, predictor: str) -> None:
    forest = made(library, task)
    data = rows(40, 1) if library != "sklearn" else np.nan_to_num(rows(40, 1))
    expected = forest.scores(data)
    instance = opened(place(library, task), config_of({SCORES: expected.shape[1:]}, predictor=predictor))

    np.testing.assert_allclose(scores_of(instance, data), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scores_of(instance, data[:1]), expected[:1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("library", list(MAKERS))
def test_a_classifier_answers_with_the_class_or_with_probabilities(place: Place, library: str) -> None:
    forest = made(library, "multi")
    files, data = place(library, "multi"), np.nan_to_num(rows(40, 1))
    expected = forest.scores(data)

    classes = opened(files, config_of({SCORES: (1,)}, is_classifier="true"))
    probabilities = opened(files, config_of({SCORES: (CLASSES,)}, output_class="true", predict_proba="true"))

    np.testing.assert_array_equal(scores_of(classes, data), expected.argmax(axis=1)[:, None])
    assert scores_of(classes, data).dtype == np.float32
    np.testing.assert_allclose(scores_of(probabilities, data), expected, rtol=1e-4)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_binary_classifier_answers_1_above_the_threshold(place: Place, library: str) -> None:
    forest = made(library, "binary")
    files, data = place(library, "binary"), rows(60, 1)
    expected = forest.scores(data)

    for threshold in (0.5, float(np.median(expected))):
        instance = opened(files, config_of({SCORES: (1,)}, is_classifier="true", threshold=str(threshold)))
        answers = scores_of(instance, data)
        np.testing.assert_array_equal(answers, expected > threshold)
        assert set(answers.ravel()) == {0.0, 1.0}


def test_a_binary_classifier_has_one_probability_or_that_of_each_class(place: Place) -> None:
    forest = made("xgboost", "binary")
    files, data = place("xgboost", "binary"), rows(20, 1)
    expected = forest.scores(data)
    options = {"is_classifier": "true", "predict_proba": "true"}

    one = scores_of(opened(files, config_of({SCORES: (1,)}, **options)), data)
    both = scores_of(opened(files, config_of({SCORES: (2,)}, **options)), data)

    np.testing.assert_allclose(one, expected, rtol=1e-5)
    np.testing.assert_allclose(both, np.hstack([1 - expected, expected]), rtol=1e-4)


def test_a_random_forest_of_two_classes_has_two_scores(place: Place) -> None:
    forest = made("sklearn", "binary")
    files, data = place("sklearn", "binary"), np.nan_to_num(rows(20, 1))

    classes = scores_of(opened(files, config_of({SCORES: (1,)}, is_classifier="true")), data)

    np.testing.assert_array_equal(classes, forest.scores(data).argmax(axis=1)[:, None])


def test_an_objective_that_gives_classes_has_probabilities_as_scores(tmp_path: Path) -> None:
    files, data = files_of(tmp_path, of_xgboost("multi", objective="multi:softmax")), rows(30, 1)
    expected = of_xgboost("multi").scores(data)

    for predictor in ("treelite", "library"):
        instance = opened(files, config_of({SCORES: (CLASSES,)}, predictor=predictor))
        np.testing.assert_allclose(scores_of(instance, data), expected, rtol=1e-4)


def test_several_targets_are_as_many_scores_but_no_class(tmp_path: Path) -> None:
    files = files_of(tmp_path, of_xgboost("regression", objective="reg:quantileerror", quantile_alpha=[0.1, 0.9]))

    low, high = scores_of(opened(files, config_of({SCORES: (2,)})), rows(50, 1)).T

    assert low.mean() < high.mean()
    with pytest.raises(ServingError, match="2 targets, of which no class is made"):
        opened(files, config_of({SCORES: (2,)}, is_classifier="true"))


SHAP_MAKERS: dict[str, Callable[[str], MadeForest]] = {
    "xgboost": of_xgboost,
    "ubj": lambda task: of_xgboost(task, "ubj"),
    "lightgbm": of_lightgbm,
    "lightgbm forest": lambda task: of_lightgbm(task, boosting="rf", bagging_freq=1, bagging_fraction=0.6),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("library", list(SHAP_MAKERS))
def test_shapley_values_are_those_of_the_library_and_add_up(tmp_path: Path, library: str, task: str) -> None:
    forest = SHAP_MAKERS[library](task)
    width = CLASSES if task == "multi" else 1
    shape = (CLASSES, FEATURES + 1) if task == "multi" else (FEATURES + 1,)
    instance = opened(files_of(tmp_path, forest), config_of({SCORES: (width,), CONTRIBUTIONS: shape}), threads=2)
    data = rows(50, 1)

    found = ask(instance, request(data))
    values: NDArray[Any] = found[CONTRIBUTIONS].reshape(50, -1, FEATURES + 1)
    instance.close()

    assert found[CONTRIBUTIONS].shape == (50, *shape)
    assert forest.contributions is not None
    own = forest.contributions(data)
    scale = 4 if library == "lightgbm forest" else 1  # its four trees are added up there
    np.testing.assert_allclose(values, own / scale, rtol=1e-4, atol=1e-6)
    assert forest.margin is not None
    np.testing.assert_allclose(values.sum(axis=2), forest.margin(data) / scale, rtol=1e-3, atol=1e-5)


def test_shapley_values_of_classes_may_be_one_row(place: Place) -> None:
    files, data = place("xgboost", "multi"), rows(5)
    flat = opened(files, config_of({SCORES: (3,), CONTRIBUTIONS: (3 * (FEATURES + 1),)}))
    deep = opened(files, config_of({SCORES: (3,), CONTRIBUTIONS: (3, FEATURES + 1)}))

    one, rows_of_classes = (ask(instance, request(data))[CONTRIBUTIONS] for instance in (flat, deep))
    np.testing.assert_array_equal(one, rows_of_classes.reshape(5, -1))


def test_only_the_outputs_that_are_asked_for_are_computed(place: Place) -> None:
    files = place("xgboost", "binary")
    instance = opened(files, config_of({SCORES: (1,), CONTRIBUTIONS: (FEATURES + 1,)}))

    assert ask(instance, request(rows(2), SCORES)).keys() == {SCORES}
    assert ask(instance, request(rows(2), CONTRIBUTIONS)).keys() == {CONTRIBUTIONS}


def test_a_checkpoint_has_no_shapley_values(place: Place) -> None:
    files = place("sklearn", "regression")

    with pytest.raises(ServingError) as caught:
        opened(files, config_of({SCORES: (1,), CONTRIBUTIONS: (FEATURES + 1,)}))

    assert caught.value.code is Code.UNSUPPORTED
    assert "only treelite can run a forest of model_type treelite_checkpoint" in caught.value.message
    assert "serve the file of XGBoost or LightGBM itself" in caught.value.hint


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FilInstance]:
    """Instances that divide every batch of two rows and more among three threads."""
    instances = {}
    for library in MAKERS:
        files = files_of(tmp_path_factory.mktemp(library), made(library, "multi"))
        instance = opened(files, sized(0, {SCORES: (CLASSES,)}), threads=3)
        forest = instance._forest
        instance._forest = replace(forest, choice=replace(forest.choice, part_rows=1))
        instances[library] = instance
    return instances


@settings(deadline=None, max_examples=25)
@given(data=st.data(), library=st.sampled_from(list(MAKERS)), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_rows_have_the_same_scores_in_any_batch(
    divided: dict[str, FilInstance], data: st.DataObject, library: str, sizes: list[int]
) -> None:
    count = sum(sizes) * FEATURES
    values = st.one_of(st.floats(width=32, allow_nan=False), st.just(float("nan")), st.integers(-3, 3).map(float))
    flat = data.draw(st.lists(values, min_size=count, max_size=count))
    batch = np.array(flat, np.float32).reshape(-1, FEATURES)

    together = scores_of(divided[library], batch)
    alone = np.concatenate([scores_of(divided[library], row[None]) for row in batch])

    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    assert together.dtype == np.float32


def test_no_rows_have_no_scores(divided: dict[str, FilInstance]) -> None:
    assert [scores_of(instance, rows(0)).shape for instance in divided.values()] == [(0, CLASSES)] * len(divided)


def test_what_a_library_fails_on_in_any_part_is_the_error_of_the_batch(
    divided: dict[str, FilInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(predictor: TreelitePredictor, part: Rows) -> Rows:
        if np.isnan(part[-1, 0]):
            raise ValueError("[12:00:00] /a/b.cc:7: Check failed: too many trees\nStack trace:")
        return np.zeros((len(part), CLASSES), np.float32)

    monkeypatch.setattr(TreelitePredictor, "scores", fail)
    batch = np.zeros((9, FEATURES), np.float32)

    assert not scores_of(divided["sklearn"], batch).any()
    batch[-1] = np.nan
    with pytest.raises(ServingError, match=r"the forest failed: Check failed: too many trees$") as caught:
        scores_of(divided["sklearn"], batch)
    assert caught.value.code is Code.INTERNAL


COMPLETED = [
    ("regression", {}, (1,)),
    ("binary", {}, (1,)),
    ("binary", {"is_classifier": "true"}, (1,)),
    ("binary", {"is_classifier": "true", "predict_proba": "true"}, (1,)),
    ("multi", {}, (CLASSES,)),
    ("multi", {"is_classifier": "true"}, (1,)),
    ("multi", {"is_classifier": "true", "predict_proba": "true"}, (CLASSES,)),
]


@pytest.mark.parametrize(("task", "parameters", "dims"), COMPLETED)
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_configuration_is_completed_from_the_forest(
    place: Place,
    library: str,
    task: str,
    parameters: dict[str, str],
    dims: tuple[int, ...],
) -> None:
    completion = complete(place(library, task), ModelConfig(name="m", parameters=parameters))

    config = completion.config
    assert [(t.name, t.data_type, t.dims) for t in config.input] == [(INPUT, FP32, (FEATURES,))]
    assert [(t.name, t.data_type, t.dims) for t in config.output] == [(SCORES, FP32, dims)]
    assert config.max_batch_size == ROWS_BATCH_SIZE
    assert config.dynamic_batching is not None
    assert f"input '{INPUT}': FP32 [{FEATURES}], from the model" in completion.notes


def test_the_server_s_default_batch_size_counts_where_it_is_0_or_larger(place: Place) -> None:
    files = place("xgboost", "binary")

    assert complete(files, ModelConfig(name="m"), 5000).config.max_batch_size == 5000
    unbatched = complete(files, ModelConfig(name="m"), 0).config
    assert (unbatched.max_batch_size, unbatched.input[0].dims) == (0, (-1, FEATURES))


def test_a_model_without_batching_takes_rows_of_its_own(place: Place) -> None:
    forest = made("lightgbm", "regression")
    instance = opened(place("lightgbm", "regression"), sized(0, {SCORES: (1,)}))

    np.testing.assert_allclose(scores_of(instance, rows(7)), forest.scores(rows(7)), rtol=1e-5)


def test_a_configuration_that_contradicts_the_forest_is_refused(place: Place) -> None:
    files = place("xgboost", "multi")
    good = config_of({SCORES: (CLASSES,)})

    wide = replace(good, input=(ModelInput(INPUT, FP32, dims=(FEATURES + 1,)),))
    assert f"the model expects shape [-1, {FEATURES}]" in refusal(files, wide).message
    double = replace(good, input=(ModelInput(INPUT, DataType.FP64, dims=(FEATURES,)),))
    assert "TYPE_FP64" in refusal(files, double).message
    assert "allowed outputs are: output__0, treeshap_output" in refusal(files, config_of({"y": (3,)})).message
    assert "output[0].dims" in refusal(files, config_of({SCORES: (1,)})).message
    assert "output[1].dims" in refusal(files, config_of({SCORES: (3,), CONTRIBUTIONS: (4,)})).message


def test_an_instance_on_a_gpu_is_refused_with_the_way_out(place: Place) -> None:
    files = place("xgboost", "binary")
    group = InstanceGroup("m_0", InstanceKind.KIND_GPU, count=1, gpus=(0,))

    error = refusal(files, replace(config_of({SCORES: (1,)}), instance_group=(group,)))

    assert error.code is Code.UNSUPPORTED
    assert "KIND_AUTO" in error.hint


class WrongTreelite(TreelitePredictor):
    def scores(self, rows: Rows) -> Rows:
        return super().scores(rows) + np.float32(0.1)


def missing(*arguments: Any) -> Any:
    raise ModuleNotFoundError("No module named 'xgboost'", name="xgboost")


def fail(library: LightGBMPredictor, data: Rows) -> Rows:
    raise ValueError("too many leaves")


@pytest.mark.parametrize(
    ("library", "patched", "name", "fault", "log", "refused"),
    [
        ("lightgbm", backend, "TreelitePredictor", WrongTreelite, "lightgbm alone, as treelite's scores differ", ""),
        ("xgboost", backend, "library_of", missing, "treelite alone, as xgboost cannot run it: No module", "[fil]"),
        (
            "lightgbm", LightGBMPredictor, "scores", fail, "treelite alone, as lightgbm cannot run it: too many leaves",
            "cannot run 'model.txt'",
        ),
    ],
)  # fmt: skip
def test_a_predictor_that_is_wrong_missing_or_fails_leaves_it_to_the_other(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    library: str,
    patched: Any,
    name: str,
    fault: Any,
    log: str,
    refused: str,
) -> None:
    monkeypatch.setattr(patched, name, fault)
    forest = made(library, "regression")
    files = place(library, "regression")

    instance = opened(files, config_of({SCORES: (1,)}))

    np.testing.assert_allclose(scores_of(instance, rows(3)), forest.scores(rows(3)), rtol=1e-5)
    assert log in caplog.text
    if refused:
        assert refused in str(refusal(files, config_of({SCORES: (1,)}, predictor="library")))


def test_the_memory_is_known_when_the_file_is_gone(place: Place) -> None:
    files = place("lightgbm", "regression")
    [file] = files.version_dir.iterdir()
    size = file.stat().st_size

    async def used() -> tuple[int, list[int]]:
        model = await FilBackend().load(files, config_of({SCORES: (1,)}), BackendSettings())
        before = len(model.memory())
        await model.create_instance(Placement("m_0", InstanceKind.KIND_CPU))
        file.unlink()
        return before, [usage.byte_size for usage in model.memory()]

    assert asyncio.run(used()) == (0, [size])


def test_the_choice_and_parameters_without_effect_are_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    opened(
        place("xgboost", "binary"),
        config_of({SCORES: (1,)}, predictor="treelite", chunk_size="4"),
    )

    assert "model 'm': treelite" in caplog.messages
    assert any("parameter 'chunk_size' has no effect" in message for message in caplog.messages)


def test_cpu_nthread_sets_the_threads(place: Place) -> None:
    files = place("lightgbm", "binary")

    instance = opened(files, config_of({SCORES: (1,)}, cpu_nthread="2"), threads=1)

    assert instance._threads == 2
    instance.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity on this system")
def test_an_instance_computes_on_its_cores(divided: dict[str, FilInstance], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[set[int]]()

    def look(predictor: TreelitePredictor, part: Rows) -> Rows:
        seen.append(os.sched_getaffinity(0))
        return np.zeros((len(part), CLASSES), np.float32)

    monkeypatch.setattr(TreelitePredictor, "scores", look)
    core = min(before := os.sched_getaffinity(0))
    base = divided["sklearn"]
    instance = FilInstance(base._forest, sized(0, {SCORES: (CLASSES,)}), base._plan, 2, (core,))

    scores_of(instance, rows(8))
    instance.close()

    assert seen == [{core}, {core}]
    assert os.sched_getaffinity(0) == before


def test_a_problem_is_named_by_its_path() -> None:
    with pytest.raises(ServingError, match=str(Problem("parameters\\['predictor'\\]", "expected one of"))):
        complete(ModelFiles(Path("m"), 1, Path("m/1")), ModelConfig(name="m", parameters={"predictor": "x"}))


@pytest.mark.parametrize("name", ["model.txt", "xgboost.json", "xgboost.ubj"])
def test_columns_of_a_data_frame_have_their_names_and_categories(tmp_path: Path, name: str) -> None:
    random = np.random.default_rng(0)
    second = "size" if name == "model.txt" else "größe"  # LightGBM refuses others
    table = pd.DataFrame({"age": random.integers(18, 80, 200), second: random.normal(size=200)})
    has_categories = name == "model.txt"
    cities = pd.Categorical(np.where(table.age > 40, "Ulm", "Köln"))
    table["city"] = cities if has_categories else cities.codes
    made = (
        lightgbm.LGBMRegressor(n_estimators=4, verbose=-1) if has_categories else xgboost.XGBRegressor(n_estimators=4)
    )
    forest: Any = made.fit(table, table.age * 2.0)
    (tmp_path / "1").mkdir()
    booster = forest.booster_ if has_categories else forest
    booster.save_model(tmp_path / "1" / name)
    files = ModelFiles(tmp_path, 1, tmp_path / "1")

    config = complete(files, ModelConfig(name="m", backend="fil")).config

    [schema] = json.loads(config.parameters["JSON_SCHEMA"])["inputs"].values()
    assert [each["title"] for each in schema["prefixItems"]] == ["age", second, "city"]
    assert schema["prefixItems"][2].get("enum") == (["Köln", "Ulm", None] if has_categories else None)
    wanted = ["Ulm", "Köln", None] if has_categories else [1, 0, None]
    sent = {"columns": ["city", second, "age"], "data": [[each, None, 30] for each in wanted]}
    decoded, _ = decode_predict(config, json.dumps({"dataframe_split": sent}).encode(), 1 << 20)
    config = replace(config, instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1),))
    found = scores_of(opened(files, config), decoded.inputs[INPUT].array.astype(np.float32))
    rows = pd.DataFrame({"age": [30] * 3, second: [np.nan] * 3})
    rows["city"] = pd.Categorical(wanted, cities.categories) if has_categories else np.array(wanted, float)
    np.testing.assert_allclose(found.reshape(-1), forest.predict(rows), rtol=1e-5)


def test_categories_of_xgboost_are_served_from_a_pickle(tmp_path: Path) -> None:
    table = pd.DataFrame({"city": pd.Categorical(["Ulm", "Köln"] * 50)})
    forest = xgboost.XGBRegressor(n_estimators=2, enable_categorical=True).fit(table, np.arange(100))
    (tmp_path / "1").mkdir()
    forest.save_model(tmp_path / "1" / "xgboost.json")

    with pytest.raises(ServingError) as caught:
        complete(ModelFiles(tmp_path, 1, tmp_path / "1"), ModelConfig(name="m", backend="fil"))

    assert caught.value.hint.startswith("treelite reads no categories of a data frame: joblib.dump(model, ")
