"""Rules of Kubernetes that its schemas do not express, as far as the chart's objects can break them."""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from tests.support.chart import Manifest, pod_specs

LABEL = re.compile(r"([a-z0-9A-Z]([-._a-z0-9A-Z]*[a-z0-9A-Z])?)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
UNITS: dict[str, float] = {"": 1.0, "m": 1e-3} | {u: 1000**n for n, u in enumerate("kMGTPE", 1)}
UNITS |= {f"{u}i": 1024**n for n, u in enumerate("KMGTPE", 1)}
LONGEST = {"Service": 63, "CronJob": 52, "Job": 63, "StatefulSet": 52, "Deployment": 46}
"""Characters of a name by kind: of a Deployment, so that its pods' names have their hashes; 253 for others."""


def amount(quantity: object) -> float:
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity))
    assert found, quantity
    return float(found[1]) * UNITS[found[2]]


def problems(manifests: list[Manifest]) -> list[str]:
    """Return what an API server would refuse."""
    return [
        f"{manifest['kind']}/{manifest['metadata']['name']}: {problem}"
        for manifest in manifests
        for problem in (*_metadata(manifest), *_pods(manifest))
    ]


def repeated_keys(text: str) -> list[str]:
    """Return the keys that a mapping of a YAML stream has twice."""
    found = []

    def walk(node: yaml.Node | None) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            found.extend(sorted({key for key in keys if keys.count(key) > 1}))
            for _, value in node.value:
                walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                walk(value)

    for document in yaml.compose_all(text, Loader=yaml.CSafeLoader):
        walk(document)
    return found


def _metadata(manifest: Manifest) -> Iterator[str]:
    metadata = manifest["metadata"]
    name = metadata["name"]
    yield from _texts("metadata", metadata)
    if not isinstance(name, str) or not (SERVICE if manifest["kind"] == "Service" else NAME).fullmatch(name):
        yield f"name {name!r}"
    elif len(name) > LONGEST.get(manifest["kind"], 253):
        yield f"a name of {len(name)} characters"


def _texts(where: str, metadata: dict[str, Any]) -> Iterator[str]:
    for kind in ("labels", "annotations"):
        for key, value in metadata.get(kind, {}).items():
            if not isinstance(value, str):
                yield f"{where}.{kind} {key}: {value!r} is not a string"
            elif kind == "labels" and (len(value) > 63 or not LABEL.fullmatch(value)):
                yield f"{where}.labels {key}: {value!r}"


def _pods(manifest: Manifest) -> Iterator[str]:
    spec = manifest.get("spec", {})
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        labels = spec["template"]["metadata"]["labels"]
        yield from _texts("template", spec["template"]["metadata"])
        if not spec["selector"]["matchLabels"].items() <= labels.items():
            yield "the selector does not match the template"
    for _, pod in pod_specs([manifest]):
        claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            where = container["name"]
            names = [entry["name"] for entry in container.get("env", [])]
            if len(names) != len(set(names)):
                yield f"{where}: env repeats a name"
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            if len(paths) != len(set(paths)):
                yield f"{where}: two mounts at one path"
            resources = container.get("resources", {})
            for name, limit in resources.get("limits", {}).items():
                if amount(resources.get("requests", {}).get(name, limit)) > amount(limit):
                    yield f"{where}: requests more {name} than its limit"
            if not {claim["name"] for claim in resources.get("claims", [])} <= claims:
                yield f"{where}: a claim that the pod does not have"
            pre_stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if pre_stop_s >= pod.get("terminationGracePeriodSeconds", 30):
                yield f"{where}: preStop takes the whole grace period"
