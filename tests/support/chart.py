"""The Helm chart in tests: its objects for given values, as the real helm makes them."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.support.kubernetes_tools import tool

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "charonia"
RELEASE = "demo"
NAMESPACE = "models"

Manifest = dict[str, Any]

WORKLOADS = {"Deployment", "StatefulSet", "Job", "CronJob", "Pod"}


class ChartRefusalError(Exception):
    """What helm says about values that it refuses."""


def rendered(values: Path) -> str:
    """Return what `helm template` prints for a file of values."""
    return template(f"--values={values}")


def objects(values: Path) -> list[Manifest]:
    return loaded(rendered(values))


def objects_of(values: Mapping[str, Any], release: str = RELEASE) -> list[Manifest]:
    """Return the objects for values. Raises `ChartRefusalError`."""
    return loaded(template("--values=-", text=json.dumps(values), release=release))


def loaded(text: str) -> list[Manifest]:
    """Return the objects of a stream of YAML documents, a new copy each time."""
    return list(json.loads(_as_json(text)))


@cache
def _as_json(text: str) -> str:
    return json.dumps([document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document])


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def server_of(manifests: list[Manifest]) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "StatefulSet")]
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield kind and name, and the specification of the pods, of all that runs pods."""
    for manifest in manifests:
        if manifest["kind"] not in WORKLOADS:
            continue
        spec = manifest["spec"]
        if manifest["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        yield (
            f"{manifest['kind']}/{manifest['metadata']['name']}",
            spec if manifest["kind"] == "Pod" else spec["template"]["spec"],
        )


@cache
def template(*arguments: str, text: str = "", release: str = RELEASE) -> str:
    """Return what `helm template` prints. Raises `ChartRefusalError`."""
    done = subprocess.run(
        [tool("helm"), "template", release, CHART, f"--namespace={NAMESPACE}", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    if done.returncode:
        raise ChartRefusalError(done.stderr)
    return done.stdout
