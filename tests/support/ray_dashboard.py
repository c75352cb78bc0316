"""The REST API of Ray Serve for tests, over real HTTP: applications that start, fail and end one look later each."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Plain = dict[str, Any]

LOOKS = 4
"""How often somebody looks until an application has started, or ended."""

ERROR = (
    "The deployment failed to start 3 times in a row. Error:\n\x1b[36mray::ServeReplica\x1b[39m (pid=1)\n"
    "  File replica.py, line 91, in __init__\ncharonia.core.errors.ServingError: model 'reader': no such file"
)


class RayDashboard:
    """What the dashboard of a cluster knows.

    Attributes:
        fate: Returns what becomes of an application, by its configuration: "RUNNING", "DEPLOY_FAILED", "DEPLOYING".
    """

    def __init__(self) -> None:
        self.url = ""
        self.fate: Callable[[Plain], str] = lambda config: "RUNNING"
        self.applications: dict[str, Plain] = {}
        self.settings: Plain = {"http_options": {"host": "0.0.0.0", "port": 8123, "root_path": ""}}
        self.bodies: list[Plain] = []
        self.before_look: Callable[[], None] = lambda: None
        self.token = ""
        self._looks: dict[str, int] = {}
        self._lock = threading.Lock()

    def look(self) -> Plain:
        """Let a little time pass, and return what there is."""
        self.before_look()
        with self._lock:
            for name, details in list(self.applications.items()):
                self._looks[name] = self._looks.get(name, 0) + 1
                if self._looks[name] >= LOOKS:
                    self._settle(name, details)
            return {"proxies": {}, "target_capacity": None, **self.settings, "applications": self.applications}

    def write(self, body: Plain) -> str:
        """Let these be the declared applications; return why not."""
        configs = {config["name"]: config for config in body["applications"]}
        routes = [config["route_prefix"] for config in configs.values() if config["route_prefix"]]
        if len(set(routes)) < len(routes):
            return "Found duplicate applications for route prefix"
        with self._lock:
            self.bodies.append(body)
            for name, details in self.applications.items():
                if name not in configs and details["source"] == "declarative":
                    details |= {"status": "DELETING", "deployed_app_config": None}
                    self._looks[name] = 0
            for name, config in configs.items():
                self._declare(name, config)
        return ""

    def scale(self, name: str, replicas: int) -> None:
        with self._lock:
            self._have(self.applications[name], replicas, "RUNNING")

    def _declare(self, name: str, config: Plain) -> None:
        before = self.applications.get(name)
        if before is not None and before["deployed_app_config"]["args"] == config["args"]:
            before |= {"deployed_app_config": config, "route_prefix": config["route_prefix"]}
            return
        self._looks[name] = 0
        details = self.applications[name] = {
            "name": name,
            "route_prefix": config["route_prefix"],
            "status": "DEPLOYING",
            "message": "",
            "deployed_app_config": config,
            "source": "declarative",
            "deployments": {},
        }
        start = config["args"].get("autoscaling", {}).get("initial_replicas", config["args"].get("min_replicas", 1))
        self._have(details, start, "STARTING")

    def _settle(self, name: str, details: Plain) -> None:
        if details["status"] == "DELETING":
            del self.applications[name]
        elif details["status"] == "DEPLOYING":
            details["status"] = self.fate(details["deployed_app_config"])
            if details["status"] == "RUNNING":
                self._have(details, len(details["deployments"]["charonia"]["replicas"]), "RUNNING")
            elif details["status"] == "DEPLOY_FAILED":
                details["deployments"]["charonia"] |= {"message": ERROR, "replicas": []}

    def _have(self, details: Plain, count: int, state: str) -> None:
        replicas = [
            {
                "replica_id": f"r{number}",
                "state": state,
                "node_id": "n1",
                "log_file_path": f"/serve/{details['name']}-{number}.log",
            }
            for number in range(count)
        ]
        details["deployments"] = {"charonia": {"message": "", "target_num_replicas": count, "replicas": replicas}}


@contextmanager
def ray_dashboard() -> Iterator[RayDashboard]:
    found = RayDashboard()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that is called
            parts = urlsplit(self.path)
            if found.token and self.headers["Authorization"] != f"Bearer {found.token}":
                self._answer(401, b"no token")
            elif parts.path == "/api/v0/logs/file":
                query = parse_qs(parts.query)
                self._answer(200, f"{query['node_id'][0]} {query['filename'][0]} {query['lines'][0]}\n".encode())
            else:
                assert parts.path == "/api/serve/applications/"
                self._answer(200, json.dumps(found.look()).encode())

        def do_PUT(self) -> None:  # the name that is called
            problem = found.write(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(400 if problem else 200, problem.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
