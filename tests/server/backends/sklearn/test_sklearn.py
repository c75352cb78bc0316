"""The sklearn backend: what is completed, what is refused, what is answered."""

import asyncio
import logging
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
import sklearn
import threadpoolctl
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from tests.support.backends import ask, complete, load, request, version_of
from tests.support.models import save_skops

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings
from charonia.server.backends.sklearn import features
from charonia.server.backends.sklearn.backend import SklearnBackend
from charonia.server.backends.sklearn.estimator import SklearnModel, Threads
from charonia.server.channel.tables import DataColumn

ROWS = np.random.default_rng(0).normal(size=(60, 4))
CLASSES = np.where(ROWS[:, 0] + ROWS[:, 1] > 0, "yes", "no")
FOREST = RandomForestClassifier(5, random_state=0, n_jobs=-1).fit(ROWS, CLASSES)
LOGISTIC = LogisticRegression().fit(ROWS, CLASSES)
TREE = 'parameters { key: "TRUSTED_TYPES" value { string_value: "sklearn.tree._tree.Tree" } }'
TRUSTED = 'parameters { key: "TRUSTED" value { string_value: "true" } }'


class Odd(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An estimator of a package that skops does not know."""

    def fit(self, rows: Array, targets: Array) -> "Odd":
        self.n_features_in_ = rows.shape[1]
        self.classes_ = np.unique(targets)
        return self

    owner: object = None

    def predict(self, rows: Array) -> Array:
        if np.asarray(rows, float).max() > 1e6:
            raise ZeroDivisionError("no such number")
        return np.resize(self.classes_, len(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    return tmp_path / "m"


def write(folder: Path, estimator: object) -> None:
    save_skops(estimator, folder / "1" / "model.skops")


def configuration(text: str = "") -> ModelConfig:
    return parse(f'name: "m" backend: "sklearn" {text}')


def completed(folder: Path, text: str = "") -> tuple[ModelConfig, tuple[str, ...]]:
    done = complete(SklearnBackend, version_of(folder), configuration(text))
    return done.config, done.notes


def tensors(config: ModelConfig) -> str:
    """Return the inputs and outputs of a configuration on one line."""

    def texts(side: Any) -> str:
        return ", ".join(
            f"{t.name} {t.data_type.wire} {list(t.dims)}{' as a scalar' if t.reshape is not None else ''}" for t in side
        )

    return f"{texts(config.input)} -> {texts(config.output)}"


def answer(folder: Path, config: ModelConfig, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Load the model, run one request and return its outputs."""

    instance = load(SklearnBackend, version_of(folder), config)
    kinds = {tensor.name: tensor.data_type for tensor in config.input}
    return ask(instance, request({name: (kinds[name], array) for name, array in arrays.items()}))  # type: ignore[misc]


def refusal(folder: Path, text: str = "") -> ServingError:
    """Complete and load the model, which fails."""
    with pytest.raises(ServingError) as caught:
        answer(folder, completed(folder, text)[0], {})
    return caught.value


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (LOGISTIC, "X FP64 [4] -> label BYTES [1] as a scalar, predict_proba FP64 [2]"),
        (
            LogisticRegression().fit(ROWS, ROWS[:, 0] > 0),
            "X FP64 [4] -> label BOOL [1] as a scalar, predict_proba FP64 [2]",
        ),
        (SVC().fit(ROWS, ROWS[:, 0] > 0), "X FP64 [4] -> label BOOL [1] as a scalar"),
        (LinearRegression().fit(ROWS, ROWS[:, 0]), "X FP64 [4] -> output FP64 [1] as a scalar"),
        (LinearRegression().fit(ROWS, ROWS[:, :3]), "X FP64 [4] -> output FP64 [3]"),
        (KMeans(3, n_init=1).fit(ROWS), "X FP64 [4] -> label INT32 [1] as a scalar"),
        (StandardScaler().fit(ROWS), "X FP64 [4] -> transform FP64 [4]"),
        (OneHotEncoder().fit([["a"], ["b"]]), "X BYTES [1] -> transform FP64 [2]"),
        (
            make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["a cat", "a dog"], [0, 1]),
            "X BYTES [1] as a scalar -> label INT64 [1] as a scalar, predict_proba FP64 [2]",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_and_outputs_are_completed_from_the_estimator(folder: Path, estimator: object, expected: str) -> None:
    write(folder, estimator)

    config, notes = completed(folder)

    assert tensors(config) == expected
    assert config.max_batch_size == 1024
    assert len(notes) >= 4


def test_an_output_for_several_targets_with_classes_is_left_out_with_a_note(folder: Path) -> None:
    targets = np.stack([CLASSES, CLASSES], axis=1)
    write(folder, RandomForestClassifier(2).fit(ROWS, targets))

    config, notes = completed(folder, TREE)

    assert tensors(config) == "X FP64 [4] -> label BYTES [2]"
    assert "output 'predict_proba': left out, as the estimator has several targets with classes" in notes


def test_a_forest_comes_with_a_hint_at_the_fil_backend(folder: Path) -> None:
    write(folder, FOREST)

    assert any("treelite.sklearn.import_model" in note for note in completed(folder, TREE)[1])


def test_the_answers_are_those_of_the_estimator(folder: Path) -> None:
    write(folder, FOREST)
    outputs = 'output { name: "predict_proba" data_type: TYPE_FP32 dims: 2 }'
    config, _ = completed(folder, f"{TREE} {outputs}")

    found = answer(folder, config, {"X": ROWS})

    assert list(found) == ["predict_proba"]
    assert found["predict_proba"].dtype == np.float32
    np.testing.assert_allclose(found["predict_proba"].astype(float), FOREST.predict_proba(ROWS), rtol=1e-6)


def test_any_method_can_be_an_output(folder: Path) -> None:
    write(folder, LOGISTIC)
    names = ("label", "decision_function", "predict_log_proba")
    text = " ".join(
        f'output {{ name: "{n}" data_type: TYPE_{t} dims: {d} }}'
        for n, t, d in zip(names, ("STRING", "FP64", "FP64"), (1, 1, 2), strict=True)
    )
    config, _ = completed(folder, f"max_batch_size: 100 {text}")

    found = answer(folder, config, {"X": ROWS})

    assert found["label"].tolist() == [[each.encode()] for each in LOGISTIC.predict(ROWS)]
    np.testing.assert_array_equal(found["decision_function"][:, 0], LOGISTIC.decision_function(ROWS))
    np.testing.assert_array_equal(found["predict_log_proba"], LOGISTIC.predict_log_proba(ROWS))


def test_without_batches_a_matrix_is_one_request(folder: Path) -> None:
    write(folder, LOGISTIC)
    text = 'input { name: "rows" data_type: TYPE_FP32 dims: [-1, 4] }'
    text += ' output { name: "label" data_type: TYPE_STRING dims: [-1] }'

    found = answer(folder, configuration(text), {"rows": ROWS.astype(np.float32)})

    assert found["label"].tolist() == [each.encode() for each in LOGISTIC.predict(ROWS)]


@pytest.mark.parametrize("fitted", [np.float64, np.float32])
@pytest.mark.parametrize("sent", ["FP64", "FP32"])
def test_an_estimator_gets_numbers_of_the_kind_that_it_takes(folder: Path, fitted: type, sent: str) -> None:
    estimator = KMeans(3, n_init=1, random_state=0).fit(ROWS.astype(fitted))  # refuses any other
    write(folder, estimator)
    config, _ = completed(folder, f'max_batch_size: 60 input {{ name: "X" data_type: TYPE_{sent} dims: 4 }}')

    found = answer(folder, config, {"X": ROWS.astype("f8" if sent == "FP64" else "f4")})

    assert found["label"].ravel().tolist() == estimator.labels_.tolist()


def test_texts_are_decoded(folder: Path) -> None:
    estimator = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["ein Bär", "a dog"] * 5, ["de", "en"] * 5)
    write(folder, estimator)
    config, _ = completed(folder)

    found = answer(folder, config, {"X": np.array(["der Bär".encode(), b"the dog"], object).reshape(2, 1)})

    assert found["label"].ravel().tolist() == [b"de", b"en"]
    with pytest.raises(ServingError, match="input 'X': expected texts in UTF-8"):
        answer(folder, config, {"X": np.array([[b"\xff"]], object)})


