"""The objects are those that KServe publishes: its SDK knows every field."""

from itertools import product
from typing import Any

import pytest
from tests.export.test_kserve import IRIS, PIPELINE, model, objects, repository
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
SIZED = {"cpu": "500m", "memory": "4Gi", "gpus": 1, "namespace": "prod", "arguments": ("--log-verbose=1",)}


EXPORTED: list[tuple[ExportedModels, dict[str, Any]]] = [
    (IRIS, REPLICAS | SIZED),
    (IRIS, SIZED | {"scope": RuntimeScope.CLUSTER}),
    (PIPELINE, {"transformer": True}),
    (repository(model("a"), model("b", "sklearn"), model("c", "python")), {"multi_model": True}),
]


@needs_sdk
def test_kserve_knows_every_field_of_what_is_exported() -> None:
    made = [
        each
        for (models, options), mode, protocol in product(EXPORTED, Mode, Protocol)
        for each in objects(models, mode=mode, protocol=protocol, **options).values()
    ]
    made += objects(**CANARY).values()

    assert through_the_models(made) == made


@needs_sdk
@pytest.mark.parametrize("key", ["minReplica", "canaryTraffic", "scaleMetrics"])
def test_a_field_that_kserve_does_not_know_is_found(key: str) -> None:
    service = objects()["service"]
    service["spec"]["predictor"][key] = 1

    assert through_the_models([service]) != [service]
