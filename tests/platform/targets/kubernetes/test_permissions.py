"""The Role of the platform permits what it does, and no more."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.platform.targets.kubernetes.conftest import NAME, ClusterStage, workload
from tests.support.kubernetes_controllers import Fate
from tests.support.process import waited_for

from charonia.platform.targets.api import RevisionPhase
from charonia.platform.targets.kubernetes.objects import APPLIED
from charonia.platform.targets.kubernetes.target import KubernetesTarget

DOCUMENTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((Path(__file__).parents[4] / "deploy" / "kubernetes" / "platform-rbac.yaml").read_text())
)
RULES = [rule for each in DOCUMENTS for rule in each.get("rules", ())]
PERMITTED = {(verb, what) for rule in RULES for verb in rule["verbs"] for what in rule["resources"]}
KINDS = {(group, what) for rule in RULES for group in rule["apiGroups"] for what in rule["resources"]}


@pytest.mark.parametrize("release", ["1.32.0", "1.33.0", "1.34.0"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_it_is_valid(document: dict[str, Any], release: str) -> None:
    kubernetes_validate.validate(document, release, strict=True)


@pytest.mark.parametrize("kind", APPLIED, ids=lambda kind: kind.kind)
def test_all_that_the_chart_may_have_can_be_applied(kind: Any) -> None:
    assert (kind.group, kind.plural) in KINDS
    assert {(verb, kind.plural) for verb in ("get", "create", "patch", "delete")} <= PERMITTED


def lived_through(stage: ClusterStage, target: KubernetesTarget) -> set[tuple[str, str]]:
    marks = {"2": Fate.CRASHES}
    stage.nodes.fate = lambda pod: marks.get(pod["metadata"]["annotations"]["charonia.dev/template"], Fate.READY)

    def until(revision: int, phase: RevisionPhase) -> None:
        waited_for(lambda: target.observe(NAME), lambda seen: (seen.serving, seen.phase) == (revision, phase))

    target.problems(workload(1, keys=True))
    target.apply(workload(1, keys=True, replicas={"max": 3}))
    until(1, RevisionPhase.READY)
    target.apply(workload(2, keys=True))
    until(1, RevisionPhase.FAILED)
    target.set_keys(NAME, ["ada infer sha256:abc"])
    target.log(NAME, 10)
    target.apply(workload(3, keys=True))
    until(3, RevisionPhase.READY)
    target.deployments()
    target.stop(NAME)
    until(0, RevisionPhase.ABSENT)
    target.remove(NAME)

    return set(stage.api.requests)


def test_everything_that_is_asked_is_permitted(stage: ClusterStage) -> None:
    asked = lived_through(stage, stage.target())

    assert asked - PERMITTED == set()
    assert {("list", "pods"), ("get", "pods/log"), ("list", "nodes"), ("delete", "secrets")} <= asked
    others = {kind.plural for kind in APPLIED} - {what for _, what in asked}  # this chart has none of them
    assert {each for each in PERMITTED - asked if each[1] not in others} <= {("list", "events")}


def test_everything_that_is_asked_for_kserve_is_permitted(stage: ClusterStage) -> None:
    asked = lived_through(stage, stage.kserve_target())

    assert asked - PERMITTED == set()
    of_kserve = {each for each in PERMITTED if each[1] in ("inferenceservices", "servingruntimes")}
    assert of_kserve <= asked
