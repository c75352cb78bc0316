"""The chart as Kubernetes and operators meet it: names, admission, real situations, rendered again."""

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.deploy.helm.admission import problems, repeated_keys
from tests.support.chart import (
    CHART,
    ChartRefusalError,
    Manifest,
    objects,
    objects_of,
    of_kind,
    pod_specs,
    rendered,
    server_of,
    template,
)
from tests.support.kubernetes_tools import tool

HERE = Path(__file__).parent
VALUES = sorted((HERE / "values").glob("*.yaml"))
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
SITUATIONS = [path for path in VALUES if path.stem.startswith("situation-")]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_kubernetes_admits_what_the_chart_makes(values: Path) -> None:
    assert repeated_keys(rendered(values)) == []
    assert problems(objects(values)) == []


@pytest.mark.parametrize("values", SITUATIONS, ids=lambda path: path.stem)
def test_the_same_values_give_the_same_objects_at_each_revision(values: Path) -> None:
    assert template(f"--values={values}", "--is-upgrade") == rendered(values)


def test_there_are_eleven_situations() -> None:
    assert len(SITUATIONS) == 11


def made(name: str) -> list[Manifest]:
    return objects(HERE / "values" / f"situation-{name}.yaml")


def pod_of_server(name: str) -> Manifest:
    spec: Manifest = server_of(made(name))["spec"]["template"]["spec"]
    return spec


NAMES = st.from_regex(r"\A[a-z0-9]([-a-z0-9.]{0,51}[a-z0-9])?\Z").filter(
    lambda name: len(name) <= 53 and not re.search(r"\.[-.]|-\.", name)
)
TEXTS = st.sampled_from(["1234", "1e3", "true", "null", "0x10", "2024-01-01", "no", "a"])


