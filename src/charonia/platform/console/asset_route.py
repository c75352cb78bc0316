"""Sends style sheets and scripts."""

from fastapi import APIRouter, Request, Response

from charonia.platform.console.assets import KEPT, PREFIX, asset
from charonia.platform.values import Text

router = APIRouter()


@router.get(PREFIX + "/{digest}/{name}")
def send(request: Request, digest: Text, name: Text) -> Response:
    """Send a file of the pages. Only under its own hash may it be kept."""
    found = asset(name)
    headers = {"Cache-Control": KEPT if digest == found.digest else "no-cache", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, media_type=found.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.content, media_type=found.media_type, headers=headers)
