"""Objects of KServe for the models of a repository: a runtime, and the services that use it. Pure.

The runtime has the arguments that every service of it has, and a service adds its own: KServe appends them.

Source: KServe's custom resources, `serving.kserve.io/v1alpha1` and `v1beta1`; Knative's container contract.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePosixPath

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid, unsupported
from charonia.export.options import (
    CANARY_NAME_CHARS_MAX,
    NAME,
    REQUESTS,
    KserveOptions,
    Mode,
    Protocol,
    RuntimeScope,
    ScaleMetric,
)

Json = dict[str, object]

MOUNT = "/mnt/models"
"""Where KServe puts what the storage URI leads to."""

HTTP_PORT = 8080
GRPC_PORT = 8081
METRICS_PORT = 8002

CONTAINER = "kserve-container"
"""Name of the server's container, by which KServe finds it."""

SLEEP_SECS = 10
"""Time after a pod is taken from its Service in which requests still arrive; Knative's queue-proxy waits by itself."""

EXIT_SECS = {"--exit-delay-secs": 5, "--exit-timeout-secs": 30}
"""Time for clients to leave, and then for requests to finish, in standard mode."""

FINALIZE_SECS = 15
"""Time for models to finalize."""

BUSY_SHARES = (
    "sum(max by (pod) (sum by (pod, model, version) (rate(charonia_load_seconds_total{0}[2m]))"
    " / sum by (pod, model, version) (charonia_instances{0})))"
)
"""The busy shares of pods, summed: KEDA divides by their number. As in the Helm chart."""

BUSY_PERCENT = 70
"""Target of the busy share."""

AGENT_SCHEMES = ("s3://", "gs://", "https://", "http://")
"""Stores that KServe's agent reads; its storage initializer reads others, too."""

REPOSITORY_FORMAT = "triton"
"""KServe's name for a repository of models."""

_LETTERS = "mkKMGTPEi"
_BYTES = {"": 1, "m": 1e-3} | {f"{letter}": 1000**power for power, letter in enumerate("kMGTPE", 1)}
_BYTES |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
"""Bytes of a quantity's unit."""


@dataclass(frozen=True, slots=True)
class ExportedModels:
    """What is exported.

    Attributes:
        name: Name of the file or folder.
        models: The configuration of each model; the platform of an ensemble, or the backend, is known.
        is_repository: Whether it is a folder of models, rather than one model.
    """

    name: str
    models: tuple[ModelConfig, ...]
    is_repository: bool


def kserve_objects(exported: ExportedModels, options: KserveOptions) -> dict[str, Json]:
    """Return the objects by the name of a file for each.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED: the models do not fit the options.
    """
    if not exported.models:
        raise invalid(f"'{exported.name}' has no models")
    if not options.storage_uri:
        raise invalid(
            "--storage-uri: expected where KServe finds the models",
            hint=f"upload it, then --storage-uri s3://BUCKET/{exported.name} or pvc://CLAIM/{exported.name}",
        )
    name = options.name or _name_of(exported.name)
    if options.canary_uri and len(name) > CANARY_NAME_CHARS_MAX:
        raise invalid(f"--canary-uri: expected a name of {CANARY_NAME_CHARS_MAX} characters at most, got '{name}'")
    # Each service has a runtime of its own by default: a shared one would change under the services that are there.
    options = replace(options, runtime=options.runtime or name)
    objects = {"runtime": _runtime(exported, options), "service": _service(name, exported, options)}
    return objects | (_trained_models(name, exported, options) if options.multi_model else {})


def _name_of(text: str) -> str:
    name = text.lower().replace("_", "-").replace(".", "-")
    if not NAME.fullmatch(name):
        raise invalid(f"'{text}' cannot be a service's name", hint="--name NAME: lower-case letters, digits and '-'")
    return name


def _metadata(name: str, namespace: str = "", annotations: Json | None = None) -> Json:
    metadata: Json = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    if annotations:
        metadata["annotations"] = annotations
    return metadata


