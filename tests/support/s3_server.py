"""A real S3 server on this machine."""

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class S3:
    """A server, and a bucket in it."""

    def __init__(self) -> None:
        self._moto = pytest.importorskip("moto.server")
        self._server: Any = None
        self.port = 0

    def start(self) -> None:
        self._server = self._moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()

    @property
    def uri(self) -> str:
        return f"s3://127.0.0.1:{self.port}/bucket/models"

    def put(self, path: str, content: bytes | str) -> None:
        self._ask("PUT", f"bucket/models/{path}", content if isinstance(content, bytes) else content.encode())

    def delete(self, path: str) -> None:
        self._ask("DELETE", f"bucket/models/{path}")

    def make_bucket(self) -> None:
        self._ask("PUT", "bucket")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        url = f"http://127.0.0.1:{self.port}/{path}"
        headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read"}
        request = urllib.request.Request(url, method=method, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Yield a server with an empty bucket, and set its credentials in the environment."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    moto_backends = pytest.importorskip("moto.backends")
    moto_backends.get_backend("s3").reset()
    server = S3()
    server.start()
    server.make_bucket()
    yield server
    server.stop()
