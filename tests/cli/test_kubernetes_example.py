"""The job of examples/kubernetes: a command line that we understand, without any right that it does not need."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from charonia.cli.tune import parse_profile, subcommand
from charonia.tools.tune.options import LaunchMode

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "tune-job.yaml"


@pytest.fixture
def pod() -> dict[str, Any]:
    (job,) = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def test_its_command_line_tunes_a_remote_server(pod: dict[str, Any]) -> None:
    program, name, *arguments = pod["containers"][0]["command"]

    _, tune_for, rest = subcommand(arguments)
    options = parse_profile(rest, tune_for).options

    assert (Path(program).name, name) == ("charonia", "tune")
    assert options.launch.mode is LaunchMode.REMOTE
    assert options.launch.repository is None
    assert options.launch.grpc_endpoint == "triton:8001"
    assert options.search.time_budget_s == 600
    assert str(options.output.json) == "-"


def test_everything_that_it_writes_lies_in_its_own_volume(pod: dict[str, Any]) -> None:
    output = parse_profile(pod["containers"][0]["command"][3:]).options.output

    assert all(volume.keys() == {"name", "emptyDir"} for volume in pod["volumes"])
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    for path in (output.repository, output.export, output.journal_folder):
        assert any(path.is_relative_to(mount) for mount in mounts)


def test_it_has_no_privileges(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in (*pod["initContainers"], *pod["containers"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_page_leads_through_it() -> None:
    page = (ROOT / "docs" / "tune_kubernetes.md").read_text(encoding="utf-8")

    assert "../examples/kubernetes/tune-job.yaml" in page
    assert "job/tune-resnet50" in page
