"""Reads objects of KServe into the SDK's models, and writes what these hold. Run with the SDK's interpreter.

What a model has no field for is lost on the way, so an object that comes back as it was has known fields only.
"""

import json
import sys
from types import SimpleNamespace

import kserve.models  # type: ignore[import-not-found]
import kubernetes.client.models as core  # type: ignore[import-not-found]
from kserve import ApiClient

KINDS = {
    "InferenceService": "V1beta1InferenceService",
    "ServingRuntime": "V1alpha1ServingRuntime",
    "ClusterServingRuntime": "V1alpha1ClusterServingRuntime",
    "TrainedModel": "V1alpha1TrainedModel",
}


def main() -> None:
    """Read a list of objects from standard input, and write them back to standard output."""
    for name in dir(core):  # the SDK looks for all types among its own
        if not hasattr(kserve.models, name):
            setattr(kserve.models, name, getattr(core, name))
    kserve.models.ResourceQuantity = str
    kserve.models.K8sIoApiAppsV1DeploymentStrategy = core.V1DeploymentStrategy
    client = ApiClient()
    read = [
        client.deserialize(SimpleNamespace(data=json.dumps(each)), KINDS[each["kind"]]) for each in json.load(sys.stdin)
    ]
    json.dump([client.sanitize_for_serialization(each) for each in read], sys.stdout)


main()