class TestTables:
    pytest.importorskip("pandas")

    @pytest.fixture
    def table(self, folder: Path) -> Any:
        import pandas as pd

        rows = pd.DataFrame({"age": [20.0, 30.0, 40.0, 50.0], "city": ["Rome", "Oslo", "Rome", "Oslo"]})
        columns = ColumnTransformer([("city", OneHotEncoder(), ["city"]), ("age", StandardScaler(), ["age"])])
        estimator = make_pipeline(columns, LogisticRegression()).fit(rows, [0, 0, 1, 1])
        write(folder, estimator)
        return estimator

    def test_columns_that_are_selected_by_name_are_inputs(self, folder: Path, table: Any) -> None:
        config, _ = completed(folder)

        assert tensors(config).startswith("age FP64 [1] as a scalar, city BYTES [1] as a scalar -> label INT64")
        sent = {"age": np.array([[25.0], [45.0]]), "city": np.array([[b"Rome"], [b"Oslo"]], object)}
        assert answer(folder, config, sent)["label"].ravel().tolist() == [0, 1]

    @pytest.mark.parametrize(
        ("names", "problem"),
        [
            (["age"], "the estimator needs column city"),
            (["age", "city"], "the estimator takes column 'city' as texts: TYPE_STRING"),
        ],
    )
    def test_a_column_that_does_not_fit_is_a_problem_of_the_configuration(
        self, folder: Path, table: Any, names: list[str], problem: str
    ) -> None:
        text = "".join(f'input {{ name: "{name}" data_type: TYPE_FP64 dims: 1 }}' for name in names)

        assert problem in refusal(folder, text).message

    def test_names_that_only_the_training_data_had_make_no_difference(self, folder: Path) -> None:
        import pandas as pd

        estimator = LogisticRegression().fit(pd.DataFrame(ROWS, columns=list("abcd")), CLASSES)
        write(folder, estimator)
        config, _ = completed(folder)

        names = ", ".join(f"{name} FP64 [1] as a scalar" for name in "abcd")
        assert tensors(config).startswith(f"{names} -> ")
        matrix, _ = completed(folder, 'max_batch_size: 100 input { name: "X" data_type: TYPE_FP32 dims: 4 }')
        one, other = (
            answer(folder, matrix, {"X": ROWS.astype("f4")}),
            answer(folder, config, {name: ROWS[:, [i]] for i, name in enumerate("abcd")}),
        )
        np.testing.assert_allclose(one["predict_proba"].astype(float), other["predict_proba"].astype(float), rtol=1e-5)
        assert other["label"].ravel().tolist() == [each.encode() for each in LOGISTIC.predict(ROWS)]

    def test_without_pandas_the_package_is_named(
        self, folder: Path, table: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)

        error = refusal(folder)

        assert "needs the package 'pandas', which is not installed" in error.message
        assert "install" in error.hint


