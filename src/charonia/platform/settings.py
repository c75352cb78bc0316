"""What `charonia platform` is told."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from charonia.core.errors import invalid

HOST = "127.0.0.1"
PORT = 8080
FIRST_PORT = 9000
LAST_PORT = 9999


@dataclass(frozen=True, slots=True)
class Oidc:
    """Single sign-on.

    Attributes:
        issuer: Address of the provider, "" for no single sign-on.
        client_id: Name of the platform there.
        client_secret: Its secret.
        admins: E-mail addresses of those who are administrators from the start.
    """

    issuer: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    admins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """Settings of a platform.

    Attributes:
        data: Folder for everything that is kept: database, artifacts, environments, deployments, logs.
        database: SQLAlchemy's address of the database, "" for SQLite in the data folder.
        artifacts: Folder or address of the store of models' files, "" for one in the data folder.
        host: Address of the page and the API.
        port: Their port, 0 for any free one.
        public_url: Where browsers reach it, "" for host and port.
        ports: First and last port for deployments on this machine; each takes three.
        store_hosts: Hosts outside the internet that versions may be read from; "*" for all.
        oidc: Single sign-on.
    """

    data: Path
    database: str = ""
    artifacts: str = ""
    host: str = HOST
    port: int = PORT
    public_url: str = ""
    ports: tuple[int, int] = (FIRST_PORT, LAST_PORT)
    store_hosts: tuple[str, ...] = ()
    oidc: Oidc = Oidc()

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ServingError: INVALID_ARG with a line for every problem.
        """
        problems = []
        public = urlsplit(self.public_url)
        if self.public_url and (
            public.scheme not in ("http", "https") or not public.hostname or public.path.strip("/")
        ):
            problems.append(
                f"--public-url: expected http://HOST or https://HOST, without a path, got '{self.public_url}'"
            )
        if not self.public_url and not _is_loopback(self.host):
            problems.append(
                f"--host: others reach '{self.host}', so expected --public-url as well: the address of the proxy with "
                "HTTPS before it"
            )
        if not 0 < self.ports[0] <= self.ports[1] < 2**16:
            problems.append(f"--ports: expected FIRST-LAST from 1 to 65535, got '{self.ports[0]}-{self.ports[1]}'")
        if self.oidc.issuer and not self.oidc.client_id:
            problems.append("--oidc-issuer: expected --oidc-client-id as well")
        issuer = urlsplit(self.oidc.issuer)
        if self.oidc.issuer and issuer.scheme != "https" and not _is_loopback(issuer.hostname or ""):
            problems.append(f"--oidc-issuer: expected https://..., got '{self.oidc.issuer}'")
        if problems:
            raise invalid("\n".join(problems))

    @property
    def url(self) -> str:
        """Where browsers reach it, without a slash at the end."""
        return self.public_url.rstrip("/") or self._url_of(self.host)

    @property
    def local_url(self) -> str:
        """Where programs of this machine reach it; all addresses of a machine have its own among them."""
        return self._url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def is_https(self) -> bool:
        """Whether browsers reach it with HTTPS."""
        return self.public_url.startswith("https://")

    def _url_of(self, host: str) -> str:
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
