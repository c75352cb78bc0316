"""Headers that tell browsers what the pages may do, on every response."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
"""Those that a route has set itself stay as they are."""

TRANSPORT_POLICY = "max-age=31536000"


class SecurityHeaders:
    """Adds the headers to the responses of an application.

    Args:
        app: The application.
        is_https: Whether browsers reach it with HTTPS only.
    """

    def __init__(self, app: ASGIApp, is_https: bool) -> None:
        self._app = app
        self._headers = HEADERS | ({"Strict-Transport-Security": TRANSPORT_POLICY} if is_https else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a call."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
