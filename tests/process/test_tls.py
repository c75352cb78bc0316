"""TLS and mutual TLS, with the stock clients."""

import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import trustme
from geventhttpclient.response import HTTPConnectionClosed
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

TURNED_AWAY = (InferenceServerException, HTTPConnectionClosed, OSError)

SENT = np.arange(100_000, dtype=np.float32).reshape(1, -1)


@dataclass(frozen=True)
class Pem:
    authority: str
    certificate: str
    key: str


def write_pem(folder: Path, name: str, authority: trustme.CA, *identities: str) -> Pem:
    issued = authority.issue_cert(*identities)
    paths = [str(folder / f"{name}.{part}.pem") for part in ("authority", "certificate", "key")]
    authority.cert_pem.write_to_path(paths[0])
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(paths[1], append=number > 0)
    issued.private_key_pem.write_to_path(paths[2])
    return Pem(*paths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    write_model(made / "models", "echo", "", config=identity_pbtxt(dims=(-1,), max_batch_size=8))
    return made


@pytest.fixture(scope="module")
def server_pem(folder: Path) -> Pem:
    return write_pem(folder, "server", trustme.CA(), "127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def client_pem(folder: Path) -> Pem:
    return write_pem(folder, "client", trustme.CA(), "client@example.org")


def options(pem: Pem, clients: Pem | None) -> list[str]:
    made = []
    for protocol in ("http", "grpc"):
        made += [f"--{protocol}-server-cert={pem.certificate}", f"--{protocol}-server-key={pem.key}"]
        if clients is None:
            made.append(f"--{protocol}-use-ssl=true")
        else:
            made += [f"--{protocol}-use-ssl-mutual=true", f"--{protocol}-root-cert={clients.authority}"]
    return made


@pytest.fixture(scope="module", params=SHAPES)
def plain(folder: Path, server_pem: Pem, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(folder / "models", *options(server_pem, None), *request.param) as server:
        yield server


@pytest.fixture(scope="module", params=SHAPES)
def mutual(folder: Path, server_pem: Pem, client_pem: Pem, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(folder / "models", *options(server_pem, client_pem), *request.param) as server:
        yield server


def http_client(server: ServeProcess, authority: Pem, own: Pem | None = None) -> Any:
    def context() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=authority.authority)
        if own is not None:
            made.load_cert_chain(own.certificate, own.key)
        return made

    return httpclient.InferenceServerClient(server.http, ssl=True, ssl_context_factory=context)


def grpc_client(server: ServeProcess, authority: Pem, own: Pem | None = None) -> Any:
    return grpcclient.InferenceServerClient(
        server.grpc,
        ssl=True,
        root_certificates=authority.authority,
        private_key=own.key if own is not None else None,
        certificate_chain=own.certificate if own is not None else None,
    )


CLIENTS = pytest.mark.parametrize(
    ("module", "connect"), [(httpclient, http_client), (grpcclient, grpc_client)], ids=["http", "grpc"]
)


def echo(module: Any, client: Any) -> "np.ndarray[Any, Any]":
    received: np.ndarray[Any, Any] = client.infer("echo", [infer_input(module, "INPUT0", SENT)]).as_numpy("OUTPUT0")
    return received


@CLIENTS
def test_a_client_with_a_certificate_is_served_under_mutual_tls(
    mutual: ServeProcess, server_pem: Pem, client_pem: Pem, module: Any, connect: Any
) -> None:
    with connect(mutual, server_pem, client_pem) as client:
        np.testing.assert_array_equal(echo(module, client), SENT)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_certificate_that_is_replaced_is_used_without_a_restart(folder: Path, shape: list[str]) -> None:
    used, renewed = (write_pem(folder, name, trustme.CA(), "127.0.0.1", "localhost") for name in ("used", "renewed"))
    expected = Path(renewed.certificate).read_text(encoding="ascii").split()

    def shown(address: str) -> list[str]:
        host, port = address.split(":")
        return ssl.get_server_certificate((host, int(port)), timeout=200).split()

    with ServeProcess(folder / "models", *options(used, None), *shape) as server:
        assert shown(server.http) != expected
        shutil.copy(renewed.key, used.key)
        shutil.copy(renewed.certificate, used.certificate)

        for address in (server.http, server.grpc):
            # Each front end reloads by itself.
            assert eventually(lambda: all(shown(address) == expected for _ in range(8)))  # noqa: B023


@CLIENTS
def test_a_client_without_a_certificate_is_turned_away_under_mutual_tls(
    mutual: ServeProcess, server_pem: Pem, module: Any, connect: Any
) -> None:
    with connect(mutual, server_pem) as client, pytest.raises(TURNED_AWAY):
        echo(module, client)


@CLIENTS
def test_a_client_with_a_strangers_certificate_is_turned_away_under_mutual_tls(
    mutual: ServeProcess, server_pem: Pem, module: Any, connect: Any
) -> None:
    # What proves the server does not vouch for clients.
    with connect(mutual, server_pem, server_pem) as client, pytest.raises(TURNED_AWAY):
        echo(module, client)


@CLIENTS
def test_a_client_that_does_not_know_the_authority_does_not_trust_the_server(
    plain: ServeProcess, client_pem: Pem, module: Any, connect: Any
) -> None:
    with connect(plain, client_pem) as client, pytest.raises(TURNED_AWAY):
        echo(module, client)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(("protocol", "agreed"), [("http", "http/1.1"), ("grpc", "h2")])
def test_the_protocol_is_agreed_on_in_either_version_of_tls(
    plain: ServeProcess, server_pem: Pem, version: ssl.TLSVersion, protocol: str, agreed: str
) -> None:
    context = ssl.create_default_context(cafile=server_pem.authority)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, port = (plain.http if protocol == "http" else plain.grpc).split(":")

    with socket.create_connection((host, int(port)), 10) as raw, context.wrap_socket(raw, server_hostname=host) as safe:
        assert safe.selected_alpn_protocol() == agreed


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_old_versions_of_tls_are_refused(plain: ServeProcess, server_pem: Pem, protocol: str) -> None:
    context = ssl.create_default_context(cafile=server_pem.authority)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = (plain.http if protocol == "http" else plain.grpc).split(":")

    with (
        socket.create_connection((host, int(port)), 10) as raw,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(raw, server_hostname=host),
    ):
        pytest.fail("it agreed")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_plain_text_and_noise_on_a_port_with_tls_only_end_their_connection(
    plain: ServeProcess, server_pem: Pem, protocol: str
) -> None:
    host, port = (plain.http if protocol == "http" else plain.grpc).split(":")
    for data in (b"GET /v2 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(range(256)) * 10, b""):
        with socket.create_connection((host, int(port)), 10) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(4096).startswith((b"HTTP", bytes(3)))

    with http_client(plain, server_pem) as client:
        assert client.is_server_ready()


def test_the_metrics_page_stays_plain(mutual: ServeProcess) -> None:
    assert "nv_inference_count" in mutual.metrics_page()


def test_a_key_that_does_not_fit_its_certificate_is_reported_at_start(
    folder: Path, server_pem: Pem, client_pem: Pem
) -> None:
    wrong = Pem(server_pem.authority, server_pem.certificate, client_pem.key)

    with pytest.raises(RuntimeError, match="-server-key"), ServeProcess(folder / "models", *options(wrong, None)):
        pytest.fail("it started")
