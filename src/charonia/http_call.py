"""HTTP calls of commands, the tools and the platform. Standard library only: a larger client takes 0.2 s to import.

A call goes where its URL says, unless it asks for more: through no proxy of the environment, and along no redirect.
"""

import base64
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

NO_ANSWER = (OSError, ValueError, HTTPException)
"""A call got no answer: the server is missing, ended or silent, or the URL is invalid."""

HTTP_URL = "http://HOST:PORT or https://HOST:PORT"

HOPS_MAX = 5
"""Most redirects that a call follows."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


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
    through_proxy: bool = False,
) -> HttpAnswer:
    """Make a call and wait for its answer, whatever its status is. Other arguments and errors: see `open_call`.

    Args:
        bytes_max: The rest of a longer body is not read; None for all.
    """
    opened = open_call(method, url, headers, body, timeout_s=timeout_s, context=context, through_proxy=through_proxy)
    with opened as answer:
        return HttpAnswer(answer.status, answer.reason, answer.headers, answer.read(bytes_max))


@contextmanager
def open_call(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    *,
    timeout_s: float,
    context: ssl.SSLContext | None = None,
    through_proxy: bool = False,
    check_redirect: Callable[[str], None] | None = None,
) -> Iterator[HTTPResponse]:
    """Make a call, and yield its answer with the body to read, whatever its status is.

    Args:
        method: The method.
        url: Where, with `http://` or `https://`.
        headers: Headers to send.
        body: Body of the request.
        timeout_s: Longest silence of the server.
        context: Certificates to trust, None for the system's.
        through_proxy: Whether the proxy that the environment names for this URL makes the call.
        check_redirect: Raises for a target of a redirect that must not be called; the others are called without the
            headers, which are for the server of the URL only. None: redirects are answers.

    Raises:
        OSError, ValueError, HTTPException: There is no answer. See `NO_ANSWER`.
    """
    sent = {"User-Agent": "charonia", **(headers or {})}
    for hop in range(HOPS_MAX + 1):
        connection, target = _connection(url, sent, timeout_s, context, through_proxy=through_proxy)
        with closing(connection):
            connection.request(method, target, body, sent)
            answer = connection.getresponse()
            place = answer.headers["Location"] if answer.status in _REDIRECTS else None
            if check_redirect is None or place is None or hop == HOPS_MAX:
                yield answer
                return
        url, sent = urljoin(url, place), {"User-Agent": "charonia"}
        check_redirect(url)


def no_answer_reason(error: Exception) -> str:
    """Return why a call got no answer, without the number that the system gives an error."""
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def is_http_url(url: str) -> bool:
    """Whether a URL has the scheme of HTTP, a host, and a possible port."""
    with suppress(ValueError):
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return False


def _connection(
    url: str, headers: dict[str, str], timeout_s: float, context: ssl.SSLContext | None, *, through_proxy: bool
) -> tuple[HTTPConnection, str]:
    """Return a connection to the server or its proxy, and the target of the request; a proxy may need headers."""
    if not is_http_url(url):
        raise ValueError(f"expected {HTTP_URL}, got '{url}'")
    parts = urlsplit(url)
    proxy = _proxy_of(parts) if through_proxy else None
    server = proxy or parts
    host = server.hostname or ""
    target = f"{parts.path or '/'}{parts.query and '?'}{parts.query}"
    known = _credentials(proxy) if proxy is not None else {}
    if parts.scheme == "http":
        if proxy is not None:
            headers |= known
            target = f"http://{parts.netloc}{target}"
        return HTTPConnection(host, server.port, timeout=timeout_s), target
    context = context or ssl.create_default_context()
    connection = HTTPSConnection(host, server.port, timeout=timeout_s, context=context)
    if proxy is not None:
        connection.set_tunnel(parts.hostname or "", parts.port, known)
    return connection, target


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for a URL, as in HTTPS_PROXY and NO_PROXY."""
    from urllib.request import getproxies, proxy_bypass

    found = getproxies().get(parts.scheme, "")
    if not found or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
