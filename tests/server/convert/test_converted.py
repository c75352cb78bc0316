"""Real models of each library as ONNX, through the command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import joblib
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingRegressor, IsolationForest, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.svm import SVC
from tests.support.kept import kept_folder
from tests.support.models import save_skops

from charonia.cli.convert import run
from charonia.core.tensor import Array
from charonia.server.backends.conversion import rename, unknown_operators

KERAS_MODEL = Path(__file__).parents[2] / "support" / "keras_model.py"
ROWS = np.random.default_rng(0).normal(size=(60, 4))
CLASSES = np.where(ROWS[:, 0] + ROWS[:, 1] * ROWS[:, 2] > 0, "yes", "no")
TEXTS = ["the cat sat", "a dog ran", "shares fell", "the market rose"] * 3


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answers(path: str, feed: Mapping[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


@pytest.mark.parametrize(
    ("estimator", "targets", "outputs"),
    [
        (make_pipeline(StandardScaler(), LogisticRegression()), CLASSES, ["label", "predict_proba"]),
        (RandomForestClassifier(5, random_state=0), CLASSES, ["label", "predict_proba"]),
        (GradientBoostingRegressor(n_estimators=5), ROWS[:, 0] * ROWS[:, 1], ["output"]),
        (make_pipeline(StandardScaler(), SVC()), CLASSES, ["label"]),
        (KMeans(3, n_init=1, random_state=0), None, ["label"]),
        (IsolationForest(n_estimators=5, random_state=0), None, ["label"]),
        (StandardScaler(), None, ["transform"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_estimator_answers_as_onnx_what_it_answers_itself(
    estimator: object, targets: Array | None, outputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    estimator.fit(ROWS, targets)  # type: ignore[attr-defined]
    save_skops(estimator, "m.skops")

    assert run(["m.skops", "--trust"]) == 0

    shown = capsys.readouterr().out
    assert "in batches of 1 and 16" in shown
    assert "charonia serve m.onnx" in shown
    found = answers("m.onnx", {"X": ROWS.astype(np.float32)})
    assert list(found) == outputs
    method = estimator.transform if outputs == ["transform"] else estimator.predict  # type: ignore[attr-defined]
    expected = method(ROWS)
    got = found[outputs[0]].reshape(expected.shape)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    else:
        assert got.tolist() == expected.tolist()


def test_a_pipeline_of_texts_is_tried_with_the_words_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    estimator = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, ["pet", "pet", "money", "money"] * 3)
    save_skops(estimator, "texts.skops")

    assert run(["texts.skops"]) == 0

    assert answers("texts.onnx", {"X": np.array([["The DOG sat"]], object)})["label"].tolist() == ["pet"]


def test_columns_that_are_selected_by_name_stay_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    pd = pytest.importorskip("pandas")
    rows = pd.DataFrame({"age": [20.0, 30.0, 40.0, 50.0], "city": ["Rome", "Oslo", "Rome", "Oslo"]})
    columns = ColumnTransformer([("city", OneHotEncoder(), ["city"]), ("age", StandardScaler(), ["age"])])
    save_skops(make_pipeline(columns, LogisticRegression()).fit(rows, [0, 0, 1, 1]), "m.skops")

    assert run(["m.skops", "--trust"]) == 0

    feed = {"age": np.array([[25.0], [45.0]], np.float32), "city": np.array([["Rome"], ["Oslo"]], object)}
    assert answers("m.onnx", feed)["label"].tolist() == [0, 1]


def test_a_model_goes_to_a_repository_under_its_name() -> None:
    save_skops(LogisticRegression().fit(ROWS, CLASSES), "m.skops")

    assert run(["m.skops", "--repository", "models", "--name", "iris"]) == 0

    assert Path("models/iris/1/model.onnx").is_file()


@pytest.mark.parametrize("where", [("--output", "m.onnx"), ("--repository", "models")])
def test_a_file_that_is_there_is_replaced_by_force_only(
    where: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    save_skops(LogisticRegression().fit(ROWS, CLASSES), "m.skops")
    path = Path("m.onnx" if where[0] == "--output" else "models/m/1/model.onnx")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")

    assert run(["m.skops", *where]) == 1
    shown = capsys.readouterr()
    assert f"'{path}' is there already (hint: --force replaces it)" in shown.err
    assert "converting" not in shown.out
    assert path.read_text() == "precious"

    assert run(["m.skops", *where, "--force"]) == 0
    assert path.stat().st_size > 100


def test_nothing_is_written_where_the_answers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    save_skops(LogisticRegression().fit(ROWS, CLASSES), "m.skops")

    assert run(["m.skops", "--tolerance", "0"]) == 1

    assert not Path("m.onnx").exists()
    shown = capsys.readouterr()
    assert "nothing was written: 'predict_proba' differ by more than --tolerance 0" in shown.err
    assert " of 34" in shown.out


def test_samples_of_a_file_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    save_skops(LogisticRegression().fit(ROWS, CLASSES), "m.skops")
    np.savez("samples.npz", X=ROWS)

    assert run(["m.skops", "--samples", "samples.npz"]) == 0

    assert "samples of the file against the original, in batches of 1 and 60" in capsys.readouterr().out


def test_answers_that_are_all_alike_are_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    save_skops(LogisticRegression().fit(ROWS, CLASSES), "m.skops")
    np.savez("samples.npz", X=np.ones((5, 4)))

    assert run(["m.skops", "--samples", "samples.npz"]) == 0

    assert "! The original answers all samples alike" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("write", "arguments", "problem"),
    [
        (lambda: None, ["m.skops"], "there is no file or folder 'm.skops'"),
        (lambda: Path("m.onnx").write_bytes(b""), ["m.onnx"], "'m.onnx' is an ONNX model already"),
        (lambda: Path("my m.onnx").write_bytes(b""), ["my m.onnx"], "(hint: charonia serve 'my m.onnx')"),
        (lambda: Path("m.txt").write_bytes(b""), ["m.txt"], "'m.txt' is of no form that can be converted"),
        (lambda: joblib.dump(SVC(), "m.joblib"), ["m.joblib"], "is a pickle, which can run any code"),
        (lambda: joblib.dump(SVC(), "m.joblib"), ["m.joblib", "--trust"], "the SVC has not been fitted"),
        (
            lambda: save_skops(LabelSpreading().fit(ROWS, CLASSES == "yes"), "m.skops"),
            ["m.skops"],
            "has no conversion for sklearn.semi_supervised._label_propagation.LabelSpreading",
        ),
        (
            lambda: save_skops(RandomForestClassifier(2).fit(ROWS, CLASSES), "m.skops"),
            ["m.skops"],
            "types that are not trusted: sklearn.tree._tree.Tree (hint: if you trust its source: --trust, or "
            "--trusted-types sklearn.tree._tree.Tree)",
        ),
        (
            lambda: save_skops(SVC().fit(ROWS, CLASSES), "m.skops"),
            ["m.skops", "--samples", "none.npz"],
            "--samples: cannot read 'none.npz'",
        ),
        (lambda: torch.save({"w": torch.ones(1)}, "m.pt"), ["m.pt"], "is a checkpoint of weights"),
        (lambda: Path("m.pt").write_bytes(b"nothing"), ["m.pt"], "m.pt is not a PyTorch model"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(
    write: object, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write()  # type: ignore[operator]

    assert run(arguments) == 1

    assert problem in capsys.readouterr().err


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.relu(self.layer(x))
        return result


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.linalg.eigvals(x).real
        return result


def test_an_exported_program_keeps_its_names_and_its_batches(capsys: pytest.CaptureFixture[str]) -> None:
    program = torch.export.export(
        Network().eval(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    torch.export.save(program, "net.pt2")

    assert run(["net.pt2"]) == 0

    assert "in batches of 1 and 16" in capsys.readouterr().out
    x = np.ones((5, 4), np.float32)
    expected = program.module()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(answers("net.onnx", {"x": x})["OUTPUT__0"].astype("f4"), expected, rtol=1e-5)


def test_a_program_with_a_fixed_batch_stays_so_and_a_note_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    torch.export.save(torch.export.export(Network().eval(), (torch.ones(2, 4),)), "net.pt2")

    assert run(["net.pt2"]) == 0

    shown = capsys.readouterr().out
    assert "note        the first dimension is fixed, so the model cannot batch: 'x' [2, 4]" in shown
    assert "in batches of 2" in shown


def test_torchscript_is_converted_with_inputs_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    torch.jit.script(Sum()).save("sum.pt")  # type: ignore[no-untyped-call]

    assert run(["sum.pt"]) == 1
    assert "--input NAME:TYPE:DIMS" in capsys.readouterr().err
    assert run(["sum.pt", "--input", "x:FP32:-1,2", "--input", "y:FP32:-1,2"]) == 0
    feed = {"x": np.ones((3, 2), np.float32), "y": np.ones((3, 2), np.float32)}
    assert answers("sum.onnx", feed)["OUTPUT__0"].tolist() == [[2.0, 2.0]] * 3


@pytest.mark.parametrize("name", ["odd.pt", "odd.pt2"])
def test_an_operator_that_cannot_be_converted_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "odd.pt":
        torch.jit.trace(Odd(), torch.ones(2, 2)).save(name)  # type: ignore[no-untyped-call]
    else:
        torch.export.save(torch.export.export(Odd(), (torch.ones(2, 2),)), name)

    assert run([name, "--input", "x:FP32:2,2"]) == 1

    assert "has no conversion for aten" in capsys.readouterr().err


def test_the_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("charonia.server.backends.conversion.find_spec", lambda name: None)
    os.mkdir("saved")
    Path("saved/saved_model.pb").touch()

    assert run(["saved"]) == 1

    shown = capsys.readouterr().err
    assert "needs the packages 'tensorflow', 'tf2onnx', 'onnx', which are not installed" in shown
    assert "[convert,tensorflow]" in shown


def test_a_keras_model_is_converted_in_a_process_of_its_own(
    pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(folder: Path) -> None:
        subprocess.run([sys.executable, KERAS_MODEL, folder / "net.keras"], check=True, capture_output=True)

    kept = kept_folder(pytestconfig, "keras", make, sources=[KERAS_MODEL], packages=["keras"])
    shutil.copy(kept / "net.keras", "net.keras")

    assert run(["net.keras"]) == 0

    shown = capsys.readouterr()
    assert "Keras model, tensorflow" in shown.out
    assert "in batches of 1 and 16" in shown.out
    assert shown.err == ""
    assert {name: array.shape for name, array in answers("net.onnx", {"x": np.ones((2, 4), np.float32)}).items()} == {
        "output_0": (2, 3)
    }


def test_operators_that_onnx_does_not_have_are_found_by_name() -> None:
    nodes = [onnx.helper.make_node(name, ["x"], ["y"]) for name in ("Relu", "StringLower", "RaggedGather")]
    nodes.append(onnx.helper.make_node("Mine", ["x"], ["y"], domain="mine"))

    found = unknown_operators(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [])))

    assert found == ["RaggedGather", "StringLower"]


def test_a_tensor_that_has_the_new_name_of_another_gives_way() -> None:
    nodes = [onnx.helper.make_node("Relu", ["x"], ["label"]), onnx.helper.make_node("Neg", ["label"], ["output_label"])]
    floats = onnx.TensorProto.FLOAT
    x, label = (onnx.helper.make_tensor_value_info(name, floats, [1]) for name in ("x", "output_label"))
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [label]), ir_version=8)

    rename(model, {"x": "X", "output_label": "label"})

    onnx.checker.check_model(model)
    onnx.save(model, "m.onnx")
    assert answers("m.onnx", {"X": np.array([2.0], np.float32)})["label"].tolist() == [-2.0]


def test_a_process_that_ends_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("charonia.server.backends.tensorflow.original.WORKER", "charonia.there_is_no_such_module")
    Path("net.tflite").touch()

    assert run(["net.tflite"]) == 1

    assert "its process ended with status 1: " in capsys.readouterr().err
