"""What the URI of a repository in an object store means. Pure.

s3://bucket/path                             Amazon S3
s3://host:port/bucket/path                   another server that speaks S3, over HTTP
s3://https://host:port/bucket/path           the same over TLS
gs://bucket/path                             Google Cloud Storage
as://account/container/path                  Azure Blob Storage
az://container/path, abfs://container/path   the same, the account from the environment
abfs://container@account.dfs.core.windows.net/path
"""

import re
from dataclasses import dataclass
from enum import Enum

from charonia.core.errors import ServingError, invalid

_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.\-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")
_PROTOCOL = re.compile(r"(https?)://(.*)", re.DOTALL)
_SCHEME = re.compile(r"([a-z0-9]+)://(.*)", re.DOTALL)


class StoreKind(Enum):
    """Whose protocol a store speaks. The value is the name of its section in a credential file."""

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
    """Where a repository lies.

    Attributes:
        uri: As it was given, without slashes at the end.
        kind: Whose protocol the store speaks.
        bucket: Bucket, or container.
        prefix: Path of the repository in it, "" for all of it.
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
    """Whether a repository is in an object store: whether it is a URI and not a path."""
    return _SCHEME.match(text) is not None


def parse_address(text: str) -> StoreAddress:
    """Return what a URI means.

    Raises:
        ServingError: INVALID_ARG for a scheme that is not known, or without a bucket.
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
