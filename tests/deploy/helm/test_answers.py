"""What users of charts for inference servers have suffered from, one by one: docs/kubernetes.md has the table."""

import os
import re
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.chart import CHART, Manifest, objects, objects_of, of_kind, pod_specs, server_of
from tests.support.kubernetes_tools import tool

HERE = Path(__file__).parent
DOCS = CHART.parents[2] / "docs" / "kubernetes.md"
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"--set(?: |=)(\S+?)=(\S+)")
INLINE = re.compile(r"`((?:\w+\.)+\w+)(?:: ([\w./-]+))?`")


def made(name: str) -> list[Manifest]:
    return objects(HERE / "values" / f"{name}.yaml")


def pod(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = server_of(manifests)["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = pod(manifests)["containers"]
    return dict(found)


def all_values() -> list[Path]:
    return sorted((HERE / "values").glob("*.yaml"))


def default(path: str) -> Any:
    found: Any = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize("page", [DOCS, CHART / "README.md"], ids=["manual", "readme"])
def test_examples_of_the_manual_are_rendered(page: Path) -> None:
    examples = [yaml.safe_load(block) for block in BLOCK.findall(page.read_text(encoding="utf-8"))]

    assert examples
    for example in examples:
        assert server_of(objects_of(example))


def test_values_that_the_manual_names_exist() -> None:
    text = DOCS.read_text(encoding="utf-8")
    roots = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    named = {path for path, _ in INLINE.findall(text) if path.split(".")[0] in roots}
    named |= {path for path, _ in SETTING.findall(text + (CHART / "README.md").read_text(encoding="utf-8"))}

    assert len(named) > 20
    for path in named - {"resources.limits.cpu", "resources.claims", "values.schema.json", "values.yaml"}:
        default(path)  # KeyError: there is no such value


def test_the_table_of_the_manual_names_tests_that_there_are() -> None:
    table = DOCS.read_text(encoding="utf-8").split("## What charts")[1]
    tests = CHART.parents[2] / "tests"
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`test_" in row]

    assert len(rows) >= 30
    for row in rows:
        named = re.findall(r"`([\w/]*test_\w+\.py)`: `(\w*)(?:\.\.\.)?(\w*)`", row.split("|")[3])
        assert named, row
        for file, before, after in named:
            source = (tests / file if "/" in file else HERE / file).read_text(encoding="utf-8")
            assert re.search(rf"def {before}\w*{after}\(", source), (file, before, after)


@pytest.mark.parametrize(
    ("name", "source", "argument"),
    [
        ("store-s3", "", "--model-repository=s3://models/production"),
        ("store-gcs", "", "--model-repository=gs://models/production"),
        ("store-azure", "", "--model-repository=as://account/models/production"),
        ("pvc", "persistentVolumeClaim", "/models/resnet/models"),
        ("pvc-made", "persistentVolumeClaim", "/models"),
        ("pvc-nfs", "persistentVolumeClaim", "/models"),
        ("image-volume", "image", "/models/models"),
        ("image-copied", "emptyDir", "/models"),
        ("default", "configMap", "/models"),
        ("python-file", "configMap", "/models/service.py"),
    ],
)
def test_each_source_of_models_is_a_value_and_lies_in_the_same_place(name: str, source: str, argument: str) -> None:
    manifests = made(name)
    server = container(manifests)
    mounts = {mount["name"]: mount for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(manifests)["volumes"]}

    assert server["args"][0] == argument
    assert mounts["cache"]["mountPath"] == "/cache"
    assert not mounts["cache"].get("readOnly")
    assert ("models" in mounts) == bool(source)
    if source:
        assert mounts["models"]["mountPath"] == "/models"
        assert volumes["models"].keys() == {"name", source}
        assert mounts["models"]["readOnly"] == (name != "pvc-made")  # into which `kubectl cp` puts models
    if name == "pvc-made":
        (claim,) = of_kind(manifests, "PersistentVolumeClaim")
        assert claim["metadata"]["name"] == volumes["models"][source]["claimName"]
        assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_shared_memory_has_a_size() -> None:
    for path in all_values():
        manifests = objects(path)
        mounts = {mount["mountPath"]: mount["name"] for mount in container(manifests)["volumeMounts"]}
        (volume,) = [v for v in pod(manifests)["volumes"] if v["name"] == mounts["/dev/shm"]]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi" if path.stem == "gpu" else "1Gi"}


def test_every_container_asks_for_what_it_needs() -> None:
    for path in all_values():
        for _, spec in pod_specs(objects(path)):
            for each in chain(spec.get("initContainers", []), spec["containers"]):
                if each["name"] != "prepare":  # of the values
                    assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
                    assert "memory" in each["resources"]["limits"]


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("default", "$(CHARONIA_REQUESTED_CORES)"),
        ("gpu", "$(CHARONIA_REQUESTED_CORES)"),
        ("cpu-number", "8"),
        ("cpu-node", None),
        ("cpu-limit", None),  # the server reads it from the control group
    ],
)
def test_threads_are_for_the_cores_that_a_pod_has(name: str, cores: str | None) -> None:
    server = container(made(name))
    given = [a.removeprefix("--cpu-cores=") for a in server["args"] if a.startswith("--cpu-cores=")]
    fields = [e["valueFrom"]["resourceFieldRef"] for e in server["env"] if e["name"] == "CHARONIA_REQUESTED_CORES"]

    assert given == ([cores] if cores else [])
    # A divisor of 1 rounds up.
    expected = {"containerName": "server", "resource": "requests.cpu", "divisor": "1"}
    assert fields == ([expected] if cores and cores.startswith("$") else [])


def test_cpus_are_enough() -> None:
    for path in all_values():
        if not path.stem.startswith("gpu"):
            assert not [name for name in container(objects(path))["resources"]["limits"] if "/" in name]
    assert container(made("gpu"))["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(made("gpu-mig"))["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1


def test_models_may_take_long_to_load() -> None:
    server = made("default")
    probe = container(server)["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    # Otherwise the Deployment would call the roll-out failed before.
    assert server_of(server)["spec"]["progressDeadlineSeconds"] > 3600
    short = container(made("auto-mode"))
    assert short["startupProbe"]["periodSeconds"] * short["startupProbe"]["failureThreshold"] == 60
    assert short["readinessProbe"]["httpGet"]["path"] == "/v2/models/bert/ready"


@pytest.mark.parametrize(("name", "scheme"), [("default", "HTTP"), ("tls", "HTTPS")])
def test_a_busy_or_half_loaded_server_gets_no_requests_and_is_not_restarted(name: str, scheme: str) -> None:
    server = container(made(name))
    probes = {kind: server[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}

    asked = {kind: (probe["httpGet"]["path"], probe["httpGet"]["scheme"]) for kind, probe in probes.items()}
    assert asked == {
        "startup": ("/v2/health/live", scheme),
        "readiness": ("/v2/health/ready", scheme),
        "liveness": ("/v2/health/live", scheme),
    }
    assert {f"--{protocol}-use-ssl=true" in server["args"] for protocol in ("http", "grpc")} == {scheme == "HTTPS"}
    unready_s, dead_s = (probes[kind]["periodSeconds"] * probes[kind]["failureThreshold"] for kind in [*probes][1:])
    assert unready_s <= 5
    assert dead_s >= 60


def test_an_update_takes_no_pod_away_before_another_one_is_ready_and_pods_are_spread() -> None:
    deployment, stateful = server_of(made("default"))["spec"], server_of(made("statefulset"))["spec"]

    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert stateful["podManagementPolicy"] == "Parallel"
    for spec in (deployment, stateful):
        spread = spec["template"]["spec"]["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert {each["whenUnsatisfiable"] for each in spread} == {"ScheduleAnyway"}  # one node is enough


def test_scaling_on_cpu_needs_no_metric_of_others() -> None:
    (scaler,) = of_kind(made("hpa-cpu"), "HorizontalPodAutoscaler")

    assert [metric["type"] for metric in scaler["spec"]["metrics"]] == ["Resource"]
    for name in ("hpa", "hpa-cpu", "keda"):
        assert "replicas" not in server_of(made(name))["spec"]  # an upgrade would undo what was scaled


def test_pods_go_slowly_and_one_by_one() -> None:
    (scaler,) = of_kind(made("hpa"), "HorizontalPodAutoscaler")
    down = scaler["spec"]["behavior"]["scaleDown"]

    assert down["stabilizationWindowSeconds"] == 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_a_node_is_drained_pod_by_pod_and_no_broken_pod_stops_it() -> None:
    (budget,) = of_kind(made("default"), "PodDisruptionBudget")

    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(
    ("setting", "is_warned"),
    [
        ("service.type=LoadBalancer", True),
        ("ingress.http.enabled=true,ingress.http.hosts={a.example.org}", True),
        ("service.type=LoadBalancer,apiKeys.existingSecret=keys", False),
        ("replicas=1", False),
    ],
)
def test_whoever_opens_it_without_keys_is_warned(tmp_path: Path, setting: str, is_warned: bool) -> None:
    command: list[str | Path] = [tool("helm"), "install", "demo", CHART, "--dry-run=client", "--set", setting]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=200, env={**os.environ, "HOME": str(tmp_path)}
    )

    notes = done.stdout.split("NOTES:")[1]
    assert ("asks for no key" in notes) == is_warned
    assert default("service.type") == "ClusterIP"


def test_credentials_are_never_in_a_pod() -> None:
    for name in ("store-s3", "store-s3-keys", "store-gcs", "store-azure", "api-keys", "api-keys-made"):
        manifests = made(name)
        text = yaml.safe_dump([spec for _, spec in pod_specs(manifests)])
        assert not re.search(r"AKIA|a: b|sha256:5a1c", text)
        made_secrets = {secret["metadata"]["name"] for secret in of_kind(manifests, "Secret")}
        assert bool(made_secrets) == (name in ("store-s3-keys", "api-keys-made"))
        for secret in made_secrets:
            assert secret in text
    assert of_kind(made("store-s3-identity"), "Secret") == []


def test_a_changed_key_needs_no_restart_and_changed_files_and_credentials_make_one() -> None:
    keys = [objects_of({"apiKeys": {"file": f"ci infer {letter * 20}"}}) for letter in "ab"]
    stores = [
        objects_of({"models": {"type": "store", "store": {"uris": ["s3://a/b"], "credentials": {"KEY": letter}}}})
        for letter in "ab"
    ]

    assert server_of(keys[0]) == server_of(keys[1])
    # A mount of a single file would never change.
    assert all("subPath" not in mount for mount in container(keys[0])["volumeMounts"])
    assert server_of(stores[0]) != server_of(stores[1])
    files = [objects_of({"models": {"files": {"identity/config.pbtxt": letter}}}) for letter in "ab"]
    assert server_of(files[0]) != server_of(files[1])


@pytest.mark.parametrize("name", ["network-policy", "network-policy-closed"])
def test_test_and_tune_job_get_through_the_network_policy_of_their_release(name: str) -> None:
    values = yaml.safe_load((HERE / "values" / f"{name}.yaml").read_text(encoding="utf-8"))
    tune = {"server": {"modelControlMode": "explicit"}, "tune": {"enabled": True, "models": ["resnet"]}}
    manifests = objects_of({**values, **tune})
    (test,) = [pod["metadata"]["labels"] for pod in of_kind(manifests, "Pod")]
    (job,) = [job["spec"]["template"]["metadata"]["labels"] for job in of_kind(manifests, "Job")]

    def may_send(labels: dict[str, str], rule: Manifest) -> bool:
        selectors = [sender["podSelector"].get("matchLabels", {}) for sender in rule["from"] if "podSelector" in sender]
        return any(selector.items() <= labels.items() for selector in selectors)

    (policy,) = of_kind(manifests, "NetworkPolicy")
    requests, metrics = policy["spec"]["ingress"]
    stranger = {"app.kubernetes.io/name": "charonia", "app.kubernetes.io/instance": "other"}
    assert may_send(test, requests)
    assert may_send(job, requests)
    assert may_send(job, metrics)
    assert may_send(stranger, requests) == (name == "network-policy")


def test_releases_side_by_side_have_addresses_of_their_own() -> None:
    vision, text = (objects_of({}, release) for release in ("vision", "text"))

    def services(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
        return {made["metadata"]["name"]: made["spec"]["selector"] for made in of_kind(manifests, "Service")}

    labels = server_of(text)["spec"]["template"]["metadata"]["labels"]
    assert not services(vision).keys() & services(text).keys()
    assert not any(selector.items() <= labels.items() for selector in services(vision).values())
    assert all(selector.items() <= labels.items() for selector in services(text).values())


def test_the_tune_job_shares_no_volume() -> None:
    for name, spec in chain(pod_specs(made("tune-job")), pod_specs(made("tune-cron"))):
        if "-tune" in name:
            assert all(volume.keys() == {"name", "emptyDir"} for volume in spec["volumes"])


def test_the_pods_of_a_stateful_set_have_names_and_volumes_of_their_own() -> None:
    manifests = made("statefulset")
    server = server_of(manifests)
    (headless,) = [s for s in of_kind(manifests, "Service") if s["spec"].get("clusterIP") == "None"]

    assert server["spec"]["serviceName"] == headless["metadata"]["name"]
    (claim,) = server["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"


def test_packages_keep_the_versions_of_the_server(tmp_path: Path) -> None:
    manifests = made("packages")
    listing, install = pod(manifests)["initContainers"]
    (path,) = [entry["value"] for entry in container(manifests)["env"] if entry["name"] == "PYTHONPATH"]

    program = listing["command"][2].replace("/packages/", f"{tmp_path}/")
    exec(compile(program, "list-packages", "exec"), {})

    versions = (tmp_path / "have.txt").read_text(encoding="utf-8").splitlines()
    assert any(re.fullmatch(r"numpy==[\d.]+", line) for line in versions)
    assert "--constraint=/packages/have.txt" in install["command"]
    assert f"--target={path}" in install["command"]
    assert install["args"] == ["scikit-learn==1.8.0", "joblib"]
