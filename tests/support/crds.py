"""Published schemas of other projects' objects: CustomResourceDefinitions in a folder, which nothing here commits."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FOLDER = os.environ.get("CHARONIA_CRDS", "")
"""A folder with CustomResourceDefinitions of KServe, KEDA, the Gateway API, the Prometheus operator and KubeRay."""

needs_crds = pytest.mark.skipif(not FOLDER, reason="CHARONIA_CRDS names no folder with CustomResourceDefinitions")


def problems_by_crd(manifest: dict[str, Any]) -> list[str]:
    """Return where an object differs from its published schema, unknown fields included."""
    validator = _validators()[manifest["apiVersion"], manifest["kind"]]
    return [f"{error.json_path}: {error.message:.200}" for error in validator.iter_errors(manifest)]


@cache
def _validators() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    return {
        (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]): jsonschema.Draft202012Validator(
            _strict(version["schema"]["openAPIV3Schema"], is_object=True)
        )
        for crd in _crds()
        for version in crd["spec"]["versions"]
    }


def _crds() -> Iterator[dict[str, Any]]:
    for path in sorted(Path(FOLDER).glob("*.yaml")):
        for document in yaml.load_all(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader):
            if document and document["kind"] == "CustomResourceDefinition":
                yield document


def _strict(schema: dict[str, Any], *, is_object: bool = False) -> dict[str, Any]:
    """Return a schema of OpenAPI as JSON Schema that refuses the fields that a cluster would drop."""
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        if is_object:  # its metadata are of any object
            found["properties"]["metadata"] = {"type": "object"}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = _strict(schema[key])
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    return found
