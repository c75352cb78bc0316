"""Which servers deployers may let the platform read from."""

import pytest
from fastapi.testclient import TestClient
from tests.platform.models.conftest import add

from charonia.core.errors import Code, ServingError
from charonia.platform.models.hosts import AllowedHosts
from charonia.stores.location import parse_address

NAMES = {
    "store.example.org": ["93.184.216.34", "2606:2800:220:1::1"],
    "minio.internal": ["10.1.2.3"],
    "both.example.org": ["93.184.216.34", "127.0.0.1"],
}


def resolve(host: str) -> list[str]:
    if host in NAMES:
        return NAMES[host]
    if host.replace(".", "").isdigit() or ":" in host:
        return [host]
    raise OSError("unknown")


def hosts(*entries: str) -> AllowedHosts:
    return AllowedHosts(entries, resolve)


def test_a_server_on_the_internet_is_allowed() -> None:
    hosts().check("https://store.example.org:9000")
    hosts().check("http://93.184.216.34")


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
        ),
        *("[::1]", "[fe80::1%25eth0]", "[fd00::1]", "[::ffff:127.0.0.1]", "minio.internal", "both.example.org"),
    ],
)
def test_others_are_refused(host: str) -> None:
    with pytest.raises(ServingError, match="expected a server on the internet") as caught:
        hosts().check(f"http://{host}:9000")

    assert caught.value.hint.startswith("`charonia platform --store-hosts ")


@pytest.mark.parametrize("entry", ["minio.internal", "10.1.0.0/16", "10.1.2.3", "*"])
def test_those_that_are_named_are_allowed(entry: str) -> None:
    hosts("other.internal", entry).check("http://minio.internal:9000")


def test_a_name_that_is_unknown_is_told() -> None:
    with pytest.raises(ServingError, match="the host 'nowhere' of 'http://nowhere' is unknown") as caught:
        hosts().check("http://nowhere")

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

    assert "is at 127.0.0.1: expected a server on the internet" in store["report"]["problem"]
    assert "is at 127.0.0.1: expected a server on the internet" in mlflow["report"]["problem"]
