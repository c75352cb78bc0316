"""A client of the platform's API, for commands and programs. Standard library only.

client = PlatformClient("http://127.0.0.1:8080", "charonia_...")
client.call("GET", "/api/v1/projects/default/models")
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from charonia.core.errors import Code, ServingError, invalid
from charonia.http_call import HTTP_URL, HttpAnswer, http_call, is_http_url, no_answer_reason

ANSWER_S_MAX = 120.0
"""Time limit of a call."""

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are sent in one call."""

TRIES_MAX = 6
"""How often in a row a piece of a file is sent when the connection breaks."""

PAUSE_S = 1.0
"""Pause before it is sent again."""

CHANGE_TRIES_MAX = 3
"""How often a change is sent if its answer is lost. It has an idempotency key, so it is applied only once."""

KEY_HINT = "give a key with --key or CHARONIA_PLATFORM_KEY"

_CODES = {
    404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS,
    501: Code.UNSUPPORTED,
    503: Code.UNAVAILABLE,
    507: Code.UNAVAILABLE,
}

Progress = Callable[[int, int], None]
"""Receives the number of bytes sent, and their total."""


class PlatformUnreachableError(ServingError):
    """The platform does not answer, or the connection broke."""


class PlatformClient:
    """The API of a platform.

    Args:
        url: Its address: "http://127.0.0.1:8080".
    """

    def __init__(self, url: str, key: str) -> None:
        if not is_http_url(url):
            raise invalid(f"--server: expected {HTTP_URL}, got '{url}'")
        self._url = url.rstrip("/")
        self._key = key

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a call, and return its answer: JSON as plain values, anything else as text.

        Args:
            method: "GET".
            path: The path, see `path_of`.
            body: Plain values for JSON, or bytes that are sent unchanged; None for none.
            query: Parameters of the address; None and "" are left out.

        Raises:
            PlatformUnreachableError: If it does not answer.

        A change whose answer is lost is sent again, with the same idempotency key.
        """
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}
        is_change = method != "GET" and not isinstance(body, bytes)
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/octet-stream"
        elif body is not None:
            body, headers["Content-Type"] = json.dumps(body, default=str).encode(), "application/json"
        parameters = {name: value for name, value in (query or {}).items() if value not in (None, "")}
        url = f"{self._url}{path}{f'?{urlencode(parameters)}' if parameters else ''}"
        if is_change:
            headers["Idempotency-Key"] = secrets.token_hex(16)
        for left in reversed(range(CHANGE_TRIES_MAX if is_change else 1)):
            try:
                answer = http_call(method, url, headers, body, timeout_s=ANSWER_S_MAX)
            except (OSError, HTTPException) as error:
                if not left or not isinstance(error, ConnectionResetError | BrokenPipeError | HTTPException):
                    raise self._unreachable(error) from None
            else:
                if not left or "Retry-After" not in answer.headers:
                    break
            time.sleep(PAUSE_S)
        kind = answer.headers.get_content_type()
        if answer.status >= 300 or (kind == "text/html" and "/files/" not in path):  # a page of another server
            raise self._refusal(answer)
        if not answer.body or not kind.endswith("json"):
            return answer.body.decode("utf-8", "replace")
        try:
            return json.loads(answer.body)
        except ValueError:
            raise self._refusal(answer) from None

    def send_files(self, project: str, files: Mapping[str, Path], progress: Progress) -> str:
        """Upload files for a version of a model, and return their batch.

        Args:
            files: Files of this machine by their path in the version.
        """
        try:
            sizes = {path: file.stat().st_size for path, file in files.items()}
            place = path_of("projects", project, "uploads")
            begun = self.call("POST", place, {"files": [{"path": p, "size": size} for p, size in sizes.items()]})
            sent, total = 0, sum(sizes.values())
            progress(sent, total)
            for upload in begun:
                address, position, size = f"{place}/{quote(upload['key'], safe='')}", 0, upload["size"]
                with files[upload["path"]].open("rb") as file:
                    while position < size:
                        file.seek(position)
                        piece = file.read(PIECE_BYTES)
                        if not piece:
                            raise invalid(f"'{files[upload['path']]}' has become shorter during the upload")
                        before, position = position, self._send(address, piece, position)
                        sent += position - before
                        progress(sent, total)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise invalid(f"'{error.filename or 'a file'}' cannot be read: {reason}") from None
        return str(begun[0]["batch"])

    def _send(self, address: str, piece: bytes, position: int) -> int:
        """Send a piece, again if the connection breaks, and return how much of the file has arrived."""
        for attempt in range(TRIES_MAX):
            try:
                if attempt:
                    time.sleep(PAUSE_S)
                    received = int(self.call("GET", address)["received"])
                    if received > position:
                        return received
                return int(self.call("PUT", address, piece, query={"offset": position})["received"])
            except PlatformUnreachableError as error:
                last = error
        raise last

    def _unreachable(self, error: Exception) -> PlatformUnreachableError:
        return PlatformUnreachableError(
            Code.UNAVAILABLE,
            f"no platform answers at {self._url}: {no_answer_reason(error)}",
            hint="`charonia platform` starts one; --server names its address",
        )

    def _refusal(self, answer: HttpAnswer) -> ServingError:
        try:
            told = json.loads(answer.body)
            message, hint = str(told["error"]), str(told.get("hint", ""))
        except (ValueError, KeyError, TypeError):
            message, hint = f"{self._url} answers {answer.status} {answer.reason}: is it charonia platform?", ""
        if answer.status == 401:
            hint = hint or KEY_HINT
        code = _CODES.get(answer.status, Code.INTERNAL if answer.status >= 500 else Code.INVALID_ARG)
        return ServingError(code, message, hint=hint)


def path_of(*parts: str | int) -> str:
    """Return the path of a call from its parts, which are quoted: "/api/v1/projects/default/models"."""
    return "/api/v1/" + "/".join(quote(str(part), safe="") for part in parts)
