"""Ten kinds of fitted objects, from the file that a notebook writes to the endpoint."""

import functools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import joblib
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.ensemble import HistGradientBoostingClassifier, StackingClassifier, VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from statsmodels.formula.api import ols
from tests.support.process import SHAPES, ServeProcess, Shape

RANDOM = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "age": RANDOM.integers(18, 80, 60),
        "city": RANDOM.choice(["Rome", "Oslo", "Bern"], 60),
        "income": RANDOM.normal(50, 10, 60),
    }
)
CATEGORIES = TABLE.astype({"city": "category"})
CLASSES = np.where(TABLE.age > 40, "old", "young")
NUMBERS = TABLE.age * 2.0 + TABLE.income
RECORDS = json.loads(TABLE[:5].to_json(orient="records"))


def columns() -> Any:
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    return ColumnTransformer(
        [
            ("numbers", numbers, make_column_selector(dtype_include="number")),
            ("texts", OneHotEncoder(handle_unknown="ignore"), ["city"]),
        ]
    )


def classifier() -> Any:
    return make_pipeline(columns(), LogisticRegression())


# fmt: off
NAMES = [
    "pipeline", "search", "calibrated", "voting", "stacking", "target", "histogram", "lightgbm", "xgboost",
    "statsmodels",
]
# fmt: on


@functools.cache
def fitted() -> dict[str, Any]:
    """Return the fitted objects, by the name of their files."""
    regressor = TransformedTargetRegressor(
        make_pipeline(columns(), LinearRegression()), func=np.log1p, inverse_func=np.expm1
    )
    return {
        "pipeline": classifier().fit(TABLE, CLASSES),
        "search": GridSearchCV(classifier(), {"logisticregression__C": [0.1, 1.0]}, cv=2).fit(TABLE, CLASSES),
        "calibrated": CalibratedClassifierCV(classifier(), cv=2).fit(TABLE, CLASSES),
        "voting": VotingClassifier([("a", classifier()), ("b", classifier())], voting="soft").fit(TABLE, CLASSES),
        "stacking": StackingClassifier([("a", classifier())], cv=2).fit(TABLE, CLASSES),
        "target": regressor.fit(TABLE, NUMBERS),
        "histogram": HistGradientBoostingClassifier(max_iter=4, categorical_features=["city"]).fit(TABLE, CLASSES),
        "lightgbm": lightgbm.LGBMClassifier(n_estimators=4, verbose=-1).fit(CATEGORIES, CLASSES),
        "xgboost": xgboost.XGBRegressor(n_estimators=4, enable_categorical=True).fit(CATEGORIES, NUMBERS),
        "statsmodels": ols("income ~ age + C(city)", data=TABLE).fit(),
    }


@pytest.fixture(scope="module", params=SHAPES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    shape: Shape = request.param
    folder = tmp_path_factory.mktemp("estimators")
    paths = [folder / f"{name}.joblib" for name in NAMES]
    for path in paths:
        joblib.dump(fitted()[path.stem], path)
    options = ("--trust", "--kserve-v1", "--mlflow-model=search", *shape)
    with ServeProcess(paths[0], *map(str, paths[1:]), *options) as running:
        yield running


def call(server: ServeProcess, path: str, body: object = None, content_type: str = "application/json") -> Any:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}/{path}", data, {"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=200) as response:
        return json.load(response)


def rows_of(name: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.astype({"city": CATEGORIES.city.dtype}) if name in ("lightgbm", "xgboost") else rows


@pytest.mark.parametrize("name", NAMES)
def test_a_file_answers_records_as_the_object_answers_its_data_frame(server: ServeProcess, name: str) -> None:
    takes = ["age", "city"] if name == "statsmodels" else list(TABLE.columns)
    records = [{column: record[column] for column in takes} for record in RECORDS]

    answer = call(server, f"v2/models/{name}/generate", records)

    estimator, rows = fitted()[name], rows_of(name, TABLE[:5])
    if hasattr(estimator, "classes_"):
        assert answer["label"] == estimator.predict(rows).tolist()
        shown = [[each["old"], each["young"]] for each in answer["predict_proba"]]
        np.testing.assert_allclose(shown, estimator.predict_proba(rows), rtol=1e-9)
    else:
        np.testing.assert_allclose(answer["output"], estimator.predict(rows), rtol=1e-6)


def test_mlflows_bodies_are_answered_with_what_predict_returns(server: ServeProcess) -> None:
    expected = {"predictions": fitted()["search"].predict(TABLE[:5]).tolist()}

    assert call(server, "invocations", {"dataframe_records": RECORDS}) == expected
    assert call(server, "invocations", {"dataframe_split": json.loads(TABLE[:5].to_json(orient="split"))}) == expected
    assert call(server, "invocations", TABLE[:5].to_csv(index=False).encode(), "text/csv") == expected


def test_rows_of_v1_have_labels_and_probabilities(server: ServeProcess) -> None:
    [first, *_] = call(server, "v1/models/voting:predict", {"instances": RECORDS})["predictions"]

    assert first["label"] == max(first["predict_proba"], key=first["predict_proba"].get)


def test_missing_values_are_imputed_together_with_rows_that_have_them(server: ServeProcess) -> None:
    answer = call(server, "v2/models/pipeline/generate", [{"age": None, "city": "Oslo", "income": 1}, RECORDS[0]])
    lone = call(server, "v2/models/pipeline/generate", {"age": 30, "city": "Oslo"})

    rows = pd.DataFrame([{"age": np.nan, "city": "Oslo", "income": 1}, RECORDS[0], {"age": 30, "city": "Oslo"}])
    assert [*answer["label"], lone["label"]] == fitted()["pipeline"].predict(rows).tolist()


def test_metadata_have_columns_and_classes(server: ServeProcess) -> None:
    metadata = call(server, "v2/models/lightgbm")

    assert [each["name"] for each in metadata["inputs"]] == ["age", "city", "income"]
    assert metadata["inputs"][1]["parameters"] == {"examples": ["Bern", "Oslo", "Rome"]}
    assert [each["parameters"] for each in metadata["outputs"]] == [
        {"values": ["old", "young"]},
        {"columns": ["old", "young"]},
    ]


def test_the_document_of_the_server_describes_columns(server: ServeProcess) -> None:
    document = call(server, "openapi.json")

    body = document["paths"]["/v2/models/search/generate"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["schema"]["properties"]) >= {"age", "city", "income"}
    assert body["example"]["city"] in ("Bern", "Oslo", "Rome")
