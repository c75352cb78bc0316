"""Reads and writes object stores through `obstore`, which no other module uses. It blocks, so call it in threads."""

import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from charonia.core.errors import invalid, unavailable
from charonia.install_hint import extra_hint
from charonia.stores.location import (
    FILE_VARIABLE,
    StoreAddress,
    StoreKind,
    credentials,
    missing_credentials,
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

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are in memory at a time."""

REASON_CHARS_MAX = 400

_SIGNATURES = re.compile(r"((?:sig|signature|x-amz-[a-z-]+|token)=)[^&\s\"')]+", re.IGNORECASE)


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
    """A repository in S3, Google Cloud Storage or Azure.

    Args:
        address: Its address.
        environment: Environment variables.
        title: What it is, for messages.

    Raises:
        ServingError: INVALID_ARG for invalid settings, or where the library is not installed.
    """

    def __init__(
        self,
        address: StoreAddress,
        environment: Mapping[str, str] = os.environ,
        *,
        title: str = "model repository",
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
        settings: dict[str, Any] = _settings(address, environment)
        kinds = {
            StoreKind.S3: obstore.store.S3Store,
            StoreKind.GCS: obstore.store.GCSStore,
            StoreKind.AZURE: obstore.store.AzureStore,
        }
        endpoint = settings.get("endpoint", environment.get("AWS_ENDPOINT_URL", ""))
        try:
            self._store: Any = kinds[address.kind](
                address.bucket,
                config=settings,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S_MAX),
                    "read_timeout": timedelta(seconds=SILENCE_S_MAX),
                    "timeout": timedelta(days=1),
                    "allow_http": endpoint.startswith("http://") or _is_emulated(address.kind, environment),
                },
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_S_MAX)},
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
        options: dict[str, Any] = {"range": (start, end)}
        if '"' in file.tag:
            options["if_match"] = file.tag
        try:
            result = self._obstore.get(self._store, self._prefix + file.path, options=cast(Any, options))
            yield from result.stream(min_chunk_size=CHUNK_BYTES)
        except (self._errors.PreconditionError, self._errors.NotFoundError, FileNotFoundError):
            raise unavailable(
                f"{self._title} '{self.uri}': '{file.path}' was changed or removed while it was fetched",
                hint="the next scan of the repository sees its present state",
            ) from None
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{file.path}' cannot be fetched", error)

    def find(self, path: str) -> RemoteFile | None:
        """Return a file by its path, None if there is none.

        Raises:
            ServingError: UNAVAILABLE when the store cannot be read.
        """
        try:
            meta = self._obstore.head(self._store, self._prefix + path)
        except (self._errors.NotFoundError, FileNotFoundError):
            return None
        except (self._errors.BaseError, OSError) as error:
            self._fail("cannot be read", error)
        return RemoteFile(path, int(meta["size"]), meta.get("e_tag") or "")

    def put(self, path: str, source: Path | bytes) -> None:
        """Write a file from one of this machine, or from memory: all of it or nothing.

        Raises:
            ServingError: UNAVAILABLE when the store cannot be written.
        """
        try:
            self._obstore.put(self._store, self._prefix + path, source, chunk_size=CHUNK_BYTES * 2)
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{path}' cannot be written", error)

    def copy(self, source: str, target: str) -> None:
        """Let the store copy a file.

        Raises:
            ServingError: UNAVAILABLE when it cannot.
        """
        try:
            self._obstore.copy(self._store, self._prefix + source, self._prefix + target)
        except (self._errors.BaseError, OSError) as error:
            self._fail(f"'{source}' cannot be copied", error)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there count as removed.

        Raises:
            ServingError: UNAVAILABLE when the store cannot be written.
        """
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


def open_store(address: StoreAddress) -> ObjectStore:
    """Return a repository in a store, with the environment's credentials; no request is sent yet.

    Raises:
        ServingError: INVALID_ARG for invalid settings.
    """
    return ObjectStore(address)


def _settings(address: StoreAddress, environment: Mapping[str, str]) -> dict[str, Any]:
    sections = None
    path = environment.get(FILE_VARIABLE, "")
    if path:
        try:
            sections = read_credential_file(Path(path).read_text(encoding="utf-8"), path)
        except OSError as error:
            raise invalid(f"{FILE_VARIABLE}: cannot read '{path}': {(error.strerror or str(error)).lower()}") from None
        except UnicodeDecodeError:
            raise invalid(f"{FILE_VARIABLE}: '{path}' is not UTF-8") from None
    found = credentials(address, environment, sections)
    settings: dict[str, Any] = dict(found.settings)
    if found.profile:
        home = Path(environment.get("HOME", "/"), ".aws")
        files = (
            Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
            Path(environment.get("AWS_CONFIG_FILE") or home / "config"),
        )
        of_profile = profile_settings(found.profile, *(_text(file) for file in files))
        settings = {**settings, **of_profile}
    return {key: value == "true" if value in ("true", "false") else value for key, value in settings.items()}


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
    text = str(error).split("\n\nDebug source:")[0]
    text = urllib.parse.unquote(" ".join(text.split()))
    return _SIGNATURES.sub(r"\1***", text)[:REASON_CHARS_MAX]
