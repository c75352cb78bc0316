"""HTTP calls of commands, the tools and the platform. Standard library only: a larger client takes 0.2 s to import.

A call goes where its URL says: through no proxy of the environment, and along no redirect.
"""

import ssl
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

NO_ANSWER = (OSError, ValueError, HTTPException)
"""A call got no answer: the server is missing, ended or silent, or the URL is invalid."""


class HttpAnswer(NamedTuple):
    """An answer, with its body up to the limit of the call."""

    status: int
    reason: str
    headers: HTTPMessage
    body: bytes


def http_call(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    *,
    timeout_s: float,
    bytes_max: int | None = None,
    context: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """Make a call and wait for its answer, whatever its status is.

    Args:
        method: The method.
        url: Where, with `http://` or `https://`.
        headers: Headers to send.
        body: Body of the request.
        timeout_s: Longest silence of the server.
        bytes_max: The rest of a longer body is not read; None for all.
        context: Certificates to trust, None for the system's.

    Raises:
        OSError, ValueError, HTTPException: There is no answer. See `NO_ANSWER`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://HOST:PORT or https://HOST:PORT, got '{url}'")
    connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    if parts.scheme == "https":
        context = context or ssl.create_default_context()
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    with closing(connection):
        connection.request(method, f"{parts.path or '/'}{parts.query and '?'}{parts.query}", body, dict(headers or {}))
        answer = connection.getresponse()
        return HttpAnswer(answer.status, answer.reason, answer.headers, answer.read(bytes_max))
