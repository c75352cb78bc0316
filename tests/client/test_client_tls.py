"""TLS of the client, against our own front ends."""

import asyncio
import ssl
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.support.fake_engine import FakeEngine

from charonia.client import AsyncClient, ClientError, Failure, TlsOptions, WireOptions
from charonia.client.dialing import tls_context
from charonia.core.errors import Code, ServingError
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.http.frontend import HttpFrontend, HttpLimits


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, name: str, *blobs: trustme.Blob) -> str:
    path = folder / name
    path.write_bytes(b"".join(blob.bytes() for blob in blobs))
    return str(path)


async def with_client(
    authority: trustme.CA, protocol: str, tls: TlsOptions, host: str, use: Callable[[AsyncClient], Any]
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2" if protocol == "grpc" else "http/1.1"])
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED if tls.certificate_file else ssl.CERT_NONE
    engine = FakeEngine()
    front_end = GrpcFrontend(engine) if protocol == "grpc" else HttpFrontend(engine, HttpLimits())
    await front_end.start("127.0.0.1", 0, ssl=context)
    try:
        url = f"{protocol}s://{host}:{front_end.port}"
        async with AsyncClient(url, options=WireOptions(tls=tls, connect_timeout_s=60)) as client:
            await use(client)
    finally:
        await front_end.close()


async def is_live(client: AsyncClient) -> None:
    assert (await client.server_metadata()).name == "charonia"


async def is_refused(client: AsyncClient) -> None:
    with pytest.raises(ClientError, match="certificate is not trusted") as caught:
        await client.server_metadata()
    assert caught.value.failure is Failure.REFUSED


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_server_with_a_certificate_that_is_trusted_is_served(
    protocol: str, authority: trustme.CA, tmp_path: Path
) -> None:
    tls = TlsOptions(ca_file=write(tmp_path, "ca.pem", authority.cert_pem))

    await with_client(authority, protocol, tls, "localhost", is_live)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_certificate_that_is_not_trusted_or_of_another_host_is_refused(
    protocol: str, authority: trustme.CA, tmp_path: Path
) -> None:
    ca_file = write(tmp_path, "ca.pem", authority.cert_pem)
    other = write(tmp_path, "other.pem", trustme.CA().cert_pem)
    await with_client(authority, protocol, TlsOptions(ca_file=other), "localhost", is_refused)
    await with_client(authority, protocol, TlsOptions(ca_file=ca_file), "127.0.0.1", is_refused)
    await with_client(authority, protocol, TlsOptions(ca_file=ca_file, verify_host=False), "127.0.0.1", is_live)
    await with_client(authority, protocol, TlsOptions(verify_peer=False), "127.0.0.1", is_live)


@pytest.mark.parametrize("is_der", [False, True], ids=["pem", "der"])
async def test_the_client_shows_its_own_certificate(is_der: bool, authority: trustme.CA, tmp_path: Path) -> None:
    ours = authority.issue_cert("client")
    certificate = write(tmp_path, "cert", *ours.cert_chain_pems)
    key = write(tmp_path, "key", ours.private_key_pem)
    if is_der:
        Path(certificate).write_bytes(ssl.PEM_cert_to_DER_cert(ours.cert_chain_pems[0].bytes().decode()))
        body = "".join(ours.private_key_pem.bytes().decode().splitlines()[1:-1])
        Path(key).write_bytes(b64decode(body))
    tls = TlsOptions(write(tmp_path, "ca.pem", authority.cert_pem), certificate, key, is_der, is_der)

    await with_client(authority, "grpc", tls, "localhost", is_live)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TlsOptions(ca_file="/nowhere/ca.pem"), "certificates to trust cannot be read from '/nowhere/ca.pem'"),
        (TlsOptions(certificate_file="/nowhere/c", key_file="k"), "certificate '/nowhere/c' with key 'k' cannot be"),
        (TlsOptions(certificate_file="/nowhere/c", certificate_is_der=True), "cannot be used"),
        (TlsOptions(key_file="k"), "key 'k' has no certificate"),
    ],
)
def test_files_that_cannot_be_used_are_named(options: TlsOptions, message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        tls_context(options, http2=False)

    assert caught.value.code is Code.INVALID_ARG


async def test_a_plain_server_is_no_tls_server() -> None:
    front_end = HttpFrontend(FakeEngine(), HttpLimits())
    await front_end.start("127.0.0.1", 0)
    async with AsyncClient(f"https://127.0.0.1:{front_end.port}") as client:
        with pytest.raises(ClientError, match="no connection to https"):
            await asyncio.wait_for(client.server_metadata(), 60)
    await front_end.close()
