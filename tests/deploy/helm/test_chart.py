"""The chart over a matrix of values: what it makes is valid, means what it says, and has no privilege."""

import json
import os
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.helm.crd_schemas import SCHEMAS
from tests.support.chart import CHART, objects, of_kind, pod_specs, rendered, server_of
from tests.support.crds import needs_crds, problems_by_crd
from tests.support.kubernetes_tools import tool
from tests.support.pod_security import violations

from charonia import __version__
from charonia.cli.infer import LINE as INFER
from charonia.cli.serve import parse
from charonia.cli.tune import parse_profile

HERE = Path(__file__).parent
VALUES = sorted((HERE / "values").glob("*.yaml"))
RELEASES = ("1.31", "1.34", "1.37")
GOLDEN = ("default", "statefulset", "tune-job")
READ_BY_KUBECTL = (*GOLDEN, "store-s3", "gpu", "hpa", "monitoring")
WRITE_GOLDEN = "CHARONIA_WRITE_GOLDEN"

each = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


@cache
def problem(release: str, text: str) -> str:
    """What is wrong with an object for a release of Kubernetes, "" if nothing is."""
    try:
        kubernetes_validate.validate(json.loads(text), release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def test_the_matrix_is_large_enough() -> None:
    assert len(VALUES) >= 30


@each
def test_every_object_is_valid_for_three_releases_of_kubernetes(values: Path) -> None:
    found: dict[str, str] = {}
    for manifest in objects(values):
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] in SCHEMAS:
            jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
            continue
        # The tests' releases share most objects.
        text = json.dumps(manifest, sort_keys=True)
        found |= {f"{release} {name}": reason for release in RELEASES if (reason := problem(release, text))}

    assert found == {}


@needs_crds
@each
def test_objects_of_other_controllers_fit_their_published_schemas(values: Path) -> None:
    found = [manifest for manifest in objects(values) if manifest["kind"] in SCHEMAS]

    assert [problems for manifest in found if (problems := problems_by_crd(manifest))] == []


@each
def test_no_pod_has_a_privilege(values: Path) -> None:
    found = {name: reasons for name, spec in pod_specs(objects(values)) if (reasons := violations(spec))}

    # Pod Security's list of volumes is older than those of images: `copy` is for namespaces that enforce it.
    expected = {"Deployment/demo-charonia": ["volume models: image"]} if values.stem == "image-volume" else {}
    assert found == expected


