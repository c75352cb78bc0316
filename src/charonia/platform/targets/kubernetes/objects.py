"""Prepares the objects of the chart before they are applied. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from charonia.platform.targets.kubernetes.marks import (
    MANAGER,
    OBJECT,
    OWNER,
    REVISION,
    SERVING,
    TEMPLATE,
    TITLE,
    Plain,
    in_order,
    is_workload,
    object_name,
    with_marks,
)
from charonia.platform.targets.kubernetes.rollout import template_mark

SCALER = "kube-controller-manager"
"""Field manager of autoscalers."""

MANAGED_BY = "app.kubernetes.io/managed-by"


def prepared(
    rendered: Sequence[Plain], owner: str, deployment: str, revision: int, before: Sequence[Plain]
) -> list[dict[str, Any]]:
    """Return the objects of a revision, in order, with labels and annotations.

    Args:
        deployment: "PROJECT/NAME".
        before: The objects of the serving revision, if any. Pods restart only if their template changes.
    """
    own = {OWNER: owner, OBJECT: object_name(deployment)}
    notes = {TITLE: deployment, REVISION: str(revision)}
    objects = [with_marks(each, own | {MANAGED_BY: MANAGER}, notes) for each in in_order(rendered)]
    workload = objects[-1]
    template = with_marks(workload["spec"]["template"], own, {TEMPLATE: ""})
    mark = str(revision)
    if before and template == with_marks(before[-1]["spec"]["template"], {}, {TEMPLATE: ""}):
        mark = template_mark(before[-1])
    workload["spec"] = {**workload["spec"], "template": with_marks(template, {}, {TEMPLATE: mark})}
    return objects


def same(one: Sequence[Plain], other: Sequence[Plain]) -> bool:
    """Return whether the objects of two revisions differ only in the number of the revision."""
    return _bare(one) == _bare(other)


def with_replicas(wanted: Plain, present: Plain | None, least: int) -> Plain:
    """Return a workload that leaves its number of replicas to its autoscaler.

    A field that we have set, and then omit, falls back to 1. Until another field manager owns it, we repeat its value.

    Args:
        wanted: The workload; returned unchanged if it sets the number of replicas.
        present: The workload in the cluster, None if there is none.
    """
    if "replicas" in wanted["spec"]:
        return wanted
    if present is not None and not _owns_replicas(present, MANAGER):
        return wanted
    count = least if present is None else max(int(present["spec"].get("replicas", 1)), least)
    return {**wanted, "spec": {**wanted["spec"], "replicas": count}}


def takes_replicas(wanted: Plain, present: Plain | None) -> bool:
    """Return whether a workload sets its number of replicas again after an autoscaler owned it, so it is taken over.

    Taking it over makes it ours by update, and a later apply would conflict: it is updated as well.
    """
    if present is None or wanted["spec"].get("replicas") in (None, present["spec"].get("replicas")):
        return False
    return _owns_replicas(present, SCALER) or _owns_replicas(present, MANAGER, ("Update",))


def tried(wanted: Plain, present: Plain | None, least: int) -> Plain:
    """Return an object for a dry run: a workload omits replicas that have yet to be taken over.

    Args:
        present: The object in the cluster, None if there is none.
    """
    if not is_workload(wanted):
        return wanted
    said = with_replicas(wanted, present, least)
    if not takes_replicas(said, present):
        return said
    return {**said, "spec": {key: value for key, value in said["spec"].items() if key != "replicas"}}


def serving_note(revision: int) -> Mapping[str, str]:
    return {SERVING: str(revision)}


def _owns_replicas(present: Plain, manager: str, operations: Sequence[str] = ("Apply", "Update")) -> bool:
    return any(
        entry.get("manager") == manager
        and entry.get("operation") in operations
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in present["metadata"].get("managedFields") or ()
    )


def _bare(objects: Sequence[Plain]) -> list[str]:
    return [json.dumps(with_marks(each, {}, {REVISION: "", SERVING: ""}), sort_keys=True) for each in objects]