@given(
    release=NAMES,
    text=TEXTS,
    kind=st.sampled_from(["Deployment", "StatefulSet"]),
    override=st.one_of(st.just(""), st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_name_and_text_makes_valid_objects(release: str, text: str, kind: str, override: str) -> None:
    values = {
        "kind": kind,
        "nameOverride": override,
        "autoscaling": {"type": "keda"},
        "commonLabels": {"team": text},
        "podLabels": {"version": text},
        "priorityClassName": text,
        "image": {"pullSecrets": [text], "tag": text},
        "serviceAccount": {"annotations": {"a": text}},
        "models": {"type": "pvc", "pvc": {"create": True, "storageClass": text}},
        "tune": {"enabled": True, "models": ["m"], "server": "other", "schedule": "0 3 * * 0"},
    }

    manifests = objects_of(values, release)

    assert problems(manifests) == []
    name = server_of(manifests)["metadata"]["name"]
    # As the controllers name pods: longer names are cut before the last five characters.
    pod = f"{name}-0" if kind == "StatefulSet" else f"{name}-5d78c9869b-"[:58] + "x7k2p"
    (scaler,) = of_kind(manifests, "ScaledObject")
    for trigger in scaler["spec"]["triggers"]:
        pattern = re.findall(r'pod=~"([^"]*)"', trigger["metadata"]["query"])[0]
        assert re.fullmatch(pattern, pod)
    claim = of_kind(manifests, "PersistentVolumeClaim")[0]["spec"]
    assert claim["storageClassName"] == text


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    one, two = (server_of(objects_of({}, "a" * 52 + end))["metadata"]["name"] for end in "xy")

    assert one != two


def test_a_class_of_a_dash_is_the_empty_class() -> None:
    (claim,) = of_kind(made("gpu-claims"), "PersistentVolumeClaim")

    assert claim["spec"]["storageClassName"] == ""
    assert claim["metadata"]["annotations"] == {"backup": "daily", "helm.sh/resource-policy": "keep"}


def test_a_variable_of_the_user_replaces_that_of_the_chart() -> None:
    env = {entry["name"]: entry.get("value") for entry in pod_of_server("own-environment")["containers"][0]["env"]}

    assert env["HOME"] == "/cache"
    assert (env["AWS_REGION"], env["PYTHONPATH"], env["A"]) == ("eu-central-1", "/mine:/packages/site", "2")


def test_a_limit_below_the_request_lowers_it() -> None:
    resources = pod_of_server("spot")["containers"][0]["resources"]

    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == "500m"
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "512Mi"


def test_installation_of_packages_has_proxy_index_and_certificates() -> None:
    install = pod_of_server("openshift")["initContainers"][1]

    assert {"PIP_INDEX_URL", "HTTPS_PROXY", "SSL_CERT_FILE"} <= {entry["name"] for entry in install["env"]}
    assert "/etc/ca" in {mount["mountPath"] for mount in install["volumeMounts"]}


def test_helpers_have_no_sidecar_and_run_where_they_should() -> None:
    manifests = made("mesh")
    (test,) = of_kind(manifests, "Pod")
    (job,) = of_kind(manifests, "Job")
    template = job["spec"]["template"]

    for metadata in (test["metadata"], template["metadata"]):
        assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
        assert metadata["labels"]["app.kubernetes.io/name"] == "charonia"
        assert metadata["labels"]["team"] == "search"
        assert metadata["annotations"]["linkerd.io/inject"] == "disabled"
    assert test["spec"]["nodeSelector"] == {"pool": "small"}
    assert (template["spec"]["serviceAccountName"], template["spec"]["priorityClassName"]) == ("tuner", "batch")


@pytest.mark.parametrize(
    ("name", "host", "fields"),
    [
        ("ipv6", True, {"ipFamilies": ["IPv6"]}),
        ("dual-stack", True, {"ipFamilyPolicy": "PreferDualStack"}),
        ("mesh", False, {}),
    ],
)
def test_one_value_sets_the_families_of_addresses(name: str, host: bool, fields: dict[str, Any]) -> None:
    for service in of_kind(made(name), "Service"):
        assert {key: value for key, value in service["spec"].items() if key.startswith("ipFamil")} == fields
    assert ("--host=*" in pod_of_server(name)["containers"][0]["args"]) == host


EXPECTED_BY_OPERATORS: dict[str, Any] = {
    "commonLabels": {"team": "search"},
    "annotations": {"reloader": "true"},
    "service": {
        "type": "LoadBalancer",
        "ipFamilyPolicy": "RequireDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
        "loadBalancerClass": "example.org/internal",
        "externalTrafficPolicy": "Local",
    },
    "schedulerName": "volcano",
    "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
    "hostAliases": [{"ip": "10.0.0.10", "hostnames": ["minio"]}],
    "minReadySeconds": 0,
    "revisionHistoryLimit": 0,
    "podDisruptionBudget": {"minAvailable": "50%"},
    "autoscaling": {"type": "keda", "keda": {"authenticationRef": {"name": "token"}, "pollingInterval": 30}},
    "models": {"type": "pvc", "pvc": {"create": True, "labels": {"a": "b"}}},
    "cache": {"size": "7Gi", "persistent": True, "labels": {"a": "b"}, "retention": {"whenScaled": "Delete"}},
    "tmpSize": "3Gi",
    "server": {"grpcMaxConnectionAgeSeconds": 300},
    "networkPolicy": {"enabled": True, "egress": [], "identity": True},
}


def test_what_operators_expect_is_where_kubernetes_reads_it() -> None:
    manifests = objects_of(EXPECTED_BY_OPERATORS | {"kind": "StatefulSet"})
    server, (scaler,) = server_of(manifests), of_kind(manifests, "ScaledObject")
    spec, pod = server["spec"], server["spec"]["template"]["spec"]
    service, headless = of_kind(manifests, "Service")
    (claim,) = of_kind(manifests, "PersistentVolumeClaim")
    (policy,) = of_kind(manifests, "NetworkPolicy")
    (budget,) = of_kind(manifests, "PodDisruptionBudget")

    assert {manifest["metadata"]["labels"]["team"] for manifest in manifests} == {"search"}
    assert spec["template"]["metadata"]["labels"]["team"] == "search"
    assert server["metadata"]["annotations"] == {"reloader": "true"}
    assert service["spec"].items() >= EXPECTED_BY_OPERATORS["service"].items()
    assert headless["spec"]["ipFamilies"] == ["IPv6", "IPv4"]
    for key in ("schedulerName", "dnsConfig", "hostAliases"):
        assert pod[key] == EXPECTED_BY_OPERATORS[key]
    assert (spec["minReadySeconds"], spec["revisionHistoryLimit"]) == (0, 0)
    assert budget["spec"]["minAvailable"] == "50%"
    assert "maxUnavailable" not in budget["spec"]
    assert scaler["spec"]["pollingInterval"] == 30
    assert {trigger["authenticationRef"]["name"] for trigger in scaler["spec"]["triggers"]} == {"token"}
    assert claim["metadata"]["labels"]["a"] == spec["volumeClaimTemplates"][0]["metadata"]["labels"]["a"] == "b"
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenScaled": "Delete"}
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "3Gi"}} in pod["volumes"]
    assert pod["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "1Gi"
    assert "--grpc-max-connection-age=300000" in pod["containers"][0]["args"]
    assert "cache,tmp" in server["spec"]["template"]["metadata"]["annotations"][SAFE_TO_EVICT]
    names, identity = policy["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53, 5353}
    endpoints = {to["ipBlock"]["cidr"] for to in identity["to"]}
    assert {"169.254.169.254/32", "169.254.169.252/32", "169.254.170.23/32"} < endpoints


def test_a_cache_that_is_not_kept_has_a_size() -> None:
    pod = server_of(objects_of({"cache": {"size": "7Gi"}}))["spec"]["template"]["spec"]

    assert {"name": "cache", "emptyDir": {"sizeLimit": "7Gi"}} in pod["volumes"]


def test_every_port_says_what_it_speaks() -> None:
    for values in VALUES:
        for service in of_kind(objects(values), "Service"):
            assert all("appProtocol" in port for port in service["spec"]["ports"])


def test_no_volume_of_a_pod_can_fill_its_node() -> None:
    for values in VALUES:
        for name, spec in pod_specs(objects(values)):
            for volume in spec["volumes"]:
                if "emptyDir" in volume and volume["name"] != "scratch":
                    assert "sizeLimit" in volume["emptyDir"], (name, volume["name"])


def test_a_changed_search_is_another_job_and_the_same_is_none() -> None:
    def job(**tune: Any) -> str:
        values = {"server": {"modelControlMode": "explicit"}, "tune": {"enabled": True, "models": ["m"], **tune}}
        name: str = of_kind(objects_of(values), "Job")[0]["metadata"]["name"]
        return name

    assert job() == job() != job(timeBudget="20m")


class Index(BaseHTTPRequestHandler):
    """A server whose repository has a model from the second question on."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        body = b'[{"name": "resnet"}]' if type(self).asked > 1 else b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("models", "wait_s", "status", "message"),
    [("resnet", "60", 0, ""), ("resnet,bert", "0", 1, "has no model bert, resnet after 0 s. Copy it")],
)
def test_the_tune_job_waits_for_its_models(models: str, wait_s: str, status: int, message: str) -> None:
    (job,) = of_kind(made("mesh"), "Job")
    (wait,) = job["spec"]["template"]["spec"]["initContainers"]
    env = {entry["name"]: entry["value"] for entry in wait["env"]}
    assert (env["URL"], env["MODELS"]) == ("http://demo-charonia:8000", "resnet")
    assert wait["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert int(env["WAIT_S"]) < job["spec"]["activeDeadlineSeconds"]
    Index.asked = 0

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = {"URL": f"http://127.0.0.1:{server.server_port}", "MODELS": models, "WAIT_S": wait_s}
        done = subprocess.run(
            [sys.executable, "-c", *wait["args"]],
            env={**os.environ, **found},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        server.shutdown()

    assert done.returncode == status
    assert message in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("models.type=pvc,models.pvc.create=true,models.pvc.readOnly=false,test.model=resnet", "cp ./MODEL "),
        ("models.type=pvc,models.pvc.create=true,models.pvc.accessModes={ReadWriteOnce}", "only pods of one node"),
        ("tune.enabled=true,tune.models={resnet},tune.server=other", "logs job/demo-charonia-tune-"),
        ("replicas=1", "docker push REGISTRY/charonia:"),
        ("replicas=1", "One request to identity:"),
        ("models.type=pvc,models.pvc.create=true", "helm test sends no request"),
        (
            "models.type=pvc,models.pvc.create=true,server.modelControlMode=explicit,"
            "tune.enabled=true,tune.models={resnet}",
            "One request to resnet:",
        ),
    ],
)
def test_the_notes_say_what_to_do_next(tmp_path: Path, setting: str, said: str) -> None:
    done = subprocess.run(
        [tool("helm"), "install", "demo", CHART, "--dry-run=client", "--set", setting],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        env={**os.environ, "HOME": str(tmp_path)},
    )

    assert said in done.stdout.split("NOTES:")[1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "podLabels has app.kubernetes.io/name"),
        ({"resources": {"claims": [{"name": "gpu"}]}}, "resources.claims names 'gpu', which is not in resourceClaims"),
        (
            {"models": {"type": "pvc", "pvc": {"create": True, "accessModes": ["ReadWriteOncePod"]}}},
            "an update starts a second pod",
        ),
        ({"extraPackages": ["a"], "env": [{"name": "PYTHONPATH", "value": "/a"}]}, "add /packages/site to it"),
    ],
)
def test_what_kubernetes_would_refuse_later_is_refused_with_a_hint(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ChartRefusalError, match=reason):
        objects_of(values)


def test_image_volumes_need_a_kubernetes_that_has_them() -> None:
    values = HERE / "values" / "image-volume.yaml"
    with pytest.raises(ChartRefusalError, match=r"need Kubernetes 1.33 .*: set models.image.copy true"):
        template(f"--values={values}", "--kube-version=1.32.0")
