"""Objects of KServe for models."""

import re
from typing import Any

import pytest
from tests.support.chart import CHART

from charonia.cli.serve import parse
from charonia.config.model import (
    EnsembleScheduling,
    EnsembleStep,
    ModelConfig,
    SequenceBatching,
    TransactionPolicy,
)
from charonia.core.errors import ServingError
from charonia.export.kserve import BUSY_SHARES, ExportedModels, divided, kserve_objects
from charonia.export.options import KserveOptions, Mode, Protocol, RuntimeScope, ScaleMetric

URI = "s3://bucket/models"


def model(name: str, backend: str = "onnxruntime", **more: Any) -> ModelConfig:
    return ModelConfig(name=name, backend=backend, **more)


def ensemble(name: str, *steps: str) -> ModelConfig:
    scheduling = EnsembleScheduling(step=tuple(EnsembleStep(model_name=step) for step in steps))
    return ModelConfig(name=name, platform="ensemble", ensemble_scheduling=scheduling)


def repository(*models: ModelConfig) -> ExportedModels:
    return ExportedModels("models", models, is_repository=True)


IRIS = ExportedModels("iris", (model("iris"),), is_repository=False)
PIPELINE = repository(ensemble("pipeline", "prepare", "iris"), model("iris"), model("prepare", "python"))


def objects(exported: ExportedModels = IRIS, **options: Any) -> dict[str, Any]:
    return dict(kserve_objects(exported, KserveOptions(**{"storage_uri": URI, **options})))


def refusal(exported: ExportedModels = IRIS, **options: Any) -> str:
    with pytest.raises(ServingError) as caught:
        objects(exported, **options)
    return str(caught.value)


def container(runtime: Any) -> Any:
    return runtime["spec"]["containers"][0]


def test_one_model_is_served_by_the_name_of_its_service() -> None:
    made = objects(namespace="prod")
    service = made["service"]

    assert list(made) == ["runtime", "service"]
    assert made["runtime"]["kind"] == "ServingRuntime"
    assert made["runtime"]["spec"]["supportedModelFormats"] == [{"name": "onnx", "version": "1"}]
    assert container(made["runtime"])["args"][:2] == ["serve", "/mnt/models"]
    assert "--model_name={{.Name}}" in container(made["runtime"])["args"]
    assert service["metadata"]["name"] == "iris"
    assert service["metadata"]["namespace"] == made["runtime"]["metadata"]["namespace"] == "prod"
    assert service["spec"] == {
        "predictor": {
            "model": {
                "modelFormat": {"name": "onnx", "version": "1"},
                "runtime": "iris",
                "protocolVersion": "v2",
                "storageUri": URI,
            }
        }
    }


def test_each_service_has_a_runtime_of_its_own_unless_it_is_named() -> None:
    one, other = objects(), objects(PIPELINE)
    shared = objects(runtime="fast")

    assert one["runtime"]["metadata"]["name"] == "iris"
    assert other["runtime"]["metadata"]["name"] == other["service"]["metadata"]["name"] == "models"
    assert shared["service"]["spec"]["predictor"]["model"]["runtime"] == shared["runtime"]["metadata"]["name"] == "fast"


def test_a_repository_is_one_service_with_the_formats_of_its_models() -> None:
    made = objects(repository(model("a"), model("b", "sklearn"), ModelConfig(name="c", platform="tensorrt_plan")))

    formats = [each["name"] for each in made["runtime"]["spec"]["supportedModelFormats"]]
    assert formats == ["triton", "onnx", "sklearn", "tensorrt"]
    assert made["service"]["spec"]["predictor"]["model"]["modelFormat"] == {"name": "triton", "version": "2"}


def test_a_runtime_of_the_cluster_has_no_namespace() -> None:
    runtime = objects(scope=RuntimeScope.CLUSTER, namespace="prod", runtime="fast", image="registry/charonia:1")[
        "runtime"
    ]

    assert (runtime["kind"], runtime["metadata"]) == ("ClusterServingRuntime", {"name": "fast"})
    assert container(runtime)["image"] == "registry/charonia:1"


def test_a_replica_has_what_was_asked_for() -> None:
    resources = container(objects(cpu="500m", memory="4Gi", gpus=1)["runtime"])["resources"]

    assert resources["limits"] == {"cpu": "500m", "memory": "4Gi", "nvidia.com/gpu": "1"} == resources["requests"]


