"""What the metrics pages say after the same requests."""

import re
import urllib.request
from typing import Any

import pytest
from tests.support.models import PYTHON_IDENTITY, write_model
from tests.support.peers import Pair, once_counted

CONFIG = """\
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
metric_tags { key: "team" value: "vision" }
"""
SAMPLE = re.compile(r"^(nv_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
TYPE = re.compile(r"^# TYPE (nv_\w+) (\w+)$", re.MULTILINE)
COUNTS = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")


@pytest.fixture(scope="module")
def pages(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        write_model(folder, name, PYTHON_IDENTITY, config=CONFIG)
    pair: Pair = start_pair(folder, "--metrics-config=summary_latencies=true", "--metrics-interval-ms=100")
    for batch in (1, 1, 3):
        tensor = {"name": "INPUT0", "shape": [batch, 2], "datatype": "FP32", "data": [0] * (2 * batch)}
        for answer in pair.ask("POST", "/v2/models/one/infer", {"inputs": [tensor]}):
            assert answer.status == 200

    def page(endpoint: str) -> str:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=200) as reply:
            text: str = reply.read().decode()
        return text

    once_counted(lambda: (counts(page(pair.ours.metrics)), counts(page(pair.theirs.metrics))))
    return page(pair.ours.metrics), page(pair.theirs.metrics)


def counts(page: str) -> set[tuple[str, str, float]]:
    """What was counted, by metric and model."""
    return {
        (name, re.findall(r'model="(\w+)"', labels)[0], float(value))
        for name, labels, value in SAMPLE.findall(page)
        if name in COUNTS
    }


def samples(page: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, labels, _ in SAMPLE.findall(page):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return found


def test_every_metric_of_triton_is_there_with_its_labels(pages: tuple[str, str]) -> None:
    ours, theirs = map(samples, pages)

    assert {name: ours.get(name) for name in theirs} == theirs


def test_every_metric_has_the_type_that_it_has_there(pages: tuple[str, str]) -> None:
    ours, theirs = (dict(TYPE.findall(page)) for page in pages)

    assert {name: ours.get(name) for name in theirs} == theirs


def test_what_is_counted_is_the_same(pages: tuple[str, str]) -> None:
    assert counts(pages[0]) == counts(pages[1])
