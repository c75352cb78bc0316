"""What values the chart takes: a wrong one is refused with a reason before anything reaches a cluster."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from tests.support.chart import CHART, ChartRefusalError, objects_of

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
FREE = {"global", "enabled"}
"""Names that Helm itself adds."""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
    return found


def differences(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Names that only the schema has, or only values.yaml."""
    names = resolved(schema).get("properties")
    if names is None:  # a map of the user's names
        return
    yield from (f"{path}{name}" for name in names.keys() ^ values.keys() if f"{path}{name}" not in FREE)
    for name in names.keys() & values.keys():
        if isinstance(values[name], dict):
            yield from differences(names[name], values[name], f"{path}{name}.")


def test_schema_and_values_have_the_same_names() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA)

    assert [name for name in differences(SCHEMA, DEFAULTS) if not re.search(r"[rR]esources\.|retention\.", name)] == []


def misspelt(schema: dict[str, Any], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values with one name that there is not, at each place that has names of its own."""
    names = resolved(schema).get("properties")
    if names is None:
        return
    yield {"misspelt": 1}
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ({name: inner} for inner in misspelt(names[name], value))


def test_a_misspelt_name_is_refused_wherever_it_stands() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    wrong = [*misspelt(SCHEMA, DEFAULTS)]

    assert len(wrong) > 30
    assert [values for values in wrong if validator.is_valid(values)] == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"autoscaler": {"minReplicas": 2}}, "additional properties 'autoscaler' not allowed"),
        ({"autoscaling": {"type": "HPA"}}, "at '/autoscaling/type': value must be one of 'none', 'hpa', 'keda'"),
        ({"replicas": "3"}, "at '/replicas': got string, want integer"),
        ({"models": {"type": "hostPath"}}, "at '/models/type': value must be one of"),
        ({"models": {"type": "store", "store": {"uris": ["/mnt/models"]}}}, "at '/models/store/uris/0'"),
        ({"models": {"path": "/models"}}, "at '/models/path'"),
        ({"resources": {"limits": {"memory": "4 GB"}}}, "at '/resources/limits/memory'"),
        ({"gpu": {"count": "one"}}, "at '/gpu/count'"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_the_schema_refuses(values: dict[str, Any], reason: str) -> None:
    # The same as helm's check of the same schema, without a process.
    found = [*jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]

    assert found
    path = reason.removeprefix("at '/").split("'")[0]
    if reason.startswith("at"):
        assert ["/".join(map(str, error.absolute_path)) for error in found] == [path]
    else:
        assert "'autoscaler' does not match any of the regexes: '^x-'" in found[0].message


def test_helm_itself_refuses_by_the_schema() -> None:
    with pytest.raises(ChartRefusalError, match="additional properties 'autoscaler' not allowed"):
        objects_of({"autoscaler": {"minReplicas": 2}})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"models": {"type": "store"}}, "models.store.uris is empty: name a repository"),
        ({"models": {"type": "image"}}, "models.image.reference is empty: name an image"),
        ({"models": {"type": "pvc"}}, "neither models.pvc.claimName nor models.pvc.create"),
        (
            {"models": {"type": "store", "store": {"uris": ["gs://a/b"], "googleKeyFile": "key.json"}}},
            "models.store.existingSecret or models.store.credentials is missing",
        ),
        ({"autoscaling": {"type": "hpa", "minReplicas": 9}}, "minReplicas 9 is more than maxReplicas 4"),
        ({"autoscaling": {"type": "hpa", "busyShare": 0, "waitRatio": 0}}, "autoscaling has no measure"),
        ({"autoscaling": {"type": "hpa", "minReplicas": 0}}, "a HorizontalPodAutoscaler keeps one pod"),
        ({"autoscaling": {"type": "keda", "minReplicas": 0}}, "needs a trigger"),
        ({"gateway": {"http": {"enabled": True}}}, "gateway.http.parentRefs is empty"),
        ({"ingress": {"grpc": {"enabled": True}}}, "ingress.grpc.hosts is empty"),
        (
            {
                "gateway": {
                    "http": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.org"]},
                    "grpc": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.org"]},
                }
            },
            "a.org is in http.hostnames and in grpc.hostnames",
        ),
        ({"tune": {"enabled": True}}, "tune.models is empty"),
        ({"tune": {"enabled": True, "models": ["m"]}}, "set server.modelControlMode explicit"),
        (
            {"tune": {"enabled": True, "models": ["m"]}, "server": {"modelControlMode": "explicit"}, "replicas": 2},
            "tune needs one pod",
        ),
        (
            {
                "tune": {"enabled": True, "models": ["m"]},
                "server": {"modelControlMode": "explicit"},
                "apiKeys": {"existingSecret": "keys"},
            },
            "tune sends no API key and speaks no TLS",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ChartRefusalError) as refused:
        objects_of(values)

    assert reason in str(refused.value)
