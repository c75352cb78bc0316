"""MLflow's registry, as a stand-in."""

from collections.abc import Iterator

import pytest
from tests.platform.models.mlflow_server import MlflowStandIn, mlflow_server

from charonia.core.errors import Code, ServingError
from charonia.platform.models.sources import IncomingFiles, MlflowServer, ProxiedArtifacts


@pytest.fixture
def mlflow() -> Iterator[MlflowStandIn]:
    with mlflow_server() as server:
        server.versions["iris", "3"] = "mlflow-artifacts:/1/abc/artifacts/model"
        server.aliases["iris", "champion"] = "3"
        server.artifacts = {
            "1/abc/artifacts/model/MLmodel": b"flavors: {}",
            "1/abc/artifacts/model/data/model keras.bin": b"weights",
            "1/other/secret": b"of another run",
        }
        yield server


def test_a_version_has_its_artifacts_at_an_address(mlflow: MlflowStandIn) -> None:
    server = MlflowServer(mlflow.address, {})
    place = "mlflow-artifacts:/1/abc/artifacts/model"

    assert server.artifacts("models:/iris/3") == (place, "models:/iris/3")
    assert server.artifacts("models:/iris@champion") == (place, "models:/iris/3")


def test_files_are_listed_and_read(mlflow: MlflowStandIn) -> None:
    store = ProxiedArtifacts(MlflowServer(mlflow.address, {}), "mlflow-artifacts:/1/abc/artifacts/model")
    files = IncomingFiles(store)

    assert files.sizes() == {"MLmodel": 11, "data/model keras.bin": 7}
    assert files.read("data/model keras.bin", 3) == b"wei"
    assert files.read("data/model keras.bin", 30) == b"weights"


@pytest.mark.parametrize(
    "model", ["iris", "models:/iris", "models:/iris/0", "models:/a/b/1", "models:/iris/Production"]
)
def test_other_names_are_refused(mlflow: MlflowStandIn, model: str) -> None:
    with pytest.raises(ServingError, match="expected models:/NAME/VERSION or models:/NAME@ALIAS"):
        MlflowServer(mlflow.address, {}).artifacts(model)


def test_what_it_does_not_have_is_not_found(mlflow: MlflowStandIn) -> None:
    with pytest.raises(ServingError, match=r"answers 404: .*not found") as caught:
        MlflowServer(mlflow.address, {}).artifacts("models:/iris/4")
    assert caught.value.code is Code.NOT_FOUND


def test_a_server_that_is_away_is_said_so() -> None:
    with pytest.raises(ServingError, match="cannot be reached") as caught:
        MlflowServer("http://127.0.0.1:1", {}).artifacts("models:/iris/4")
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("address", ["", "file:///etc", "ftp://x"])
def test_a_server_has_an_http_address(address: str) -> None:
    with pytest.raises(ServingError, match="expected an address that begins with http"):
        MlflowServer(address, {})


def test_credentials_go_to_the_server_that_the_environment_names_only(mlflow: MlflowStandIn) -> None:
    token = {"MLFLOW_TRACKING_URI": mlflow.address + "/", "MLFLOW_TRACKING_TOKEN": "secret"}
    password = {
        "MLFLOW_TRACKING_URI": mlflow.address,
        "MLFLOW_TRACKING_USERNAME": "ada",
        "MLFLOW_TRACKING_PASSWORD": "pw",
    }

    MlflowServer("", token).artifacts("models:/iris/3")
    MlflowServer("", password).artifacts("models:/iris/3")
    MlflowServer(mlflow.address, token | {"MLFLOW_TRACKING_URI": "http://another"}).artifacts("models:/iris/3")

    assert mlflow.seen == ["Bearer secret", "Basic YWRhOnB3", ""]


def test_redirects_are_not_followed(mlflow: MlflowStandIn) -> None:
    with pytest.raises(ServingError, match="answers 302"), MlflowServer(mlflow.address, {}).open("moved"):
        pass


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "very slow"])
def test_a_file_that_breaks_off_is_not_taken(
    mlflow: MlflowStandIn, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    store = ProxiedArtifacts(MlflowServer(mlflow.address, {}), "mlflow-artifacts:/1/abc/artifacts/model")
    files = IncomingFiles(store)
    files.sizes()
    mlflow.cut = is_cut
    if not is_cut:
        monkeypatch.setattr("charonia.stores.remote.PART_S_MAX", -1.0)

    with pytest.raises(ServingError, match=r"came incomplete|cannot be fetched"):
        list(files._pieces("data/model keras.bin", lambda _: None))
