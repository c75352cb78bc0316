"""Certificates of endpoints, which are reloaded when their files change."""

import asyncio
import re
import shutil
import ssl
from pathlib import Path

import pytest
import trustme

from charonia.core.errors import ServingError
from charonia.server.endpoints import Certificate
from charonia.server.options import EndpointTls


class Authority:
    """Signs certificates for localhost, and keeps each under a name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = trustme.CA()

    def issue(self, name: str) -> str:
        """Write a new pair, and return its serial number."""
        issued = self._authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(self.folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")
        return self.serial(self.folder / f"{name}.pem")

    @staticmethod
    def serial(path: Path) -> str:
        decoded = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
        return str(decoded["serialNumber"])

    def use(self, certificate: str, key: str) -> EndpointTls:
        """Put a certificate and a key in the server's place."""
        shutil.copy(self.folder / f"{certificate}.pem", self.folder / "server.pem")
        shutil.copy(self.folder / f"{key}.key", self.folder / "server.key")
        return EndpointTls(True, False, str(self.folder / "server.pem"), str(self.folder / "server.key"))


async def shown(certificate: Certificate, folder: Path) -> str:
    """The serial number of the certificate that a new connection gets."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        text = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=200)
    path = folder / "shown.pem"
    path.write_text(text)
    return Authority.serial(path)


def test_a_new_certificate_is_for_new_connections_and_a_bad_pair_keeps_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    certificate = Certificate(authority.use("first", "first"), "http", alpn="http/1.1")

    def seen() -> str:
        certificate.refresh()
        return asyncio.run(shown(certificate, tmp_path))

    assert seen() == first
    authority.use("second", "first")
    assert seen() == first
    assert "the previous certificate stays in use" in caplog.text
    caplog.clear()
    assert seen() == first
    assert caplog.text == ""  # said one time
    authority.use("second", "second")
    assert seen() == second
    (tmp_path / "server.pem").unlink()
    assert seen() == second


def test_a_pair_that_cannot_be_used_at_the_start_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("first")
    authority.issue("second")

    with pytest.raises(ServingError, match="--grpc-server-cert, --grpc-server-key"):
        Certificate(authority.use("first", "second"), "grpc", alpn="h2")


@pytest.mark.parametrize("name", ["server.pem", "server.key"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("first")
    tls = authority.use("first", "first")
    (tmp_path / name).unlink()

    with pytest.raises(ServingError, match=re.escape(str(tmp_path / name))):
        Certificate(tls, "http", alpn="http/1.1")
