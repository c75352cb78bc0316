"""Ray Serve's REST API on the dashboard of a cluster.

A change declares all applications of the cluster: applications of other owners are passed on unchanged. Ray cannot
refuse a change of an outdated state, so the state is read again right before each write.
"""

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from charonia.core.errors import invalid, unavailable
from charonia.http_call import NO_ANSWER, http_call
from charonia.platform.targets.ray.applications import Plain

APPLICATIONS = "/api/serve/applications/"
LOG = "/api/v0/logs/file"

CHANGE_TRIES = 5
"""How often a change is retried because another client has changed applications in between."""

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
        token: The token, "" if the cluster requires none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._lock = threading.Lock()

    def look(self) -> Plain:
        """Return the state of Serve and of all applications.

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
            make: Returns the applications to declare, given the declared ones.

        Raises:
            ServingError: UNAVAILABLE when it does not answer, or other clients keep changing applications; INVALID_ARG
                with Ray's message when it refuses.
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
        raise unavailable(f"other clients changed the applications of Ray {CHANGE_TRIES} times", hint="try again")

    def log(self, node: str, path: str, lines: int) -> str:
        """Return the last lines of a log file of a node. Raises as `look`."""
        query = urlencode({"node_id": node, "filename": path.lstrip("/"), "lines": lines})
        return self._call(f"{LOG}?{query}").decode("utf-8", "replace")

    def _call(self, path: str, body: Plain | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        method, data = ("GET", None) if body is None else ("PUT", json.dumps(body).encode())
        try:
            url = f"{self.url}{path}"
            answer = http_call(method, url, headers, data, timeout_s=ANSWER_S_MAX, bytes_max=ANSWER_BYTES_MAX)
        except NO_ANSWER as error:
            raise unavailable(f"the dashboard of Ray at {self.url} does not answer: {error}") from None
        text = answer.body.decode("utf-8", "replace").strip()
        if answer.status == HTTPStatus.BAD_REQUEST:
            raise invalid(f"Ray refuses it: {text}")
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise unavailable(f"the dashboard of Ray at {self.url} answers {answer.status}: {text}")
        return answer.body


def declared_in(seen: Plain) -> dict[str, Any]:
    """Return the declared applications. Those started by `serve.run` are not declared, and stay in any case.

    Raises:
        ServingError: UNAVAILABLE for an application that cannot be passed on.
    """
    found = {}
    for name, details in seen["applications"].items():
        if details.get("source") != "declarative" or details["status"] == "DELETING":
            continue
        if details.get("deployed_app_config") is None:
            raise unavailable(f"Ray does not say how its application '{name}' is declared: a change would end it")
        found[name] = details["deployed_app_config"]
    return found
