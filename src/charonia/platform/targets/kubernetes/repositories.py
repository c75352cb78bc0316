"""Where pods find the models of revisions: in the platform's artifact store, which they open themselves.

A repository is a folder `repositories/PROJECT/NAME/HASH` there. The hash covers all of its content except the traffic
split, which changes in place, because it changes in running servers, too.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from charonia.platform.artifacts.blobs import disk_faults
from charonia.platform.artifacts.manifest import Blob, served_path
from charonia.platform.artifacts.store import ArtifactStore, remote_key
from charonia.platform.targets.api import Workload, make_model_folder
from charonia.platform.targets.server_calls import content_of

FOLDER = "repositories"

COPY_BYTES_MAX = 5 * 2**30
"""Largest file that S3 copies by itself; others are sent from here."""

DELETED_TOGETHER = 500
"""Files that are removed with one call."""

_CONFIG = "config.pbtxt"
_DIGEST_CHARS = 16


class ModelRepositories:
    """Where pods find the models of revisions: in an object store.

    Args:
        store: The artifact store, which is one.
    """

    def __init__(self, store: ArtifactStore) -> None:
        assert store.remote is not None
        self._store = store
        self._remote = store.remote

    def problem(self) -> str:
        """Return why pods cannot read it, "" if they can."""
        return ""

    def address(self, workload: Workload) -> str:
        """Return the repository of a workload for its servers."""
        return f"{self._remote.uri}/{repository_folder(workload)}"

    def publish(self, workload: Workload) -> None:
        """Store the files of all models there, without their configurations. Existing files are left alone.

        Raises:
            ServingError: UNAVAILABLE when it cannot be written.
        """
        folder = repository_folder(workload)
        present = {file.path: file.size for file in self._remote.files(f"{folder}/")}
        for path, blob in repository_files(workload).items():
            if present.get(f"{folder}/{path}") == (0 if blob is None else blob.size):
                continue
            if blob is None:
                self._remote.put(f"{folder}/{path}", b"")
            elif blob.size > COPY_BYTES_MAX:
                self._remote.put(f"{folder}/{path}", self._store.fetch(blob))
            else:
                self._remote.copy(remote_key(blob), f"{folder}/{path}")

    def configure(self, address: str, configs: Mapping[str, str]) -> None:
        """Put the configurations of models into a repository. Raises as `publish`."""
        folder = address.removeprefix(f"{self._remote.uri}/")
        for model, text in configs.items():
            self._remote.put(f"{folder}/{model}/{_CONFIG}", text.encode())

    def remove_except(self, deployment: str, kept: Collection[str]) -> None:
        """Remove all repositories of a deployment except these. Raises as `publish`."""
        folder = f"{FOLDER}/{deployment}/"
        inside = tuple(address.removeprefix(f"{self._remote.uri}/") + "/" for address in kept)
        gone = [file.path for file in self._remote.files(folder) if not file.path.startswith(inside or "/")]
        for start in range(0, len(gone), DELETED_TOGETHER):
            self._remote.delete(gone[start : start + DELETED_TOGETHER])


class ClaimRepositories(ModelRepositories):
    """Repositories in the folder of the artifact store, on a volume that pods mount.

    Args:
        folder: The folder: the root of the volume.
        is_mounted: Whether pods mount it.
    """

    def __init__(self, folder: Path, *, is_mounted: bool = True) -> None:
        self._folder = folder
        self._is_mounted = is_mounted

    def problem(self) -> str:
        if self._is_mounted:
            return ""
        return (
            f"artifact store: pods cannot read the folder '{self._folder}' of this machine: expected an object store "
            "(--artifacts s3://..., gs://... or as://...), or a volume that they mount, too (--kubernetes-claim)"
        )

    def address(self, workload: Workload) -> str:
        return repository_folder(workload)

    def publish(self, workload: Workload) -> None:
        """Make hard links to the files of all models. See `ModelRepositories`."""
        folder = self._folder / repository_folder(workload)
        for model in workload.models:
            config = folder / model.name / _CONFIG
            before = config.read_text(encoding="utf-8") if config.exists() else None
            with disk_faults(f"files of '{model.name}'", folder):
                make_model_folder(folder, model)
                if before is not None:
                    config.write_text(before, encoding="utf-8")

    def configure(self, address: str, configs: Mapping[str, str]) -> None:
        for model, text in configs.items():
            folder = self._folder / address / model
            with disk_faults(f"configuration of '{model}'", folder):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f".{_CONFIG}.new").write_text(text, encoding="utf-8")
                (folder / f".{_CONFIG}.new").replace(folder / _CONFIG)

    def remove_except(self, deployment: str, kept: Collection[str]) -> None:
        root = self._folder / FOLDER / deployment
        for path in root.iterdir() if root.is_dir() else ():
            if f"{FOLDER}/{deployment}/{path.name}" not in kept:
                shutil.rmtree(path, ignore_errors=True)
        if not kept:
            shutil.rmtree(root, ignore_errors=True)


def open_repositories(store: ArtifactStore, claim: str) -> ModelRepositories:
    """Return where pods find models.

    Args:
        claim: The PersistentVolumeClaim that it is on, "" for none.
    """
    if store.remote is not None and not claim:
        return ModelRepositories(store)
    return ClaimRepositories(store.local.folder, is_mounted=bool(claim))


def repository_folder(workload: Workload) -> str:
    """Return the folder of a workload's repository in the store: equal ones have equal content, except for traffic."""
    digest = hashlib.sha256(json.dumps(content_of(workload)).encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{FOLDER}/{workload.deployment}/{digest}"


def repository_files(workload: Workload) -> dict[str, Blob | None]:
    """Return the files of a repository by their path in it, without configurations; None for an empty one."""
    found: dict[str, Blob | None] = {}
    for model in workload.models:
        for number, files in sorted(model.files.items()):
            paths = {f"{model.name}/{served_path(path, number)}": blob for path, blob in files.items()}
            found |= {path: blob for path, blob in paths.items() if path != f"{model.name}/{_CONFIG}"}
            if not any(path.startswith(f"{model.name}/{number}/") for path in paths):
                found[f"{model.name}/{number}/.keep"] = None  # stores have no empty folders
    return found
