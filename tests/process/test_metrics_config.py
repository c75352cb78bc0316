"""Latencies on the metrics page of a running server: summaries, buckets of a model's own, and tags."""

from pathlib import Path

import numpy as np
import tritonclient.http as httpclient
from tests.support.models import chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

METRICS = """
metric_tags { key: "team" value: "vision" }
model_metrics { metric_control {
  metric_identifier { family: "charonia_request_duration_seconds" } histogram_options { buckets: [ 0.5, 60 ] } } }
"""


def test_summaries_buckets_and_tags_are_on_the_page(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", "", config=identity_pbtxt(dims=(2,), max_batch_size=0, more=METRICS))
    write_model(tmp_path, "pipe", "", config=chain_pbtxt("echo", dims=(2,), max_batch_size=0))
    flags = ["summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01", "counter_latencies=false"]
    with ServeProcess(tmp_path, *(f"--metrics-config={flag}" for flag in flags)) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            given = infer_input(httpclient, "INPUT0", np.zeros(2, np.float32))
            for _ in range(3):
                client.infer("pipe", [given])
        shown = server.metrics_page()

    echo = '_team="vision",model="echo",version="1"'
    assert f'nv_inference_request_summary_us{{{echo},quantile="0.9"}} ' in shown
    assert f"nv_inference_request_summary_us_count{{{echo}}} 3" in shown
    assert 'nv_inference_request_summary_us_count{model="pipe",version="1"} 3' in shown
    assert f'charonia_request_duration_seconds_bucket{{{echo},le="60"}} 3' in shown
    assert f'charonia_request_duration_seconds_bucket{{{echo},le="0.5"}} ' in shown
    assert f"nv_inference_request_success{{{echo}}} 3" in shown
    assert "_duration_us{" not in shown
    assert "NaN" not in shown
