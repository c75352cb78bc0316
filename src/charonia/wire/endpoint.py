"""URLs of servers: which protocol, which host and port, and whether with TLS."""

import re
from dataclasses import dataclass

from charonia.core.errors import invalid

_PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 443}
_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s/:\[\]@?#]+)(?::(?P<port>\d{1,5}))?"
    r"(?P<path>/[^\s?#]*)?"
)
_HINT = "expected HOST:PORT, http://HOST:PORT, https://HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server.

    Attributes:
        protocol: "http" or "grpc".
        host: Host name or address, an IPv6 address without brackets.
        tls: Whether the connection is encrypted.
        prefix: Path before that of the protocol, without a trailing slash (HTTP only).
        name: Host name that `host` is an address of, for requests and certificates; "" where `host` is the name itself.
    """

    protocol: str
    host: str
    port: int
    tls: bool
    prefix: str
    name: str = ""

    @property
    def authority(self) -> str:
        """Host and port in URL form, as requests name them."""
        return _authority(self.name or self.host, self.port)

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{_authority(self.host, self.port)}{self.prefix}"


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_url(url: str) -> Endpoint:
    """Parse a URL; the default scheme is HTTP, and each scheme has a default port.

    Raises:
        ServingError: INVALID_ARG for an invalid URL.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise invalid(f"'{url}' is not the URL of a server", hint=_HINT)
    scheme = (match["scheme"] or "http").lower()
    if scheme not in _PORTS:
        raise invalid(f"URL '{url}': expected one of the schemes {', '.join(_PORTS)}, got '{scheme}'", hint=_HINT)
    port = int(match["port"]) if match["port"] else _PORTS[scheme]
    if not 0 < port < 65_536:
        raise invalid(f"URL '{url}': expected a port from 1 to 65535, got {port}")
    prefix = (match["path"] or "").rstrip("/")
    tls = scheme.endswith("s")
    protocol = scheme.removesuffix("s")
    if prefix and protocol == "grpc":
        raise invalid(f"URL '{url}': a gRPC server has no path, got '{prefix}'")
    return Endpoint(protocol, match["host"].strip("[]"), port, tls, prefix)
