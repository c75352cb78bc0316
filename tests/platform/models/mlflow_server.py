"""A stand-in for a server of MLflow: its registry, and the artifacts that it hands out."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

API = "/api/2.0/"


@dataclass
class MlflowStandIn:
    """What the server has."""

    versions: dict[tuple[str, str], str] = field(default_factory=dict)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    cut: bool = False
    seen: list[str] = field(default_factory=list)
    address: str = ""

    def answer(self, call: str, query: dict[str, str]) -> tuple[int, bytes]:
        key = (query.get("name", ""), query.get("version", query.get("alias", "")))
        if call == "mlflow/model-versions/get-download-uri" and key in self.versions:
            return 200, json.dumps({"artifact_uri": self.versions[key]}).encode()
        if call == "mlflow/registered-models/alias" and key in self.aliases:
            return 200, json.dumps({"model_version": {"name": key[0], "version": self.aliases[key]}}).encode()
        if call == "mlflow-artifacts/artifacts":
            return 200, json.dumps({"files": self._listed(query.get("path", ""))}).encode()
        path = unquote(call.removeprefix("mlflow-artifacts/artifacts/"))
        if path in self.artifacts:
            return 200, self.artifacts[path]
        if call == "moved":
            return 302, b""
        return 404, json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"{key} not found"}).encode()

    def _listed(self, folder: str) -> list[dict[str, object]]:
        inner = [path.removeprefix(f"{folder}/") for path in self.artifacts if path.startswith(f"{folder}/")]
        folders = sorted({path.split("/")[0] for path in inner if "/" in path})
        files = [path for path in inner if "/" not in path]
        return [{"path": name, "is_dir": True} for name in folders] + [
            {"path": name, "is_dir": False, "file_size": len(self.artifacts[f"{folder}/{name}"])} for name in files
        ]


@contextmanager
def mlflow_server() -> Iterator[MlflowStandIn]:
    """Yield a server without models."""
    stand_in = MlflowStandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            stand_in.seen.append(self.headers.get("Authorization", ""))
            status, body = stand_in.answer(parts.path.removeprefix(API), query)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            is_file = parts.path.startswith(f"{API}mlflow-artifacts/artifacts/")
            self.wfile.write(body[: len(body) // 2] if stand_in.cut and is_file else body)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
