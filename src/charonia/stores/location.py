"""The URI of a repository in an object store, and the credentials to read it. Pure.

s3://bucket/path                             Amazon S3
s3://host:port/bucket/path                   another server that speaks S3, over HTTP
s3://https://host:port/bucket/path           the same over TLS
gs://bucket/path                             Google Cloud Storage
as://account/container/path                  Azure Blob Storage
az://container/path, abfs://container/path   the same, the account from the environment
abfs://container@account.dfs.core.windows.net/path

Credentials come from the environment variables of the clouds' own tools, as in Triton, or from a credential file. That
file has a section for each kind of store, with credentials by URI; the longest URI that is a prefix of the repository's
counts, "" for all others. The library that reads the stores finds further credentials itself: tokens of a Kubernetes
service account or of a virtual machine.
"""

import configparser
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from charonia.core.errors import ServingError, invalid

_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.\-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")
_PROTOCOL = re.compile(r"(https?)://(.*)", re.DOTALL)
_SCHEME = re.compile(r"([a-z0-9]+)://(.*)", re.DOTALL)


class StoreKind(Enum):
    """The protocol of a store. The value is the name of its section in a credential file."""

    S3 = "s3"
    GCS = "gs"
    AZURE = "as"


SCHEMES = {
    "s3": StoreKind.S3,
    "gs": StoreKind.GCS,
    "as": StoreKind.AZURE,
    "az": StoreKind.AZURE,
    "abfs": StoreKind.AZURE,
    "abfss": StoreKind.AZURE,
}
"""Kind of store by scheme."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a repository.

    Attributes:
        uri: As given, without trailing slashes.
        kind: The protocol of the store.
        bucket: Bucket, or container.
        prefix: Path of the repository in it, "" for its root.
        endpoint: URL of the server, "" for the cloud's own.
        account: Account of Azure, "" where the URI does not name it.
    """

    uri: str
    kind: StoreKind
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    account: str = ""


def is_store(text: str) -> bool:
    """Whether a repository is in an object store: a URI, not a path."""
    return _SCHEME.match(text) is not None


def parse_address(text: str) -> StoreAddress:
    """Return the address that a URI means.

    Raises:
        ServingError: INVALID_ARG for an unknown scheme, or a URI without a bucket.
    """
    match = _SCHEME.match(text)
    kind = SCHEMES.get(match[1]) if match is not None else None
    if match is None or kind is None:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise invalid(f"model repository '{text}': expected a folder or a URI that begins with one of {schemes}")
    uri, rest = text.rstrip("/"), match[2]
    if kind is StoreKind.S3:
        return _s3(uri, rest)
    if match[1] == "as":
        account, _, rest = rest.partition("/")
        bucket, prefix = _split(uri, rest, "as://account/container/path")
        if not account:
            raise _malformed(uri, "as://account/container/path")
        return StoreAddress(uri, kind, bucket, prefix, account=account)
    bucket, prefix = _split(uri, rest, f"{match[1]}://{'bucket' if kind is StoreKind.GCS else 'container'}/path")
    if kind is StoreKind.AZURE and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        return StoreAddress(uri, kind, bucket, prefix, account=host.partition(".")[0])
    return StoreAddress(uri, kind, bucket, prefix)


def _s3(uri: str, rest: str) -> StoreAddress:
    protocol = _PROTOCOL.match(rest)
    scheme, rest = (protocol[1], protocol[2]) if protocol is not None else ("http", rest)
    host, _, path = rest.partition("/")
    if protocol is None and not _HOST_AND_PORT.fullmatch(host):
        bucket, prefix = _split(uri, rest, "s3://bucket/path")
        return StoreAddress(uri, StoreKind.S3, bucket, prefix)
    bucket, prefix = _split(uri, path, "s3://host:port/bucket/path")
    return StoreAddress(uri, StoreKind.S3, bucket, prefix, endpoint=f"{scheme}://{host}")


def _split(uri: str, rest: str, form: str) -> tuple[str, str]:
    bucket, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    if not bucket or any(part in (".", "..") for part in parts):
        raise _malformed(uri, form)
    return bucket, "/".join(parts)


def _malformed(uri: str, form: str) -> ServingError:
    return invalid(f"model repository '{uri}': expected {form}")


FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
"""Environment variable: path of the credential file."""

REGION = "us-east-1"
"""Region of S3 where nothing names one."""

_S3_KEYS = {
    "key_id": "access_key_id",
    "secret_key": "secret_access_key",
    "session_token": "session_token",
    "region": "region",
}
_PROFILE_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}

_MACHINES = ("169.254.169.254", "metadata.google.internal")
"""Metadata servers, which have the credentials of a virtual machine."""

