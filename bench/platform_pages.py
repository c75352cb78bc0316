"""How long the platform's pages and calls take with 1,000 models, 100 deployments and 30 days; its CPU time when idle.

Usage: python -m bench.platform_pages
"""

import http.client
import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from examples.demo.server import free_ports, running_server
from examples.platform.process import Platform, running_platform

from bench import platform_rows as rows
from bench.machine import machine
from charonia.platform.app import PAGES

ROUNDS = 20
IDLE_S = 30.0
PAGE_MS_MAX = 200.0
IDLE_SHARE_MAX = 0.03
RESULTS = Path(__file__).parent / "results"

_PART = re.compile(r"{(\w+)(?::\w+)?}")

VALUES = {
    "project": "default",
    "model": rows.model_name(0),
    "number": "1",
    "version": "1",
    "id": "1",
    "path": "config.pbtxt",
}
"""Values of path parameters; `name` depends on the resource."""

NAMES = {"deployments": rows.deployment_name(0), "models": rows.model_name(0), "environments": "environment-0"}

QUERIES = {
    "/api/v1/projects/{project}/deployments/{name}/revisions/{number}/diff": "to=20",
    "/api/v1/projects/{project}/deployments/{name}/explain": f"model={rows.model_name(0)}",
    "/api/v1/projects/{project}/deployments/{name}/traffic": f"model={rows.model_name(0)}",
    "/api/v1/projects/{project}/models/{model}/versions/{number}/difference": "from=2",
}

LONGEST = (
    "/p/default/models?offset=950",
    "/p/default/models?search=0999",
    "/p/default/models?tag=team-7",
    "/p/default/jobs?offset=4950",
    "/p/default/deployments/deployment-000/figures?range=24h",
    "/p/default/deployments/deployment-000/figures?range=30d",
    "/api/v1/projects/default/models?limit=200&offset=800",
    "/api/v1/projects/default/deployments?limit=200",
    "/api/v1/projects/default/tasks?limit=200",
    "/api/v1/audit?limit=200",
)
"""More calls: the longest lists, the last pages, searches."""

LEFT_OUT = re.compile(r"/login|^/$|/files/|/static/|/assets/|/server/")
"""Routes that redirect, only read a file, or forward a server's answer."""


def concrete(path: str, upload: Mapping[str, str]) -> str:
    """Return a path of the API or of a page with values in place of its parameters."""
    place = next((kind for kind in NAMES if f"/{kind}" in path), "")
    values = {**VALUES, "name": NAMES.get(place, "default"), "key": upload["key"]}
    found = _PART.sub(lambda part: values[part[1]], path)
    queries = {**QUERIES, "/api/v1/projects/{project}/uploads": f"batch={upload['batch']}"}
    return f"{found}?{queries[path]}" if path in queries else found


def paths(openapi: Mapping[str, Any], upload: Mapping[str, str]) -> list[str]:
    """Return every page, and every GET of the API."""
    pages = {route.path for module in PAGES for route in module.router.routes if "GET" in route.methods}
    calls = [path for path, methods in openapi["paths"].items() if "get" in methods]
    return [concrete(path, upload) for path in sorted(pages) + calls if not LEFT_OUT.search(path)] + list(LONGEST)


class Browser:
    """A signed-in browser: one connection, a cookie."""

    def __init__(self, platform: Platform) -> None:
        parts = urlsplit(platform.link)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        self._headers = {"Accept": "text/html"}
        self._connection.request("GET", f"{parts.path}?{parts.query}")
        answer = self._connection.getresponse()
        answer.read()
        self._headers["Cookie"] = "; ".join(
            value.partition(";")[0] for name, value in answer.getheaders() if name.lower() == "set-cookie"
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and content of a page."""
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 500:  # the server closes the connection
            self._connection.close()
        return answer.status, content


def measure_pages(platform: Platform) -> list[dict[str, Any]]:
    """Return the times of each page and call, the slowest first."""
    found, browser = [], Browser(platform)
    (upload,) = platform.call("POST", "uploads", body={"files": [{"path": "model.onnx", "size": 10}]})
    for path in paths(json.loads(browser.get("/api/openapi.json")[1]), upload):
        status, content = browser.get(path)  # the warm-up
        times_ms = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            browser.get(path)
            times_ms.append((time.perf_counter() - begin) * 1e3)
        median, worst = round(statistics.median(times_ms), 1), round(max(times_ms), 1)
        found.append({"path": path, "status": status, "bytes": len(content), "p50_ms": median, "worst_ms": worst})
    return sorted(found, key=lambda row: -float(row["p50_ms"]))


def measure_idle(platform: Platform) -> float:
    """Return the share of a core that the platform takes when idle, without clients."""
    process = psutil.Process(platform.process.pid)
    before, begin = process.cpu_times(), time.perf_counter()
    time.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.perf_counter() - begin)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, repository, ports = Path(folder) / "data", Path(folder) / "models", free_ports()
        data.mkdir()
        rows.make_rows(data)
        rows.make_repository(repository)
        with (
            running_server(repository, ports),
            rows.adopted(data, ports, ""),
            running_platform(data, 0) as platform,
        ):
            time.sleep(10)  # all deployments have been looked at
            idle = measure_idle(platform)
            pages = measure_pages(platform)
    record = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": {name.lower(): count for name, count in vars(rows).items() if isinstance(count, int)},
        "idle_core_share": round(idle, 4),
        "pages": pages,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "platform_pages.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{idle:.1%} of a core when nothing changes (expected less than {IDLE_SHARE_MAX:.0%})")
    print(f"{'p50 ms':>8}{'worst':>8}{'status':>8}{'kB':>7}  path (expected less than {PAGE_MS_MAX:.0f} ms)")
    for page in pages:
        size_kb = page["bytes"] / 1e3
        print(f"{page['p50_ms']:>8}{page['worst_ms']:>8}{page['status']:>8}{size_kb:>7.0f}  {page['path']}")


if __name__ == "__main__":
    main()