@each
def test_no_pod_can_write_to_its_image_or_call_kubernetes(values: Path) -> None:
    for _, spec in pod_specs(objects(values)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            if "env" in container:
                home = next(e["value"] for e in container["env"] if e["name"] == "HOME")
                assert home in {mount["mountPath"] for mount in container["volumeMounts"]}


@each
def test_what_a_pod_mounts_it_has(values: Path) -> None:
    manifests = objects(values)
    claims = {
        claim["metadata"]["name"]
        for workload in of_kind(manifests, "StatefulSet")
        for claim in workload["spec"].get("volumeClaimTemplates", [])
    }

    for name, spec in pod_specs(manifests):
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        assert not claims & set(volumes)
        wanted = claims if name.startswith("StatefulSet") else set()
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
            assert len(mounted) == len(set(mounted))
            assert set(mounted) <= set(volumes) | wanted


@each
def test_what_is_selected_are_the_servers_alone(values: Path) -> None:
    manifests = objects(values)
    server = server_of(manifests)
    labels = server["spec"]["template"]["metadata"]["labels"]
    others = [
        pod["labels"]
        for pod in (
            *(job["spec"]["template"]["metadata"] for job in of_kind(manifests, "Job")),
            *(job["spec"]["jobTemplate"]["spec"]["template"]["metadata"] for job in of_kind(manifests, "CronJob")),
            *(pod["metadata"] for pod in of_kind(manifests, "Pod")),
        )
    ]
    selectors = [service["spec"]["selector"] for service in of_kind(manifests, "Service")]
    selectors += [
        found.get("matchLabels", found)
        for kind, key in (
            ("PodDisruptionBudget", "selector"),
            ("NetworkPolicy", "podSelector"),
            ("PodMonitor", "selector"),
        )
        for found in (manifest["spec"][key] for manifest in of_kind(manifests, kind))
    ]
    selectors.append(server["spec"]["selector"]["matchLabels"])

    assert len(selectors) >= 3
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not any(selector.items() <= other.items() for other in others)


@each
def test_names_of_ports_lead_to_ports(values: Path) -> None:
    manifests = objects(values)
    names = {port["name"] for port in server_of(manifests)["spec"]["template"]["spec"]["containers"][0]["ports"]}
    services = {service["metadata"]["name"]: service for service in of_kind(manifests, "Service")}
    used = {port["targetPort"] for service in services.values() for port in service["spec"]["ports"]}
    used |= {e["port"] for monitor in of_kind(manifests, "PodMonitor") for e in monitor["spec"]["podMetricsEndpoints"]}
    used |= {
        port["port"]
        for policy in of_kind(manifests, "NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }

    assert used <= names
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            backend = rule["http"]["paths"][0]["backend"]["service"]
            assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]["spec"]["ports"]}
    for route in (*of_kind(manifests, "HTTPRoute"), *of_kind(manifests, "GRPCRoute")):
        backend = route["spec"]["rules"][0]["backendRefs"][0]
        if backend.get("kind") != "InferencePool":  # which has a service that chooses pods
            assert backend["port"] in {port["port"] for port in services[backend["name"]]["spec"]["ports"]}


@each
def test_the_server_understands_its_arguments(values: Path) -> None:
    container = server_of(objects(values))["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["charonia", "serve"]
    known = {entry["name"] for entry in container["env"]}
    arguments = [argument.replace("$(CHARONIA_REQUESTED_CORES)", "2") for argument in container["args"]]

    options, notes = parse(arguments, {"CHARONIA_CACHE": "/cache"})

    assert ("CHARONIA_REQUESTED_CORES" in known) == (arguments != container["args"])
    assert notes == ()
    assert options.http.port == 8000
    assert options.grpc.port == 8001
    assert options.metrics.port == 8002
    assert options.models.repositories or arguments[0].startswith("/")


@each
def test_the_grace_period_is_what_the_steps_of_the_end_take(values: Path) -> None:
    spec = server_of(objects(values))["spec"]["template"]["spec"]
    container = spec["containers"][0]
    arguments = [argument.replace("$(CHARONIA_REQUESTED_CORES)", "2") for argument in container["args"]]
    options, _ = parse(arguments, {})
    pre_stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)

    needed_s = pre_stop_s + options.exit_delay_secs + options.exit_timeout_secs
    # What the guard may take: the engine's margin, see charonia.server.guard.restarts.
    assert spec["terminationGracePeriodSeconds"] == needed_s + 15


@each
def test_the_tune_job_understands_its_arguments(values: Path) -> None:
    manifests = objects(values)
    jobs = [*of_kind(manifests, "Job"), *(job["spec"]["jobTemplate"] for job in of_kind(manifests, "CronJob"))]

    assert bool(jobs) == ("tune" in yaml.safe_load(values.read_text(encoding="utf-8")))
    for job in jobs:
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["command"] == ["charonia", "tune", "profile"]
        options = parse_profile(container["args"]).options
        assert options.launch.http_endpoint in ("demo-charonia:8000", "staging-charonia-headless:8000")
        ports = {
            service["metadata"]["name"].replace("demo", "staging"): {port["port"] for port in service["spec"]["ports"]}
            for service in of_kind(manifests, "Service")
        }
        metrics = options.launch.metrics_url.removeprefix("http://").removesuffix("/metrics")
        for endpoint in (options.launch.http_endpoint, options.launch.grpc_endpoint, metrics):
            host, port = endpoint.replace("demo", "staging").split(":")
            assert int(port) in ports[host]
        assert str(options.output.journal_folder).startswith(container["workingDir"])
        # It waits for as long as the server may take to start, then searches.
        probe = server_of(manifests)["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        start_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert options.launch.retries >= start_s  # one a second
        assert start_s + options.search.time_budget_s < job["spec"]["activeDeadlineSeconds"]


@each
def test_the_test_of_the_release_understands_its_arguments(values: Path) -> None:
    manifests = objects(values)
    pods = of_kind(manifests, "Pod")

    given = yaml.safe_load(values.read_text()) or {}
    is_built_in = given.get("models", {}).get("type", "files") == "files"
    named = given.get("test", {}).get("model", is_built_in or bool(given.get("tune", {}).get("models")))
    assert len(pods) == bool(named)
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert container["command"] == ["charonia", "infer"]
        (url,) = [argument for argument in container["args"] if argument.startswith("--url=")]
        services = {service["metadata"]["name"]: service for service in of_kind(manifests, "Service")}
        scheme, host, port = url.removeprefix("--url=").replace("//", "").split(":")
        assert scheme == ("https" if "tls" in yaml.safe_load(values.read_text(encoding="utf-8")) else "http")
        assert int(port) in {each["port"] for each in services[host]["spec"]["ports"]}
        INFER.parse(container["args"])


@pytest.mark.parametrize("name", GOLDEN)
def test_what_the_chart_makes_has_not_changed_unnoticed(name: str) -> None:
    made = rendered(HERE / "values" / f"{name}.yaml")
    golden = HERE / "golden" / f"{name}.yaml"
    if os.environ.get(WRITE_GOLDEN):
        golden.write_text(made, encoding="utf-8")

    assert made == golden.read_text(encoding="utf-8"), f"{WRITE_GOLDEN}=1 writes it anew"


def test_helm_finds_nothing_to_object_to() -> None:
    done = subprocess.run(
        [tool("helm"), "lint", "--strict", CHART], capture_output=True, text=True, check=False, timeout=200
    )

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", READ_BY_KUBECTL)
def test_kubectl_reads_all_objects(name: str) -> None:
    values = HERE / "values" / f"{name}.yaml"
    command: list[str | Path] = [
        tool("kubectl"),
        "label",
        "--local",
        "--filename=-",
        "--output=json",
        "read-by=kubectl",
    ]

    done = subprocess.run(command, input=rendered(values), capture_output=True, text=True, check=False, timeout=200)

    assert done.returncode == 0, done.stderr
    decoder, text, read = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        found, end = decoder.raw_decode(text)
        read.append(f"{found['kind']}/{found['metadata']['name']}")
        text = text[end:].lstrip()
    assert sorted(read) == sorted(f"{made['kind']}/{made['metadata']['name']}" for made in objects(values))


def test_the_chart_has_the_version_of_the_package() -> None:
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))

    assert chart["appVersion"] == __version__
    assert chart["version"] == __version__


def test_the_wheel_has_the_chart() -> None:
    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]

    assert included["deploy/helm/charonia"] == "charonia/deploy/helm/charonia"


def test_the_user_of_the_pods_is_that_of_the_image() -> None:
    dockerfile = CHART.parents[1] / "image" / "Dockerfile"
    users = re.findall(r"^USER (\d+):(\d+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    context = server_of(objects(HERE / "values" / "default.yaml"))["spec"]["template"]["spec"]["securityContext"]

    assert (str(context["runAsUser"]), str(context["runAsGroup"])) == users[-1]
