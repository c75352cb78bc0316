"""Where pods find models: in an object store, or on a volume that they mount."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.platform.targets.kubernetes.conftest import workload
from tests.support.models import identity_pbtxt
from tests.support.s3_server import S3, s3_server

from charonia.platform.artifacts.store import ArtifactStore, open_artifacts
from charonia.platform.targets.api import PlacedModel, Workload
from charonia.platform.targets.kubernetes.repositories import open_repositories

CONFIG = identity_pbtxt("identity", dims=(4,))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch) as server:
        yield server


def with_files(store: ArtifactStore, folder: Path) -> Workload:
    """Return a workload whose model has two versions, the first without files of its own."""
    shared, weights = (store.add([text], what="file") for text in (b"cat\ndog\n", b"weights"))
    files = {1: {"labels.txt": shared}, 2: {"labels.txt": shared, "1/model.bin": weights, "config.pbtxt": weights}}
    for number, manifest in files.items():
        store.materialise(manifest, folder / str(number))
    versions = {number: folder / str(number) for number in files}
    model = PlacedModel("echo", versions, CONFIG, 15, {1: "one", 2: "two"}, files)
    return replace(workload(1), models=(model,))


def paths(store: ArtifactStore) -> dict[str, int]:
    assert store.remote is not None
    return {file.path.split("/", 4)[-1]: file.size for file in store.remote.files("repositories/")}


def test_a_repository_in_an_object_store_is_copied_there_by_the_store(s3: S3, tmp_path: Path) -> None:
    store = open_artifacts(s3.uri, tmp_path / "data")
    repositories, asked = open_repositories(store, ""), with_files(store, tmp_path / "versions")
    sent = list[str]()

    repositories.publish(asked)
    address = repositories.address(asked)
    repositories.configure(address, {"echo": CONFIG})
    assert store.remote is not None
    store.remote.copy = lambda source, target: sent.append(target)  # type: ignore[method-assign]
    repositories.publish(asked)

    assert address.startswith(f"{s3.uri}/repositories/default/reader/")
    assert paths(store) == {
        "echo/config.pbtxt": len(CONFIG),
        "echo/labels.txt": 8,
        "echo/1/.keep": 0,
        "echo/2/model.bin": 7,
    }
    assert sent == []  # what is there already is not copied again
    assert repositories.problem() == ""


def test_repositories_that_no_revision_has_are_removed_and_no_others(s3: S3, tmp_path: Path) -> None:
    store = open_artifacts(s3.uri, tmp_path / "data")
    repositories, asked = open_repositories(store, ""), with_files(store, tmp_path / "versions")
    neighbour = replace(asked, deployment="default/reader-2")
    changed = replace(asked, models=(replace(asked.models[0], config=identity_pbtxt("identity", dims=(5,))),))
    for each in (asked, neighbour, changed):
        repositories.publish(each)

    repositories.remove_except("default/reader", [repositories.address(changed)])
    store.collect(lambda: set())  # blobs that nobody uses go, repositories of deployments stay

    assert store.remote is not None
    left = {file.path.rpartition("/echo/")[0] for file in store.remote.files()}
    assert left == {repositories.address(each).removeprefix(f"{s3.uri}/") for each in (neighbour, changed)}
    repositories.remove_except("default/reader", ())
    assert {file.path.split("/")[2] for file in store.remote.files()} == {"reader-2"}


def test_the_address_stands_for_all_but_traffic(tmp_path: Path) -> None:
    store = open_artifacts("", tmp_path / "data")
    repositories = open_repositories(store, "claim")

    one, split = workload(1, version=1), workload(2, version=1, traffic='{"weights": {"1": 100}}')

    assert repositories.address(one) == repositories.address(split)
    assert repositories.address(one) != repositories.address(workload(1, version=2))


def test_a_repository_on_a_volume_is_made_of_links(tmp_path: Path) -> None:
    store = open_artifacts(str(tmp_path / "volume"), tmp_path / "data")
    repositories, asked = open_repositories(store, "claim"), with_files(store, tmp_path / "versions")
    folder = tmp_path / "volume" / repositories.address(asked)

    repositories.publish(asked)
    repositories.configure(repositories.address(asked), {"echo": CONFIG})
    changed = CONFIG + "# changed\n"
    repositories.configure(repositories.address(asked), {"echo": changed})
    repositories.publish(asked)  # leaves the configuration

    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "echo/2/model.bin",
        "echo/config.pbtxt",
        "echo/labels.txt",
    ]
    assert (folder / "echo" / "1").is_dir()
    assert (folder / "echo" / "config.pbtxt").read_text() == changed
    assert (folder / "echo" / "2" / "model.bin").samefile(tmp_path / "versions" / "2" / "1" / "model.bin")
    repositories.remove_except("default/reader", ())
    assert not folder.exists()


def test_a_folder_of_the_platforms_machine_is_nothing_for_pods(tmp_path: Path) -> None:
    repositories = open_repositories(open_artifacts("", tmp_path), "")

    assert "expected an object store (--artifacts s3://" in repositories.problem()
    assert "--kubernetes-claim" in repositories.problem()