def test_knative_scales_by_requests_and_divides_traffic() -> None:
    options: dict[str, Any] = {"scale_metric": ScaleMetric.CONCURRENCY, "scale_target": 4, "canary_percent": 0}
    service = objects(replicas_min=0, replicas_max=3, **options)["service"]

    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Serverless"}
    assert {key: value for key, value in service["spec"]["predictor"].items() if key != "model"} == {
        "minReplicas": 0,
        "maxReplicas": 3,
        "scaleMetric": "concurrency",
        "scaleTarget": 4,
        "canaryTrafficPercent": 0,
    }


@pytest.mark.parametrize(("canary", "length"), [("", 51), ("s3://bucket/next", 46)])
def test_services_of_the_longest_names_are_labels_of_dns(canary: str, length: int) -> None:
    percent = 10 if canary else None
    made = objects(name="a" * length, mode=Mode.STANDARD, canary_uri=canary, canary_percent=percent)

    # KServe names the Services of predictors, transformers and canaries like this.
    suffixes = ["predictor", "transformer", *(f"{each['predictor']['name']}-predictor" for each in canaries(made))]
    assert max(len(f"{made['service']['metadata']['name']}-{suffix}") for suffix in suffixes) == 63


def canaries(made: dict[str, Any]) -> list[Any]:
    found: list[Any] = made["service"]["spec"].get("canary", [])
    return found


def test_a_canary_in_standard_mode_is_a_second_predictor_with_its_own_models() -> None:
    uri = "s3://bucket/next"
    service = objects(mode=Mode.STANDARD, canary_percent=10, canary_uri=uri, replicas_min=4, replicas_max=8)["service"]
    predictor, (canary,) = service["spec"]["predictor"], service["spec"]["canary"]

    assert "canaryTrafficPercent" not in predictor
    assert canary["trafficPercent"] == 10
    # KServe scales it with its share of the predictor's replicas, and refuses bounds of its own.
    assert canary["predictor"].keys() == {"name", "model"}
    assert canary["predictor"]["model"] == predictor["model"] | {"storageUri": uri, "name": "kserve-container"}


