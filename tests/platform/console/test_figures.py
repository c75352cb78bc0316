"""What charts, tiles and the page of traffic make of figures."""

import re
from pathlib import Path
from typing import Any

from charonia.platform.console import deployment_figures as shown
from charonia.platform.console.environment_pages import suggested, to_build
from charonia.platform.console.model_pages import deployment_name, difference, read_links
from charonia.platform.console.people_page import DONE, action_text, detail_text
from charonia.platform.console.traffic_pages import shadows, traffic_view
from charonia.platform.database.tables import EnvironmentRow
from charonia.platform.deployments.figures import Figures, FiguresPoint
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.models.records import NeededPackageRecord, VersionReport
from charonia.platform.people import audit
from charonia.platform.targets.api import Replica

SHADOW: dict[str, Any] = {"sent": 9, "compared": 8, "different": 2, "failed": 1, "dropped": 3, "difference_rate": 0.25}
SHADOW |= {"latency_us": {"p99": 2500.0}}
TRAFFIC: dict[str, Any] = {
    "model": "digits",
    "sticky": "key",
    "versions": [
        {"version": "10", "is_ready": True, "weight": 1.0, "share": 0.25, "requests": 100, "errors": 5}
        | {"latency_us": {"p50": 1500.0}, "shadow": None},
        {"version": "9", "is_ready": True, "weight": 3.0, "share": 0.75, "requests": 300, "errors": 0}
        | {"latency_us": {}, "shadow": SHADOW},
    ],
    "shadow": {"9": {"share": 0.1}},
    "canary": {"plan": {"version": 10, "stable": 9, "steps": [10, 25, 100]}, "state": "rolled_back", "step": 1}
    | {"percent": 0, "reason": "more errors", "checks": {}},
    "history": [{"time": "2026-11-23T22:48:35Z", "text": "first"}, {"time": "2026-11-23T22:50:00Z", "text": "last"}],
}


def point(time: float, **versions: Figures) -> FiguresPoint:
    by_name = {name.replace("_", "/"): figures for name, figures in versions.items()}
    return FiguresPoint(time, Figures(requests_per_s=10, errors_per_s=1), by_name, 2e8, 0.5, None, None)


def view(**values: Any) -> DeploymentView:
    fields = dict.fromkeys(DeploymentView.__dataclass_fields__)
    return DeploymentView(**{**fields, "spec": {"models": [{"name": "a", "versions": [1, 2]}]}, **values})


def test_a_version_that_came_later_has_gaps_before() -> None:
    found = shown.charts([point(1, a_1=Figures(5)), point(2, a_1=Figures(4), a_2=Figures(6))])

    assert found["times"] == [1, 2]
    assert found["charts"]["rate"] == [
        {"label": "version 1", "values": [5, 4]},
        {"label": "version 2", "values": [None, 6]},
    ]


def test_there_are_charts_without_figures() -> None:
    assert shown.charts([])["charts"]["rate"] == []


def test_a_deployment_in_the_list_says_what_fails() -> None:
    failed = {"revision": 3, "latest_state": "failed", "latest_reason": "there is no memory"}
    line = shown.line(view(figures=point(1), target="local", **failed))

    assert line["errors"] == "10 %"
    assert line["has_errors"]
    assert line["says"] == "Revision 3 has failed: there is no memory"
    assert line["models"] == "a 1, 2"


def test_a_deployment_in_the_list_says_where_it_runs_unless_that_is_here() -> None:
    assert shown.line(view(target="kubernetes"))["models"] == "a 1, 2 at kubernetes"


def test_a_deployment_waits_where_its_servers_say_why() -> None:
    pod = Replica("pod", is_ready=False, restarts=0, reason="it waits for a node")
    says = {"reason": "it waits for a node", "doing": "it waits for a node"}

    assert shown.waits(view(replicas=[pod], **says))
    assert not shown.waits(view(replicas=[], **says))
    assert not shown.waits(view(replicas=[pod], reason="degraded", doing=""))


