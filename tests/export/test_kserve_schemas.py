"""The objects are those that KServe publishes: its SDK knows every field."""

from itertools import product
from typing import Any

import pytest
from tests.export.test_kserve import IRIS, PIPELINE, model, objects, repository
from tests.support.crds import needs_crds, problems_by_crd
from tests.support.kserve_sdk import needs_sdk, through_the_models

from charonia.export.kserve import ExportedModels
from charonia.export.options import Mode, Protocol, RuntimeScope, ScaleMetric

REPLICAS = {"replicas_min": 1, "replicas_max": 3, "scale_metric": ScaleMetric.CPU, "scale_target": 70}
CANARY: dict[str, Any] = {
    "canary_percent": 0,
    "replicas_min": 0,
    "scale_metric": ScaleMetric.CONCURRENCY,
    "scale_target": 4,
}
STANDARD_CANARY: dict[str, Any] = {
    "mode": Mode.STANDARD,
    "canary_percent": 10,
    "canary_uri": "s3://bucket/next",
    "replicas_min": 2,
}
BUSY: dict[str, Any] = {"mode": Mode.STANDARD, "namespace": "prod", "scale_metric": ScaleMetric.BUSY, "replicas_max": 4}
SIZED = {"cpu": "500m", "memory": "4Gi", "gpus": 1, "namespace": "prod", "arguments": ("--log-verbose=1",)}


EXPORTED: list[tuple[ExportedModels, dict[str, Any]]] = [
    (IRIS, REPLICAS | SIZED),
    (IRIS, SIZED | {"scope": RuntimeScope.CLUSTER}),
    (PIPELINE, {"transformer": True}),
    (repository(model("a"), model("b", "sklearn"), model("c", "python")), {"multi_model": True}),
]


def made() -> list[Any]:
    found = [
        each
        for (models, options), mode, protocol in product(EXPORTED, Mode, Protocol)
        for each in objects(models, mode=mode, protocol=protocol, **options).values()
    ]
    return [*found, *objects(**CANARY).values(), *objects(**STANDARD_CANARY).values()]


UNKNOWN = ("minReplica", "canaryTraffic", "scaleMetrics")


def with_unknown(key: str) -> Any:
    service = objects()["service"]
    service["spec"]["predictor"][key] = 1
    return service


@pytest.fixture(scope="module")
def returned() -> list[Any]:
    """What is exported, and services with unknown fields, through the models: the SDK's start takes a second."""
    return through_the_models([*made(), *map(with_unknown, UNKNOWN)])


@needs_sdk
def test_kserve_knows_every_field_of_what_is_exported(returned: list[Any]) -> None:
    assert returned[: -len(UNKNOWN)] == made()


@needs_crds
def test_what_is_exported_fits_the_published_schemas_of_kserve() -> None:
    # The SDK has no class for values of metrics.
    found = [*made(), *objects(**BUSY).values()]

    assert [problems for each in found if (problems := problems_by_crd(each))] == []


@needs_crds
def test_an_unknown_field_is_found_by_the_published_schemas() -> None:
    service = objects()["service"]
    service["spec"]["predictor"]["model"]["storageURI"] = 1

    assert problems_by_crd(service)


@needs_sdk
@pytest.mark.parametrize("key", UNKNOWN)
def test_a_field_that_kserve_does_not_know_is_found(returned: list[Any], key: str) -> None:
    assert returned[UNKNOWN.index(key) - len(UNKNOWN)] != with_unknown(key)
