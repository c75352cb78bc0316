"""Sources of a version: an upload, an address, a Git repository, a folder of the platform's machine, MLflow's registry.

Users name servers, and the platform reaches more than they do: `AllowedHosts` decides.

Source: MLflow's REST API documentation ("Get Model Version", "Get Download URI For ModelVersion Artifacts"), and its
artifact proxy (`mlflow-artifacts`).
"""

import base64
import contextlib
import ipaddress
import json
import os
import re
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from charonia.core.errors import invalid, not_found, unavailable, unsupported
from charonia.http_call import NO_ANSWER, no_answer_reason, open_call
from charonia.platform.artifacts.archives import is_archive, unpack
from charonia.platform.artifacts.blobs import PIECE_BYTES, disk_faults
from charonia.platform.artifacts.manifest import FILES_MAX, Blob, is_content, safe_path
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.models.git import checkout, is_git, parse_git
from charonia.platform.values import Number, RequestBody, Text
from charonia.stores.location import HOSTS, SERVICE_ACCOUNT, StoreAddress, entry_for, is_cloud, is_store, parse_address
from charonia.stores.remote import ObjectStore, RemoteFile, RemoteStore, open_store, pieces

Sections = Mapping[str, Mapping[str, object]]
"""Credentials of stores by scheme and address."""

STORE_SECRETS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("s3", *HOSTS), frozenset({"key_id", "secret_key", "session_token", "region", "endpoint"})),
    "as": frozenset({"account_str", "account_key"}),
    "gs": frozenset(SERVICE_ACCOUNT),
}
"""Members of a secret with credentials, by scheme; a profile or a path would be of the platform's machine."""

ANY = "*"

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HUB = re.compile(r"https://(?:[a-z0-9-]+\.)*(?:huggingface\.co|hf\.co)(?:/.*)?")
"""Hugging Face's hub, and where it keeps large files."""

_ACCOUNT_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
"""Characters of an account of Azure, which becomes a part of the name of a host."""


def resolve(host: str) -> list[str]:
    """Return the addresses of a host. Raises OSError if there are none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Servers that may be read from. Unknown servers are refused wherever they are: they may redirect to any other.

    Attributes:
        entries: Names, addresses, networks such as 10.1.0.0/16; "*" for all.
    """

    entries: Sequence[str] = ()
    resolve: Callable[[str], Sequence[str]] = resolve

    def check_store(self, place: StoreAddress, sections: Sections | None = None) -> None:
        """Check the server of a store; an address without one means the cloud's, or the platform's own setting.

        Args:
            sections: Credentials of the project, which may name a server as well.
        """
        entry = entry_for(place, sections)
        named = entry if isinstance(entry, Mapping) else {}
        for account in (place.account, str(named.get("account_str", ""))):
            if not set(account) <= _ACCOUNT_CHARACTERS and ANY not in self.entries:
                raise invalid(f"account of '{place.uri}': expected small letters, digits and '-'")
        endpoint = place.endpoint or str(named.get("endpoint", ""))
        if endpoint:
            self.check(endpoint)

    def check(self, url: str) -> None:
        """Check that a server may be read from: a cloud's always. Blocks."""
        try:
            if is_cloud(url) or _HUB.fullmatch(url):
                return
            host = urlsplit(url).hostname or ""
        except ValueError as error:
            raise invalid(f"'{url}' is not an address: {error}") from None
        if host in self.entries or ANY in self.entries or self._is_in_networks(host, url):
            return
        raise invalid(
            f"'{url}': expected a cloud, or a server that the platform may read from, got '{host}'",
            hint=f"`charonia platform --store-hosts {host}` allows it; administrators of all projects may name any",
        )

    def _is_in_networks(self, host: str, url: str) -> bool:
        networks = [network for entry in self.entries if (network := _network(entry)) is not None]
        if not networks:
            return False
        try:
            found = [_plain(ipaddress.ip_address(text.partition("%")[0])) for text in self.resolve(host)]
        except (OSError, UnicodeError, ValueError):
            raise unavailable(f"the host '{host}' of '{url}' is unknown") from None
        return bool(found) and all(any(address in network for network in networks) for address in found)


