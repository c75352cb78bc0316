"""Files of Git LFS, over HTTPS. Their hashes are in pointers; nothing else in a repository is read, also no .lfsconfig.

Source: Git LFS's specification of pointers, its batch API, and the authentication of servers over SSH.
"""

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia.core.errors import invalid, unavailable
from charonia.stores.location import parse_address
from charonia.stores.remote import HttpFile, NoRedirect, RemoteFile

POINTER_BYTES_MAX = 1024

BATCH_MAX = 100
"""Files of one request."""

ANSWER_BYTES_MAX = 4 * 2**20

HEADERS_MAX = 16
"""Headers that a server may name for a download."""

SILENCE_S_MAX = 30.0

_MEDIA = "application/vnd.git-lfs+json"
_START = b"version https://git-lfs.github.com/spec/"
_FACTS = re.compile(rb"^oid sha256:([0-9a-f]{64})\nsize ([0-9]{1,15})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LfsServer:
    """Where a repository's files are.

    Attributes:
        url: Its address, which begins with https://.
        headers: Headers with which it lets the caller in.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)


def place_of(answer: object, what: str, default: str = "") -> LfsServer:
    """Return the address and headers that a server names. Raises ServingError: UNAVAILABLE if they are not valid."""
    found = answer if isinstance(answer, dict) else {}
    href, headers = found.get("href") or default, found.get("header") or {}
    if not isinstance(href, str) or not href.startswith("https://") or not isinstance(headers, dict):
        raise unavailable(f"{what}: expected an https:// address in the answer of its server, got none")
    if len(headers) > HEADERS_MAX or not all(isinstance(text, str) for text in headers.values()):
        raise unavailable(f"{what}: expected at most {HEADERS_MAX} headers in the answer of its server")
    return LfsServer(href, headers)


def pointers(found: Path) -> dict[Path, RemoteFile]:
    """Return hash and size of each file of which a folder, or a path, has only the pointer."""
    paths = [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]
    result = {}
    for path in paths:
        text = path.read_bytes() if path.stat().st_size <= POINTER_BYTES_MAX else b""
        if text.startswith(_START):
            facts = _FACTS.search(text)
            if facts is None:
                raise invalid(f"'{path.name}' is not a valid pointer of Git LFS")
            result[path] = RemoteFile(path.name, int(facts[2]), facts[1].decode())
    return result


def fetch(
    server: LfsServer, found: Mapping[Path, RemoteFile], allow: Callable[[str], None], check: Callable[[], None]
) -> None:
    """Replace pointers by their files. Blocks.

    Args:
        allow: Raises for a URL that must not be read.
        check: Called repeatedly; an exception cancels the work.

    Raises:
        ServingError: UNAVAILABLE for a file that the server lacks, or another than the pointer names.
    """
    entries = list(found.items())
    for first in range(0, len(entries), BATCH_MAX):
        part = entries[first : first + BATCH_MAX]
        places = _places(server, [pointer for _, pointer in part], allow)
        for path, pointer in part:
            place = place_of(places.get(pointer.tag), f"Git LFS: '{path.name}'")
            allow(place.url)
            digest = hashlib.sha256()
            with path.open("wb") as file:
                source = HttpFile(parse_address(place.url), allow, place.headers)
                for piece in source.read(pointer, 0, pointer.size) if pointer.size else ():
                    digest.update(piece)
                    file.write(piece)
                    check()
            if digest.hexdigest() != pointer.tag:
                raise unavailable(f"Git LFS: '{path.name}': the server sent another file than the pointer names")


def _places(server: LfsServer, wanted: list[RemoteFile], allow: Callable[[str], None]) -> dict[str, object]:
    """Return the answer of the batch API for each hash, where there is a file."""
    allow(server.url)
    objects = [{"oid": pointer.tag, "size": pointer.size} for pointer in wanted]
    body = {"operation": "download", "transfers": ["basic"], "hash_algo": "sha256", "objects": objects}
    headers = {**server.headers, "Accept": _MEDIA, "Content-Type": _MEDIA}
    try:
        request = urllib.request.Request(  # noqa: S310 # its scheme was checked
            f"{server.url.rstrip('/')}/objects/batch", json.dumps(body).encode(), headers
        )
        with urllib.request.build_opener(NoRedirect).open(request, timeout=SILENCE_S_MAX) as answer:
            found: Any = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            raise unavailable(f"Git LFS: '{server.url}' answers {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", type(error).__name__)
        raise unavailable(f"Git LFS: '{server.url}' cannot be read: {reason}") from None
    listed = found.get("objects") if isinstance(found, dict) else None
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {
        each["oid"]: actions.get("download")
        for each in entries
        if isinstance(each.get("oid"), str) and isinstance(actions := each.get("actions"), dict)
    }
