"""Which servers deployers may let the platform read from."""

import pytest
from fastapi.testclient import TestClient
from tests.platform.models.conftest import add

from charonia.core.errors import Code, ServingError
from charonia.platform.models.sources import AllowedHosts
from charonia.stores.location import parse_address

NAMES = {
    "store.example.org": ["93.184.216.34", "2606:2800:220:1::1"],
    "minio.internal": ["10.1.2.3"],
    "both.internal": ["10.2.0.1", "127.0.0.1"],
}


def resolve(host: str) -> list[str]:
    if host in NAMES:
        return NAMES[host]
    if host.replace(".", "").isdigit() or ":" in host:
        return [host]
    raise OSError("unknown")


def hosts(*entries: str) -> AllowedHosts:
    return AllowedHosts(entries, resolve)


@pytest.mark.parametrize("entries", [(), ("other.internal", "10.2.0.0/16")])
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "[::1]", "[fe80::1%25eth0]", "[::ffff:127.0.0.1]"),
        *("store.example.org", "minio.internal", "both.internal"),
    ],
)
def test_a_server_that_nobody_has_named_is_refused(host: str, entries: tuple[str, ...]) -> None:
    """Also one on the internet: it may send on to one inside."""
    with pytest.raises(ServingError, match="expected a cloud, or a server that the platform may read from") as caught:
        hosts(*entries).check(f"http://{host}:9000")

    assert caught.value.hint.startswith("`charonia platform --store-hosts ")


@pytest.mark.parametrize("entry", ["minio.internal", "10.1.0.0/16", "10.1.2.3", "*"])
def test_those_that_are_named_are_allowed(entry: str) -> None:
    hosts("other.internal", entry).check("http://minio.internal:9000")


def test_a_name_that_is_unknown_is_told() -> None:
    with pytest.raises(ServingError, match="the host 'nowhere' of 'http://nowhere' is unknown") as caught:
        hosts("10.0.0.0/8").check("http://nowhere")

    assert caught.value.code is Code.UNAVAILABLE


def test_the_server_of_a_store_is_checked() -> None:
    hosts().check_store(parse_address("s3://bucket/path"))
    hosts().check_store(parse_address("as://account/container/path"))
    with pytest.raises(ServingError, match=r"127\.0\.0\.1"):
        hosts().check_store(parse_address("s3://127.0.0.1:9000/bucket/path"))
    with pytest.raises(ServingError, match="account of 'as://evil"):
        hosts().check_store(parse_address("as://evil.example#/container/path"))


def test_a_deployer_cannot_read_the_machine_of_the_platform(admin: TestClient, as_caller: object) -> None:
    assert callable(as_caller)
    headers = as_caller("deployer")

    store = add(admin, "a", kind="address", place="s3://127.0.0.1:1/bucket/a", headers=headers)
    mlflow = add(admin, "b", kind="mlflow", place="models:/b/1", server="http://127.0.0.1:1", headers=headers)

    assert "expected a cloud, or a server that the platform may read from" in store["report"]["problem"]
    assert "expected a cloud, or a server that the platform may read from" in mlflow["report"]["problem"]
