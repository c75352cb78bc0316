"""Versions from object stores, folders and MLflow."""

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.models.conftest import MODELS, add, add_files
from tests.platform.models.mlflow_server import MlflowStandIn, mlflow_server
from tests.support.git_server import git_server
from tests.support.s3_server import S3, s3_server, virtual_hosts

from charonia.core.errors import ServingError
from charonia.platform.artifacts import blobs
from charonia.platform.models.sources import default_name
from charonia.platform.state import Platform

Caller = Callable[..., dict[str, str]]

pytestmark = pytest.mark.usefixtures("quick_checks")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr("charonia.stores.remote.RETRIES_MAX", 0)
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowStandIn]:
    with mlflow_server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        server.versions["iris", "3"] = "mlflow-artifacts:/1/abc/artifacts/model"
        server.artifacts = {
            "1/abc/artifacts/model/MLmodel": b"flavors: {onnx: {data: model.onnx}}",
            "1/abc/artifacts/model/model.onnx": b"weights",
            "1/abc/artifacts/model/requirements.txt": b"onnx==1.17\n",
        }
        yield server


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def paths(version: dict[str, Any]) -> list[str]:
    return [file["path"] for file in version["files"]]


def test_a_folder_of_an_object_store_becomes_a_version(admin: TestClient, s3: S3) -> None:
    for path, content in (
        ("net/config.pbtxt", b"max_batch_size: 1"),
        ("net/1/model.onnx", b"1"),
        ("net/2/model.onnx", bytes(5_000_000)),
    ):
        s3.put(path, content)

    version = add(admin, "net", kind="address", place=f"{s3.uri}/net/")

    assert (version["state"], version["source"]) == ("ready", f"{s3.uri}/net/")
    assert paths(version) == ["1/model.onnx", "config.pbtxt"]
    assert version["size"] == 5_000_017
    assert version["report"]["left_out"] == ["1/model.onnx"]
    assert add(admin, "net", kind="address", place=f"{s3.uri}/net", take=1)["size"] == 18


def test_one_file_or_archive_of_an_object_store_becomes_a_version(admin: TestClient, s3: S3, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"weights")
    with tarfile.open(tmp_path / "m.tgz", "w:gz") as archive:
        archive.add(tmp_path / "model.onnx", "7/model.onnx")
    s3.put("net.onnx", b"weights of a file")
    s3.put("net.tgz", (tmp_path / "m.tgz").read_bytes())

    assert paths(add(admin, "file", kind="address", place=f"{s3.uri}/net.onnx")) == ["1/model.onnx"]
    assert paths(add(admin, "archive", kind="address", place=f"{s3.uri}/net.tgz")) == ["1/model.onnx"]


