"""Prometheus scrapes a server, and promtool reads its metrics page."""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.ports import free_port
from tests.support.process import ServeProcess

SCRAPED_WITHIN_S = 200.0

MORE = """
response_cache { enable: true }
instance_group { kind: KIND_CPU rate_limiter { resources { name: "disk" count: 1 } } }
"""
FLAGS = ("--rate-limit=execution_count", "--cache-config=local,size=1048576", "--metrics-config=summary_latencies=true")

SCRAPE = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs: [{{job_name: charonia, static_configs: [{{targets: ["{metrics}"]}}]}}]
"""

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus is not installed: on Debian, apt-get install prometheus",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_model(
        folder, "echo", PYTHON_IDENTITY, config=identity_pbtxt("python", dims=(-1,), max_batch_size=8, more=MORE)
    )
    with ServeProcess(folder, *FLAGS) as server:
        tensor = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/echo/infer", json.dumps({"inputs": [tensor]}).encode()
        )
        with urllib.request.urlopen(request, timeout=200):
            yield server


class Prometheus:
    def __init__(self, folder: Path, metrics: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(SCRAPE.format(metrics=metrics), encoding="utf-8")
        self._address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "no_proxy": "*"},
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its HTTP API, asked for again until it has any."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        deadline = time.monotonic() + SCRAPED_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=200) as reply:
                    data = json.load(reply)["data"]
            except OSError:
                data = None
            if (data and data != {"resultType": "vector", "result": []}) or time.monotonic() > deadline:
                return data
            time.sleep(0.1)


@pytest.fixture(scope="module")
def prometheus(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics)
    yield started
    started.stop()


def test_prometheus_scrapes_the_server_and_renames_none_of_its_labels(prometheus: Prometheus) -> None:
    up = prometheus.ask("query", query='up{job="charonia"} == 1')
    workers = prometheus.ask("query", query="charonia_worker_up")
    labels = prometheus.ask("labels")

    assert [sample["value"][1] for sample in up["result"]] == ["1"]
    assert [sample["metric"]["model_instance"] for sample in workers["result"]] == ["echo_0_0"]
    assert "instance" in labels
    assert [label for label in labels if label.startswith("exported_")] == []


def test_promtool_objects_only_to_names_that_are_tritons(server: ServeProcess) -> None:
    page = server.metrics_page()

    done = subprocess.run(["promtool", "check", "metrics"], input=page.encode(), capture_output=True, check=False)

    assert "charonia_rate_limit_executions_total{" in page
    assert done.returncode in (0, 3)  # 3: only remarks on style
    assert [line for line in done.stderr.decode().splitlines() if not line.startswith("nv_")] == []
