"""The URI of a repository in an object store, and the credentials to read it. Pure.

s3://bucket/path                             Amazon S3
s3://host:port/bucket/path                   another server that speaks S3, over HTTP
s3://https://host:port/bucket/path           the same over TLS
s3+https://host/bucket/path?style=virtual    the same; other settings are style (virtual or path) and region
oss://, cos://, obs://, tos://, r2://        Alibaba, Tencent, Huawei, Volcengine and Cloudflare, bucket/path
gs://bucket/path                             Google Cloud Storage
as://account/container/path                  Azure Blob Storage
az://container/path, abfs://container/path   the same, the account from the environment
abfs://container@account.dfs.core.windows.net/path
https://bucket.s3.eu-west-1.amazonaws.com/path, and such addresses of the other clouds
https://host/path?signature                  one file, as presigned addresses have it

Credentials come from the environment variables of the clouds' own tools, as in Triton, or from a credential file. That
file has a section for each kind of store, with credentials by URI; the longest URI that is a prefix of the repository's
counts, "" for all others. The library that reads the stores finds other credentials itself: tokens of a Kubernetes
service account or of a virtual machine.
"""

import configparser
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote, urlsplit

from charonia.core.errors import ServingError, invalid

_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.\-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")
_PROTOCOL = re.compile(r"(https?)://(.*)", re.DOTALL)
_SCHEME = re.compile(r"([a-z0-9+]+)://(.*)", re.DOTALL)
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_STYLES = ("virtual", "path")


class StoreKind(Enum):
    """The protocol of a store. The value is the name of its section in a credential file."""

    S3 = "s3"
    GCS = "gs"
    AZURE = "as"
    FILE = "https"


HOSTS = {
    "oss": "oss-{}.aliyuncs.com",
    "cos": "cos.{}.myqcloud.com",
    "obs": "obs.{}.myhuaweicloud.com",
    "tos": "tos-s3-{}.volces.com",
    "r2": "{}.r2.cloudflarestorage.com",
}
"""Host of clouds that speak S3, by scheme, with their region; R2 has the account in its place."""

SCHEMES = {
    "s3": StoreKind.S3,
    "s3+https": StoreKind.S3,
    "s3+http": StoreKind.S3,
    **dict.fromkeys(HOSTS, StoreKind.S3),
    "gs": StoreKind.GCS,
    "as": StoreKind.AZURE,
    "az": StoreKind.AZURE,
    "abfs": StoreKind.AZURE,
    "abfss": StoreKind.AZURE,
    "https": StoreKind.FILE,
}
"""Kind of store by scheme."""

