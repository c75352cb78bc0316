"""Ensembles of models with and without batches, the sequence in their responses, and their statistics."""

from typing import Any

import pytest
from tests.support.models import PYTHON_IDENTITY, write_model
from tests.support.peers import Pair, once_counted

TENSOR = '{0} {{ name: "{1}0" data_type: TYPE_FP32 dims: [ {2} ] }} '
STEP = """step {{ model_name: "{0}" model_version: -1 input_map {{ key: "INPUT0" value: "{1}" }}
  output_map {{ key: "OUTPUT0" value: "{2}" }} }} """
MEMBERS = {"row": (0, "4"), "rows": (0, "-1, 4"), "batching": (4, "4")}
ENSEMBLES: dict[str, tuple[int, str, list[str]]] = {
    "batch_to_row": (4, "4", ["batching", "row"]),
    "batch_to_rows": (4, "4", ["batching", "rows"]),
    "rows_alone": (4, "4", ["rows"]),
    "there_and_back": (4, "4", ["batching", "rows", "batching"]),
    "within": (4, "4", ["row", "batching", "row"]),
    "without": (0, "4", ["row", "batching"]),
    "shapes_differ": (4, "5", ["batching", "row"]),
    "too_large": (8, "4", ["batching", "row"]),
}
COUNTED = {"counted": (4, "4", ["rows"])}
SHAPES = [[4], [1, 4], [3, 4], [1, 1, 4], [2, 1, 4]]


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    for name, (size, dims) in MEMBERS.items():
        write_model(folder, name, PYTHON_IDENTITY, config=f'backend: "python" {head(size, dims)}')
    for name, (size, dims, models) in {**ENSEMBLES, **COUNTED}.items():
        tensors = ["INPUT0", *(f"t{number}" for number in range(1, len(models))), "OUTPUT0"]
        steps = "".join(STEP.format(model, *tensors[i : i + 2]) for i, model in enumerate(models))
        config = f'platform: "ensemble" {head(size, dims)} ensemble_scheduling {{ {steps} }}'
        write_model(folder, name, "", config=config)
    started: Pair = start_pair(folder, "--model-control-mode=explicit", "--load-model=batching")
    return started


def head(size: int, dims: str) -> str:
    return f"max_batch_size: {size} {TENSOR.format('input', 'INPUT', dims)} {TENSOR.format('output', 'OUTPUT', dims)}"


def body(shape: list[int], **parameters: object) -> dict[str, object]:
    count = 1
    for size in shape:
        count *= size
    given = {"name": "INPUT0", "shape": shape, "datatype": "FP32", "data": list(range(count))}
    return {"inputs": [given], "parameters": parameters}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_what_loads_and_what_it_answers_is_the_same(pair: Pair, same_http: Any, name: str) -> None:
    ours, theirs = pair.ask("POST", f"/v2/repository/models/{name}/load", {})

    assert (ours.status == 200) is (theirs.status == 200) is (name not in ("shapes_differ", "too_large"))
    if ours.status == 200:
        for shape in SHAPES:
            answers = pair.ask("POST", f"/v2/models/{name}/infer", body(shape))
            assert len({answer.status == 200 for answer in answers}) == 1, f"{shape}: {answers}"
            if answers[0].status == 200:
                assert answers[0].document == answers[1].document


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"sequence_id": 5, "sequence_start": True},
        {"sequence_id": 5, "sequence_end": True},
        {"sequence_id": "talk", "sequence_start": True, "sequence_end": True},
    ],
)
def test_responses_say_to_which_sequence_they_belong(pair: Pair, same_http: Any, parameters: dict[str, object]) -> None:
    pair.ask("POST", "/v2/repository/models/batch_to_row/load", {})

    answer = same_http(pair, "POST", "/v2/models/batch_to_row/infer", body([1, 4], **parameters))

    expected = {"sequence_id": 0, "sequence_start": False, "sequence_end": False} | parameters
    assert answer.document["parameters"] == expected


def test_batches_are_counted_by_their_size(pair: Pair) -> None:
    pair.ask("POST", "/v2/repository/models/counted/load", {})
    for size in (1, 3, 3):
        pair.ask("POST", "/v2/models/counted/infer", body([1, size, 4]))
        pair.ask("POST", "/v2/models/counted/infer", body([size, 4]))

    def counted() -> tuple[dict[int, int], dict[int, int]]:
        ours, theirs = pair.ask("GET", "/v2/models/counted/stats")
        return sizes(ours.document), sizes(theirs.document)

    ours, theirs = once_counted(counted)

    assert ours == theirs
    assert set(ours) == {1, 3}


def sizes(document: Any) -> dict[int, int]:
    return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in document["model_stats"][0]["batch_stats"]}