_VARIABLES = {
    StoreKind.S3: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true",
    StoreKind.GCS: "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true",
    StoreKind.AZURE: "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY, or AZURE_SKIP_SIGNATURE=true",
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """The settings that open a store.

    Attributes:
        settings: Setting by its name in the library.
        profile: Profile of the AWS tools that has the keys, "" for none.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""


def read_credential_file(text: str, path: str) -> dict[str, dict[str, object]]:
    """Return the sections of a credential file, by kind of store and URI.

    Raises:
        ServingError: INVALID_ARG for a malformed file. The message never quotes its content.
    """
    try:
        document = json.loads(text)
    except ValueError:
        raise invalid(f"{FILE_VARIABLE}: '{path}' is not JSON") from None
    if not isinstance(document, dict) or not all(isinstance(section, dict) for section in document.values()):
        raise invalid(f"{FILE_VARIABLE}: '{path}': expected an object with an object for each of gs, s3, as")
    return document


def credentials(
    address: StoreAddress, environment: Mapping[str, str], sections: Mapping[str, Mapping[str, object]] | None
) -> Credentials:
    """Return the settings that open a store.

    Args:
        address: The store.
        environment: Environment variables.
        sections: The credential file, None where there is none. It takes precedence over the environment.

    Raises:
        ServingError: INVALID_ARG when the file's entry for the store is malformed.
    """
    entry = _entry(address, sections) if sections is not None else None
    match address.kind:
        case StoreKind.S3:
            return _s3_credentials(address, environment, _fields(address, entry))
        case StoreKind.GCS:
            return _gcs(address, environment, entry)
        case StoreKind.AZURE:
            return _azure(address, environment, _fields(address, entry))


def missing_credentials(kind: StoreKind, reason: str) -> str:
    """Return the hint for a store that failed with `reason`: empty unless the credentials are missing."""
    if not any(machine in reason for machine in _MACHINES):
        return ""
    return f"no credentials were given, and this machine has none: set {_VARIABLES[kind]} for a public store"


def profile_settings(profile: str, credential_file: str, config_file: str) -> dict[str, str]:
    """Return the settings of a profile of the AWS tools.

    Args:
        profile: Its name.
        credential_file: Content of `~/.aws/credentials`, "" where there is none.
        config_file: Content of `~/.aws/config`, "" where there is none.

    Raises:
        ServingError: INVALID_ARG for malformed files.
    """
    settings: dict[str, str] = {}
    for text, section in ((config_file, f"profile {profile}"), (config_file, profile), (credential_file, profile)):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            raise invalid(f"the files of the AWS tools cannot be read for profile '{profile}'") from None
        if parser.has_section(section):
            settings |= {_PROFILE_KEYS[key]: value for key, value in parser[section].items() if key in _PROFILE_KEYS}
    return settings


def _entry(address: StoreAddress, sections: Mapping[str, Mapping[str, object]]) -> object:
    section = sections.get(address.kind.value, {})
    matching = [uri for uri in section if not uri or _covers(uri.rstrip("/"), address.uri)]
    return section[max(matching, key=len)] if matching else None


def _covers(uri: str, other: str) -> bool:
    return other == uri or other.startswith(uri + "/")


def _fields(address: StoreAddress, entry: object) -> dict[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _malformed_credentials(address, "an object of texts")
    return {key: value for key, value in entry.items() if value}


def _s3_credentials(address: StoreAddress, environment: Mapping[str, str], given: Mapping[str, str]) -> Credentials:
    settings = {_S3_KEYS[key]: value for key, value in given.items() if key in _S3_KEYS}
    settings.setdefault("region", environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or REGION)
    if address.endpoint:
        settings["endpoint"] = address.endpoint
        settings["virtual_hosted_style_request"] = "false"
    if "access_key_id" in settings:
        return Credentials(settings)
    profile = given.get("profile", "") or environment.get("AWS_PROFILE", "")
    if not profile and not environment.get("AWS_ACCESS_KEY_ID"):
        profile = "default"
    return Credentials(settings, profile)


def _gcs(address: StoreAddress, environment: Mapping[str, str], entry: object) -> Credentials:
    if entry is not None and not isinstance(entry, str):
        raise _malformed_credentials(address, "the path of a file")
    path = entry or environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    return Credentials({"application_credentials": path} if path else {})


def _azure(address: StoreAddress, environment: Mapping[str, str], given: Mapping[str, str]) -> Credentials:
    account = address.account or given.get("account_str", "") or environment.get("AZURE_STORAGE_ACCOUNT", "")
    key = given.get("account_key", "") or environment.get("AZURE_STORAGE_KEY", "")
    settings = {"account_name": account, "account_key": key}
    return Credentials({name: value for name, value in settings.items() if value})


def _malformed_credentials(address: StoreAddress, expected: str) -> ServingError:
    return invalid(f"{FILE_VARIABLE}: the entry for '{address.uri}' in \"{address.kind.value}\": expected {expected}")
