"""A platform with a cluster, by its API: a deployment that fits nowhere is corrected, updated and rolled back."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from tests.platform.targets.kubernetes.conftest import ClusterStage
from tests.support.kubernetes_api import Plain
from tests.support.kubernetes_controllers import Fate
from tests.support.kubernetes_tools import tool
from tests.support.models import identity_pbtxt
from tests.support.platform_models import add_version
from tests.support.platform_process import PlatformProcess
from tests.support.process import eventually, waited_for
from tests.support.s3_server import S3, s3_server

from charonia.platform.app import make_app
from charonia.platform.database.connection import Database
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import KubernetesSettings, PlatformSettings

AT = "/api/v1/projects/default/deployments"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def make_platform(stage: ClusterStage, s3: S3, tmp_path: Path) -> Callable[[], TestClient]:
    """Return what starts a platform with this cluster, on the same data each time."""
    helm = str(tool("helm"))
    return lambda: platform_of(stage, s3, tmp_path / "data", helm)


def platform_of(stage: ClusterStage, s3: S3, data: Path, helm: str) -> TestClient:
    config = KubernetesSettings(str(stage.config), helm=helm, proxy=stage.api.url, store_secret="store")
    app = make_app(PlatformSettings(data, isolation="available", artifacts=s3.uri, kubernetes=config))
    with app.state.platform.database.transaction() as session:
        prepare_owner(session, data)
    key = (data / "owner.key").read_text().strip()
    return TestClient(app, base_url="http://127.0.0.1:8080", headers={"Authorization": f"Bearer {key}"})


def client_of(platform: PlatformProcess) -> httpx2.Client:
    return httpx2.Client(base_url=platform.url, headers={"Authorization": f"Bearer {platform.key}"})


def view(client: httpx2.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{AT}/reader").json()
    return found


def until(client: httpx2.Client, **wanted: Any) -> dict[str, Any]:
    return waited_for(lambda: view(client), lambda found: wanted.items() <= found.items())


def spec(version: int, cores: int) -> dict[str, Any]:
    models = [{"name": "echo", "versions": [version]}]
    return {"name": "reader", "target": "kubernetes", "models": models, "device": {"cpu_cores": cores}, "replicas": 2}


def test_from_a_pod_without_a_node_to_an_update_and_back(
    make_platform: Callable[[], TestClient], stage: ClusterStage, s3: S3, tmp_path: Path
) -> None:
    def fate(pod: Plain) -> Fate:
        requested = pod["spec"]["containers"][0]["resources"]["requests"].get("cpu", "1")
        return Fate.UNSCHEDULABLE if requested == "64" else Fate.READY

    stage.nodes.fate = fate
    with make_platform() as client:
        database = client.app.state.platform.database  # type: ignore[attr-defined]
        for content in (b"one", b"two"):
            files = {"config.pbtxt": identity_pbtxt("identity", dims=(4,)).encode(), "1/model.bin": content}
            add_version(database, tmp_path / "data", "echo", files, artifacts=s3.uri)

        assert client.post(AT, json=spec(1, cores=64)).status_code == 201
        expected = "it waits for a node: 0/3 nodes are available"
        assert eventually(lambda: expected in view(client)["reason"]), view(client)
        assert "no node has enough cpu free" in view(client)["reason"]
        page = client.get("/p/default/deployments/reader", headers={"Accept": "text/html"}).text
        assert "no node has enough cpu free" in page
        assert client.put(f"{AT}/reader?revision=1", json=spec(1, cores=1)).status_code == 200
        first = until(client, state="ready", serving=2)
        assert len(first["replicas"]) == 2
        shutil.rmtree(tmp_path / "data" / "versions")  # pods have their own

    with make_platform() as client:  # another process, later: it finds what runs
        assert until(client, state="ready", serving=2)["http"] == first["http"]
        before = stage.api.names("pods")
        assert client.put(f"{AT}/reader", json=spec(2, cores=1)).status_code == 200
        until(client, state="ready", serving=3)
        assert not set(before) & set(stage.api.names("pods"))
        assert client.post(f"{AT}/reader/rollback", json={"to": 2}).status_code == 200
        until(client, state="ready", serving=4)
        [pod, _] = stage.api.all("pods")
        repository = next(
            each for each in pod["spec"]["containers"][0]["args"] if each.startswith("--model-repository=")
        )
        assert f"{s3.uri}/repositories/default/reader/" in repository
        platform = client.app.state.platform  # type: ignore[attr-defined]
        published = {file.path.split("/", 4)[4] for file in platform.artifacts.remote.files("repositories/")}
        assert published == {"echo/config.pbtxt", "echo/1/model.bin"}
        assert client.delete(f"{AT}/reader").status_code == 202
        assert eventually(lambda: client.get(f"{AT}/reader").status_code == 404)

    assert [kind for kind, _ in stage.api.objects] == []


def test_a_platform_that_is_killed_while_pods_start_is_followed_by_one_that_finds_them(
    stage: ClusterStage, s3: S3, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    options = [f"--artifacts={s3.uri}", f"--kubernetes={stage.config}", f"--kubernetes-proxy={stage.api.url}"]
    options += [f"--helm={tool('helm')}", "--kubernetes-image=registry.example.org/charonia:1.0"]
    stage.nodes.fate = lambda pod: Fate.SLOW

    with PlatformProcess(data, *options) as platform:
        database = Database(f"sqlite:///{data / 'platform.sqlite'}")
        files = {"config.pbtxt": identity_pbtxt("identity", dims=(4,)).encode(), "1/model.bin": b"one"}
        add_version(database, data, "echo", files, artifacts=s3.uri)
        database.close()
        with client_of(platform) as client:
            assert client.post(AT, json=spec(1, cores=1)).status_code == 201
            assert eventually(lambda: bool(stage.api.names("pods")))
        platform.kill()
    stage.nodes.fate = lambda pod: Fate.READY
    uids = [each["metadata"]["uid"] for each in stage.api.all("deployments")]
    with PlatformProcess(data, *options) as again, client_of(again) as client:
        found = until(client, state="ready", serving=1)

    assert [each["metadata"]["uid"] for each in stage.api.all("deployments")] == uids
    assert sorted(replica["name"] for replica in found["replicas"]) == stage.api.names("pods")
    assert stage.api.all("pods")[0]["spec"]["containers"][0]["image"] == "registry.example.org/charonia:1.0"


def test_a_platform_without_a_cluster_says_how_it_gets_one(admin: TestClient) -> None:
    answer = admin.post(AT, json={"name": "reader", "target": "kubernetes", "models": [{"name": "echo"}]})
    other = admin.post(AT, json={"name": "reader", "target": "nomad", "models": [{"name": "echo"}]})

    assert answer.status_code == 400
    assert answer.json()["hint"] == "`charonia platform --kubernetes` gives it a cluster"
    assert other.json()["error"] == "target: expected one of local, got 'nomad'"


def test_with_kserve_a_deployment_is_updated_stopped_and_removed(stage: ClusterStage, s3: S3, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with platform_of(stage, s3, data, helm="no-helm") as client:
        database = client.app.state.platform.database  # type: ignore[attr-defined]
        for content in (b"one", b"two"):
            files = {"config.pbtxt": identity_pbtxt("identity", dims=(4,)).encode(), "1/model.bin": content}
            add_version(database, data, "echo", files, artifacts=s3.uri)

        assert client.post(AT, json=spec(1, cores=1) | {"target": "kserve"}).status_code == 201
        assert len(until(client, state="ready", serving=1)["replicas"]) == 2
        assert client.put(f"{AT}/reader", json=spec(2, cores=1) | {"target": "kserve"}).status_code == 200
        until(client, state="ready", serving=2)
        (service,) = stage.api.all("inferenceservices")
        address = service["spec"]["predictor"]["model"]["storageUri"]
        assert address.startswith(f"{s3.uri}/repositories/default/reader/")
        answer = client.post(AT, json=spec(1, cores=1) | {"name": "other", "target": "nowhere"})
        assert "expected one of local, kubernetes, kserve, got 'nowhere'" in answer.text

        assert client.delete(f"{AT}/reader").status_code in (200, 202, 204)
        left = ("inferenceservices", "servingruntimes", "deployments", "serviceaccounts", "secrets")
        assert eventually(lambda: not any(map(stage.api.names, left)))
