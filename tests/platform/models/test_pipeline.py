"""Repositories and pipelines: models are added together, and a deployment brings what its models call."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.conftest import when_ended
from tests.platform.models.conftest import MODELS, add, add_files, send, settled

from charonia.config.pbtxt import parse
from charonia.platform.models.pipeline import CALLS_MAX, calls_of, stages
from charonia.platform.models.records import VersionReport
from charonia.platform.state import Platform

pytestmark = pytest.mark.usefixtures("quick_checks")

AT = "/api/v1/projects/default/deployments"


def step(name: str, before: str, after: str) -> str:
    maps = f'input_map {{ key: "x" value: "{before}" }} output_map {{ key: "y" value: "{after}" }}'
    return f'{{ model_name: "{name}" {maps} }}'


ENSEMBLE = f"""
platform: "ensemble" max_batch_size: 0
input [ {{ name: "in" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "out" data_type: TYPE_FP32 dims: [ -1 ] }} ]
ensemble_scheduling {{ step [ {step("second", "mid", "out")}, {step("first", "in", "mid")} ] }}
"""
STEP = b"""
backend: "identity"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
REPOSITORY = {
    "models/README.md": b"# models",
    "models/whole/config.pbtxt": ENSEMBLE.encode(),
    "models/whole/1/.gitkeep": b"",
    "models/first/config.pbtxt": STEP,
    "models/second/config.pbtxt": STEP,
    "models/second/1/weights.json": b"{}",
    "models/second/3/weights.json": b"[]",
}


def added(client: TestClient, files: dict[str, bytes], name: str = "models") -> list[dict[str, Any]]:
    """Add a repository, and return its versions when they are settled."""
    place = {"source": {"kind": "upload", "place": send(client, files)}}
    task = client.post(f"{MODELS}/{name}/versions", json=place).json()["task"]
    found = when_ended(client, task)
    assert found["state"] == "done", found
    return [settled(client, each["model"], each["number"]) for each in found["result"]["versions"]]


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("pb_utils.InferenceRequest(model_name='a', inputs=[])", ["a"]),
        (
            "InferenceRequest(names=[x], model_name=\n  # why\n  'a')\nInferenceRequest(model_name='b')",
            ["a", "b"],
        ),
        ("NAME = 'a'\nInferenceRequest(model_name=NAME)", ["a"]),
        ("class M:\n    def f(self):\n        self.n = 'a'\n        InferenceRequest(model_name=self.n)", ["a"]),
        ("def run(name, x):\n    InferenceRequest(model_name=name)\nrun('a', 1)\nrun(x=1, name='b')", ["a", "b"]),
        ("InferenceRequest(model_name=choose())\nInferenceRequest(model_name=f'{x}')", []),
        ("# InferenceRequest(model_name='a')\n'''InferenceRequest(model_name='a')'''", []),
        ("InferenceRequest(model_name='a'\n'''", ["a"]),
        ("InferenceRequest(" * 20_000, []),
        (
            "\n".join(f"InferenceRequest(model_name='m{n}')" for n in range(CALLS_MAX + 1)),
            [f"m{n}" for n in range(CALLS_MAX)],
        ),
    ],
)
def test_calls_are_found_in_the_source_of_a_model(source: str, calls: list[str]) -> None:
    assert calls_of(parse('backend: "python"'), [source]) == calls


def test_a_repository_becomes_a_version_of_each_of_its_models(admin: TestClient, platform: Platform) -> None:
    versions = added(admin, REPOSITORY)

    assert {each["model"]: each["state"] for each in versions} == dict.fromkeys(("whole", "first", "second"), "ready")
    assert [each["path"] for each in versions[[v["model"] for v in versions].index("second")]["files"]] == [
        "1/weights.json",
        "config.pbtxt",
    ]
    assert {each["name"] for each in admin.get(MODELS).json()["models"]} == {"whole", "first", "second"}

    again = added(admin, {**REPOSITORY, "models/first/1/more.json": b"{}"}, "anew")

    assert {each["model"]: each["number"] for each in again} == {"whole": 1, "first": 2, "second": 1}
    assert admin.get(f"{MODELS}/anew").status_code == 404


def test_a_pipeline_is_deployed_with_its_steps_in_stages(admin: TestClient, platform: Platform) -> None:
    platform.deployments.close()  # what is wanted is enough
    (whole,) = (each for each in added(admin, REPOSITORY) if each["model"] == "whole")
    spec = {"name": "whole", "models": [{"name": "whole", "versions": [1]}]}

    plan = admin.put(f"{AT}/whole?dry_run=true", json=spec).json()
    made = admin.post(AT, json=spec)

    assert (sorted(plan["steps"]), plan["missing"]) == (["first", "second"], [])
    assert made.status_code == 201, made.text
    models = {each["name"]: each["versions"] for each in admin.get(f"{AT}/whole").json()["spec"]["models"]}
    assert models == {"whole": [1], "first": [1], "second": [1]}
    assert stages(VersionReport.from_json(whole["report"])) == [["first"], ["second"]]


def test_an_ensemble_without_a_step_is_not_deployed(admin: TestClient) -> None:
    add_files(admin, "whole", {"config.pbtxt": ENSEMBLE.encode()})
    add_files(admin, "first", {"config.pbtxt": STEP})

    refused = admin.put(
        f"{AT}/whole?dry_run=true", json={"name": "whole", "models": [{"name": "whole", "versions": [1]}]}
    )

    assert (refused.status_code, refused.json()["error"]) == (
        400,
        "models: 'whole' calls 'second', which does not exist",
    )


def test_a_python_model_may_do_without_a_model_that_it_calls(admin: TestClient) -> None:
    call = b"import triton_python_backend_utils as pb\npb.InferenceRequest(model_name='absent')\n"
    add_files(admin, "caller", {"config.pbtxt": b'backend: "python"', "1/model.py": call})

    plan = admin.put(
        f"{AT}/caller?dry_run=true", json={"name": "caller", "models": [{"name": "caller", "versions": [1]}]}
    )

    assert plan.json()["missing"] == ["'caller' calls 'absent', which does not exist"]
    assert plan.json()["problems"] == []


@pytest.mark.parametrize("name", ["models", "first"])
def test_a_repository_with_a_fault_adds_nothing_and_leaves_nothing_in_the_list(admin: TestClient, name: str) -> None:
    broken = {**REPOSITORY, "models/second/config.pbtxt": b"{"}

    version = add(admin, name, kind="upload", place=send(admin, broken))

    assert version["state"] == "refused"
    assert version["report"]["problem"].startswith("model 'second': ")
    assert admin.get(MODELS).json()["models"] == []


def test_a_repository_is_no_version_of_a_model_that_it_does_not_have(admin: TestClient) -> None:
    add_files(admin, "other", {"config.pbtxt": STEP})

    version = add(admin, "other", kind="upload", place=send(admin, REPOSITORY))

    assert "expected a version of model 'other', got a repository with" in version["report"]["problem"]
