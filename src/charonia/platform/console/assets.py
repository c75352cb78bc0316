"""Style sheets and scripts of the pages, at addresses that contain their hash, so that browsers can cache them."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from charonia.core.errors import not_found
from charonia.platform.values import Text

PREFIX = "/assets"
KEPT = "public, max-age=31536000, immutable"

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_VENDOR = "platform/console/assets/vendor"
_OWN = "platform/console/assets"
_SERVER = "server/page/assets"

BUNDLES = {
    "console.css": (
        f"{_SERVER}/look.css",
        f"{_VENDOR}/uplot-1.6.32.min.css",
        f"{_OWN}/console.css",
        f"{_OWN}/screens.css",
    ),
    "console.js": (f"{_VENDOR}/htmx-2.0.11.min.js", f"{_OWN}/console.js"),
    "charts.js": (f"{_VENDOR}/uplot-1.6.32.min.js", f"{_OWN}/charts.js"),
    "upload.js": (f"{_OWN}/upload.js",),
    "traffic.js": (f"{_OWN}/traffic.js",),
    "trial.js": (
        *(f"{_SERVER}/{name}.js" for name in ("elements", "tensors", "server", "inputs", "answer", "trial")),
        f"{_OWN}/trial.js",
    ),
    "card.js": (f"{_SERVER}/elements.js", f"{_SERVER}/markdown.js", f"{_OWN}/card.js"),
    "icon.svg": (f"{_OWN}/icon.svg",),
}
"""Source files by address, concatenated. The form to try a model is shared with the server's page."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the pages.

    Attributes:
        content: Its bytes.
    """

    content: bytes
    compressed: bytes
    media_type: str
    digest: str


def asset(name: str) -> Asset:
    """Return an asset."""
    if name not in BUNDLES:
        raise not_found(f"the pages have no asset '{name}'")
    return _made(name)


def address(name: str) -> str:
    return f"{PREFIX}/{asset(name).digest}/{name}"


@cache
def _made(name: str) -> Asset:
    package = files("charonia")
    content = b"\n".join(package.joinpath(path).read_bytes() for path in BUNDLES[name])
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Asset(content, gzip.compress(content, 9, mtime=0), _TYPES[name.rpartition(".")[2]], digest)


router = APIRouter(include_in_schema=False)


@router.get(PREFIX + "/{digest}/{name}")
def send(request: Request, digest: Text, name: Text) -> Response:
    """Send a file of the pages. It is cacheable only under its own hash."""
    found = asset(name)
    headers = {"Cache-Control": KEPT if digest == found.digest else "no-cache", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, media_type=found.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.content, media_type=found.media_type, headers=headers)
