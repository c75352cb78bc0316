"""Files that are tried in a process of their own, and forests that are not sound."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import treelite
from tests.support.forests import LEGACY, of_lightgbm, of_sklearn, of_xgboost

from charonia.core.errors import Code, ServingError
from charonia.server.backends.fil import probe
from charonia.server.backends.fil.forest import read_forest
from charonia.server.backends.fil.options import LIBRARY, TREELITE, ForestPlan
from charonia.server.backends.fil.predictors import library_of
from charonia.server.backends.fil.probe import DAMAGED, Probe, Prober, structure_problem
from charonia.server.backends.python.template import WorkerTemplate


def of_file(path: Path, model_type: str, *, explains: bool = False, predictor: str = "auto") -> Probe:
    return Probe("m", path, model_type, ForestPlan(predictor=predictor), explains)


def check(tried: Probe) -> None:
    asyncio.run(Prober().check(tried, keeps=False))


def refusal(tried: Probe) -> ServingError:
    with pytest.raises(ServingError) as caught:
        check(tried)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(f"model 'm': '{tried.path.name}' cannot be read as {tried.model_type}: ")
    return caught.value


def misplaced_trees(folder: Path) -> Path:
    """Write a file of LightGBM that says wrong where its trees begin: LightGBM aborts the process that reads it."""
    path = of_lightgbm("binary").write(folder)
    path.write_bytes(path.read_bytes().replace(b"tree_sizes=", b"tree_sizes=1"))
    return path


def test_a_good_file_of_each_kind_passes(tmp_path: Path) -> None:
    legacy = tmp_path / "xgboost.model"
    legacy.write_bytes(LEGACY)

    check(of_file(of_xgboost("multi").write(tmp_path), "xgboost_json", explains=True))
    check(of_file(of_xgboost("binary", "ubj").write(tmp_path), "xgboost_ubj"))
    check(of_file(of_lightgbm("multi").write(tmp_path), "lightgbm", explains=True))
    check(of_file(of_sklearn("multi").write(tmp_path), "treelite_checkpoint"))
    check(of_file(legacy, "xgboost"))


def test_a_file_that_kills_a_library_is_refused(tmp_path: Path) -> None:
    path = misplaced_trees(tmp_path)

    error = refusal(of_file(path, "lightgbm"))

    assert "what reads it crashes: the worker process was ended by SIGABRT" in error.message
    assert error.hint == DAMAGED
    check(of_file(path, "lightgbm", predictor=TREELITE))  # which does not read the damaged line


@pytest.mark.parametrize("damage", [b"[boosting gbdt]", b"[]", b"\xff\xff"])
def test_what_follows_the_trees_of_lightgbm_may_be_damaged(tmp_path: Path, damage: bytes) -> None:
    path = of_lightgbm("binary").write(tmp_path)
    content = path.read_bytes()
    assert b"[boosting: gbdt]" in content
    path.write_bytes(content.replace(b"[boosting: gbdt]", damage))
    tried = of_file(path, "lightgbm", explains=True, predictor=LIBRARY)

    check(tried)

    library_of(path, "lightgbm", read_forest(path, "lightgbm", tried.plan, "m"))


def test_a_file_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    model = treelite.Model.deserialize(of_sklearn("regression").write(tmp_path))
    model.get_header_accessor().set_field("num_feature", np.array([2**30], np.int32))
    model.serialize(path := tmp_path / "wide.tl")

    error = refusal(of_file(path, "treelite_checkpoint"))

    assert "it takes more than 2048 MiB of memory" in error.message
    assert error.hint == DAMAGED


def test_a_forest_that_leads_out_of_its_memory_is_refused(tmp_path: Path) -> None:
    model = treelite.Model.deserialize(of_sklearn("regression").write(tmp_path))
    spoil(model, "split_index", 0, 10**9)
    model.serialize(path := tmp_path / "beyond.tl")

    error = refusal(of_file(path, "treelite_checkpoint"))

    assert "tree 0: a test is of a feature that a row does not have" in error.message
    assert error.hint == DAMAGED


async def test_where_nothing_can_be_forked_a_process_imports_the_libraries_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = of_sklearn("regression").write(tmp_path / "good"), misplaced_trees(tmp_path / "bad")
    broken = WorkerTemplate("a library", ["no_such_library"], {})
    monkeypatch.setattr(Prober, "_template", lambda prober, library: prober._templates.setdefault(library, broken))

    prober = Prober()
    await prober.check(of_file(good, "treelite_checkpoint"), keeps=False)
    with pytest.raises(ServingError, match="ended by SIGABRT"):
        await prober.check(of_file(bad, "lightgbm"), keeps=False)
    await prober.aclose()
    assert "forests take longer to load: a library cannot be imported: ModuleNotFoundError" in caplog.text


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> Probe:
    """Return a probe whose process does something else."""
    script = folder / "model.py"
    script.write_text(
        "import os, signal, time\nclass TritonPythonModel:\n    @staticmethod\n"
        f"    def auto_complete_config(question):\n        {lines}\n"
    )
    monkeypatch.setattr(probe, "_SCRIPT", script)
    return of_file(of_sklearn("regression").write(folder), "treelite_checkpoint")


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S_MAX", 0.3)
    (pids := tmp_path / "pid").touch()
    hangs = scripted(tmp_path, monkeypatch, f"open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    error = refusal(hangs)

    assert "it was not read within 1 s" in error.message
    assert error.hint == DAMAGED
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_a_process_that_dies_is_an_error_with_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = scripted(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)")

    assert "what reads it crashes: the worker process was ended by SIGSEGV" in refusal(dies).message


def test_a_load_does_not_try_again_what_its_completion_has_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def passes(prober: Prober, tried: Probe, size: int) -> dict[str, str]:
        asked.append(tried.path.name)
        return {}

    monkeypatch.setattr(Prober, "_ask", passes)
    path = of_sklearn("regression").write(tmp_path)
    tried = of_file(path, "treelite_checkpoint")

    async def load(prober: Prober, *, changes: bool = False) -> int:
        asked.clear()
        await prober.check(tried, keeps=True)
        if changes:
            path.write_bytes(path.read_bytes() + b"\0")
        await prober.check(tried, keeps=False)
        return len(asked)

    async def run() -> list[int]:
        prober = Prober()
        return [await load(prober), await load(prober), await load(prober, changes=True)]

    assert asyncio.run(run()) == [1, 1, 2]


def test_a_library_is_tried_where_a_load_reads_with_it() -> None:
    path = Path("f")

    assert of_file(path, "lightgbm").library == of_file(path, "lightgbm", predictor=LIBRARY).library == "lightgbm"
    assert of_file(path, "xgboost_ubj", predictor=TREELITE, explains=True).library == "xgboost"
    assert of_file(path, "xgboost_json", predictor=TREELITE).library == ""
    assert of_file(path, "treelite_checkpoint", explains=True).library == ""


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
