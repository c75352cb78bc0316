"""Rules for the processes of projects: files, ports, variables. Pure."""

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/opt/rocm", "/proc", "/sys",
    *(f"/etc/{name}" for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload")),
    *(f"/etc/{name}" for name in ("localtime", "timezone", "os-release", "passwd", "group", "mime.types", "magic")),
    *(f"/etc/{name}" for name in ("hosts", "host.conf", "gai.conf", "nsswitch.conf", "resolv.conf", "services")),
    *(f"/etc/{name}" for name in ("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/tls/cert.pem", "protocols")),
    *(f"/etc/{name}" for name in ("pki/ca-trust", "pki/tls/openssl.cnf", "ca-certificates", "crypto-policies")),
    *(f"/etc/{name}" for name in ("OpenCL", "vulkan", "nvidia", "fonts")),
    "/run/systemd/resolve", "/run/opengl-driver",
)  # fmt: skip
"""Libraries, certificates and settings of the system: to read and to execute."""

DEVICES = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm",
    "/dev/dri", "/dev/kfd", "/dev/accel", "/dev/nvidia-caps", "/dev/infiniband",
)  # fmt: skip
"""Writable devices, except NVIDIA's GPUs (`NVIDIA_DEVICES`)."""

NVIDIA_DEVICES = "nvidia*"
"""Pattern of names in /dev."""

HIDDEN = ("/home", "/root", "/run", "/tmp", "/var/tmp")
"""Folders with files and sockets of users. Processes see only their own files in them."""

_PASSED_ON = frozenset(
    {"LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TZ", "NO_COLOR"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
)
_PREFIXES = (
    "LC_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "NVIDIA_",
    "TF_CPP_",
    "TF_GPU_",
    "ORT_",
    "MALLOC_",
)
"""Variables of the platform that every process gets: locale, certificates, proxies, threads. Others may be secrets."""

_FOR_PACKAGES = ("PIP_", "UV_")
"""Variables for processes that install packages: indexes, mirrors, their certificates."""

_NOT_PASSED_ON = frozenset(
    {"UV_CACHE_DIR", "UV_PYTHON_INSTALL_DIR", "UV_TOOL_DIR", "PIP_CACHE_DIR", "UV_PUBLISH_TOKEN", "UV_PUBLISH_PASSWORD"}
)

FILE_VARIABLES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "PIP_CONFIG_FILE",
    "PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_CONFIG_FILE",
)  # fmt: skip
"""Variables that name a file or folder to read."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The argument of `confine.py`.

    Attributes:
        read: Files and folders to read and to execute.
        write: Files and folders that it may also change.
        hidden: Folders that look empty except for these.
        bind: First and last port of each range that it cannot listen on.
        connect: Ports that it cannot connect to, of any machine.
        network: Whether it can use any other port.
        beside: Abstract socket to connect to first, "" for none.
        parent: The process whose end also ends it, 0 for none.
        user: The user that a process of root becomes, 0 for root without capabilities.
        namespace: How folders are hidden: "mount", "user" for a user namespace, "" for not at all.
        landlock: Version of Landlock, 0 for none.
    """

    read: Sequence[str]
    write: Sequence[str]
    hidden: Sequence[str] = ()
    folder: str = "/"
    bind: Sequence[tuple[int, int]] = ()
    connect: Sequence[int] = ()
    network: bool = True
    beside: str = ""
    parent: int = 0
    user: int = 0
    namespace: str = ""
    landlock: int = 0

    def text(self) -> str:
        """Return what `confine.py`, in the same interpreter, reads without importing a parser."""
        return marshal.dumps(asdict(self)).hex()


def environment(own: Mapping[str, str], home: str, temporary: str, *, installs: bool) -> dict[str, str]:
    """Return the variables of a process."""
    prefixes = (*_PREFIXES, *(_FOR_PACKAGES if installs else ()))
    kept = {
        name: text
        for name, text in own.items()
        if (name in _PASSED_ON or name.startswith(prefixes)) and name not in _NOT_PASSED_ON
    }
    caches = dict.fromkeys(("XDG_CACHE_HOME", "CHARONIA_CACHE"), f"{home}/cache")
    return {**kept, "HOME": home, "TMPDIR": temporary, **caches, "UV_CACHE_DIR": f"{home}/cache/uv"}


def bind_ranges(reserved: tuple[int, int], refused: Sequence[int], own: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of ports that a process cannot listen on.

    Args:
        reserved: First and last port of all deployments.
    """
    ports = sorted({*range(reserved[0], reserved[1] + 1), *refused} - set(own))
    ranges: list[tuple[int, int]] = []
    for port in ports:
        if ranges and ranges[-1][1] == port - 1:
            ranges[-1] = (ranges[-1][0], port)
        else:
            ranges.append((port, port))
    return ranges


def missing(landlock: int, namespace: str, *, is_root: bool, has_users: bool) -> list[str]:
    """Return the gaps of the isolation on this machine, a sentence each, the largest first."""
    found = []
    if not landlock:
        return ["The kernel has no Landlock: models can read and change all files of the platform's user."]
    if landlock < _TRUNCATE_ABI:
        found.append(f"Landlock {landlock} cannot keep models from emptying files: Linux 6.2 can.")
    if landlock < _PORTS_ABI:
        found.append(f"Landlock {landlock} cannot keep models from the platform's ports: Linux 6.7 can.")
    if landlock < REQUIRED_ABI:
        found.append(f"Landlock {landlock} cannot keep models from controlling other servers: Linux 6.12 can.")
    if not namespace:
        found.append(
            "Neither mounts nor user namespaces are allowed: models can change modes of files, and connect to UNIX "
            "sockets, that the platform's user owns."
        )
    if is_root and not has_users:
        found.append("The platform cannot change users: models run as root, without capabilities.")
    return found


_TRUNCATE_ABI, _PORTS_ABI, REQUIRED_ABI = 3, 4, 6
"""Versions of Landlock (Linux 6.2, 6.7, 6.12); the last one keeps models from files, ports and other processes."""