_PASTED = {
    scheme: re.compile(rf"(?:(?P<bucket>.+)\.)?(?P<host>{host})", re.ASCII)
    for scheme, host in {
        "s3": r"s3(?:[.-](?:dualstack\.)?(?P<region>[a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?",
        "oss": r"(?:s3\.)?oss-(?P<region>[a-z0-9-]+?)(?:-internal)?\.aliyuncs\.com",
        "cos": r"cos\.(?P<region>[a-z0-9-]+)\.myqcloud\.com",
        "obs": r"obs\.(?P<region>[a-z0-9-]+)\.myhuaweicloud\.com",
        "tos": r"tos-s3-(?P<region>[a-z0-9-]+)\.volces\.com",
        "r2": r"(?P<region>[0-9a-f]{32})(?:\.[a-z]+)?\.r2\.cloudflarestorage\.com",
    }.items()
}
"""Hosts in the addresses that consoles of clouds show, by scheme."""


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
        scheme: Scheme of its credentials.
        region: Region of S3, "" where the URI does not name it.
        style: Where requests to S3 have the bucket: in the name of the host ("virtual"), or in the path.
        query: Query of the address of a file, which may hold a signature.
    """

    uri: str
    kind: StoreKind
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    account: str = ""
    scheme: str = "s3"
    region: str = ""
    style: str = ""
    query: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """Address of a file for HTTP."""
        return f"{self.uri}?{self.query}" if self.query else self.uri


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
    scheme, (uri, rest) = match[1], (text.rstrip("/"), match[2])
    if kind is StoreKind.FILE:
        return _https(uri)
    if scheme in HOSTS or "+" in scheme:
        return _s3_elsewhere(uri, scheme)
    if kind is StoreKind.S3:
        return _s3(uri, rest)
    if scheme == "as":
        account, _, rest = rest.partition("/")
        bucket, prefix = _split(uri, rest, "as://account/container/path")
        if not account:
            raise _malformed(uri, "as://account/container/path")
        return StoreAddress(uri, kind, bucket, prefix, account=account, scheme=kind.value)
    bucket, prefix = _split(uri, rest, f"{scheme}://{'bucket' if kind is StoreKind.GCS else 'container'}/path")
    if kind is StoreKind.AZURE and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        return StoreAddress(uri, kind, bucket, prefix, account=host.partition(".")[0], scheme=kind.value)
    return StoreAddress(uri, kind, bucket, prefix, scheme=kind.value)


def _s3(uri: str, rest: str) -> StoreAddress:
    protocol = _PROTOCOL.match(rest)
    scheme, rest = (protocol[1], protocol[2]) if protocol is not None else ("http", rest)
    host, _, path = rest.partition("/")
    if protocol is None and not _HOST_AND_PORT.fullmatch(host):
        bucket, prefix = _split(uri, rest, "s3://bucket/path")
        return StoreAddress(uri, StoreKind.S3, bucket, prefix)
    bucket, prefix = _split(uri, path, "s3://host:port/bucket/path")
    return StoreAddress(uri, StoreKind.S3, bucket, prefix, endpoint=f"{scheme}://{host}", style="path")


def _s3_elsewhere(uri: str, scheme: str) -> StoreAddress:
    """Return a bucket of another cloud, or of a server with settings in the query."""
    whole, _, query = uri.partition("?")
    rest, settings = whole.partition("://")[2].rstrip("/"), dict(parse_qsl(query, keep_blank_values=True))
    is_cloud = scheme in HOSTS
    form = f"{scheme}://bucket/path" if is_cloud else f"{scheme}://host/bucket/path?style=virtual"
    host, _, path = ("", "", rest) if is_cloud else rest.partition("/")
    style, region = settings.pop("style", "virtual" if is_cloud else "path"), settings.pop("region", "")
    if settings or style not in _STYLES or (region and not _REGION.fullmatch(region)) or "@" in host:
        raise _malformed(uri, f"{form}, with no other settings than style ({' or '.join(_STYLES)}) and region")
    if not is_cloud and not host:
        raise _malformed(uri, form)
    bucket, prefix = _split(uri, path, form)
    endpoint = "" if is_cloud else f"{scheme.partition('+')[2]}://{host}"
    own = scheme if is_cloud else "s3"
    return StoreAddress(whole, StoreKind.S3, bucket, prefix, endpoint, scheme=own, region=region, style=style)


def _https(uri: str) -> StoreAddress:
    """Return the bucket of a cloud that an address shows; else, or where it is signed, one file."""
    try:
        parts = urlsplit(uri)
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        raise _malformed(uri.partition("?")[0], "https://host/path") from None
    whole, form = f"https://{parts.netloc}{parts.path}", "https://bucket.host/path"
    if not host or parts.username is not None:
        raise _malformed(f"https://{host}{parts.path}", "https://host/path, without a user")
    path = unquote(parts.path).lstrip("/")
    found = next(((s, each) for s, pattern in _PASTED.items() if (each := pattern.fullmatch(host))), None)
    if parts.query or port is not None:
        found = None
    elif found is not None:
        scheme, match = found
        bucket, prefix = _split(whole, f"{match['bucket']}/{path}" if match["bucket"] else path, form)
        endpoint, region = f"https://{match['host']}", match["region"] or ""
        region = "auto" if scheme == "r2" else region
        style = "virtual" if match["bucket"] or scheme not in ("s3", "r2") else "path"
        return StoreAddress(whole, StoreKind.S3, bucket, prefix, endpoint, scheme=scheme, region=region, style=style)
    elif host == "storage.googleapis.com":
        return StoreAddress(whole, StoreKind.GCS, *_split(whole, path, form), scheme="gs")
    elif host.endswith(".blob.core.windows.net"):
        account = host.partition(".")[0]
        return StoreAddress(whole, StoreKind.AZURE, *_split(whole, path, form), account=account, scheme="as")
    if not path:
        raise _malformed(whole, "https://host/path")
    return StoreAddress(whole, StoreKind.FILE, host, path, f"https://{parts.netloc}", scheme="https", query=parts.query)


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

_OWN_VARIABLES = {
    "access_key_id": ("ACCESS_KEY_ID", "SECRET_ID", "ACCESS_KEY"),
    "secret_access_key": ("ACCESS_KEY_SECRET", "SECRET_ACCESS_KEY", "SECRET_KEY"),
    "session_token": ("SESSION_TOKEN", "SECURITY_TOKEN"),
    "region": ("REGION", "ACCOUNT_ID"),
    "endpoint": ("ENDPOINT",),
}
"""Settings of clouds that speak S3: variables after their prefix, as OSS_ in OSS_ENDPOINT."""

_S3_KEYS = {
    "endpoint": "endpoint",
    "style": "style",
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
    StoreKind.FILE: "",
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """The settings that open a store.

    Attributes:
        settings: Setting by its name in the library.
        profile: Profile of the AWS tools that has the keys, "" for none.
        keys: Key, secret and token for S3, which are used in place of all others; none for those of the environment.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)


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
    entry = entry_for(address, sections)
    match address.kind:
        case StoreKind.S3:
            return _s3_credentials(address, environment, _fields(address, entry))
        case StoreKind.GCS:
            return _gcs(address, environment, entry)
        case StoreKind.AZURE:
            return _azure(address, environment, _fields(address, entry))
        case StoreKind.FILE:
            return Credentials()


