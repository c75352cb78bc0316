"""What people have fitted: served from its file as a data frame of named columns, and asked with JSON and CSV."""

import json
import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from tests.support.backends import complete, load, version_of

from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.core.response import InferResponse
from charonia.server.backends.api import Outputs
from charonia.server.backends.sklearn.backend import SklearnBackend
from charonia.server.backends.sklearn.features import prepare
from charonia.wire.v1_predict import decode_predict, encode_predictions

BYTES_MAX = 1 << 20
RANDOM = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "age": RANDOM.integers(18, 80, 60),
        "city": RANDOM.choice(["Rome", "Oslo", "Bern"], 60),
        "income": RANDOM.normal(50, 10, 60),
        "member": RANDOM.choice([True, False], 60),
    }
)
CLASSES = np.where(TABLE.age > 40, "old", "young")
NUMBERS = TABLE.age * 2.0 + TABLE.income
CATEGORIES = TABLE.astype({"city": "category"})


def columns(*, imputes: bool = False) -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(), StandardScaler()) if imputes else StandardScaler()
    texts: Any = OneHotEncoder(handle_unknown="ignore")
    texts = make_pipeline(SimpleImputer(strategy="most_frequent"), texts) if imputes else texts
    return ColumnTransformer([("numbers", numbers, ["age", "income"]), ("texts", texts, ["city"])])


def pipeline(**options: bool) -> Any:
    return make_pipeline(columns(**options), LogisticRegression())