def test_in_standard_mode_replicas_follow_the_busy_share_of_their_own_pods() -> None:
    options: dict[str, Any] = {"mode": Mode.STANDARD, "namespace": "prod", "replicas_max": 4}
    service = objects(PIPELINE, transformer=True, scale_metric=ScaleMetric.BUSY, **options)["service"]

    assert service["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "keda"
    for kind in ("predictor", "transformer"):
        component = service["spec"][kind]
        assert not component.keys() & {"scaleMetric", "scaleTarget"}  # which KServe refuses beside KEDA
        (metric,) = component["autoScaling"]["metrics"]
        assert metric["external"]["target"] == {"type": "Value", "value": "0.7"}
        query = metric["external"]["metric"]["query"]
        pods = set(re.findall('namespace="prod",pod=~"([^"]*)"', query))
        assert len(pods) == 1
        assert re.fullmatch(pods.pop(), f"models-{kind}-5d78c9869b-x7k2p")


def test_the_query_of_the_busy_share_is_that_of_the_chart() -> None:
    template = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")

    assert BUSY_SHARES.replace("{0}", "{{ $pods }}") in template


def test_by_cpu_knative_scales_with_another_class() -> None:
    annotations = objects(scale_metric=ScaleMetric.CPU)["service"]["metadata"]["annotations"]

    assert annotations["autoscaling.knative.dev/class"] == "hpa.autoscaling.knative.dev"


def test_a_deployment_has_probes_and_an_end_that_knative_has_itself() -> None:
    predictor = objects(mode=Mode.STANDARD)["service"]["spec"]["predictor"]
    served = predictor["model"]

    assert served["livenessProbe"]["httpGet"] == served["startupProbe"]["httpGet"]
    assert served["startupProbe"]["httpGet"] == {"path": "/v2/health/live", "port": 8080}
    sleep = served["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert predictor["deploymentStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert predictor["terminationGracePeriodSeconds"] == sleep + 5 + 30 + 15
    assert not {"livenessProbe", "lifecycle"} & objects()["service"]["spec"]["predictor"]["model"].keys()


@pytest.mark.parametrize(
    ("arguments", "end_s"),
    [
        (("--exit-timeout-secs=600",), 605),
        (("--exit-delay-secs", "20", "--exit-timeout-secs", "1"), 21),
        (("--exit-delay-secs=20", "--exit-delay-secs=0"), 30),
        (("--log-verbose=1",), 35),
    ],
)
def test_the_grace_period_follows_the_arguments(arguments: tuple[str, ...], end_s: int) -> None:
    made = objects(mode=Mode.STANDARD, arguments=arguments)
    predictor = made["service"]["spec"]["predictor"]
    options, _ = parse(container(made["runtime"])["args"][1:-1], {})

    assert options.exit_delay_secs + options.exit_timeout_secs == end_s
    assert predictor["terminationGracePeriodSeconds"] == 10 + end_s + 15


@pytest.mark.parametrize("mode", Mode)
def test_grpc_has_the_only_port(mode: Mode) -> None:
    made = objects(protocol=Protocol.GRPC, mode=mode)
    served = made["service"]["spec"]["predictor"]["model"]

    assert served["ports"] == [{"name": "h2c", "containerPort": 8081, "protocol": "TCP"}]
    assert served["protocolVersion"] == "grpc-v2"
    assert "ports" not in container(made["runtime"])


def test_v1_is_turned_on_where_it_is_asked_for() -> None:
    runtime = objects(protocol=Protocol.V1)["runtime"]

    assert "--kserve-v1" in container(runtime)["args"]
    assert runtime["spec"]["protocolVersions"] == ["v2", "grpc-v2", "v1"]
    assert "--kserve-v1" not in container(objects()["runtime"])["args"]


def test_an_ensemble_is_divided_into_transformer_and_predictor() -> None:
    spec = objects(PIPELINE, transformer=True, protocol=Protocol.GRPC)["service"]["spec"]
    transformer = spec["transformer"]["containers"][0]

    assert spec["predictor"]["model"]["args"] == ["--model-control-mode=explicit", "--load-model=iris"]
    assert transformer["args"][-3:] == ["--model-control-mode=explicit", "--load-model=pipeline", "--predictor=iris"]
    assert {"name": "STORAGE_URI", "value": URI} in transformer["env"]
    assert "ports" in transformer
    assert "ports" not in spec["predictor"]["model"]


def test_the_predictor_may_be_chosen() -> None:
    models = repository(ensemble("both", "detect", "read"), model("detect"), model("read"))

    assert divided(models, "read") == ("both", "read")
    assert "expected one step that may be the predictor, got detect, read" in refusal(models, transformer=True)


@pytest.mark.parametrize(
    ("exported", "predictor", "message"),
    [
        (IRIS, "", "expected one ensemble that no other one calls, got none"),
        (repository(ensemble("a", "x"), ensemble("b", "x"), model("x")), "", "got a, b"),
        (PIPELINE, "other", "expected one ensemble with the step 'other'"),
        (repository(ensemble("a", "x"), model("x")), "", "has one step, and nothing would be left"),
        (repository(ensemble("a", "x", "y"), model("x")), "", "needs model 'y', which 'models' does not have"),
        (
            repository(ensemble("a", "x", "y"), model("x", sequence_batching=SequenceBatching()), model("y", "python")),
            "",
            "it keeps sequences, whose requests have to reach the same replica",
        ),
        (
            repository(
                ensemble("a", "x", "y"),
                model("x", model_transaction_policy=TransactionPolicy(decoupled=True)),
                model("y", "python"),
            ),
            "",
            "it answers with any number of responses",
        ),
        (
            repository(ensemble("a", "b", "y"), ensemble("b", "y"), model("y", "python")),
            "b",
            "it is an ensemble itself",
        ),
    ],
)
def test_an_ensemble_that_cannot_be_divided_is_refused(exported: ExportedModels, predictor: str, message: str) -> None:
    assert message in refusal(exported, transformer=True, predictor=predictor)


def test_models_are_added_one_by_one() -> None:
    made = objects(repository(model("a"), model("b", "sklearn")), multi_model=True, memory="2Gi", namespace="prod")

    assert list(made) == ["runtime", "service", "model-a", "model-b"]
    assert made["runtime"]["spec"]["multiModel"] is True
    assert {"--model-control-mode=explicit", "--strict-readiness=start"} <= {*container(made["runtime"])["args"]}
    served = made["service"]["spec"]["predictor"]["model"]
    assert "storageUri" not in served
    assert served["resources"] == container(made["runtime"])["resources"]  # KServe looks for the memory there
    assert made["model-b"]["metadata"] == {"name": "b", "namespace": "prod"}
    assert made["model-b"]["spec"] == {
        "inferenceService": "models",
        "model": {"framework": "sklearn", "storageUri": f"{URI}/b", "memory": "1024Mi"},
    }


def test_what_cannot_be_added_one_by_one_is_refused() -> None:
    assert "ensemble 'pipeline' needs others" in refusal(PIPELINE, multi_model=True)
    assert "model 'a_b' cannot be the name of a TrainedModel" in refusal(repository(model("a_b")), multi_model=True)
    assert "expected a repository, got one model" in refusal(multi_model=True)
    pair = repository(model("a"), model("b"))
    assert "KServe's agent fetches models from s3://" in refusal(pair, multi_model=True, storage_uri="pvc://c/m")


def test_the_memory_of_a_model_stays_when_others_are_added() -> None:
    more: dict[str, Any] = {"multi_model": True, "model_memory": "256Mi"}
    one, two = objects(repository(model("a")), **more), objects(repository(model("a"), model("b")), **more)

    assert one["model-a"] == two["model-a"]
    assert two["model-b"]["spec"]["model"]["memory"] == "256Mi"


def test_names_of_folders_become_names_of_services() -> None:
    named = ExportedModels("My_Models.v2", (model("a"),), is_repository=True)
    strange = ExportedModels("2nd", (model("a"),), is_repository=True)

    assert objects(named)["service"]["metadata"]["name"] == "my-models-v2"
    assert "'2nd' cannot be a service's name (hint: --name NAME" in refusal(strange)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage_uri": ""}, "--storage-uri: expected where KServe finds the models"),
        ({"storage_uri": "models"}, "--storage-uri: expected a URI"),
        ({"name": "Iris"}, "--name: expected lower-case letters"),
        ({"name": "a" * 52}, "--name: expected lower-case letters, digits and '-', a letter first, at most 51"),
        ({"namespace": "a" * 64}, "--namespace: expected lower-case letters, digits and '-', at most 63"),
        (
            {"mode": Mode.STANDARD, "name": "a" * 47, "canary_uri": "s3://b/c", "canary_percent": 1},
            "--canary-uri: expected a name of 46 characters at most",
        ),
        ({"memory": "much"}, "--memory: expected a quantity"),
        ({"replicas_min": 3, "replicas_max": 2}, "--min-replicas 3 is more than --max-replicas 2"),
        ({"scale_target": 3}, "--scale-metric says what it is the target of"),
        ({"scale_metric": ScaleMetric.CPU, "scale_target": 101}, "--scale-target: expected a percentage"),
        ({"mode": Mode.STANDARD, "scale_metric": ScaleMetric.MEMORY}, "--scale-target gives it one"),
        ({"model_memory": "1Gi"}, "--model-memory: only with --multi-model"),
        ({"model_memory": "much", "multi_model": True}, "--model-memory: expected a quantity"),
        ({"predictor": "x"}, "--predictor: only with --transformer"),
        ({"transformer": True, "multi_model": True}, "exclude each other"),
        ({"mode": Mode.STANDARD, "canary_percent": 10}, "--canary-percent and --canary-uri"),
        ({"mode": Mode.STANDARD, "canary_uri": "s3://b/c"}, "--canary-percent and --canary-uri"),
        ({"canary_uri": "s3://b/c", "canary_percent": 10}, "--canary-uri: Knative keeps the previous revision"),
        ({"canary_uri": "next"}, "--canary-uri: expected a URI"),
        (
            {"mode": Mode.STANDARD, "canary_uri": "s3://b/c", "canary_percent": 1, "transformer": True},
            "--canary-uri: KServe divides traffic of predictors only",
        ),
        ({"scale_metric": ScaleMetric.BUSY}, "--scale-metric busy-share: KServe has KEDA in --mode standard"),
        ({"mode": Mode.STANDARD, "scale_metric": ScaleMetric.BUSY, "replicas_max": 3}, "expected --namespace"),
        ({"mode": Mode.STANDARD, "replicas_min": 0}, "--min-replicas 0: only Knative"),
        ({"mode": Mode.STANDARD, "scale_metric": ScaleMetric.RPS}, "--scale-metric rps: only Knative counts"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    assert message in refusal(**options)


def test_a_folder_without_models_is_refused() -> None:
    assert "'models' has no models" in refusal(repository())