def test_a_pickle_is_read_only_where_the_model_is_trusted(folder: Path) -> None:
    joblib.dump(LOGISTIC, folder / "1" / "model.joblib")

    error = refusal(folder)

    assert error.code is Code.UNSUPPORTED
    assert error.message.startswith("model.joblib is a pickle, which can run any code when it is read")
    assert 'parameters { key: "TRUSTED" value { string_value: "true" } }' in error.hint
    assert tensors(completed(folder, TRUSTED)[0]).startswith("X FP64 [4] -> label")


def test_a_pickle_that_is_not_trusted_is_refused_without_scikit_learn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joblib.dump(LOGISTIC, folder / "1" / "model.joblib")
    monkeypatch.setitem(sys.modules, "charonia.server.backends.sklearn.estimator", None)

    assert refusal(folder).message.startswith("model.joblib is a pickle")
    with pytest.raises(ModuleNotFoundError):
        completed(folder, TRUSTED)


def test_a_pickle_runs_nothing_before_it_is_trusted(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (folder / "ran",)

    joblib.dump(Trap(), folder / "1" / "model.pkl")
    (folder / "1" / "model.pkl").rename(folder / "1" / "model.skops")

    assert "cannot read model.skops: File is not a zip file" in refusal(folder).message
    assert not (folder / "ran").exists()


def test_a_file_that_is_served_alone_is_refused_with_the_command_that_serves_it(folder: Path) -> None:
    joblib.dump(LOGISTIC, folder / "1" / "my model.joblib")

    error = refusal(folder, 'default_model_filename: "my model.joblib" parameters { key: "TRY_EXAMPLE" value {} }')

    assert re.search(r"charonia serve --trust '.*my model\.joblib'$", error.hint)


def test_types_that_skops_does_not_know_are_refused_by_name(folder: Path) -> None:
    write(folder, FOREST)

    error = refusal(folder)

    assert error.code is Code.UNSUPPORTED
    assert error.message == "model.skops makes objects of types that are not trusted: sklearn.tree._tree.Tree"
    assert TREE in error.hint
    assert tensors(completed(folder, TREE)[0]) == tensors(completed(folder, TRUSTED)[0])


@pytest.mark.parametrize("content", [b"", b"nothing that is an archive"])
def test_a_file_that_is_none_of_skops_is_refused(folder: Path, content: bytes) -> None:
    (folder / "1" / "model.skops").write_bytes(content)

    error = refusal(folder)

    assert error.message == "cannot read model.skops: File is not a zip file"
    assert "was it copied as a whole?" in error.hint


def test_a_file_that_is_cut_short_is_refused(folder: Path) -> None:
    write(folder, LOGISTIC)
    joblib.dump(FOREST, folder / "whole.joblib")
    content = (folder / "1" / "model.skops").read_bytes()
    (folder / "1" / "model.skops").write_bytes(content[: len(content) // 2])
    assert "cannot read model.skops" in refusal(folder).message
    (folder / "1" / "model.skops").unlink()
    (folder / "1" / "model.joblib").write_bytes((folder / "whole.joblib").read_bytes()[:2000])

    error = refusal(folder, TRUSTED)

    assert error.code is Code.INVALID_ARG
    assert "cannot read model.joblib" in error.message


def test_a_file_of_skops_without_skops_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, LOGISTIC)
    monkeypatch.setitem(sys.modules, "skops.io", None)

    error = refusal(folder)

    assert error.message == "model.skops needs the package 'skops', which is not installed"
    assert "[sklearn]" in error.hint


def test_the_archive_of_another_framework_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(folder / "1" / "model.skops", "w") as archive:
        archive.writestr("archive/data.pkl", b"")

    assert refusal(folder).message == "model.skops is no estimator: it is a zip archive of archive/data.pkl"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": 1}, "model.joblib holds an object of type dict, expected an estimator with `predict` or `transform`"),
        (SVC(), "model.joblib: the SVC has not been fitted"),
    ],
)
def test_what_is_no_fitted_estimator_is_refused(folder: Path, value: object, problem: str) -> None:
    joblib.dump(value, folder / "1" / "model.joblib")

    assert refusal(folder, TRUSTED).message == problem


