"""A real S3 server on this machine, and a proxy that makes it demand virtual-hosted requests."""

import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

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
        with urllib.request.urlopen(request, timeout=200) as answer:
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


@contextmanager
def virtual_hosts(monkeypatch: pytest.MonkeyPatch, server: S3) -> Iterator[list[tuple[str, str]]]:
    """Yield the requests to hosts below ".test", as bucket and access key, while a proxy passes them to a server.

    As Alibaba OSS, it refuses requests that have the bucket in the path.
    """
    seen: list[tuple[str, str]] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host, target = urlsplit(self.path).netloc, urlsplit(self.path)
            bucket = host.partition(".")[0] if host.count(".") > 2 else ""
            key = re.search(r"Credential=([^/]*)", self.headers.get("Authorization", ""))
            seen.append((bucket, key[1] if key else ""))
            if not bucket:
                self.answer(403, b"<Error><Code>SecondLevelDomainForbidden</Code></Error>", {})
                return
            url = f"http://127.0.0.1:{server.port}/{bucket}{target.path}?{target.query}"
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    urllib.request.Request(url, headers=headers), timeout=200
                ) as answer:
                    self.answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.headers.items()})
            except urllib.error.HTTPError as error:
                self.answer(error.code, error.read(), {})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name in ("etag", "content-type", "content-range", "last-modified"):
                if name in headers:
                    self.send_header(name, headers[name])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    try:
        yield seen
    finally:
        proxy.shutdown()
        proxy.server_close()
