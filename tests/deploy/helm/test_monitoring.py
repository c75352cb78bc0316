"""Dashboard and alert rules of the chart: valid, and about metrics that there are."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.chart import CHART, objects, of_kind

HERE = Path(__file__).parent
FILES = CHART / "files"
RULES: dict[str, Any] = yaml.safe_load((FILES / "rules.yaml").read_text(encoding="utf-8"))
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))
ADAPTER: dict[str, Any] = yaml.safe_load((FILES / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
METRIC = re.compile(r"\b(?:nv|charonia|gen_ai)_\w+")
SUFFIXES = ("_bucket", "_sum", "_count")

promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed: apt-get install prometheus"
)


def documented() -> dict[str, str]:
    """The metrics of docs/metrics.md, which a test compares with the server, and the type of each."""
    page = (CHART.parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", page, re.MULTILINE)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}


def expressions() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    rules = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    adapted = [rule[query] for rule in ADAPTER["rules"]["custom"] for query in ("seriesQuery", "metricsQuery")]
    return [*targets, *variables, *rules, *adapted, *scaled_on()]


def scaled_on() -> list[str]:
    """The queries of KEDA: the busy share and the waiting time, each summed over the pods."""
    (scaler,) = of_kind(objects(HERE / "values" / "keda.yaml"), "ScaledObject")
    return [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]


def adapted(name: str) -> str:
    """A query of prometheus-adapter, for the pods of all releases."""
    (rule,) = [rule for rule in ADAPTER["rules"]["custom"] if rule["name"]["as"] == name]
    query: str = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace,pod").replace("<<.LabelMatchers>>", "")
    return query


def test_dashboard_rules_and_scaling_use_only_metrics_that_there_are() -> None:
    metrics = documented()
    assert len(metrics) > 80
    unknown = set()
    for expression in expressions():
        used = set(METRIC.findall(expression))
        assert used, expression
        for name in used:
            base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s) and name not in metrics), name)
            if base not in metrics or (base != name and metrics[base] not in ("histogram", "summary")):
                unknown.add(name)

    assert unknown == set()


def test_a_rate_is_one_of_a_counter() -> None:
    metrics = documented()
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\(((?:nv|charonia|gen_ai)_\w+)", expression):
            assert metrics.get(name, "histogram") in ("counter", "histogram"), name


def test_every_panel_can_be_read() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len(panels) >= 15
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            assert 'namespace=~"$namespace"' in target["expr"]


def test_config_maps_hold_the_files() -> None:
    made = objects(HERE / "values" / "monitoring.yaml")
    (board,) = [m for m in of_kind(made, "ConfigMap") if m["metadata"]["name"].endswith("-dashboard")]
    (rule,) = of_kind(made, "PrometheusRule")
    plain = objects(HERE / "values" / "monitoring-plain.yaml")
    (rules,) = [m for m in of_kind(plain, "ConfigMap") if m["metadata"]["name"].endswith("-rules")]

    assert json.loads(board["data"]["charonia.json"]) == DASHBOARD
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rule["spec"] == RULES
    assert yaml.safe_load(rules["data"]["charonia.rules.yaml"]) == RULES


@promtool
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", FILES / "rules.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES['groups'][0]['rules'])} rules found" in done.stdout


@promtool
def test_panels_are_expressions_of_prometheus(tmp_path: Path) -> None:
    queries = [e.replace("$__rate_interval", "5m") for e in expressions() if "label_values" not in e and "<<" not in e]
    rules = [{"record": f"panel:{n}:value", "expr": query} for n, query in enumerate(queries)]
    path = tmp_path / "panels.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")

    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def run_rules(folder: Path, rules: Path, inputs: list[dict[str, str]], **expected: Any) -> None:
    test = {"interval": "1m", "input_series": inputs, **expected}
    path = folder / "test.yaml"
    path.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}), encoding="utf-8"
    )
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


M = {"namespace": "models", "pod": "demo-charonia-5f7-x2", "model": "resnet", "version": "1"}


POD = {"namespace": "models", "pod": "demo-charonia-5f7-x2"}
WORKER = {**M, "model_instance": "resnet_0"}


def alert(name: str, severity: str, summary: str, at: str = "30m", **labels: str) -> list[dict[str, Any]]:
    found = {"exp_labels": {"severity": severity, **labels}, "exp_annotations": {"summary": summary}}
    return [{"eval_time": at, "alertname": name, "exp_alerts": [found]}]


@promtool
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            [
                series("nv_inference_request_failure", "0+6x60", **M, reason="BACKEND"),
                series("nv_inference_request_success", "0+60x60", **M),
            ],
            alert(
                "CharoniaRequestsFail",
                "critical",
                "9.091% of the requests of resnet fail in the model or at a full queue",
                namespace="models",
                model="resnet",
            ),
        ),
        (
            [
                series("charonia_queue_duration_seconds_sum", "0+50x60", **M),
                series("charonia_compute_duration_seconds_sum", "0+10x60", **M),
            ],
            alert(
                "CharoniaRequestsWait",
                "warning",
                "requests of resnet wait 5 times as long as they are computed",
                namespace="models",
                model="resnet",
            ),
        ),
        (
            [
                series("charonia_instances", "4x60", **M),
                series("charonia_instances_max", "4x60", **M),
                series("nv_inference_pending_request_count", "7x60", **M),
            ],
            alert("CharoniaInstancesAtLimit", "warning", "resnet has 4 instances, its limit, and requests wait", **M),
        ),
        (
            [series("charonia_cache_up", "0x60", namespace="models")],
            alert(
                "CharoniaCacheDown",
                "warning",
                "the server's response cache in Redis does not answer; requests are computed",
                namespace="models",
            ),
        ),
        (
            [
                series("charonia_request_duration_seconds_bucket", "0+60x1440 86400+0x60", **M, le="0.1"),
                series("charonia_request_duration_seconds_bucket", "0+60x1440 86400+120x60", **M, le="0.4"),
                series("charonia_request_duration_seconds_bucket", "0+60x1440 86400+120x60", **M, le="+Inf"),
                series("charonia_request_duration_seconds_count", "0+60x1440 86400+120x60", **M),
            ],
            alert(
                "CharoniaModelSlow",
                "warning",
                "p99 of resnet is twice that of yesterday: 397ms",
                at="24h30m",
                namespace="models",
                model="resnet",
            ),
        ),
        (
            [series("charonia_worker_restarts_total", "0x15 1+1x45", **WORKER)],
            alert(
                "CharoniaWorkerRestarts",
                "warning",
                "the worker resnet_0 was started again 15 times in 15 minutes",
                **WORKER,
            ),
        ),
        (  # series that begin with the event
            [series("charonia_process_restarts_total", "_x20 1x40", **POD, process="engine", reason="SIGKILL")],
            alert(
                "CharoniaProcessRestarts",
                "warning",
                "engine ended (SIGKILL) and was started again",
                **POD,
                process="engine",
                reason="SIGKILL",
            ),
        ),
        (
            [series("charonia_process_restarts_total", "1x25 2x35", **POD, process="engine", reason="SIGKILL")],
            alert(
                "CharoniaProcessRestarts",
                "warning",
                "engine ended (SIGKILL) and was started again",
                **POD,
                process="engine",
                reason="SIGKILL",
            ),
        ),
        (
            [series("charonia_model_ready", "1x10 0x50", **POD, model="resnet")],
            alert(
                "CharoniaModelNotReady",
                "warning",
                "resnet could not be loaded, or is still loading, in demo-charonia-5f7-x2",
                **POD,
                model="resnet",
            ),
        ),
        (
            [series("charonia_model_load_failures_total", "_x20 1x40", **POD, model="resnet")],
            alert("CharoniaModelLoadsFail", "warning", "resnet could not be loaded on demand", **POD, model="resnet"),
        ),
        (
            [series("charonia_worker_memory_bytes", "1000000000+20000000x300", **WORKER)],
            alert(
                "CharoniaWorkerLeaks",
                "warning",
                "the memory of the worker resnet_0 has grown by half in two hours, and goes on",
                at="210m",
                **WORKER,
            ),
        ),
    ],
    ids=[
        *("failures", "waiting", "instances", "cache", "latency", "workers"),
        *("first-restart", "another-restart", "not-ready", "loads", "leak"),
    ],
)
def test_an_alert_comes_when_it_should(
    tmp_path: Path, inputs: list[dict[str, str]], expected: list[dict[str, Any]]
) -> None:
    run_rules(tmp_path, FILES / "rules.yaml", inputs, alert_rule_test=expected)


@promtool
def test_no_alert_comes_from_a_server_at_ease(tmp_path: Path) -> None:
    inputs = [
        series("nv_inference_request_success", "0+60x60", **M),
        series("nv_inference_request_failure", "0x60", **M, reason="BACKEND"),
        series("nv_inference_request_failure", "0+30x60", **M, reason="CANCELED"),
        series("charonia_queue_duration_seconds_sum", "0+5x60", **M),
        series("charonia_compute_duration_seconds_sum", "0+10x60", **M),
        # 4000 answers of the response cache a second
        series("charonia_queue_duration_seconds_sum", "0+4x60", **{**M, "model": "cached"}),
        series("charonia_compute_duration_seconds_sum", "1x60", **{**M, "model": "cached"}),
        series("charonia_process_restarts_total", "0x10 1x50", **M, process="engine", reason="renewed"),
        series("charonia_cache_up", "1x60", namespace="models"),
        series("charonia_model_ready", "1x10 0x5 1x45", **POD, model="resnet"),
    ]
    names = [rule["alert"] for rule in RULES["groups"][0]["rules"]]

    run_rules(
        tmp_path,
        FILES / "rules.yaml",
        inputs,
        alert_rule_test=[{"eval_time": "30m", "alertname": name, "exp_alerts": []} for name in names],
    )


def pod_load(pod: str, load: str, queue: str, compute: str, model: str = "resnet") -> list[dict[str, str]]:
    labels = {**M, "pod": pod, "model": model}
    return [
        series("charonia_load_seconds_total", load, **labels),
        series("charonia_instances", "2x60", **labels),
        series("charonia_queue_duration_seconds_sum", queue, **labels),
        series("charonia_compute_duration_seconds_sum", compute, **labels),
    ]


LOADS = [
    *pod_load("demo-charonia-5f7-x2", "0+60x30 1800x30", "0+30x30 900x30", "0+30x30 900x30"),  # half of two instances
    *pod_load("demo-charonia-5f7-x2", "0+96x30 2880x30", "0x60", "0x60", "busier"),
    *pod_load("demo-charonia-5f7-y3", "0+24x30 720x30", "0+900x30 27000x30", "0+30x30 900x30"),
    *pod_load("demo-charonia-5f7-z4", "0x60", "0x40 0+3x20", "1x60"),  # answers of the response cache
]


@promtool
@pytest.mark.parametrize(
    ("queries", "values"),
    [
        (lambda: scaled_on()[0], {"20m": 0.8 + 0.2, "38m": 0.0, "60m": 0.0}),
        (lambda: f"sum({adapted('charonia_busy_share')})", {"20m": 0.8 + 0.2, "38m": 0.0, "60m": 0.0}),
        (lambda: scaled_on()[1], {"20m": 1.0 + 2.0, "38m": 0.0, "60m": 0.5}),
        (lambda: f"sum({adapted('charonia_wait_ratio')})", {"20m": 1.0 + 2.0, "38m": 0.0, "60m": 0.5}),
    ],
    ids=["busy, KEDA", "busy, adapter", "waiting, KEDA", "waiting, adapter"],
)
def test_what_is_scaled_on_is_zero_without_requests_and_the_sum_over_the_pods_else(
    tmp_path: Path, queries: Callable[[], str], values: dict[str, float]
) -> None:
    rules = tmp_path / "scaling.yaml"
    rule = {"record": "charonia:scaled:sum", "expr": queries()}
    rules.write_text(json.dumps({"groups": [{"name": "scaling", "rules": [rule]}]}), encoding="utf-8")
    others = pod_load("demo-charonia-other-5f7-y3", "0+90x60", "0+90x60", "0+1x60")  # another release
    samples = [
        {
            "expr": "charonia:scaled:sum",
            "eval_time": at,
            "exp_samples": [{"labels": "charonia:scaled:sum", "value": value}],
        }
        for at, value in values.items()
    ]
    is_keda = "demo-charonia" in rule["expr"]
    run_rules(tmp_path, rules, LOADS + others * is_keda, promql_expr_test=samples)
