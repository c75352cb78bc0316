"""Sources of a version: an upload, an address, a folder of the platform's machine, MLflow's registry."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from charonia.core.errors import invalid, unsupported
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.models.arriving import ArrivingFiles, FolderFiles, OwnFiles, RemoteFiles
from charonia.platform.models.hosts import AllowedHosts
from charonia.platform.models.mlflow import PROXIED, MlflowServer, ProxiedArtifacts
from charonia.stores.location import is_store, parse_address
from charonia.stores.remote import open_store

PLACE_CHARS_MAX = 2000

SourceKind = Literal["upload", "address", "folder", "mlflow"]


@dataclass(frozen=True, slots=True)
class VersionSource:
    """Where a version comes from.

    Attributes:
        kind: Its kind.
        place: The batch of an upload; "s3://bucket/path"; "/path/of/a/folder"; "models:/NAME/VERSION".
        take: Which of several versions in a model's folder to take, 0 for the highest.
        server: Address of MLflow's server, "" for the one in the platform's environment.
    """

    kind: SourceKind
    place: str
    take: int = 0
    server: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """Check everything that needs no access to the source.

        Raises:
            ServingError: INVALID_ARG for an invalid place.
        """
        if not self.place or len(self.place) > PLACE_CHARS_MAX or "\0" in self.place:
            raise invalid(f"source: expected a place of 1 to {PLACE_CHARS_MAX} characters")
        if self.kind == "address":
            parse_address(self.place)
        if self.kind == "folder" and not Path(self.place).is_absolute():
            raise invalid(f"folder: expected an absolute path on the platform's machine, got '{self.place}'")


def open_source(
    source: VersionSource,
    uploads: UploadFolder,
    sent: Mapping[str, str],
    *,
    may_read_folders: bool,
    hosts: AllowedHosts,
) -> tuple[ArrivingFiles, str]:
    """Return the files, and their origin in words. Blocks.

    Args:
        source: The source.
        uploads: Uploaded files.
        sent: Their keys by path, for an upload.
        may_read_folders: Whether the caller may read any folder of this machine.
        hosts: Servers that may be read from.

    Raises:
        ServingError: INVALID_ARG for an invalid place; NOT_FOUND; UNAVAILABLE when it cannot be reached.
    """
    match source.kind:
        case "upload":
            paths = list(sent)
            title = paths[0] if len(paths) == 1 else f"{paths[0].split('/')[0]} and others ({len(paths)} files)"
            return OwnFiles({path: uploads.sealed(key) for path, key in sent.items()}), f"upload of {title}"
        case "address":
            return _at(source.place, hosts), source.place
        case "folder":
            return _folder(Path(source.place), uploads), f"folder {source.place}"
        case "mlflow":
            server = MlflowServer(source.server)
            if source.server:  # otherwise the platform's own setting
                hosts.check(server.address)
            uri, name = server.artifacts(source.place)
            return _of_mlflow(server, uri, uploads if may_read_folders else None, hosts), f"{name} of {server.address}"


def _of_mlflow(server: MlflowServer, uri: str, uploads: UploadFolder | None, hosts: AllowedHosts) -> ArrivingFiles:
    """Return the files at an address from MLflow; without `uploads`, none of this machine."""
    scheme = uri.partition(":")[0]
    if scheme == PROXIED:
        return RemoteFiles(ProxiedArtifacts(server, uri))
    if is_store(uri) and scheme != "file":
        return _at(uri, hosts)
    path = uri.removeprefix("file://") if scheme == "file" else uri
    if path.startswith("/") and uploads is not None:
        return _folder(Path(path), uploads)
    raise unsupported(
        f"the files of the model are at '{uri}', which the platform does not read",
        hint="start MLflow with --serve-artifacts, or let an administrator import the folder",
    )


def _folder(folder: Path, uploads: UploadFolder) -> ArrivingFiles:
    data = uploads.folder.parent.resolve()
    if data.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(data):
        raise invalid(f"folder '{folder}': it contains the platform's own data", hint="name the folder of a model")
    return FolderFiles(folder)


def _at(address: str, hosts: AllowedHosts) -> ArrivingFiles:
    """Return the files below an address, or the one file at it."""
    place = parse_address(address)
    hosts.check_store(place)
    store = open_store(place)
    if place.prefix and next(iter(store.files()), None) is None:
        above, _, name = place.uri.rpartition("/")
        around = open_store(parse_address(above))
        return RemoteFiles(around, only=around.find(name))
    return RemoteFiles(store)
