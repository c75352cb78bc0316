"""Requests of browsers: which pages may call the server, and by which names.

Source: the Fetch standard, "HTTP-CORS protocol". Why pages are refused: `charonia.wire.browsers`.
"""

from collections.abc import Sequence

from charonia.core.errors import invalid
from charonia.server.http.exchange import Exchange
from charonia.wire.browsers import foreign_page, host_name, is_local_host

ANY = "*"
"""The origin, or host, that stands for every one."""

PREFLIGHT_SECONDS = 3600
"""How long browsers may remember the answer to a preflight request."""

HOSTS_REMEMBERED_MAX = 64
"""Number of `Host` fields that are known to be allowed."""

_REFUSED = 403
_EXPOSED = b"Access-Control-Expose-Headers: Inference-Header-Content-Length, X-Request-Id\r\n"


def refuse_foreign(exchange: Exchange, method: bytes = b"POST") -> bool:
    """Return whether a request comes from a page that may not call the server, and then answer it.

    Args:
        exchange: The request, after `BrowserRules.admit`.
        method: What it does: by default something that may change the server, whatever its method.
    """
    page = "" if exchange.headers else foreign_page(method, exchange.request.headers)  # those of an admitted origin
    if page:
        exchange.fail(
            invalid(
                f"requests of web pages of '{page}' are not allowed",
                hint="--cors-origins names the origins whose pages may call this server",
            ),
            _REFUSED,
        )
    return bool(page)


class BrowserRules:
    """Refuses requests of pages of other sites, answers preflight requests, and marks responses that pages may read.

    Args:
        origins: Allowed origins, such as "https://example.org"; `ANY` allows every one.
        hosts: Names that requests may be for, besides local ones; None for all.

    Attributes:
        known_hosts: `Host` fields that are known to be allowed; None where all are.
    """

    def __init__(self, origins: Sequence[str] = (), hosts: Sequence[str] | None = None) -> None:
        self._allows_any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = None if hosts is None or ANY in hosts else frozenset(host.lower() for host in hosts)
        self.known_hosts: set[bytes | None] | None = None if self._hosts is None else {None}

    def admit(self, exchange: Exchange) -> bool:
        """Return whether a request of a page, or for a host that is not known, may be handled; if not, answer it."""
        request = exchange.request
        headers = request.headers
        if not self._is_allowed_host(headers.get(b"host")):
            host = host_name(headers[b"host"].decode("latin-1"))[:256]
            exchange.fail(
                invalid(
                    f"requests for the host '{host}' are not allowed",
                    hint=f"--allowed-hosts={host} allows them; requests for localhost and addresses are allowed",
                ),
                _REFUSED,
            )
            return False
        origin = headers.get(b"origin")
        if origin is not None and (self._allows_any or origin in self._origins):
            return not self._share(exchange, origin)
        return not refuse_foreign(exchange, request.method)

    def _share(self, exchange: Exchange, origin: bytes) -> bool:
        """Let a page read the response; return whether this was a preflight request, which is answered."""
        headers = exchange.request.headers
        allowed = b"*" if self._allows_any else origin
        exchange.headers = b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n%b" % (allowed, _EXPOSED)
        method = headers.get(b"access-control-request-method")
        if exchange.request.method != b"OPTIONS" or method is None:
            return False
        # Asked before the request itself, without its key.
        wanted = headers.get(b"access-control-request-headers", b"")
        extra = b"Access-Control-Allow-Methods: %b\r\n" % method
        extra += b"Access-Control-Allow-Headers: %b\r\n" % wanted if wanted else b""
        exchange.respond(200, [], extra=extra + b"Access-Control-Max-Age: %d\r\n" % PREFLIGHT_SECONDS)
        return True

    def _is_allowed_host(self, field: bytes | None) -> bool:
        known = self.known_hosts
        if known is None or self._hosts is None or field is None or field in known:
            return True
        text = field.decode("latin-1")
        is_allowed = is_local_host(text) or host_name(text) in self._hosts
        if is_allowed and len(known) < HOSTS_REMEMBERED_MAX:
            known.add(field)
        return is_allowed