def _runtime(exported: ExportedModels, options: KserveOptions) -> Json:
    is_cluster = options.scope is RuntimeScope.CLUSTER
    own = ["--model_name={{.Name}}"]
    if options.multi_model:  # a model that is added later does not make pods unready while it loads, or when it fails
        own = ["--model-control-mode=explicit", "--strict-readiness=start"]
    container = _container(options, [*_serve(options), *own])
    container["readinessProbe"] = _probe("ready")
    spec: Json = {
        "annotations": {"prometheus.kserve.io/port": str(METRICS_PORT), "prometheus.kserve.io/path": "/metrics"},
        "supportedModelFormats": [{"name": name, "version": version} for name, version in _formats(exported)],
        "protocolVersions": [protocol.value for protocol in Protocol if protocol is not Protocol.V1]
        + ["v1"] * (options.protocol is Protocol.V1),
        "containers": [container],
    }
    if options.multi_model:
        spec["multiModel"] = True
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ClusterServingRuntime" if is_cluster else "ServingRuntime",
        "metadata": _metadata(options.runtime, "" if is_cluster else options.namespace),
        "spec": spec,
    }


def _service(name: str, exported: ExportedModels, options: KserveOptions) -> Json:
    annotations: Json = {
        # The names that every release of KServe knows.
        "serving.kserve.io/deploymentMode": "Serverless" if options.mode is Mode.KNATIVE else "RawDeployment",
    }
    if options.mode is Mode.KNATIVE and options.scale_metric not in (None, *REQUESTS):
        annotations["autoscaling.knative.dev/class"] = "hpa.autoscaling.knative.dev"
    elif options.scale_metric is ScaleMetric.BUSY:
        annotations["serving.kserve.io/autoscalerClass"] = "keda"
    format_name, version = _formats(exported)[0]
    model: Json = {
        "modelFormat": {"name": format_name, "version": version},
        "runtime": options.runtime,
        "protocolVersion": options.protocol.value,
    }
    if options.multi_model:
        model["resources"] = _resources(options)  # KServe compares the models' memory with this one, not the runtime's
    else:
        model["storageUri"] = options.storage_uri
    spec: Json = {"predictor": {**_component(options, f"{name}-predictor"), "model": model}}
    if options.transformer:
        ensemble, step = divided(exported, options.predictor)
        model["args"] = _only(step)
        container = _container(options, [*_serve(options), *_only(ensemble), f"--predictor={step}"])
        container["readinessProbe"] = _probe("ready")
        container["env"] = [
            {"name": "STORAGE_URI", "value": options.storage_uri},
            {"name": "PROTOCOL", "value": options.protocol.value},
        ]
        container |= _reached(options)
        spec["transformer"] = {**_component(options, f"{name}-transformer"), "containers": [container]}
        model["protocolVersion"] = Protocol.V2.value  # that of the transformer's calls
        model |= _lived(options)
    else:
        model |= _reached(options)
    if options.canary_uri:
        # Its CustomResourceDefinition requires the container's name here alone.
        changed = {"name": CONTAINER, "storageUri": options.canary_uri}
        canary = {"name": "canary", "model": deepcopy(model) | changed}
        spec["canary"] = [{"predictor": canary, "trafficPercent": options.canary_percent}]
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _metadata(name, options.namespace, annotations),
        "spec": spec,
    }


def _trained_models(service: str, exported: ExportedModels, options: KserveOptions) -> dict[str, Json]:
    if not exported.is_repository:
        raise invalid(f"--multi-model: expected a repository, got one model, '{exported.name}'")
    if not options.storage_uri.startswith(AGENT_SCHEMES):
        raise invalid(
            f"--multi-model: KServe's agent fetches models from {', '.join(AGENT_SCHEMES)}, got '{options.storage_uri}'"
        )
    ensembles = [each.name for each in exported.models if each.ensemble_scheduling is not None]
    if ensembles:
        raise unsupported(
            f"--multi-model adds models one by one, and ensemble '{ensembles[0]}' needs others",
            hint="without --multi-model, one service serves the whole repository",
        )
    return {
        f"model-{each.name}": {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "TrainedModel",
            "metadata": _metadata(_exact(each.name), options.namespace),
            "spec": {
                "inferenceService": service,
                "model": {
                    "framework": _format(each)[0],
                    "storageUri": f"{options.storage_uri.rstrip('/')}/{each.name}",
                    "memory": options.model_memory or _share(options.memory, len(exported.models)),
                },
            },
        }
        for each in exported.models
    }