def _plain(address: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address stands for, else the address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


START_BYTES = 64
"""Bytes of a file that are read to recognise it."""

LISTED_MAX = 10 * FILES_MAX
"""Most files of a source, including files of other versions."""

ProgressCallback = Callable[[int], None]
"""Receives the number of bytes that have arrived; an exception cancels the work."""


class IncomingFiles:
    """The files of a future version, below an address of an object store.

    Args:
        only: The only file to read, None for all.
    """

    def __init__(self, store: RemoteStore, only: RemoteFile | None = None) -> None:
        self._store = store
        self._only = only
        self._files: dict[str, RemoteFile] = {}

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each file by its path.

        Raises:
            ServingError: UNAVAILABLE when they cannot be read; INVALID_ARG for invalid paths, or too many.
        """
        self._files = {}
        for file in self._store.files() if self._only is None else (self._only,):
            if file.path.endswith("/") or not file.path:  # a marker of a folder
                continue
            if len(self._files) >= LISTED_MAX:
                raise invalid(f"'{self._store.uri}': expected at most {LISTED_MAX} files, found more")
            self._files[safe_path(file.path)] = file
        if not self._files:
            raise not_found(f"'{self._store.uri}': no files below this address", hint="give the address of a folder")
        return {path: file.size for path, file in self._files.items()}

    def read(self, path: str, limit: int) -> bytes:
        """Return the first bytes of a file. Raises ServingError: UNAVAILABLE when it cannot be read."""
        file = self._files[path]
        end = min(limit, file.size)
        return b"".join(map(bytes, self._store.read(file, 0, end))) if end else b""

    def keep(self, path: str, store: ArtifactStore, progress: ProgressCallback) -> Blob:
        """Put a file into the store.

        Raises:
            ServingError: UNAVAILABLE when it cannot be read or stored; INTERNAL for a damaged disk.
            StorageFullError: There is no room for it.
        """
        return store.add(self._pieces(path, progress), what=f"file '{path}'")

    def local(self, path: str, store: ArtifactStore, progress: ProgressCallback) -> Path:
        """Return the path of a file on this machine, fetched as content that no version has yet. Raises as `keep`."""
        return store.local.path(store.local.add(self._pieces(path, progress), what=f"file '{path}'").sha256)

    def _pieces(self, path: str, progress: ProgressCallback) -> Iterator[bytes]:
        file, size = self._files[path], 0
        for piece in self._store.read(file, 0, file.size) if file.size else ():
            size += len(piece)
            progress(len(piece))
            yield bytes(piece)
        if size != file.size:
            raise unavailable(f"'{self._store.uri}': '{path}' came incomplete: {size} of {file.size} bytes")


class LocalFiles(IncomingFiles):
    """Files of this machine.

    Args:
        files: The path of each, by path in the version.
        is_own: Whether they belong to the platform, which never changes them.
    """

    def __init__(self, files: Mapping[str, Path], *, is_own: bool = True) -> None:
        self._paths = files
        self._is_own = is_own

    def sizes(self) -> Mapping[str, int]:
        return {path: os.path.getsize(file) for path, file in self._paths.items()}

    def read(self, path: str, limit: int) -> bytes:
        with disk_faults("import", self._paths[path]), self._paths[path].open("rb") as file:
            return file.read(limit)

    def keep(self, path: str, store: ArtifactStore, progress: ProgressCallback) -> Blob:
        if self._is_own:
            blob = store.adopt(self._paths[path], what=f"file '{path}'")
            progress(blob.size)
            return blob
        with disk_faults("import", self._paths[path]), self._paths[path].open("rb") as file:
            return store.add(_counted(iter(lambda: file.read(PIECE_BYTES), b""), progress), what=f"file '{path}'")

    def local(self, path: str, store: ArtifactStore, progress: ProgressCallback) -> Path:
        return self._paths[path]


@contextmanager
def unpacked(
    files: IncomingFiles, store: ArtifactStore, isolation: Isolation, progress: ProgressCallback
) -> Iterator[IncomingFiles]:
    """Yield the files unchanged, or the content of a single archive."""
    paths = list(files.sizes())
    if len(paths) != 1 or not is_archive(paths[0]):
        yield files
        return
    with store.local.scratch() as folder:
        unpack(files.local(paths[0], store, progress), paths[0], folder, isolation, lambda: progress(0))
        yield LocalFiles({path: folder / path for path in _below(folder)})


def _below(folder: Path) -> list[str]:
    found: list[str] = []
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_content(name))
        for name in sorted(names):
            with contextlib.suppress(OSError):
                if not os.path.isfile(os.path.join(top, name)):  # a socket, a link to nowhere
                    continue
            found.append(safe_path(os.path.relpath(os.path.join(top, name), folder)))
            if len(found) > LISTED_MAX:
                raise invalid(f"'{folder.name}': expected at most {LISTED_MAX} files, found more")
    return found


def _counted(pieces: Iterator[bytes], progress: ProgressCallback) -> Iterator[bytes]:
    for piece in pieces:
        progress(len(piece))
        yield piece


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
            text = answer.read(ANSWER_BYTES_MAX)
        try:
            found = json.loads(text)
        except ValueError:
            raise unavailable(f"server of MLflow '{self.address}': its answer is not JSON") from None
        if not isinstance(found, dict):
            raise unavailable(f"server of MLflow '{self.address}': its answer is not a JSON object")
        return found

    @contextmanager
    def open(self, call: str) -> Iterator[HTTPResponse]:
        """Send a request and yield the open answer. A redirect is an error: it would take the credentials along."""
        url = f"{self.address}/api/2.0/{call}"
        try:
            with open_call("GET", url, self._headers, timeout_s=SILENCE_S_MAX, through_proxy=True) as answer:
                if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                    reason = _message(answer.read(2000))
                    text = f"server of MLflow '{self.address}' answers {answer.status}{f': {reason}' if reason else ''}"
                    raise not_found(text) if answer.status == HTTPStatus.NOT_FOUND else unavailable(text)
                yield answer
        except NO_ANSWER as error:
            raise unavailable(
                f"server of MLflow '{self.address}' cannot be reached: {no_answer_reason(error)}",
                hint="try again",
            ) from None

    def list(self, folder: str) -> list[Mapping[str, Any]]:
        """Return the entries of a folder of artifacts that the server hands out."""
        files = self._ask("mlflow-artifacts/artifacts", {"path": folder}).get("files", [])
        return [entry for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []


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
        with self._server.open(f"mlflow-artifacts/artifacts/{place}") as answer:
            yield from pieces(answer, end, f"'{self.uri}': '{file.path}'")


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

SourceKind = Literal["upload", "address", "git", "folder", "mlflow"]


class VersionSource(RequestBody):
    """Where a version comes from."""

    kind: SourceKind
    place: Text = Field(
        description="The batch of an upload; s3://bucket/path; git+https://host/group/repo.git@REF#FOLDER; "
        "/path/of/a/folder; models:/NAME/VERSION of MLflow."
    )
    take: Number = Field(default=0, description="Which version of a model's folder with several, 0 for the highest.")
    server: Text = Field(default="", description="Address of MLflow's server, empty for the platform's default.")
    secret: Text = Field(
        default="", description="Secret with the credentials of the store, or the token or key of the repository."
    )

    @property
    def shown(self) -> str:
        """The place, without the signature that the address of a file may have."""
        return self.place.partition("?")[0] if self.place.startswith("https://") else self.place

    def check(self) -> None:
        """Check everything that needs no access to the source."""
        if not self.place or len(self.place) > PLACE_CHARS_MAX or "\0" in self.place:
            raise invalid(f"source: expected a place of 1 to {PLACE_CHARS_MAX} characters")
        if self.kind == "address":
            parse_address(self.place)
        elif self.kind == "git":
            parse_git(self.place)
        elif self.secret:
            raise invalid(
                f"secret '{self.secret}': expected a store or a Git repository with it, got a source of '{self.kind}'"
            )
        if self.kind == "folder" and not Path(self.place).is_absolute():
            raise invalid(f"folder: expected an absolute path on the platform's machine, got '{self.place}'")


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads a source.

    Attributes:
        hosts: Servers that the caller may name.
        may_read_folders: Whether the caller may read any folder of this machine.
        secret: The value of the secret that the source names.
    """

    uploads: UploadFolder
    store: ArtifactStore
    isolation: Isolation
    progress: ProgressCallback
    hosts: AllowedHosts
    may_read_folders: bool
    secret: str = field(default="", repr=False)


@contextmanager
def open_source(
    source: VersionSource, sent: Mapping[str, str], reader: SourceReader
) -> Iterator[tuple[IncomingFiles, str]]:
    """Yield the files, and their origin in words. Blocks.

    Args:
        sent: Their keys by path, for an upload.
    """
    uploads, hosts = reader.uploads, reader.hosts
    match source.kind:
        case "upload":
            paths = list(sent)
            title = paths[0] if len(paths) == 1 else f"{paths[0].split('/')[0]} and others ({len(paths)} files)"
            yield LocalFiles({path: uploads.sealed(key) for path, key in sent.items()}), f"upload of {title}"
        case "address":
            yield _at(source.place, hosts, _credentials_of(source, reader.secret)), source.shown
        case "git":
            address = parse_git(source.place)
            hosts.check(address.url)
            with (
                reader.store.local.scratch() as folder,
                checkout(address, reader.secret, folder, reader.isolation, lambda: reader.progress(0), hosts.check) as (
                    found,
                    commit,
                ),
            ):
                files = {found.name: found} if found.is_file() else {path: found / path for path in _below(found)}
                yield LocalFiles(files), address.at(commit)
        case "folder":
            yield _folder(Path(source.place), uploads), f"folder {source.place}"
        case "mlflow":
            server = MlflowServer(source.server)
            if source.server:  # otherwise the platform's own setting
                hosts.check(server.address)
            uri, name = server.artifacts(source.place)
            yield (
                _of_mlflow(server, uri, uploads if reader.may_read_folders else None, hosts),
                f"{name} of {server.address}",
            )


def _credentials_of(source: VersionSource, secret: str) -> Sections | None:
    """Return a secret as the credential file of one address. No message quotes it."""
    if not source.secret:
        return None
    scheme = parse_address(source.place).scheme
    members = STORE_SECRETS.get(scheme)
    if members is None:
        raise invalid(f"secret '{source.secret}': expected no secret for an address with {scheme}://")
    try:
        found = json.loads(secret)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found or not found.keys() <= members:
        raise invalid(f"secret '{source.secret}': expected a JSON object with {', '.join(sorted(members))}")
    return {scheme: {"": found}}


def _of_mlflow(server: MlflowServer, uri: str, uploads: UploadFolder | None, hosts: AllowedHosts) -> IncomingFiles:
    """Return the files at an address from MLflow; without `uploads`, none of this machine."""
    scheme = uri.partition(":")[0]
    if scheme == PROXIED:
        return IncomingFiles(ProxiedArtifacts(server, uri))
    if is_store(uri) and scheme != "file":
        return _at(uri, hosts)
    path = uri.removeprefix("file://") if scheme == "file" else uri
    if path.startswith("/") and uploads is not None:
        return _folder(Path(path), uploads)
    raise unsupported(
        f"the files of the model are at '{uri}', which the platform does not read",
        hint="start MLflow with --serve-artifacts, or let an administrator import the folder",
    )


def default_name(source: str) -> str:
    """Derive the name of a model from the name of its file, folder, repository or address. Raises ServingError."""
    if (match := _MODEL.fullmatch(source)) is not None:
        return match["name"]
    place = parse_git(source).name if is_git(source) else source
    place = place.partition("?")[0].partition("://")[2] if is_store(place) else place
    parts = [part for part in re.split(r"[/\\]", place) if part not in ("", ".", "..")]
    name = re.sub(r"\.(tar\.\w+|tgz|[A-Za-z]\w*)$", "", parts.pop()) if parts else ""
    while parts and (name.isdecimal() or name in ("model", "model_repository", "models")):
        name = parts.pop()
    if not (name := re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._")):
        raise invalid(f"model: expected a name, and '{source}' names no model", hint="enter a name (--name)")
    return name


def _folder(folder: Path, uploads: UploadFolder) -> IncomingFiles:
    data = uploads.folder.parent.resolve()
    if data.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(data):
        raise invalid(f"folder '{folder}': it contains the platform's own data", hint="name the folder of a model")
    if not folder.is_dir():
        raise not_found(f"folder '{folder}': it does not exist on the platform's machine")
    with disk_faults("import", folder):
        files = {path: (folder / path).resolve() for path in _below(folder)}
    for path, file in files.items():
        if not file.is_relative_to(folder.resolve()):
            raise invalid(f"file '{path}' is a link that leads out of '{folder}'")
    return LocalFiles(files, is_own=False)


def _at(address: str, hosts: AllowedHosts, sections: Sections | None = None) -> IncomingFiles:
    """Return the files below an address, or the one file at it."""
    place = parse_address(address)
    hosts.check_store(place, sections)
    store = open_store(place, sections=sections, check=hosts.check)
    if isinstance(store, ObjectStore) and place.prefix and next(iter(store.files()), None) is None:
        around, found = store.parent()
        return IncomingFiles(around, only=found)
    return IncomingFiles(store)