def test_an_archive_at_a_presigned_address_comes_over_tls_and_its_signature_is_not_shown(
    admin: TestClient, as_caller: Caller, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("tls")
    (folder / "model.onnx").write_bytes(b"weights")
    with tarfile.open(folder / "m.tgz", "w:gz") as archive:
        archive.add(folder / "model.onnx", "7/model.onnx")
    with git_server(folder, monkeypatch) as server:
        server.large["net.tgz"] = (folder / "m.tgz").read_bytes()
        bare = f"{server.address.removeprefix('git+')}/info/lfs/net.tgz"
        source: dict[str, Any] = {"kind": "address", "place": f"{bare}?X-Signature=sesame"}

        version = add(admin, "net", **source)
        foreign = add(admin, "a", as_caller("deployer"), **source)
        asked = list(server.seen)
        server.moved = "http://127.0.0.1:1/net.tgz"
        moved = add(admin, "b", **source)
        monkeypatch.delenv("SSL_CERT_FILE")
        unknown = add(admin, "c", **source)

    assert (version["state"], version["source"], paths(version)) == ("ready", bare, ["1/model.onnx"])
    assert set(asked) == {"GET /group/models.git/info/lfs/net.tgz?X-Signature=sesame"}
    for refused, problem in (
        (foreign, "expected a cloud, or a server that the platform may read from"),
        (moved, "expected a redirect to https://"),
        (unknown, "certificate verify failed"),
    ):
        assert problem in refused["report"]["problem"]
    assert "sesame" not in str([version, foreign, moved, unknown, admin.get("/api/v1/audit").text])


def test_credentials_of_a_project_open_a_store_and_deployers_name_no_server_in_them(
    admin: TestClient, as_caller: Caller, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("net/1/model.onnx", b"weights")
    value = '{"key_id": "of-project", "secret_key": "hidden", "endpoint": "http://oss.cloud.test"}'
    admin.put("/api/v1/projects/default/secrets/store", json={"value": value})
    source: dict[str, Any] = {"kind": "address", "place": "oss://bucket/models/net", "secret": "store"}

    with virtual_hosts(monkeypatch, s3) as seen:
        version = add(admin, "net", **source)
        refused = add(admin, "other", as_caller("deployer"), **source)

    assert (version["state"], paths(version)) == ("ready", ["1/model.onnx"])
    assert set(seen) == {("bucket", "of-project")}
    assert "oss.cloud.test" in refused["report"]["problem"]
    assert "hidden" not in admin.get("/api/v1/audit").text


@pytest.mark.parametrize("value", ["text", "[]", "{}", '{"profile": "of-the-machine"}'])
def test_a_secret_without_credentials_of_a_store_is_refused_without_its_value(admin: TestClient, value: str) -> None:
    admin.put("/api/v1/projects/default/secrets/store", json={"value": value})

    version = add(admin, "net", kind="address", place="s3://bucket/net", secret="store")

    assert version["report"]["problem"].startswith("secret 'store': expected a JSON object with")
    assert "of-the-machine" not in str(version)


@pytest.mark.parametrize("place", ["http://example.org/model", "s3://", "nonsense", "s3://bucket/../x"])
def test_an_address_that_is_none_is_refused_at_once(admin: TestClient, place: str) -> None:
    answer = admin.post(f"{MODELS}/a/versions", json={"source": {"kind": "address", "place": place}})

    assert answer.status_code == 400
    assert admin.get(f"{MODELS}/a").status_code == 404


def test_an_address_without_files_is_said_so(admin: TestClient, s3: S3) -> None:
    version = add(admin, "a", kind="address", place=f"{s3.uri}/nothing")

    assert version["state"] == "refused"
    assert "no files below this address" in version["report"]["problem"]


def test_a_store_that_is_away_is_said_so_and_a_later_attempt_succeeds(admin: TestClient, s3: S3) -> None:
    s3.put("net/1/model.onnx", b"weights")
    s3.stop()
    try:
        version = add(admin, "a", kind="address", place=f"{s3.uri}/net")
    finally:
        s3.start()

    assert version["state"] == "refused"
    assert "cannot be read" in version["report"]["problem"]
    s3.make_bucket()
    s3.put("net/1/model.onnx", b"weights")
    assert add(admin, "a", kind="address", place=f"{s3.uri}/net")["state"] == "ready"


def test_a_folder_of_the_machine_becomes_a_version(admin: TestClient, elsewhere: Path) -> None:
    folder = elsewhere / "models" / "net"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"weights")
    (folder / "labels.txt").symlink_to(folder / "1" / "model.onnx")

    version = add(admin, "net", kind="folder", place=str(folder))

    assert paths(version) == ["1/model.onnx", "labels.txt"]
    (folder / "1" / "model.onnx").write_bytes(b"changed")
    assert admin.get(f"{MODELS}/net/versions/1/files/1/model.onnx").content == b"weights"


def test_a_link_out_of_the_folder_is_refused(admin: TestClient, elsewhere: Path) -> None:
    folder = elsewhere / "net"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").symlink_to("/etc/passwd")

    version = add(admin, "net", kind="folder", place=str(folder))

    assert version["state"] == "refused"
    assert "is a link that leads out of" in version["report"]["problem"]
    assert "it does not exist" in add(admin, "net", kind="folder", place=str(elsewhere / "no"))["report"]["problem"]


@pytest.mark.parametrize("inner", ["", "..", "artifacts", "artifacts/sha256/.."])
def test_the_platform_does_not_import_its_own_data(admin: TestClient, platform: Platform, inner: str) -> None:
    version = add(admin, "net", kind="folder", place=str(platform.settings.data / inner))

    assert "it contains the platform's own data" in version["report"]["problem"]


def test_a_model_of_mlflow_becomes_a_version(admin: TestClient, mlflow: MlflowStandIn) -> None:
    version = add(admin, "iris", kind="mlflow", place="models:/iris/3")

    assert version["state"] == "ready", version["report"]
    assert paths(version) == ["1/model.onnx", "requirements.txt"]
    assert version["report"]["requirements"] == "onnx==1.17"
    assert version["source"] == f"models:/iris/3 of {mlflow.address}"


def test_a_model_of_mlflow_in_an_object_store_or_a_folder(
    admin: TestClient, as_caller: Caller, mlflow: MlflowStandIn, s3: S3, elsewhere: Path
) -> None:
    for name in ("MLmodel", "model.onnx"):
        content = mlflow.artifacts[f"1/abc/artifacts/model/{name}"]
        s3.put(f"run/model/{name}", content)
        (elsewhere / name).write_bytes(content)
    mlflow.versions["iris", "4"] = f"{s3.uri}/run/model"
    mlflow.versions["iris", "5"] = f"file://{elsewhere}"

    assert paths(add(admin, "iris", kind="mlflow", place="models:/iris/4")) == ["1/model.onnx"]
    refused = add(admin, "other", as_caller("deployer"), kind="mlflow", place="models:/iris/5")
    assert "which the platform does not read" in refused["report"]["problem"]
    assert paths(add(admin, "folder", kind="mlflow", place="models:/iris/5")) == ["1/model.onnx"]


def test_a_model_that_mlflow_does_not_have_is_said_so(admin: TestClient, mlflow: MlflowStandIn) -> None:
    version = add(admin, "iris", kind="mlflow", place="models:/iris/9", server=mlflow.address)

    assert version["state"] == "refused"
    assert "answers 404" in version["report"]["problem"]


def test_without_room_a_version_is_refused_and_its_upload_stays(
    admin: TestClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    room = [2**40]

    def usage(folder: Path) -> Any:
        return real(folder)._replace(free=room[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    files = admin.post("/api/v1/projects/default/uploads", json={"files": [{"path": "a.onnx", "size": 7}]}).json()
    admin.put(f"/api/v1/projects/default/uploads/{files[0]['key']}", content=b"weights")
    room[0] = blobs.RESERVE_BYTES + 6

    full = admin.post("/api/v1/projects/default/uploads", json={"files": [{"path": "b.onnx", "size": 7}]})
    refused = add(admin, "a", kind="upload", place=files[0]["batch"])

    assert (full.status_code, full.json()["hint"]) == (507, "delete unused versions, or add room")
    assert "has room for 6" in refused["report"]["problem"]
    assert list(platform.artifacts.local.all()) == []
    room[0] = 2**40
    assert add(admin, "a", kind="upload", place=files[0]["batch"])["state"] == "ready"


def test_a_platform_with_its_files_in_an_object_store(
    admin: TestClient, s3: S3, platform: Platform, tmp_path: Path
) -> None:
    from charonia.platform.artifacts.store import open_artifacts

    remote = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/artifacts", tmp_path / "cache")
    platform.artifacts.remote = remote.remote
    version = add_files(admin, "a", {"a.onnx": b"weights"})
    platform.artifacts.local.remove(version["files"][0]["sha256"])

    assert admin.get(f"{MODELS}/a/versions/1/files/1/model.onnx").content == b"weights"
    assert os.path.exists(platform.artifacts.local.path(version["files"][0]["sha256"]))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("https://host/reader.onnx?Signature=secret", "reader"),
        ("resnet.onnx", "resnet"),
        ("model.onnx", "model"),
        ("/a/b/resnet-50.v2.onnx", "resnet-50.v2"),
        ("models/resnet/1/model.onnx", "resnet"),
        ("resnet/", "resnet"),
        ("resnet.tar.gz", "resnet"),
        ("s3://bucket/models/ocr", "ocr"),
        ("models:/fraud/3", "fraud"),
        ("models:/fraud@best", "fraud"),
        ("my model.pt", "my-model"),
        ("s3://bucket/models/reader/3/", "reader"),
        ("s3://bucket/reader.onnx", "reader"),
        ("/srv/reader/1/model.onnx", "reader"),
        ("models:/reader/7", "reader"),
        ("git@host:group/models.git@main#sub/reader", "reader"),
        ("https://host/group/reader.git", "reader"),
    ],
)
def test_a_model_has_the_name_of_its_source(source: str, name: str) -> None:
    assert default_name(source) == name


@pytest.mark.parametrize("source", [".", "../..", "///"])
def test_a_source_without_a_name_needs_one(source: str) -> None:
    with pytest.raises(ServingError, match="names no model"):
        default_name(source)
