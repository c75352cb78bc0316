"""Repositories in a real S3 server on this machine, served to the stock clients."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tests.support.faulty_network import SLOW, FaultyNetwork, Link, broken
from tests.support.models import identity, identity_pbtxt
from tests.support.process import ServeProcess, eventually
from tests.support.s3_server import S3, s3_server, virtual_hosts
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

from charonia.cli.values import fetched
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.repository.sources import Sources
from charonia.server.model_options import StoreSettings
from charonia.stores.location import parse_address
from charonia.stores.remote import ObjectStore, RemoteFile

pytest.importorskip("obstore")
pytestmark = pytest.mark.skipif(find_spec("moto") is None, reason="needs moto, whose import takes half a second")

CONFIG = identity_pbtxt("onnxruntime", dims=(4,))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch) as server:
        yield server


def infer(client: Any, library: Any, model: str = "m", output: str = "OUTPUT0") -> list[float]:
    tensor = infer_input(library, "INPUT0", np.array([[1, 2, 3, 4]], np.float32))
    values: list[float] = client.infer(model, [tensor]).as_numpy(output).ravel().tolist()
    return values


def test_a_bucket_is_served_to_the_stock_clients(s3: S3, tmp_path: Path) -> None:
    s3.put("m/config.pbtxt", CONFIG)
    s3.put("m/1/model.onnx", identity(dims=(4,)))

    with (
        ServeProcess(s3.uri, f"--model-store-cache={tmp_path}") as server,
        http_client.InferenceServerClient(server.http) as http,
        grpc_client.InferenceServerClient(server.grpc) as grpc,
    ):
        assert infer(http, http_client) == infer(grpc, grpc_client) == [1, 2, 3, 4]
        assert [(e["name"], e["state"]) for e in http.get_model_repository_index()] == [("m", "READY")]


def test_stores_of_several_clouds_that_refuse_paths_are_served_together(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("m", "n"):
        s3.put(f"{model}/{model}/config.pbtxt", CONFIG)
        s3.put(f"{model}/{model}/1/model.onnx", identity(dims=(4,)))
    for name, value in {
        "OSS_ACCESS_KEY_ID": "oss-key",
        "OSS_ACCESS_KEY_SECRET": "s",
        "OSS_ENDPOINT": "http://oss.cloud.test",
        "COS_SECRET_ID": "cos-key",
        "COS_SECRET_KEY": "s",
        "COS_ENDPOINT": "http://cos.cloud.test",
    }.items():
        monkeypatch.setenv(name, value)

    with (
        virtual_hosts(monkeypatch, s3) as seen,
        ServeProcess(
            "oss://bucket/models/m",
            "--model-repository=cos://bucket/models/n",
            "--model-repository=s3+http://third.cloud.test/bucket/models/none?style=virtual",
            f"--model-store-cache={tmp_path}",
        ) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        assert infer(client, http_client, "m") == infer(client, http_client, "n") == [1, 2, 3, 4]

    assert set(seen) == {("bucket", "oss-key"), ("bucket", "cos-key"), ("bucket", "key")}


def test_a_store_that_refuses_paths_says_so(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.stores.remote.RETRIES_MAX", 0)
    with (
        virtual_hosts(monkeypatch, s3),
        pytest.raises(ServingError, match="SecondLevelDomainForbidden") as caught,
    ):
        next(ObjectStore(parse_address("s3+http://oss.cloud.test/bucket/models")).files())

    assert "style=virtual" in caught.value.hint


def test_files_of_a_store_become_local_files_for_tools(s3: S3) -> None:
    s3.put("data/one.json", "{}")
    s3.put("data/below/two.json", "[]")

    folder, file = fetched(f"{s3.uri}/data"), fetched(f"{s3.uri}/data/one.json")

    assert {path.name: path.read_text() for path in folder.rglob("*.json")} == {"one.json": "{}", "two.json": "[]"}
    assert (file.name, file.read_text()) == ("one.json", "{}")


def test_a_change_in_the_bucket_is_followed_and_only_what_changed_is_fetched(s3: S3, tmp_path: Path) -> None:
    s3.put("m/config.pbtxt", CONFIG)
    s3.put("m/1/model.onnx", identity(dims=(4,)))
    arguments = ("--model-control-mode=poll", "--repository-poll-secs=1", f"--model-store-cache={tmp_path}")

    with (
        ServeProcess(s3.uri, *arguments) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        s3.put("m/config.pbtxt", CONFIG + 'metric_tags { key: "state" value: "new" }')
        assert eventually(lambda: client.get_model_config("m").get("metric_tags") == {"state": "new"})
        s3.put("n/1/model.onnx", identity(dims=(4,)))
        assert eventually(lambda: bool(client.is_model_ready("n")))
        s3.delete("m/config.pbtxt")
        s3.delete("m/1/model.onnx")
        assert eventually(lambda: not client.is_model_ready("m"))

    assert "fetching 1 of 2 files of 'm'" in server.log


def test_models_stay_while_the_store_is_down_and_what_failed_comes_when_it_is_back(s3: S3, tmp_path: Path) -> None:
    s3.put("m/config.pbtxt", CONFIG)
    s3.put("m/1/model.onnx", identity(dims=(4,)))
    arguments = ("--model-control-mode=poll", "--repository-poll-secs=1", f"--model-store-cache={tmp_path}")

    with (
        ServeProcess(s3.uri, *arguments) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        s3.stop()
        assert eventually(lambda: "the last successful scan of it is used" in server.log)
        assert infer(client, http_client) == [1, 2, 3, 4]
        s3.start()
        s3.put("n/1/model.onnx", identity(dims=(4,)))
        assert eventually(lambda: bool(client.is_model_ready("n")))


def test_a_load_request_looks_into_the_bucket(s3: S3, tmp_path: Path) -> None:
    s3.put("m/config.pbtxt", CONFIG)

    with (
        ServeProcess(s3.uri, "--model-control-mode=explicit", f"--model-store-cache={tmp_path}") as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        with pytest.raises(InferenceServerException, match="at least one version"):
            client.load_model("m")
        s3.put("m/1/model.onnx", identity(dims=(4,)))
        client.load_model("m")
        assert infer(client, http_client) == [1, 2, 3, 4]
        s3.stop()
        with pytest.raises(InferenceServerException, match="cannot be read"):
            client.load_model("other")
        client.load_model("m")  # the cache still has it
        assert infer(client, http_client) == [1, 2, 3, 4]
        s3.start()


def test_a_store_that_is_down_at_start_ends_the_server(tmp_path: Path) -> None:
    nobody = "s3://127.0.0.1:1/bucket/models"
    with pytest.raises(RuntimeError, match="cannot be read"), ServeProcess(nobody, f"--model-store-cache={tmp_path}"):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="none"),
        pytest.param(("--model-control-mode=poll", "--repository-poll-secs=1", "--front-ends=2"), id="poll"),
    ],
)
def test_a_server_that_may_wait_for_its_store_is_not_ready_until_it_has_the_models(
    s3: S3, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    s3.put("m/config.pbtxt", CONFIG)
    s3.put("m/1/model.onnx", identity(dims=(4,)))
    s3.stop()

    more = ("--exit-on-error=false", f"--model-store-cache={tmp_path}", *arguments)
    with ServeProcess(s3.uri, *more) as server, http_client.InferenceServerClient(server.http) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        s3.start()
        assert eventually(client.is_server_ready)
        assert infer(client, http_client) == [1, 2, 3, 4]


def test_a_file_that_changes_while_it_is_fetched_is_not_taken_for_the_old_one(s3: S3) -> None:
    s3.put("m/1/a", b"old")
    store = ObjectStore(parse_address(s3.uri))
    (listed,) = store.files()
    s3.put("m/1/a", b"new")

    with pytest.raises(ServingError, match="was changed or removed"):
        list(store.read(listed, 0, 3))
    with pytest.raises(ServingError, match="was changed or removed"):
        list(store.read(RemoteFile("m/1/none", 3, ""), 0, 3))


CONTENT = bytes(range(256)) * 400


@pytest.mark.parametrize("link", SLOW.values(), ids=SLOW)
def test_a_slow_network_costs_time_only(s3: S3, link: Link) -> None:
    s3.put("m/1/a", CONTENT)
    with FaultyNetwork(s3.port, to_client=link, to_server=link) as network:
        store = ObjectStore(parse_address(s3.uri.replace(str(s3.port), str(network.port))))
        (listed,) = store.files()

        assert b"".join(map(bytes, store.read(listed, 0, len(CONTENT)))) == CONTENT


@pytest.mark.parametrize(
    ("link", "limit"),
    [
        (broken(5000)["cut"], "SILENCE_S_MAX"),
        (broken(5000)["silent"], "SILENCE_S_MAX"),
        (Link(bytes_per_s=5000.0, piece_bytes=500), "PART_S_MAX"),
    ],
    ids=["cut", "silent", "very slow"],
)
def test_a_fetch_over_a_broken_connection_fails_and_leaves_nothing_in_part(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Link, limit: str
) -> None:
    s3.put("m/1/a", CONTENT)
    with FaultyNetwork(s3.port) as network:
        uri = s3.uri.replace(str(s3.port), str(network.port))
        with monkeypatch.context() as patch:
            patch.setattr("charonia.stores.remote.RETRIES_MAX", 1)
            patch.setattr(f"charonia.stores.remote.{limit}", 1.0)
            sources = Sources([uri], StoreSettings(str(tmp_path)))
        model = sources.scan_all().models["m"]
        network.to_client = link

        with pytest.raises(ServingError, match=r"cannot be fetched|came incomplete") as caught:
            sources.fetch(model)
        assert caught.value.code is Code.UNAVAILABLE
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
        sources.close()

        network.to_client = Link()
        sources = Sources([uri], StoreSettings(str(tmp_path)))
        folder, _ = sources.fetch(sources.scan_all().models["m"])

    assert (folder.path / "1" / "a").read_bytes() == CONTENT
    sources.close()


def test_a_bucket_that_is_not_there_is_named(s3: S3, tmp_path: Path) -> None:
    sources = Sources([f"s3://127.0.0.1:{s3.port}/nothing"], StoreSettings(str(tmp_path)))

    (reason,) = sources.scan_all().unread

    assert reason.startswith(f"model repository 's3://127.0.0.1:{s3.port}/nothing' cannot be read: ")
    sources.close()


def test_google_cloud_storage_is_read_by_its_own_protocol(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The XML interface of Google Cloud Storage lists and reads as S3 does, so this server can stand in for it.
    s3.put("m/1/a", b"content")
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{s3.port}")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    sources = Sources(["gs://bucket/models"], StoreSettings(str(tmp_path)))

    folder, _ = sources.fetch(sources.scan_all().models["m"])

    assert (folder.path / "1" / "a").read_bytes() == b"content"
    sources.close()


@pytest.mark.parametrize(("content", "reason"), [("{", "is not JSON"), (None, "cannot read")])
def test_a_credential_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, reason: str
) -> None:
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", os.fspath(path))

    with pytest.raises(ServingError, match=reason) as caught:
        Sources(["s3://bucket"], StoreSettings(str(tmp_path)))

    assert caught.value.code is Code.INVALID_ARG


def test_the_keys_of_a_credential_file_are_used(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("m/1/a", b"content")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    path = tmp_path / "credentials.json"
    path.write_text('{"s3": {"": {"key_id": "of-file", "secret_key": "s", "region": "eu-west-1"}}}')
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", os.fspath(path))

    sources = Sources([s3.uri], StoreSettings(str(tmp_path / "cache")))

    assert list(sources.scan_all().models) == ["m"]
    sources.close()
