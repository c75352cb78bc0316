"""What processes of projects get: variables, ports, and what is said of machines that cannot confine them."""

import pytest

from charonia.platform.isolation.rules import bind_ranges, environment, missing

OWN = {
    "PATH": "/usr/bin",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "2",
    "SSL_CERT_FILE": "/certs/company.pem",
    "REQUESTS_CA_BUNDLE": "/certs/company.pem",
    "HTTPS_PROXY": "http://proxy:3128",
    "no_proxy": "localhost",
    "PIP_INDEX_URL": "https://mirror/simple",
    "UV_INDEX_URL": "https://mirror/simple",
    "UV_CACHE_DIR": "/caches/uv",
    "UV_PUBLISH_TOKEN": "secret",
    "HOME": "/users/ada",
    "TMPDIR": "/tmp",
    "CHARONIA_DATABASE": "postgresql://u:secret@host/db",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "TF_VAR_password": "secret",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/0/bus",
}


def test_variables_are_allowed_by_name() -> None:
    found = environment(OWN, "/room", "/tmp/short", installs=True)

    assert found == {
        **{name: OWN[name] for name in ("PATH", "LC_ALL", "OMP_NUM_THREADS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")},
        **{name: OWN[name] for name in ("HTTPS_PROXY", "no_proxy", "PIP_INDEX_URL", "UV_INDEX_URL")},
        "HOME": "/room",
        "TMPDIR": "/tmp/short",
        "XDG_CACHE_HOME": "/room/cache",
        "CHARONIA_CACHE": "/room/cache",
        "UV_CACHE_DIR": "/room/cache/uv",
    }


def test_indexes_of_packages_are_for_processes_that_install_some() -> None:
    found = environment(OWN, "/room", "/tmp/short", installs=False)

    assert {"PIP_INDEX_URL", "UV_INDEX_URL"} & found.keys() == set()
    assert found["HTTPS_PROXY"] == OWN["HTTPS_PROXY"]


@pytest.mark.parametrize(
    ("own", "ranges"),
    [
        ((), [(5432, 5432), (9000, 9005)]),
        ((9000, 9005), [(5432, 5432), (9001, 9004)]),
        ((9002, 9003), [(5432, 5432), (9000, 9001), (9004, 9005)]),
    ],
)
def test_a_process_listens_on_its_own_ports_of_deployments_only(
    own: tuple[int, ...], ranges: list[tuple[int, int]]
) -> None:
    assert bind_ranges((9000, 9005), [5432], own) == ranges


@pytest.mark.parametrize(
    ("landlock", "namespace", "is_root", "has_users", "said"),
    [
        (7, "mount", True, True, []),
        (6, "user", False, False, []),
        (0, "user", False, False, ["The kernel has no Landlock"]),
        (2, "user", False, False, ["emptying files", "the platform's ports", "controlling other servers"]),
        (4, "user", False, False, ["controlling other servers"]),
        (6, "", False, False, ["UNIX sockets"]),
        (6, "", True, False, ["UNIX sockets", "run as root"]),
    ],
)
def test_what_stays_in_reach_is_said(
    landlock: int, namespace: str, is_root: bool, has_users: bool, said: list[str]
) -> None:
    found = missing(landlock, namespace, is_root=is_root, has_users=has_users)

    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))