class Model:
    """An estimator in a file, completed and loaded."""

    def __init__(self, folder: Path, estimator: Any, *, example: Any = None, name: str = "model.joblib") -> None:
        self._files = version_of(folder / "m")
        version = self._files.version_dir
        if name.endswith(".cbm"):
            estimator.save_model(version / name)
        else:
            joblib.dump(estimator, version / name)
        text = 'name: "m" backend: "sklearn" parameters { key: "TRUSTED" value { string_value: "true" } }'
        if example is not None:
            example.to_csv(version / "rows.csv", index=False)
            text += ' parameters { key: "EXAMPLE_ROWS" value { string_value: "rows.csv" } }'
        self.config = complete(SklearnBackend, self._files, parse(text)).config
        self.schema = json.loads(self.config.parameters["JSON_SCHEMA"])
        self.example = json.loads(self.config.parameters["EXAMPLE"])

    @property
    def inputs(self) -> dict[str, str]:
        """Datatype by input; with a question mark where it can be left out."""
        kinds = {each.name: each.data_type for each in self.config.input}
        optional = {each.name for each in self.config.input if each.optional}
        return {name: kind.wire + "?" * (name in optional) for name, kind in kinds.items() if kind is not None}

    def predictions(self, body: object, content_type: bytes = b"") -> Any:
        """Return what the v1 protocol answers to a body."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        request, is_rows = decode_predict(self.config, sent, BYTES_MAX, content_type)
        [result] = load(SklearnBackend, self._files, self.config).execute([request]).results
        assert isinstance(result, Outputs), result
        response = InferResponse("m", "1", "", result.tensors)
        return json.loads(encode_predictions(response, is_rows, self.config))["predictions"]


def answers_as(model: Model, estimator: Any, rows: Any, records: list[dict[str, Any]]) -> None:
    """Check that records get what the estimator itself answers to a data frame."""
    found = model.predictions({"dataframe_records": records})
    expected = [each.item() if hasattr(each, "item") else each for each in np.ravel(estimator.predict(rows))]
    if hasattr(estimator, "predict_proba"):
        assert [each["label"] for each in found] == expected
        classes = [str(each) for each in estimator.classes_]
        shown = [[each["predict_proba"][name] for name in classes] for each in found]
        np.testing.assert_allclose(shown, estimator.predict_proba(rows), rtol=1e-9)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def boosted(name: str) -> Any:
    if name == "lightgbm":
        return pytest.importorskip("lightgbm").LGBMClassifier(n_estimators=4, verbose=-1)
    return pytest.importorskip("xgboost").XGBRegressor(n_estimators=4, enable_categorical=True)


def fitted(name: str) -> tuple[Any, Any]:
    """Return a fitted object, and the table that it was fitted with."""
    of_index = ColumnTransformer([("t", TfidfVectorizer(), 1), ("n", StandardScaler(), [0])])
    selected = ColumnTransformer(
        [
            ("n", StandardScaler(), make_column_selector(dtype_include="number")),
            ("t", OneHotEncoder(), make_column_selector(pattern="city")),
        ]
    )
    forest, grid = make_pipeline(columns(), RandomForestClassifier(3)), {"logisticregression__C": [0.1, 1.0]}
    regressor = make_pipeline(columns(), LinearRegression())
    made: dict[str, Any] = {
        "grid search": GridSearchCV(pipeline(), grid, cv=2),
        "random search": RandomizedSearchCV(pipeline(), grid, n_iter=2, cv=2, random_state=0),
        "calibration": CalibratedClassifierCV(pipeline(), cv=2),
        "voting": VotingClassifier([("a", pipeline()), ("b", forest)], voting="soft"),
        "stacking": StackingClassifier([("a", pipeline())], cv=2),
        "target": TransformedTargetRegressor(regressor, func=np.log1p, inverse_func=np.expm1),
        "selector": make_pipeline(selected, LogisticRegression()),
        "text by index": make_pipeline(of_index, LogisticRegression()),
        "histogram": HistGradientBoostingClassifier(max_iter=4, categorical_features=["city"]),
    }
    estimator = made[name] if name in made else boosted(name)
    tables = {"text by index": TABLE[["age", "city"]], "lightgbm": CATEGORIES, "xgboost": CATEGORIES}
    rows, target = tables.get(name, TABLE), NUMBERS if name in ("target", "xgboost") else CLASSES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(rows, target), rows


KINDS = (
    *("grid search", "random search", "calibration", "voting", "stacking", "target", "selector", "text by index"),
    *("histogram", "lightgbm", "xgboost"),
)


@pytest.mark.parametrize("name", KINDS)
def test_a_fitted_object_answers_records_as_it_answers_a_data_frame(tmp_path: Path, name: str) -> None:
    estimator, rows = fitted(name)

    model = Model(tmp_path, estimator)

    assert list(model.inputs) == list(rows.columns)
    assert model.inputs["city"].startswith("BYTES")
    assert model.config.max_batch_size == 1024
    answers_as(model, estimator, rows[:5], json.loads(TABLE[list(rows.columns)][:5].to_json(orient="records")))


@pytest.mark.filterwarnings("ignore")  # of pandas, as the package uses what is deprecated
def test_encoders_of_other_packages_are_served(tmp_path: Path) -> None:
    encoders = pytest.importorskip("category_encoders")
    estimator = make_pipeline(encoders.TargetEncoder(cols=["city"]), LogisticRegression()).fit(TABLE, CLASSES == "old")

    model = Model(tmp_path, estimator)

    answers_as(model, estimator, TABLE[:4], json.loads(TABLE[:4].to_json(orient="records")))


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_a_file_of_catboost_is_served_without_trust(tmp_path: Path, kind: str) -> None:
    catboost = pytest.importorskip("catboost")
    made = catboost.CatBoostClassifier if kind == "classifier" else catboost.CatBoostRegressor
    estimator = made(iterations=4, verbose=0, cat_features=["city"], allow_writing_files=False)
    rows = TABLE[["age", "city", "income"]]
    estimator.fit(rows, CLASSES if kind == "classifier" else NUMBERS)

    model = Model(tmp_path, estimator, name="model.cbm")

    assert model.inputs == {"age": "FP64?", "city": "BYTES", "income": "FP64?"}
    answers_as(model, estimator, rows[:4], json.loads(rows[:4].to_json(orient="records")))


def test_a_file_of_catboost_that_was_fitted_with_an_array_takes_a_matrix(tmp_path: Path) -> None:
    catboost = pytest.importorskip("catboost")
    estimator = catboost.CatBoostRegressor(iterations=4, verbose=0, allow_writing_files=False)
    rows = np.arange(30.0).reshape(10, 3)
    estimator.fit(rows, rows.sum(axis=1))

    model = Model(tmp_path, estimator, name="model.cbm")

    assert model.inputs == {"X": "FP64"}
    found = model.predictions({"instances": rows.tolist()})
    np.testing.assert_allclose(found, estimator.predict(rows), rtol=1e-9)


@pytest.mark.parametrize("has_formula", [True, False])
def test_results_of_statsmodels_are_served(tmp_path: Path, has_formula: bool) -> None:
    statsmodels = pytest.importorskip("statsmodels.api")
    if has_formula:
        from statsmodels.formula.api import ols

        results = ols("income ~ age + C(city)", data=TABLE).fit()
        rows = TABLE[["age", "city"]]
    else:
        rows = statsmodels.add_constant(TABLE[["age"]])
        results = statsmodels.OLS(TABLE.income, rows).fit()

    model = Model(tmp_path, results)

    found = model.predictions({"instances": json.loads(rows[:3].to_json(orient="records"))})
    np.testing.assert_allclose(found, results.predict(rows[:3]), rtol=1e-9)


def test_columns_without_names_are_a_matrix_in_their_order(tmp_path: Path) -> None:
    rows = TABLE[["age", "city"]].to_numpy()
    estimator = make_pipeline(
        ColumnTransformer([("t", TfidfVectorizer(), 1), ("n", StandardScaler(), [0])]), LogisticRegression()
    ).fit(rows, CLASSES)

    model = Model(tmp_path, estimator)

    assert model.inputs == {"X": "BYTES"}
    found = model.predictions({"instances": rows[:3].tolist()})
    assert [each["label"] for each in found] == estimator.predict(rows[:3]).tolist()


class TestMissingValues:
    def test_what_the_pipeline_imputes_may_be_null_or_left_out(self, tmp_path: Path) -> None:
        estimator = pipeline(imputes=True).fit(TABLE, CLASSES)
        model = Model(tmp_path, estimator)

        found = model.predictions([{"age": None, "city": "Oslo"}, {"age": 30, "city": None}])

        rows = pd.DataFrame(
            {"age": [np.nan, 30], "city": ["Oslo", np.nan], "income": [np.nan] * 2, "member": [True] * 2}
        )
        assert [each["label"] for each in found] == estimator.predict(rows).tolist()
        assert model.inputs == {"age": "FP64?", "city": "BYTES?", "income": "FP64?", "member": "FP64?"}
        assert model.schema["inputs"]["age"]["type"] == ["number", "boolean", "null"]

    def test_only_columns_that_are_used_are_required(self, tmp_path: Path) -> None:
        model = Model(tmp_path, pipeline().fit(TABLE, CLASSES))

        assert model.predictions([{"age": 30, "city": "Oslo", "income": 5}])[0]["label"] == "young"
        with pytest.raises(ServingError) as caught:
            model.predictions([{"city": "Oslo", "income": 5}])
        assert str(caught.value) == "model 'm': the table lacks age (hint: its inputs are age, city, income, member)"
        with pytest.raises(ServingError, match="row 1 has no value for 'age', which model 'm' needs"):
            model.predictions([{"age": 30, "city": "Oslo", "income": 5}, {"city": "Oslo", "income": 5}])

    def test_a_misspelt_column_is_not_taken_for_one_that_is_left_out(self, tmp_path: Path) -> None:
        model = Model(tmp_path, pipeline(imputes=True).fit(TABLE, CLASSES))

        with pytest.raises(ServingError, match=r"has no input 'incoem' .*did you mean 'income'"):
            model.predictions([{"age": 30, "city": "Oslo", "incoem": 5}])

    def test_a_category_that_is_missing_is_missing(self, tmp_path: Path) -> None:
        estimator, _ = fitted("lightgbm")
        model = Model(tmp_path, estimator)

        [found] = model.predictions([{"age": 30, "city": None, "income": None, "member": None}])

        row = CATEGORIES[:1].assign(
            age=30.0, city=pd.Categorical([None], CATEGORIES.city.cat.categories), income=np.nan
        )
        row["member"] = np.nan
        assert found["predict_proba"] == pytest.approx(
            dict(zip(estimator.classes_, estimator.predict_proba(row)[0], strict=True))
        )


class TestExamples:
    def test_example_rows_say_what_the_estimator_does_not(self, tmp_path: Path) -> None:
        rows = pd.DataFrame({"when": pd.to_datetime(["2024-01-31", "2024-02-03"] * 3), "flag": [True, False, True] * 2})
        estimator = make_pipeline(FunctionTransformer(_days), LinearRegression()).fit(rows, range(6))

        with pytest.raises(ServingError, match=r"rows\.csv"):
            Model(tmp_path / "without", estimator)
        model = Model(tmp_path / "with", estimator, example=rows)

        assert model.inputs == {"when": "BYTES", "flag": "BOOL"}
        assert model.schema["inputs"]["when"]["format"] == "date-time"
        assert model.example == {"when": "2024-01-31T00:00:00", "flag": True}
        found = model.predictions(
            [{"when": "2024-01-31", "flag": True}, {"when": "2024-02-03T00:00:00", "flag": False}]
        )
        np.testing.assert_allclose(found, estimator.predict(rows[:2]))
        with pytest.raises(ServingError, match="expected times in ISO 8601"):
            model.predictions([{"when": "tomorrow", "flag": True}])

    def test_an_object_without_names_gets_those_of_its_example(self, tmp_path: Path) -> None:
        rows = TABLE[["age", "income"]]
        estimator = LogisticRegression().fit(rows.to_numpy(), CLASSES)

        model = Model(tmp_path, estimator, example=rows)

        answers_as(model, estimator, rows[:3].to_numpy(), json.loads(rows[:3].to_json(orient="records")))

    def test_example_rows_with_other_columns_are_refused(self, tmp_path: Path) -> None:
        estimator = LogisticRegression().fit(TABLE[["age", "income"]], CLASSES)

        with pytest.raises(ServingError, match="the example rows lack column income"):
            Model(tmp_path / "a", estimator, example=TABLE[["age"]])
        with pytest.raises(ServingError, match="the example rows have 4 columns, and the estimator takes 2"):
            Model(tmp_path / "b", LogisticRegression().fit(TABLE[["age", "income"]].to_numpy(), CLASSES), example=TABLE)


def _days(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"day": rows["when"].dt.day_of_week, "up": rows["flag"].map({True: 1.0, False: 0.0})})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("bodies"), pipeline(imputes=True).fit(TABLE, CLASSES))


class TestBodies:
    RECORDS = json.loads(TABLE[:3].to_json(orient="records"))

    @pytest.mark.parametrize(
        "body",
        [
            RECORDS,
            {"dataframe_records": RECORDS},
            {"instances": RECORDS},
            {"dataframe_split": json.loads(TABLE[:3].to_json(orient="split"))},
            {"dataframe_split": json.loads(TABLE[["city", "member", "income", "age"]][:3].to_json(orient="split"))},
            TABLE[:3].to_csv(index=False).encode(),
        ],
        ids=lambda body: next(iter(body)) if isinstance(body, dict) else type(body).__name__,
    )
    def test_a_table_has_many_forms(self, model: Model, body: object) -> None:
        found = model.predictions(body, b"text/csv; charset=utf-8" if isinstance(body, bytes) else b"")

        assert [each["label"] for each in found] == pipeline(imputes=True).fit(TABLE, CLASSES).predict(
            TABLE[:3]
        ).tolist()

    def test_rows_without_names_are_refused_where_columns_have_names(self, model: Model) -> None:
        for body in ({"instances": [[1, "Rome", 2, True]]}, {"dataframe_split": {"data": [[1, "Rome", 2, True]]}}):
            with pytest.raises(ServingError, match="expected objects with the inputs age, city, income, member"):
                model.predictions(body)

    def test_classes_are_named(self, model: Model) -> None:
        assert model.schema["outputs"]["label"]["enum"] == ["old", "young"]
        assert [each["title"] for each in model.schema["outputs"]["predict_proba"]["prefixItems"]] == ["old", "young"]
        assert model.schema["inputs"]["city"]["examples"] == ["Bern", "Oslo", "Rome"]
        assert model.example["city"] in ("Bern", "Oslo", "Rome")


@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(),
        make_pipeline(SimpleImputer(), StandardScaler(), RandomForestClassifier(5, random_state=0)),
        GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0]}, cv=2),
        HistGradientBoostingClassifier(max_iter=5),
    ],
    ids=["logistic", "pipeline", "search", "boosting"],
)
def test_an_estimator_that_does_not_look_at_names_gets_arrays_and_does_not_warn(estimator: Any) -> None:
    rows = TABLE[["income", "age"]].astype(float)
    estimator.fit(rows, CLASSES)
    expected = estimator.predict(rows)

    features = prepare(estimator)
    found = features.rows({"age": rows.age.to_numpy(), "income": rows.income.to_numpy()})

    assert features.names == ("income", "age")
    assert isinstance(found, np.ndarray)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert estimator.predict(found).tolist() == expected.tolist()


def test_an_estimator_that_looks_at_names_keeps_them() -> None:
    estimator = make_pipeline(ColumnTransformer([("a", StandardScaler(), ["income"])]), LogisticRegression())
    estimator.fit(TABLE[["income", "age"]].astype(float), CLASSES)

    features = prepare(estimator)

    assert features.takes_frame
    assert estimator.feature_names_in_.tolist() == ["income", "age"]
