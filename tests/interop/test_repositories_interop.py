"""Namespaces and repository agents: the same requests to Charonia and to Triton."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.models import PYTHON_IDENTITY, answering, chain_pbtxt, identity_pbtxt, write_model
from tests.support.peers import Pair

CONFIG = identity_pbtxt("python", dims=(2,), max_batch_size=4)
REQUEST = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
AGENTS = 'model_repository_agents {{ agents {{ name: "{0}" }} }}'


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("repositories")
    one, two = folder / "one", folder / "two"
    for repository, amount in ((one, 10), (two, 20)):
        write_model(repository, "step", answering(f"array + {amount}"), config=CONFIG)
        write_model(
            repository, f"ensemble_{repository.name}", "", config=chain_pbtxt("step", dims=(2,), max_batch_size=4)
        )
    write_model(two, "alone", PYTHON_IDENTITY, config=CONFIG)
    write_model(one, "ensemble_of_other", "", config=chain_pbtxt("alone", dims=(2,), max_batch_size=4))
    started: Pair = start_pair(one, f"--model-repository={two}", "--model-namespacing=true")
    return started


@pytest.mark.parametrize("model", ["ensemble_one", "ensemble_two", "alone", "ensemble_of_other"])
def test_ensembles_find_the_models_of_their_own_repository_first(pair: Pair, same_http: Any, model: str) -> None:
    answer = same_http(pair, "POST", f"/v2/models/{model}/infer", REQUEST, absent=["parameters"])

    expected = {"ensemble_one": [11, 12], "ensemble_two": [21, 22]}.get(model, [1, 2])
    assert answer.document["outputs"][0]["data"] == expected


@pytest.mark.parametrize("path", ["step/infer", "none/infer"])
def test_a_name_of_two_models_is_refused_alike_and_an_unknown_one_is_404_here(pair: Pair, path: str) -> None:
    ours, theirs = pair.ask("POST", f"/v2/models/{path}", REQUEST)

    assert (ours.status, theirs.status) == (400 if path == "step/infer" else 404, 400)


@pytest.mark.parametrize("model", ["ensemble_one", "ensemble_two", "ensemble_of_other"])
def test_the_configuration_names_the_namespace_of_each_step(pair: Pair, model: str) -> None:
    ours, theirs = (answer.document for answer in pair.ask("GET", f"/v2/models/{model}/config"))

    assert ours["ensemble_scheduling"]["step"] == theirs["ensemble_scheduling"]["step"]


def test_the_index_has_each_model_of_a_name(pair: Pair) -> None:
    ours, theirs = (answer.document for answer in pair.ask("POST", "/v2/repository/index"))

    def names(index: Any) -> list[tuple[str, str]]:
        return sorted((entry["name"], entry.get("state", "")) for entry in index)

    assert names(ours) == names(theirs)


def test_a_model_whose_agent_is_not_there_is_not_loaded_and_here_the_answer_says_why(
    start_pair: Any, same_http: Any, tmp_path: Path
) -> None:
    write_model(tmp_path, "agent", PYTHON_IDENTITY, config=CONFIG + AGENTS.format("none"))
    write_model(tmp_path, "other", PYTHON_IDENTITY, config=CONFIG)
    pair: Pair = start_pair(tmp_path, "--model-control-mode=explicit", "--load-model=other")

    ours, theirs = pair.ask("POST", "/v2/repository/models/agent/load", b"")
    assert (ours.status, theirs.status) == (500, 500)
    assert "unable to find repository agent 'none'" in ours.document["error"]
    same_http(pair, "POST", "/v2/models/other/infer", REQUEST)
    same_http(pair, "GET", "/v2/models/agent/ready")
