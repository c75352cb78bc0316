"""A server with estimators of scikit-learn, as its clients see it."""

from collections.abc import Iterator
from pathlib import Path

import joblib
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tests.support.fork_server import run_command
from tests.support.models import save_skops
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

ROWS = np.random.default_rng(0).normal(size=(60, 4))
CLASSES = np.where(ROWS[:, 0] + ROWS[:, 1] > 0, "yes", "no")
PIPELINE = make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, CLASSES)
FOREST = RandomForestClassifier(5, random_state=0).fit(ROWS, CLASSES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("sklearn")
    for name in ("pipeline", "forest"):
        (repository / name / "1").mkdir(parents=True)
    save_skops(PIPELINE, repository / "pipeline" / "1" / "model.skops")
    joblib.dump(FOREST, repository / "forest" / "1" / "model.joblib")
    (repository / "forest" / "config.pbtxt").write_text(
        'max_batch_size: 64 parameters { key: "TRUSTED" value { string_value: "true" } }'
    )
    with ServeProcess(repository) as running:
        yield running


@pytest.mark.parametrize(("model", "estimator"), [("pipeline", PIPELINE), ("forest", FOREST)])
def test_an_estimator_answers_over_both_protocols(
    server: ServeProcess, model: str, estimator: LogisticRegression
) -> None:
    x = ROWS[:4]

    with http.InferenceServerClient(server.http) as client:
        one = client.infer(model, [infer_input(http, "X", x)])
    with grpc.InferenceServerClient(server.grpc) as client:
        other = client.infer(model, [infer_input(grpc, "X", x)])

    for answer in (one, other):
        assert answer.as_numpy("label").tolist() == [[label.encode()] for label in estimator.predict(x)]
        np.testing.assert_allclose(answer.as_numpy("predict_proba"), estimator.predict_proba(x), rtol=1e-12)


def test_a_file_is_served_as_it_is_and_a_pickle_if_it_is_trusted(tmp_path: Path) -> None:
    save_skops(PIPELINE, tmp_path / "iris.skops")
    joblib.dump(FOREST, tmp_path / "forest.joblib")

    refused = run_command("serve", str(tmp_path / "forest.joblib"), "--http-port=0", "--grpc-port=0")

    assert refused.returncode == 1
    assert f"charonia serve --trust {tmp_path / 'forest.joblib'}" in refused.stderr
    with ServeProcess(tmp_path / "iris.skops", str(tmp_path / "forest.joblib"), "--trust") as server:
        asked = run_command("infer", "iris", "-u", server.http, "-i", "X=1,1,0,0")
        assert asked.stdout.splitlines()[0] == "label BYTES[1,1]: yes"
        assert run_command("infer", "forest", "-u", server.http, "-i", "X=1,1,0,0").returncode == 0
