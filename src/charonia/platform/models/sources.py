"""Sources of a version: an upload, an address, a folder of the platform's machine, MLflow's registry.

Source: MLflow's REST API documentation ("Get Model Version", "Get Download URI For ModelVersion Artifacts"), and its
artifact proxy (`mlflow-artifacts`).
"""

import base64
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from charonia.core.errors import ServingError, invalid, not_found, unavailable, unsupported
from charonia.platform.artifacts.blobs import PIECE_BYTES
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.models.arriving import ArrivingFiles, FolderFiles, OwnFiles, RemoteFiles
from charonia.platform.models.hosts import AllowedHosts
from charonia.stores.location import is_store, parse_address
from charonia.stores.remote import RemoteFile, open_store

SERVER_VARIABLE = "MLFLOW_TRACKING_URI"
"""Environment variable with the address of the server, as for MLflow's own tools."""

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Longest answer of the API."""

SILENCE_S_MAX = 30.0
"""Longest pause in an answer."""

FOLDERS_MAX = 1000
"""Folders of a model."""

PROXIED = "mlflow-artifacts"
"""Scheme of artifacts that the server itself hands out."""

_MODEL = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>[1-9][0-9]*)|@(?P<alias>[^/@]+))")


class MlflowServer:
    """A server of MLflow.

    Credentials of the environment go only to the server that the environment names.

    Args:
        address: Its address, "" for the one in the environment.
    """

    def __init__(self, address: str = "", environment: Mapping[str, str] = os.environ) -> None:
        own = environment.get(SERVER_VARIABLE, "").rstrip("/")
        self.address = address.rstrip("/") or own
        if not self.address.startswith(("http://", "https://")):
            raise invalid(
                f"server of MLflow: expected an address that begins with http:// or https://, got '{self.address}'",
                hint=f"name one, or set {SERVER_VARIABLE} for the platform",
            )
        self._headers = _credentials(environment) if self.address == own else {}
        self._opener = urllib.request.build_opener(_NoRedirect)

    def artifacts(self, model: str) -> tuple[str, str]:
        """Return where the files of a model's version are, and its name: "models:/NAME/VERSION".

        Args:
            model: "models:/NAME/VERSION" or "models:/NAME@ALIAS".
        """
        match = _MODEL.fullmatch(model)
        if match is None:
            raise invalid(f"model of MLflow: expected models:/NAME/VERSION or models:/NAME@ALIAS, got '{model}'")
        name, number = match["name"], match["version"]
        if match["alias"]:
            answer = self._ask("mlflow/registered-models/alias", {"name": name, "alias": match["alias"]})
            number = str(_field(answer, "model_version", "version"))
        answer = self._ask("mlflow/model-versions/get-download-uri", {"name": name, "version": number})
        return str(_field(answer, "artifact_uri")), f"models:/{name}/{number}"

    def _ask(self, call: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        with self.open(f"{call}?{urllib.parse.urlencode(query)}") as answer:
            try:
                text = answer.read(ANSWER_BYTES_MAX + 1)
                found = json.loads(text[:ANSWER_BYTES_MAX])
            except (OSError, HTTPException) as error:
                raise self._away(error) from None
            except ValueError:
                raise unavailable(f"server of MLflow '{self.address}': its answer is not JSON") from None
        if not isinstance(found, dict):
            raise unavailable(f"server of MLflow '{self.address}': its answer is not a JSON object")
        return found

    def open(self, call: str) -> Any:
        """Send a request and return the open answer."""
        request = urllib.request.Request(f"{self.address}/api/2.0/{call}", headers=self._headers)
        try:
            return self._opener.open(request, timeout=SILENCE_S_MAX)
        except urllib.error.HTTPError as error:
            with error:
                reason = _message(error.read(2000))
            text = f"server of MLflow '{self.address}' answers {error.code}{f': {reason}' if reason else ''}"
            raise (not_found(text) if error.code == 404 else unavailable(text)) from None
        except (OSError, HTTPException) as error:
            raise self._away(error) from None

    def list(self, folder: str) -> list[Mapping[str, Any]]:
        """Return the entries of a folder of artifacts that the server hands out."""
        files = self._ask("mlflow-artifacts/artifacts", {"path": folder}).get("files", [])
        return [entry for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []

    def _away(self, error: OSError | HTTPException) -> ServingError:
        reason = getattr(error, "reason", error)
        return unavailable(f"server of MLflow '{self.address}' cannot be reached: {reason}", hint="try again")


class ProxiedArtifacts:
    """A folder of artifacts that a server of MLflow hands out, as a store.

    Args:
        uri: Its address: "mlflow-artifacts:/1/abc/artifacts/model".
    """

    def __init__(self, server: MlflowServer, uri: str) -> None:
        self.uri = uri
        self._server = server
        self._root = urllib.parse.unquote(urllib.parse.urlsplit(uri).path).strip("/")

    def files(self) -> Iterator[RemoteFile]:
        """Yield every file. See `stores.remote.RemoteStore`."""
        folders = [""]
        for count in range(FOLDERS_MAX):
            if count >= len(folders):
                return
            for entry in self._server.list(f"{self._root}/{folders[count]}".rstrip("/")):
                path = f"{folders[count]}/{entry.get('path', '')}".strip("/")
                if entry.get("is_dir"):
                    folders.append(path)
                else:
                    yield RemoteFile(path, int(entry.get("file_size") or 0), "")
        raise invalid(f"'{self.uri}': expected at most {FOLDERS_MAX} folders, found more")

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file; `start` is 0. See `stores.remote.RemoteStore`."""
        assert start == 0
        place = urllib.parse.quote(f"{self._root}/{file.path}")
        left = end
        with self._server.open(f"mlflow-artifacts/artifacts/{place}") as answer:
            while left > 0:
                try:
                    piece = answer.read(min(PIECE_BYTES, left))
                except (OSError, HTTPException) as error:
                    raise unavailable(f"'{self.uri}': '{file.path}' cannot be fetched: {error}") from None
                if not piece:
                    return
                left -= len(piece)
                yield piece


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are errors: they would take the credentials along."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _credentials(environment: Mapping[str, str]) -> dict[str, str]:
    token = environment.get("MLFLOW_TRACKING_TOKEN", "")
    name, password = (environment.get(f"MLFLOW_TRACKING_{part}", "") for part in ("USERNAME", "PASSWORD"))
    if token:
        return {"Authorization": f"Bearer {token}"}
    if name:
        return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
    return {}


def _field(answer: Mapping[str, Any], *names: str) -> Any:
    found: Any = answer
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    if not found:
        raise not_found(f"MLflow: expected '{'.'.join(names)}' in the answer, there is none")
    return found


def _message(body: bytes) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    return str(found.get("message", ""))[:400] if isinstance(found, dict) else ""


PLACE_CHARS_MAX = 2000

SourceKind = Literal["upload", "address", "folder", "mlflow"]


@dataclass(frozen=True, slots=True)
class VersionSource:
    """Where a version comes from.

    Attributes:
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
        """Check everything that needs no access to the source."""
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
        sent: Their keys by path, for an upload.
        may_read_folders: Whether the caller may read any folder of this machine.
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