def test_a_class_that_is_not_installed_is_named(folder: Path) -> None:
    content = b"\x80\x04\x8c\x0amissing_id\x94\x8c\x05Model\x94\x93."  # GLOBAL missing_id.Model
    (folder / "1" / "model.pkl").write_bytes(content)

    error = refusal(folder, TRUSTED)

    assert "No module named 'missing_id'" in error.message
    assert "it needs the package that has 'missing_id'" in error.hint


@pytest.mark.parametrize("name", ["model.skops", "model.joblib"])
def test_a_file_of_another_version_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    path = folder / "1" / name
    if name == "model.skops":
        write(folder, LOGISTIC)
        with zipfile.ZipFile(path) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for entry, text in content.items():
                archive.writestr(entry, text.replace(sklearn.__version__.encode(), b"1.2.0"))
    else:
        joblib.dump(_Old({**LOGISTIC.__getstate__(), "_sklearn_version": "1.2.0"}), path)
    config, _ = completed(folder, TRUSTED)

    with caplog.at_level(logging.WARNING):
        answer(folder, config, {"X": ROWS[:1]})

    assert f"model 'm': {name} was written with scikit-learn 1.2.0, and this is" in caplog.text


class _Old:
    """Pickles an estimator as another version of scikit-learn would have."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        return LogisticRegression, (), self.state


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('input { name: "X" data_type: TYPE_FP32 dims: 5 }', "the estimator takes rows of 4 features, got dims [5]"),
        ('input { name: "X" data_type: TYPE_STRING dims: 4 }', "the estimator takes numbers, got TYPE_STRING"),
        (
            "".join(f'input {{ name: "{n}" data_type: TYPE_FP32 dims: 2 }}' for n in "ab"),
            "expected one input, the matrix; got a, b",
        ),
        (
            'output { name: "transform" data_type: TYPE_FP32 dims: 2 }',
            "unexpected inference output 'transform', the estimator provides: label, output, predict_proba",
        ),
        (
            'output { name: "predict_proba" data_type: TYPE_FP32 dims: 3 }',
            "the estimator answers 'predict_proba' with shape [-1, 2], got [-1, 3]",
        ),
        (
            'output { name: "label" data_type: TYPE_INT64 dims: 1 }',
            "the estimator answers 'label' as TYPE_STRING, got TYPE_INT64",
        ),
        (
            'output { name: "predict_proba" data_type: TYPE_INT32 dims: 2 }',
            "the estimator answers 'predict_proba' as TYPE_FP64, got TYPE_INT32",
        ),
        ('parameters { key: "N_JOBS" value { string_value: "0" } }', "expected a whole number of at least 1, got '0'"),
        ('parameters { key: "TRUSTED" value { string_value: "maybe" } }', "expected true or false, got 'maybe'"),
        ("instance_group { kind: KIND_GPU }", "no instances of KIND_GPU"),
    ],
)
def test_a_configuration_that_contradicts_the_estimator_is_refused(folder: Path, text: str, problem: str) -> None:
    write(folder, LOGISTIC)

    assert problem in refusal(folder, f"max_batch_size: 4 {text}").message


def test_what_the_estimator_refuses_and_what_it_fails_on_are_told_apart(folder: Path) -> None:
    joblib.dump(Odd().fit(ROWS, CLASSES), folder / "1" / "model.joblib")
    config, _ = completed(folder, TRUSTED)
    with pytest.raises(ServingError) as caught:
        answer(folder, config, {"X": np.full((1, 4), 1e7)})
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == "the estimator failed: ZeroDivisionError: no such number"
    (folder / "1" / "model.joblib").unlink()
    write(folder, LOGISTIC)

    with pytest.raises(ServingError) as caught:
        answer(folder, config, {"X": np.full((1, 4), np.nan)})

    assert caught.value.code is Code.INVALID_ARG
    assert "Input X contains NaN" in caught.value.message


@pytest.mark.parametrize(
    ("parameter", "jobs"), [("", 1), ('parameters { key: "N_JOBS" value { string_value: "3" } }', 3)]
)
def test_the_threads_of_an_estimator_are_not_those_of_its_file(folder: Path, parameter: str, jobs: int) -> None:
    write(folder, make_pipeline(StandardScaler(), RandomForestClassifier(2, n_jobs=-1)).fit(ROWS, CLASSES))

    config, _ = completed(folder, f"{TREE} {parameter}")

    model = asyncio.run(SklearnBackend().load(version_of(folder), config, BackendSettings()))

    assert isinstance(model, SklearnModel)
    assert [step.n_jobs for _, step in model.estimator.steps if hasattr(step, "n_jobs")] == [jobs]


class CountedLibrary:
    user_api = "openmp"
    filepath = "libgomp.so"

    def __init__(self) -> None:
        self.limits: list[int] = []

    def set_num_threads(self, threads: int) -> None:
        self.limits.append(threads)


def test_a_thread_is_limited_anew_only_when_another_model_ran_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CountedLibrary()
    monkeypatch.setattr(
        "charonia.server.backends.sklearn.estimator.ThreadpoolController",
        lambda: SimpleNamespace(lib_controllers=[library]),
    )
    one, other = Threads(), Threads()

    for threads, limit in ((one, 2), (one, 2), (other, 1), (one, 2), (one, 3)):
        threads.limit_thread(limit)
    in_another_thread = threading.Thread(target=one.limit_thread, args=(3,))
    in_another_thread.start()
    in_another_thread.join()

    assert library.limits == [2, 1, 2, 3, 3]


def test_native_libraries_use_the_threads_of_the_instance(folder: Path) -> None:
    write(folder, LOGISTIC)
    config, _ = completed(folder)

    with threadpoolctl.threadpool_limits(2):
        answer(folder, config, {"X": ROWS[:1]})
        found: dict[str, set[int]] = {}
        for library in threadpoolctl.threadpool_info():
            if "torch" not in library["filepath"]:
                found.setdefault(library["user_api"], set()).add(library["num_threads"])

    assert found == {"blas": {1}, "openmp": {1}}


def test_an_estimator_that_refers_to_itself_is_visited_once() -> None:
    inner = Odd().fit(ROWS, CLASSES)
    pipeline = make_pipeline(StandardScaler(), inner)
    inner.owner = [pipeline]

    assert [type(part).__name__ for part, _ in features.parts_of(pipeline)] == ["Pipeline", "StandardScaler", "Odd"]


def test_a_row_of_each_kind_of_features_is_an_example() -> None:
    columns = (DataColumn("age", np.dtype(float)), DataColumn("city", None, ("Rome",)))
    mixed = features.Features(2, columns, is_named=True)

    assert {name: array.tolist() for name, array in mixed.example(2).items()} == {
        "age": [1.0, 1.0],
        "city": [b"Rome", b"Rome"],
    }


def test_a_model_is_found_under_each_name(folder: Path) -> None:
    joblib.dump(LOGISTIC, folder / "1" / "model.pkl")
    shutil.copy(folder / "1" / "model.pkl", folder / "1" / "model.joblib")

    for name in ("model.joblib", "model.pkl"):
        assert name in refusal(folder).message
        (folder / "1" / name).unlink()
    assert refusal(folder).message == "model 'm' version 1 has no file 1/model.skops"
