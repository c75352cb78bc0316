"""Cross-origin requests: which pages of other sites may call the server from a browser.

Source: the Fetch standard, "HTTP-CORS protocol".
"""

from collections.abc import Callable, Sequence

from charonia.server.http.exchange import Exchange

ANY = "*"
"""The origin that stands for every one."""

PREFLIGHT_SECONDS = 3600
"""How long browsers may remember the answer to a preflight request."""

_EXPOSED = b"Access-Control-Expose-Headers: Inference-Header-Content-Length\r\n"


class CrossOrigin:
    """Answers preflight requests, and marks the responses that pages of allowed origins may read."""

    def __init__(self, origins: Sequence[str], handle: Callable[[Exchange], None]) -> None:
        """Wrap the handler of requests.

        Args:
            origins: Allowed origins, such as "https://example.org"; `ANY` allows every one.
            handle: Answers requests.
        """
        self._allows_any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._handle = handle

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later. Never raises."""
        headers = exchange.request.headers
        origin = headers.get(b"origin")
        if origin is None or not (self._allows_any or origin in self._origins):
            self._handle(exchange)
            return
        allowed = b"*" if self._allows_any else origin
        exchange.headers = b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n%b" % (allowed, _EXPOSED)
        method = headers.get(b"access-control-request-method")
        if exchange.request.method != b"OPTIONS" or method is None:
            self._handle(exchange)
            return
        # Asked before the request itself, without its key.
        wanted = headers.get(b"access-control-request-headers", b"")
        extra = b"Access-Control-Allow-Methods: %b\r\n" % method
        extra += b"Access-Control-Allow-Headers: %b\r\n" % wanted if wanted else b""
        exchange.respond(200, [], extra=extra + b"Access-Control-Max-Age: %d\r\n" % PREFLIGHT_SECONDS)