def test_versions_stand_side_by_side_in_the_order_of_their_numbers() -> None:
    found = traffic_view(TRAFFIC, view(figures=None))

    assert [each["version"] for each in found["versions"]] == ["9", "10"]
    assert dict(found["rows"])["Errors"] == ["0", "5 (5 %)"]
    assert dict(found["rows"])["p50"] == [shown.NONE, "1.5 ms"]
    assert dict(found["rows"])["Copies compared"] == ["8", shown.NONE]
    assert dict(found["rows"])["Answers that differ"] == ["2 (25 %)", shown.NONE]
    assert dict(found["rows"])["p99 of copies"] == ["2.5 ms", shown.NONE]
    assert [each["copies_percent"] for each in found["versions"]] == ["10", "0"]
    assert found["candidates"][0] == ("10", "version 10")


def test_a_shadow_keeps_what_may_differ_when_its_share_changes() -> None:
    present = {"9": {"share": 0.1, "relative_tolerance": 0.5}}

    assert shadows([("9", 20), ("10", 0), ("11", 2.5), ("12", None)], present) == {
        "9": {"share": 0.2, "relative_tolerance": 0.5},
        "11": {"share": 0.025},
    }


def test_a_stickiness_that_the_page_does_not_offer_stays() -> None:
    found = traffic_view({**TRAFFIC, "sticky": "header:x-user"}, view(figures=None))

    assert found["stickies"][-1] == ("header:x-user", "header:x-user")


def test_a_plan_that_was_rolled_back_shows_where() -> None:
    found = traffic_view(TRAFFIC, view(figures=None))

    assert [step["kind"] for step in found["canary"]["steps"]] == ["done", "broken", ""]
    assert not found["canary_open"]
    assert found["history"][0] == {"time": "11-23 22:50", "text": "last"}


def test_the_environment_that_has_what_is_missing_is_suggested() -> None:
    report = VersionReport(needs=[NeededPackageRecord("torch", "torch", is_here=False)])
    built = [
        EnvironmentRow(name="empty", state="ready", packages=[]),
        EnvironmentRow(name="failed", state="failed", packages=[["Torch", "2"]]),
        EnvironmentRow(name="pytorch", state="ready", packages=[["Torch", "2"]]),
    ]

    assert suggested(report, built) == "pytorch"
    assert suggested(VersionReport(checked_with="mine"), built) == "mine"
    assert suggested(VersionReport(), built) == ""


def test_the_preset_of_a_backend_is_built_where_no_environment_has_what_is_missing() -> None:
    needs = [NeededPackageRecord("torch", "torch", is_here=False)]
    report = VersionReport(backend="pytorch", needs=needs)
    broken = EnvironmentRow(name="pytorch-2", state="failed", packages=[])
    ready = EnvironmentRow(name="mine", state="ready", packages=[["torch", "2.9"]])

    preset = to_build(report, [broken])
    assert preset is not None
    assert preset.title == "PyTorch 2"
    assert to_build(report, [ready]) is None
    assert to_build(VersionReport(backend="pytorch"), []) is None


def test_a_deployment_has_a_name_that_addresses_can_have() -> None:
    assert deployment_name("My Model.v2") == "my-model-v2"
    assert deployment_name("...") == "model"


def test_links_are_a_label_and_an_address() -> None:
    assert read_links("the paper https://a.example/b\n\ncode: https://c.example") == {
        "the paper": "https://a.example/b",
        "code": "https://c.example",
    }


def test_a_difference_has_the_lines_that_differ() -> None:
    assert [line for line in difference("a\nb\n", "a\nc\n") if line[0] in "+-"] == ["-b", "+c"]


def test_what_the_audit_log_notes_is_said_in_words() -> None:
    platform = Path(audit.__file__).parents[1]
    source = "".join(path.read_text() for path in platform.rglob("*.py"))
    noted = set(re.findall(r'audit\.record\([^"]*"([a-z.]+\.[a-z]+)"', source))
    noted |= set(re.findall(r'"((?:deployment|environment)\.(?:create|change|rebuild))"', source))

    assert len(noted) > 20
    assert {action.rpartition(".")[2] for action in noted} == DONE.keys()
    assert action_text("deployment.key.add") == "Deployment key added"


def test_an_entry_of_the_audit_log_is_one_line_without_what_is_empty() -> None:
    detail = {
        "changes": ["one", "two"],
        "step_seconds": 20,
        "note": "",
        "take": 0,
        "change": {"canary": {"stable": None}},
    }

    assert detail_text(detail) == 'changes: one; two, step seconds: 20, change: {"canary": {"stable": null}}'
