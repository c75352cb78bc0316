"""Security headers on every response, and the check that only this platform's own pages call it."""

from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia.platform.settings import PlatformSettings
from charonia.wire.browsers import foreign_page, host_name, is_local_host, listens_locally

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Headers that a route has already set are kept."""

TRANSPORT_POLICY = "max-age=31536000"


class SecurityHeaders:
    """Adds the headers to the responses of an application."""

    def __init__(self, app: ASGIApp, is_https: bool) -> None:
        self._app = app
        self._headers = HEADERS | ({"Strict-Transport-Security": TRANSPORT_POLICY} if is_https else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class OwnPages:
    """Refuses changes by pages of other sites, and requests for hosts that are not this platform.

    A session's token and the `SameSite` cookie protect signed-in users; this also covers calls without a session.

    Args:
        settings: Its settings. The host is checked if it listens on the loopback interface.
    """

    def __init__(self, app: ASGIApp, settings: PlatformSettings) -> None:
        self._app = app
        self._origin = settings.url.encode()
        self._host = (urlsplit(settings.url).hostname or "") if listens_locally(settings.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else ""
        if problem:
            hint = f"the platform is at {self._origin.decode()}; --public-url sets another address"
            await JSONResponse({"error": problem, "hint": hint}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        headers = dict(scope["headers"])
        field = headers.get(b"host", b"").decode("latin-1")
        if self._host is not None and not is_local_host(field) and host_name(field) != self._host:
            return f"requests for the host '{host_name(field)[:256]}' are not allowed"
        page = foreign_page(scope["method"].encode(), headers) if headers.get(b"origin") != self._origin else ""
        return f"requests of web pages of '{page}' are not allowed" if page else ""
