"""The running server that a command asks: the options that name it, and calls to it."""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import TYPE_CHECKING

from charonia.cli.command_line import Option
from charonia.cli.values import HEADER_HELP, header, with_key
from charonia.core.errors import invalid, unavailable
from charonia.http_call import NO_ANSWER, no_answer_reason, open_call
from charonia.wire.endpoint import parse_url

if TYPE_CHECKING:
    from charonia.client import Client


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The server, headers of the requests to it, and the file of the certificates to trust, "" for the system's."""

    url: str = "localhost:8000"
    headers: tuple[tuple[str, str], ...] = ()
    ssl_ca: str = ""

    def client(self, timeout_s: float = 60.0, url: str = "") -> "Client":
        """Return a client of the server, or of another URL of it. Raises INVALID_ARG."""
        from charonia.client import Client, TlsOptions, WireOptions  # late: a call needs no client

        options = WireOptions(headers=with_key(self.headers), tls=TlsOptions(ca_file=self.ssl_ca))
        return Client(url or self.url, timeout_s=timeout_s, options=options)

    @contextmanager
    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Iterator[HTTPResponse]:
        """Make a call over HTTP, and yield its answer, whatever its status is.

        Args:
            headers: Headers in place of `self.headers`.

        Raises:
            ServingError: UNAVAILABLE if there is no answer, or it breaks off; INVALID_ARG for another URL.
        """
        scheme, separator, _ = self.url.partition("://")
        if separator and scheme.lower() not in ("http", "https"):
            raise invalid(f"--url: expected HOST:PORT, or a URL of http or https, got '{self.url}'")
        endpoint = parse_url(self.url)
        sent = dict(with_key(self.headers)) if headers is None else headers
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca or None) if endpoint.tls else None
            with open_call(method, f"{endpoint}{path}", sent, body, timeout_s=timeout_s, context=context) as answer:
                yield answer
        except NO_ANSWER as error:
            hint, text = "-u names its address", no_answer_reason(error)
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = "--ssl-ca names certificates to trust"
                text = f"its certificate is not trusted: {error.verify_message}"
            raise unavailable(f"no charonia server answers at {endpoint}: {text}", hint=hint) from None


THIS_MACHINE = ServerAccess()

SSL_CA = Option("--ssl-ca", "server.ssl_ca", str, "FILE", "Certificates to trust, for TLS", default="the system's")


def url_option(more: str = "") -> Option:
    return Option("--url -u", "server.url", str, "URL", f"HOST:PORT of the server's HTTP endpoint, or a URL{more}")


def access_options(more: str = "") -> tuple[Option, ...]:
    """Return the options of a command that has the field `server`; `more` is added to the help of --url."""
    return (
        url_option(more),
        Option("--header -H", "server.headers", header, "NAME:VALUE|@FILE", HEADER_HELP, tuple),
        SSL_CA,
    )
