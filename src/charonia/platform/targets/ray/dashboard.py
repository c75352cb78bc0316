"""Ray Serve's REST API, which the dashboard of a cluster has.

A change gives Ray all applications of the cluster: what others have is passed on as it was read. Ray has no way to
refuse a change that is based on something old, so what there is is read once more right before it is written.
"""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from charonia.core.errors import invalid, unavailable
from charonia.platform.targets.ray.applications import Plain

APPLICATIONS = "/api/serve/applications/"
LOG = "/api/v0/logs/file"

CHANGE_TRIES = 5
"""How often a change is begun again because somebody else has changed applications meanwhile."""

ANSWER_S_MAX = 30.0
"""Longest wait for an answer: a change may start Serve."""

ANSWER_BYTES_MAX = 64 * 2**20

KEPT_SETTINGS = ("proxy_location", "http_options", "grpc_options", "target_capacity")
"""Settings of Serve that are passed on with each change."""

Configs = Mapping[str, Plain]
"""Declared applications by name."""


class Dashboard:
    """The dashboard of a Ray cluster.

    Args:
        url: Its address.
        token: The token of a cluster that asks for one, "" for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._lock = threading.Lock()

    def look(self) -> Plain:
        """Return what Serve says of itself and of all applications.

        Raises:
            ServingError: UNAVAILABLE when it does not answer.
        """
        try:
            found: Plain = json.loads(self._call(APPLICATIONS))
        except ValueError as error:
            raise unavailable(f"the dashboard of Ray at {self.url} does not answer with JSON: {error}") from None
        return found

    def change(self, make: Callable[[Configs], Configs]) -> None:
        """Change the declared applications.

        Args:
            make: Returns what is to be declared, from what is.

        Raises:
            ServingError: UNAVAILABLE when it does not answer, or others change applications all the time; INVALID_ARG
                with Ray's words when it refuses.
        """
        with self._lock:
            for _ in range(CHANGE_TRIES):
                seen = self.look()
                declared = declared_in(seen)
                wanted = make(declared)
                if wanted == declared:
                    return
                if declared_in(self.look()) == declared:
                    kept = {name: seen[name] for name in KEPT_SETTINGS if seen.get(name) is not None}
                    self._call(APPLICATIONS, {**kept, "applications": list(wanted.values())})
                    return
        raise unavailable(f"others changed the applications of Ray {CHANGE_TRIES} times meanwhile", hint="try again")

    def log(self, node: str, path: str, lines: int) -> str:
        """Return the last lines of a log file of a node. Raises as `look`."""
        query = urlencode({"node_id": node, "filename": path.lstrip("/"), "lines": lines})
        return self._call(f"{LOG}?{query}").decode("utf-8", "replace")

    def _call(self, path: str, body: Plain | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self.url}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="GET" if body is None else "PUT",
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as response:
                answer: bytes = response.read(ANSWER_BYTES_MAX)
                return answer
        except urllib.error.HTTPError as error:
            text = error.read(ANSWER_BYTES_MAX).decode("utf-8", "replace").strip()
            if error.code == http.client.BAD_REQUEST:
                raise invalid(f"Ray refuses it: {text}") from None
            raise unavailable(f"the dashboard of Ray at {self.url} answers {error.code}: {text}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            said = getattr(error, "reason", None) or error
            raise unavailable(f"the dashboard of Ray at {self.url} does not answer: {said}") from None


def declared_in(seen: Plain) -> dict[str, Any]:
    """Return the declared applications. Those of `serve.run` are not, and stay whatever is declared.

    Raises:
        ServingError: UNAVAILABLE for one that could not be passed on.
    """
    found = {}
    for name, details in seen["applications"].items():
        if details.get("source") != "declarative" or details["status"] == "DELETING":
            continue
        if details.get("deployed_app_config") is None:
            raise unavailable(f"Ray does not say how its application '{name}' is declared: a change would end it")
        found[name] = details["deployed_app_config"]
    return found