def divided(exported: ExportedModels, predictor: str) -> tuple[str, str]:
    """Return the ensemble and its step that becomes the predictor.

    Args:
        exported: The models.
        predictor: The step, "" for the only one whose backend computes.

    Raises:
        ServingError: There is not one ensemble with not one such step, or the step has to be with its callers.
    """
    models = {each.name: each for each in exported.models}
    called = {name for each in exported.models for name in _names(each)}
    roots = [each for each in exported.models if each.ensemble_scheduling is not None and each.name not in called]
    if predictor:
        roots = [each for each in roots if predictor in _names(each)]
    if len(roots) != 1:
        found = ", ".join(each.name for each in roots) or "none"
        wanted = f"with the step '{predictor}' " if predictor else ""
        raise invalid(
            f"--transformer: expected one ensemble {wanted}that no other one calls, got {found}",
            hint="export a repository with that ensemble and its steps",
        )
    ensemble = roots[0]
    missing = [name for name in _names(ensemble) if name not in models]
    if missing:
        raise invalid(f"ensemble '{ensemble.name}' needs model '{missing[0]}', which '{exported.name}' does not have")
    steps = [models[name] for name in _names(ensemble)]
    candidates = [each.name for each in steps if not _prepares(each)]
    if not predictor and len(candidates) != 1:
        raise invalid(
            f"ensemble '{ensemble.name}': expected one step that may be the predictor, got {', '.join(candidates)}",
            hint="--predictor STEP says which; the others run in the transformer",
        )
    step = models[predictor or candidates[0]]
    if len(steps) == 1:
        raise invalid(f"ensemble '{ensemble.name}' has one step, and nothing would be left for a transformer")
    _check_apart(ensemble.name, step)
    return ensemble.name, step.name


def _check_apart(ensemble: str, step: ModelConfig) -> None:
    """Check that a step can run in another server than its ensemble."""
    reason = ""
    if step.ensemble_scheduling is not None:
        reason = "is an ensemble itself"
    elif step.sequence_batching is not None:
        reason = "keeps sequences, whose requests have to reach the same replica"
    elif step.model_transaction_policy is not None and step.model_transaction_policy.decoupled:
        reason = "answers with any number of responses"
    if reason:
        raise unsupported(
            f"step '{step.name}' of ensemble '{ensemble}' cannot be a predictor: it {reason}",
            hint="--predictor names another step; without --transformer, one service runs the whole ensemble",
        )


def _names(config: ModelConfig) -> list[str]:
    scheduling = config.ensemble_scheduling
    return list(dict.fromkeys(step.model_name for step in scheduling.step)) if scheduling is not None else []


def _prepares(config: ModelConfig) -> bool:
    record = record_of(config.backend, config.platform)
    return record.prepares or not record.name


def _format(config: ModelConfig) -> tuple[str, str]:
    if config.platform == ENSEMBLE:
        return REPOSITORY_FORMAT, "2"
    record = record_of(config.backend, config.platform)
    suffix = PurePosixPath(config.default_model_filename).suffix
    own = next((form.kserve for form in record.forms if form.kserve and suffix in form.suffixes), None)
    return own or record.kserve or (REPOSITORY_FORMAT, "2")


def _formats(exported: ExportedModels) -> list[tuple[str, str]]:
    """Return the formats of the models, that of the whole first."""
    found = {_format(each): None for each in exported.models}
    return list(dict.fromkeys([*([(REPOSITORY_FORMAT, "2")] if exported.is_repository else []), *sorted(found)]))


