"""What `charonia platform` is told."""

from dataclasses import dataclass, field
from pathlib import Path

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
        oidc: Single sign-on.
    """

    data: Path
    database: str = ""
    artifacts: str = ""
    host: str = HOST
    port: int = PORT
    public_url: str = ""
    ports: tuple[int, int] = (FIRST_PORT, LAST_PORT)
    oidc: Oidc = Oidc()