def entry_for(address: StoreAddress, sections: Mapping[str, Mapping[str, object]] | None) -> object:
    """Return the credentials of an address in a credential file, None for none."""
    return _entry(address, sections) if sections is not None else None


def is_cloud(url: str) -> bool:
    """Whether a URL is of a cloud's S3."""
    parts = urlsplit(url)
    return (
        parts.scheme == "https"
        and parts.netloc == parts.hostname
        and any(pattern.fullmatch(parts.netloc) for pattern in _PASTED.values())
    )


def missing_credentials(kind: StoreKind, reason: str) -> str:
    """Return the hint for a store that failed with `reason`: empty unless the credentials are missing."""
    if "SecondLevelDomainForbidden" in reason:
        return (
            "this store expects the bucket in the name of the host: add ?style=virtual to an address with s3+https://"
        )
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
    section = sections.get(address.scheme, {})
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
    found = {_S3_KEYS[key]: value for key, value in given.items() if key in _S3_KEYS}
    is_amazon = address.scheme not in HOSTS
    if not is_amazon and not found.get("access_key_id"):  # an entry for its region or endpoint alone keeps the keys
        prefix = prefix_of(address)
        for setting, names in _OWN_VARIABLES.items():
            value = next((environment[prefix + name] for name in names if environment.get(prefix + name)), "")
            if value:
                found.setdefault(setting, value)
    keys: dict[str, str] = {
        key: found.pop(key) for key in ("access_key_id", "secret_access_key", "session_token") if key in found
    }
    region = address.region or found.get("region", "")
    if is_amazon:
        region = region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or REGION
    endpoint, style = address.endpoint or found.get("endpoint", ""), found.get("style") or address.style
    if not is_amazon and not endpoint:
        region = region.removeprefix(f"{address.scheme}-")
        if not _REGION.fullmatch(region):
            name = "ACCOUNT_ID" if address.scheme == "r2" else "REGION"
            prefix = prefix_of(address)
            raise invalid(
                f"'{address.uri}': expected the {name.lower().replace('_', ' ')} of the bucket, got '{region}'",
                hint=f"set {prefix}{name} or {prefix}ENDPOINT, or add ?region=... to the address",
            )
        endpoint = f"https://{HOSTS[address.scheme].format(region)}"
    settings = {"region": "auto" if address.scheme == "r2" else region or REGION}
    if endpoint:
        endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
        if style == "virtual":
            protocol, _, host = endpoint.rstrip("/").partition("://")
            endpoint = f"{protocol}://{host if host.startswith(f'{address.bucket}.') else f'{address.bucket}.{host}'}"
        settings |= {"endpoint": endpoint, "virtual_hosted_style_request": str(style == "virtual").lower()}
    if keys.get("access_key_id"):
        return Credentials(settings, keys=keys)
    if not is_amazon:
        return Credentials(settings | {"skip_signature": "true"})
    profile = given.get("profile", "") or environment.get("AWS_PROFILE", "")
    if not profile and not environment.get("AWS_ACCESS_KEY_ID"):
        profile = "default"
    return Credentials(settings, profile)


def prefix_of(address: StoreAddress) -> str:
    """Return the prefix of the environment variables of a cloud: OSS_."""
    return f"{address.scheme.upper()}_"


SERVICE_ACCOUNT = (
    "type", "project_id", "private_key_id", "private_key", "client_email", "client_id", "auth_uri", "token_uri",
    "auth_provider_x509_cert_url", "client_x509_cert_url", "universe_domain",
)  # fmt: skip
"""Members of the JSON key of a service account of Google."""


def _gcs(address: StoreAddress, environment: Mapping[str, str], entry: object) -> Credentials:
    if isinstance(entry, Mapping):  # the key itself; no member of it names a server
        key = {name: str(entry.get(name, "")) for name in ("private_key_id", "private_key", "client_email")}
        if entry.get("type") != "service_account" or not all(key.values()):
            raise _malformed_credentials(address, "the JSON key of a service account")
        return Credentials({"service_account_key": json.dumps({"type": "service_account", **key})})
    if entry is not None and not isinstance(entry, str):
        raise _malformed_credentials(address, "the path of a file, or the JSON key of a service account")
    path = entry or environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    return Credentials({"application_credentials": path} if path else {})


def _azure(address: StoreAddress, environment: Mapping[str, str], given: Mapping[str, str]) -> Credentials:
    account = address.account or given.get("account_str", "") or environment.get("AZURE_STORAGE_ACCOUNT", "")
    key = given.get("account_key", "") or environment.get("AZURE_STORAGE_KEY", "")
    settings = {"account_name": account, "account_key": key}
    return Credentials({name: value for name, value in settings.items() if value})


def _malformed_credentials(address: StoreAddress, expected: str) -> ServingError:
    return invalid(f"{FILE_VARIABLE}: the entry for '{address.uri}' in \"{address.kind.value}\": expected {expected}")