def _exact(name: str) -> str:
    """Return a model's name, which is that of its TrainedModel as well."""
    if not NAME.fullmatch(name):
        raise invalid(
            f"--multi-model: model '{name}' cannot be the name of a TrainedModel: lower-case letters, digits and '-'",
            hint="rename its folder, and `name` in its config.pbtxt",
        )
    return name


def _share(memory: str, count: int) -> str:
    """Return the memory for each of the models of a service: KServe refuses what is more than the service has."""
    number, factor = float(memory.rstrip(_LETTERS)), _BYTES[memory.lstrip("0123456789.")]
    return f"{int(number * factor / count) // 2**20}Mi"


def _serve(options: KserveOptions) -> list[str]:
    return [
        "serve",
        MOUNT,
        f"--http-port={HTTP_PORT}",
        f"--grpc-port={GRPC_PORT}",
        f"--metrics-port={METRICS_PORT}",
        *(f"{name}={secs}" for name, secs in EXIT_SECS.items() if options.mode is Mode.STANDARD or "timeout" in name),
        *(["--kserve-v1"] if options.protocol is Protocol.V1 else []),
        *options.arguments,
    ]


def _only(model: str) -> list[str]:
    return ["--model-control-mode=explicit", f"--load-model={model}"]


def _container(options: KserveOptions, arguments: Sequence[str]) -> Json:
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": ["charonia"],
        "args": list(arguments),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": _resources(options),
    }


def _resources(options: KserveOptions) -> Json:
    resources: Json = {"cpu": options.cpu, "memory": options.memory}
    if options.gpus:
        resources["nvidia.com/gpu"] = str(options.gpus)
    return {"requests": dict(resources), "limits": dict(resources)}


def _component(options: KserveOptions, deployment: str) -> Json:
    """Return what predictor and transformer have in common: how many replicas there are, and how they end."""
    component: Json = {"minReplicas": options.replicas_min, "maxReplicas": options.replicas_max}
    if options.scale_metric is ScaleMetric.BUSY:
        pods = f'{{namespace="{options.namespace}",pod=~"{deployment}-[a-z0-9]+-[a-z0-9]+"}}'
        metric: Json = {"backend": "prometheus", "serverAddress": options.prometheus, "query": BUSY_SHARES.format(pods)}
        target: Json = {"type": "Value", "value": str((options.scale_target or BUSY_PERCENT) / 100)}
        component["autoScaling"] = {"metrics": [{"type": "External", "external": {"metric": metric, "target": target}}]}
    elif options.scale_metric is not None:
        component |= {"scaleMetric": options.scale_metric.value, "scaleTarget": options.scale_target}
    if options.mode is Mode.KNATIVE:
        component["canaryTrafficPercent"] = options.canary_percent
    else:
        words = " ".join(options.arguments).replace("=", " ").split()
        given = {name: int(value) for name, value in pairwise(words) if name in EXIT_SECS and value.isdecimal()}
        component["terminationGracePeriodSeconds"] = SLEEP_SECS + sum((EXIT_SECS | given).values()) + FINALIZE_SECS
        surge = {"maxSurge": 1, "maxUnavailable": 0}
        component["deploymentStrategy"] = {"type": "RollingUpdate", "rollingUpdate": surge}
    return {key: value for key, value in component.items() if value is not None}


def _reached(options: KserveOptions) -> Json:
    ports = [{"name": "h2c", "containerPort": GRPC_PORT, "protocol": "TCP"}]
    return _lived(options) | ({"ports": ports} if options.protocol is Protocol.GRPC else {})


def _lived(options: KserveOptions) -> Json:
    """Return a container's probes and its end, which Knative has itself."""
    if options.mode is Mode.KNATIVE:
        return {}
    return {
        "startupProbe": {**_probe("live"), "periodSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {**_probe("live"), "periodSeconds": 10, "failureThreshold": 3},
        "lifecycle": {"preStop": {"sleep": {"seconds": SLEEP_SECS}}},
    }


def _probe(state: str) -> Json:
    return {"httpGet": {"path": f"/v2/health/{state}", "port": HTTP_PORT}}
