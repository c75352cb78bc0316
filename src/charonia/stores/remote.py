"""Reads and writes object stores through `obstore`, which no other module uses. It blocks, so call it in threads."""

import atexit
import copy
import os
import re
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from charonia.core.errors import invalid, unavailable
from charonia.http_call import NO_ANSWER, no_answer_reason, open_call
from charonia.install_hint import extra_hint
from charonia.stores.location import (
    FILE_VARIABLE,
    Credentials,
    StoreAddress,
    StoreKind,
    credentials,
    missing_credentials,
    parse_address,
    profile_settings,
    read_credential_file,
)

RETRIES_MAX = 4
"""Retries of a request to a store that fails."""

RETRY_S_MAX = 30.0
"""Time from a request's first attempt after which there are no more retries."""

CONNECT_S_MAX = 5.0
"""Connect timeout."""

SILENCE_S_MAX = 30.0
"""Read timeout: the longest pause in a response."""

PART_BYTES = 32 * 1024 * 1024
"""Bytes of a file in one request to an object store."""

PART_S_MAX = 1800.0
"""Time limit of a request to a store, and of each such part of a file: a store may send a byte now and then."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are in memory at a time."""

REASON_CHARS_MAX = 400

_SIGNATURES = re.compile(
    r"((?:sig|signature|x-amz-[a-z-]+|x-oss-[a-z-]+|OSSAccessKeyId|token)=)[^&\s\"')]+", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store.

    Attributes:
        path: Path from the repository, with "/" between names.
        size: Bytes.
        tag: Entity tag, or the time of its last change where there is none: equal while the content is the same.
    """

    path: str
    size: int
    tag: str


class RemoteStore(Protocol):
    """A repository in a store."""

    uri: str

    def files(self) -> Iterator[RemoteFile]:
        """Yield every file.

        Raises:
            ServingError: UNAVAILABLE when the store cannot be read.
        """
        ...

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
        """Yield the bytes from `start` up to `end` of a file, in pieces.

        Raises:
            ServingError: UNAVAILABLE when the file cannot be read, or has changed since it was listed.
        """
        ...


class ObjectStore:
    """A repository in S3, Google Cloud Storage or Azure. Its methods raise UNAVAILABLE when the store does not do it.

    Args:
        address: Its address.
        environment: Environment variables.
        title: What it is, for messages.
        sections: Credentials in the form of a credential file, None for the file that the environment names.

    Raises:
        ServingError: INVALID_ARG for invalid settings, or where the library is not installed.
    """

    def __init__(
        self,
        address: StoreAddress,
        environment: Mapping[str, str] = os.environ,
        *,
        title: str = "model repository",
        sections: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        try:
            import obstore  # not in every installation
            import obstore.exceptions
            import obstore.store
        except ImportError:
            raise invalid(
                f"{title} '{address.uri}': object stores need the package obstore",
                hint=extra_hint("stores"),
            ) from None
        self.uri = address.uri
        self._title = title
        self._prefix = address.prefix + "/" if address.prefix else ""
        self._kind = address.kind
        self._obstore = obstore
        self._errors = obstore.exceptions
        settings, keys = _settings(address, environment, sections)
        kinds = {
            StoreKind.S3: obstore.store.S3Store,
            StoreKind.GCS: obstore.store.GCSStore,
            StoreKind.AZURE: obstore.store.AzureStore,
        }
        endpoint = str(settings.get("endpoint", environment.get("AWS_ENDPOINT_URL", "")))
        try:
            self._store: Any = kinds[address.kind](
                address.bucket,
                config=settings,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S_MAX),
                    "read_timeout": timedelta(seconds=SILENCE_S_MAX),
                    "timeout": timedelta(seconds=PART_S_MAX),
                    "allow_http": endpoint.startswith("http://") or _is_emulated(address.kind, environment),
                },
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_S_MAX)},
                # A provider, since the library would add the token of the environment to a given key.
                **({"credential_provider": _provider(keys)} if keys else {}),
            )
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise invalid(f"{title} '{address.uri}' cannot be used: {_reason(error)}") from None

    def files(self, below: str = "") -> Iterator[RemoteFile]:
        """Yield every file below the repository's path, or one in it. See `RemoteStore.files`."""
        try:
            for page in self._obstore.list(self._store, prefix=self._prefix + below or None):
                for meta in page:
                    path = str(meta["path"])
                    if not path.startswith(self._prefix):
                        continue
                    tag = meta.get("e_tag") or f"{meta['last_modified'].timestamp():.6f}"
                    yield RemoteFile(path[len(self._prefix) :], int(meta["size"]), tag)
        except (self._errors.BaseError, OSError) as error:
            self._fail("cannot be read", error)

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
        """Yield a part of a file. See `RemoteStore.read`."""
        unchanged = {"if_match": file.tag} if '"' in file.tag else {}
        try:
            for first in range(start, end, PART_BYTES):
                options: Any = {"range": (first, min(first + PART_BYTES, end)), **unchanged}
                result = self._obstore.get(self._store, self._prefix + file.path, options=options)
                yield from result.stream(min_chunk_size=CHUNK_BYTES)
        except (self._errors.PreconditionError, self._errors.NotFoundError, FileNotFoundError):
            raise unavailable(
                f"{self._title} '{self.uri}': '{file.path}' was changed or removed while it was fetched",
                hint="the next scan of the repository sees its present state",
            ) from None
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{file.path}' cannot be fetched", error)

    def find(self, path: str) -> RemoteFile | None:
        """Return a file by its path, None if there is none."""
        try:
            meta = self._obstore.head(self._store, self._prefix + path)
        except (self._errors.NotFoundError, FileNotFoundError):
            return None
        except (self._errors.BaseError, OSError) as error:
            self._fail("cannot be read", error)
        return RemoteFile(path, int(meta["size"]), meta.get("e_tag") or "")

    def parent(self) -> tuple["ObjectStore", RemoteFile | None]:
        """Return the store one folder higher, and the file there that this store's path names, None for none."""
        store = copy.copy(self)
        above, _, name = self._prefix.rstrip("/").rpartition("/")
        store.uri, store._prefix = self.uri.rpartition("/")[0], f"{above}/" if above else ""
        return store, store.find(name)

    def put(self, path: str, source: Path | bytes) -> None:
        """Write a file from one of this machine, or from memory: all of it or nothing."""
        try:
            self._obstore.put(self._store, self._prefix + path, source, chunk_size=CHUNK_BYTES * 2)
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{path}' cannot be written", error)

    def copy(self, source: str, target: str) -> None:
        """Let the store copy a file."""
        try:
            self._obstore.copy(self._store, self._prefix + source, self._prefix + target)
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{source}' cannot be copied", error)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there count as removed."""
        try:
            self._obstore.delete(self._store, [self._prefix + path for path in paths])
        except (self._errors.NotFoundError, FileNotFoundError):
            pass
        except (self._errors.BaseError, OSError) as error:
            self._fail("cannot be written", error)

    def _fail(self, what: str, error: Exception) -> NoReturn:
        reason = _reason(error)
        raise unavailable(
            f"{self._title} '{self.uri}' {what}: {reason}", hint=missing_credentials(self._kind, reason)
        ) from None


class HttpFile:
    """A single file at an https address.

    Args:
        check: Raises for a URL that must not be read, also for the target of a redirect.
        headers: Headers for the server at the address, and for no other.
    """

    def __init__(
        self,
        address: StoreAddress,
        check: Callable[[str], None] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.uri = address.uri
        self._url = address.url
        self._headers = headers
        self._check = check

    def files(self) -> Iterator[RemoteFile]:
        """Yield the file. See `RemoteStore.files`."""
        with self._open() as answer:
            size = answer.headers.get("Content-Length") or ""
            if not size.isdecimal():
                raise unavailable(f"'{self.uri}': expected a Content-Length in the answer of the server, got none")
            name = urllib.parse.unquote(self.uri.rpartition("/")[2])
            yield RemoteFile(name, int(size), answer.headers.get("ETag") or "")

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of the file; `start` is 0. See `RemoteStore.read`."""
        assert start == 0
        with self._open() as answer:
            yield from pieces(answer, end, f"'{self.uri}'")

    @contextmanager
    def _open(self) -> Iterator[HTTPResponse]:
        try:
            with open_call(
                "GET",
                self._url,
                self._headers,
                timeout_s=SILENCE_S_MAX,
                through_proxy=True,
                check_redirect=self._check_redirect,
            ) as answer:
                if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                    expired = (
                        " (a presigned address is valid for a limited time)" if answer.status in (401, 403) else ""
                    )
                    raise unavailable(f"'{self.uri}': the server answers {answer.status}{expired}")
                yield answer
        except NO_ANSWER as error:
            raise unavailable(f"'{self.uri}' cannot be reached: {_reason(error)}") from None

    def _check_redirect(self, url: str) -> None:
        if not url.startswith("https://"):
            raise unavailable(f"'{self.uri}': expected a redirect to https://, got another")
        if self._check is not None:
            self._check(url.partition("?")[0])


def pieces(answer: Any, size: int, title: str) -> Iterator[bytes]:
    """Yield so many bytes of an HTTP response.

    Raises:
        ServingError: UNAVAILABLE when it breaks off, or each `PART_BYTES` take longer than `PART_S_MAX`.
    """
    due_s = time.monotonic() + PART_S_MAX * (1 + size // PART_BYTES)
    left = size
    while left > 0:
        try:
            piece = answer.read1(min(CHUNK_BYTES, left))
        except NO_ANSWER as error:
            raise unavailable(f"{title} cannot be fetched: {_reason(error)}") from None
        if not piece:
            raise unavailable(f"{title} came incomplete: {size - left} of {size} bytes")
        if time.monotonic() > due_s:
            raise unavailable(f"{title} cannot be fetched: expected {PART_BYTES} bytes in {PART_S_MAX:g} s, got fewer")
        left -= len(piece)
        yield piece


def open_store(
    address: StoreAddress,
    *,
    sections: Mapping[str, Mapping[str, object]] | None = None,
    check: Callable[[str], None] | None = None,
) -> RemoteStore:
    """Return a repository in a store, or the file at an address; no request is sent yet.

    Args:
        sections: Credentials in the form of a credential file, None for the environment's.
        check: See `HttpFile`.

    Raises:
        ServingError: INVALID_ARG for invalid settings.
    """
    if address.kind is StoreKind.FILE:
        return HttpFile(address, check)
    return ObjectStore(address, sections=sections)


@cache
def local_copy(uri: str) -> Path:
    """Return a folder with the files below a URI, or the file at it, which is removed when the program exits.

    Raises:
        ServingError: INVALID_ARG for an invalid URI, UNAVAILABLE when the files cannot be read.
    """
    address = parse_address(uri)
    folder = Path(tempfile.mkdtemp(prefix="charonia-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = open_store(address)
    files = [file for file in store.files() if not file.path.endswith("/")]
    name = address.prefix.rpartition("/")[2] or address.bucket
    if not files and isinstance(store, ObjectStore) and address.prefix:
        store, found = store.parent()
        files = [found] if found is not None else []
    if not files:
        raise unavailable(f"'{address.uri}': no files below this address")
    is_file = len(files) == 1 and files[0].path == name
    for file in files:
        target = folder / file.path if is_file else folder / name / file.path
        if ".." in target.parts:
            raise invalid(f"'{address.uri}': expected paths within a folder, got '{file.path}'")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as output:
            for piece in store.read(file, 0, file.size) if file.size else ():
                output.write(piece)
    return folder / name


def _provider(keys: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    credential = {
        "access_key_id": keys["access_key_id"],
        "secret_access_key": keys.get("secret_access_key", ""),
        "token": keys.get("session_token"),
        "expires_at": None,
    }
    return lambda: credential


def _settings(
    address: StoreAddress, environment: Mapping[str, str], sections: Mapping[str, Mapping[str, object]] | None
) -> tuple[dict[str, Any], Mapping[str, str]]:
    path = environment.get(FILE_VARIABLE, "")
    if path and sections is None:
        try:
            sections = read_credential_file(Path(path).read_text(encoding="utf-8"), path)
        except OSError as error:
            raise invalid(f"{FILE_VARIABLE}: cannot read '{path}': {(error.strerror or str(error)).lower()}") from None
        except UnicodeDecodeError:
            raise invalid(f"{FILE_VARIABLE}: '{path}' is not UTF-8") from None
    found: Credentials = credentials(address, environment, sections)
    settings: dict[str, Any] = dict(found.settings)
    if found.profile:
        home = Path(environment.get("HOME", "/"), ".aws")
        files = (
            Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
            Path(environment.get("AWS_CONFIG_FILE") or home / "config"),
        )
        of_profile = profile_settings(found.profile, *(_text(file) for file in files))
        settings = {**settings, **of_profile}
    plain = {key: value == "true" if value in ("true", "false") else value for key, value in settings.items()}
    return plain, found.keys


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # without the file the other settings may suffice, or the store reports it
        return ""


def _is_emulated(kind: StoreKind, environment: Mapping[str, str]) -> bool:
    """Whether the environment replaces the cloud with a server without TLS."""
    variables = {
        StoreKind.S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
        StoreKind.GCS: ("GOOGLE_BASE_URL",),
        StoreKind.AZURE: ("AZURE_STORAGE_ENDPOINT",),
    }
    if kind is StoreKind.AZURE and environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("true", "1"):
        return True
    return any(environment.get(name, "").startswith("http://") for name in variables[kind])


def _reason(error: Exception) -> str:
    """Return an error of the library on one line of limited length, without signatures."""
    text = no_answer_reason(error).split("\n\nDebug source:")[0]
    text = urllib.parse.unquote(" ".join(text.split()))
    return _SIGNATURES.sub(r"\1***", text)[:REASON_CHARS_MAX]
