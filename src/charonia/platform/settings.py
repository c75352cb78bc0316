"""Settings of `charonia platform`; the options in `cli/platform.py` say what each means."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from charonia.core.errors import invalid
from charonia.http_call import HTTP_URL, is_http_url
from charonia.wire.browsers import listens_locally

HOST = "127.0.0.1"
PORT = 8080
FIRST_PORT = 9000
LAST_PORT = 9999

ISOLATION = ("required", "available", "off")
POSTGRESQL_PORT = 5432

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,54}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Oidc:
    """Single sign-on."""

    issuer: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    admins: tuple[str, ...] = ()


KSERVE_MODES = ("standard", "knative")

IN_CLUSTER = "in-cluster"
"""In place of a kubeconfig: the platform is a pod of the cluster, and calls it with its service account."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """A cluster where deployments run."""

    config: str = ""
    context: str = ""
    namespace: str = ""
    owner: str = ""
    image: str = ""
    images: tuple[tuple[str, str], ...] = ()
    values: str = ""
    chart: str = ""
    helm: str = "helm"
    store_secret: str = ""
    claim: str = ""
    proxy: str = ""
    kserve_mode: str = "standard"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """A Ray cluster where deployments run."""

    dashboard: str = ""
    token: str = field(default="", repr=False)
    http: str = ""
    owner: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """Settings of a platform."""

    data: Path
    database: str = ""
    artifacts: str = ""
    host: str = HOST
    port: int = PORT
    public_url: str = ""
    ports: tuple[int, int] = (FIRST_PORT, LAST_PORT)
    store_hosts: tuple[str, ...] = ()
    trusted_backends: tuple[str, ...] = ()
    isolation: str = "required"
    readable: tuple[str, ...] = ()
    oidc: Oidc = Oidc()
    kubernetes: KubernetesSettings = KubernetesSettings()
    ray: RaySettings = RaySettings()

    def __post_init__(self) -> None:
        problems = _url_problems({"--public-url": self.public_url})
        if not problems and urlsplit(self.public_url).path.strip("/"):
            problems.append(f"--public-url: expected a URL without a path, got '{self.public_url}'")
        if not self.public_url and not listens_locally(self.host):
            problems.append(
                f"--host: others reach '{self.host}', so expected --public-url as well: the address of the HTTPS "
                "proxy in front of it"
            )
        if self.isolation not in ISOLATION:
            problems.append(f"--isolation: expected one of {', '.join(ISOLATION)}, got '{self.isolation}'")
        if not 0 < self.ports[0] <= self.ports[1] < 2**16:
            problems.append(f"--ports: expected FIRST-LAST from 1 to 65535, got '{self.ports[0]}-{self.ports[1]}'")
        if self.oidc.issuer and not self.oidc.client_id:
            problems.append("--oidc-issuer: expected --oidc-client-id as well")
        issuer = urlsplit(self.oidc.issuer)
        if self.oidc.issuer and issuer.scheme != "https" and not listens_locally(issuer.hostname or ""):
            problems.append(f"--oidc-issuer: expected https://..., got '{self.oidc.issuer}'")
        problems += [*_kubernetes_problems(self.kubernetes), *_ray_problems(self.ray)]
        if problems:
            raise invalid("\n".join(problems))

    @property
    def url(self) -> str:
        """Its address for browsers, without a slash at the end."""
        return self.public_url.rstrip("/") or self._url_of(self.host)

    @property
    def local_url(self) -> str:
        """Its address for programs of this machine; all addresses of a machine include its own."""
        return self._url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def refused_ports(self) -> tuple[int, ...]:
        """Ports that models cannot connect to: the platform's, and its database's."""
        database = urlsplit(self.database)
        return (self.port, *([database.port or POSTGRESQL_PORT] if database.hostname else []))

    @property
    def is_https(self) -> bool:
        return self.public_url.startswith("https://")

    def _url_of(self, host: str) -> str:
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _url_problems(urls: Mapping[str, str]) -> list[str]:
    return [f"{name}: expected {HTTP_URL}, got '{url}'" for name, url in urls.items() if url and not is_http_url(url)]


def _kubernetes_problems(settings: KubernetesSettings) -> list[str]:
    if not settings.config:
        given = settings != KubernetesSettings()
        return ["--kubernetes: expected a kubeconfig or 'in-cluster' with the options of the cluster"] if given else []
    problems = []
    if settings.owner and not _LABEL.fullmatch(settings.owner):
        problems.append(f"--kubernetes-owner: expected up to 56 letters, digits and -, got '{settings.owner}'")
    problems += _url_problems({"--kubernetes-proxy": settings.proxy})
    if settings.kserve_mode not in KSERVE_MODES:
        problems.append(f"--kserve-mode: expected {' or '.join(KSERVE_MODES)}, got '{settings.kserve_mode}'")
    return problems


def _ray_problems(settings: RaySettings) -> list[str]:
    if not settings.dashboard:
        given = settings != RaySettings()
        return ["--ray: expected the address of a dashboard with the options of the cluster"] if given else []
    problems = _url_problems({"--ray": settings.dashboard, "--ray-http": settings.http})
    if settings.owner and not _LABEL.fullmatch(settings.owner):
        problems.append(f"--ray-owner: expected up to 63 letters, digits and -, got '{settings.owner}'")
    return problems
