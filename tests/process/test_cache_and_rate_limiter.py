"""Response cache, warm-up and rate limiter in a running server, with the stock clients."""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.models import chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import ServeProcess
from tests.support.redis_server import RedisProcess
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

NOTING = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.pause = float(os.environ.get("PAUSE", "0"))

    def execute(self, requests):
        begin = time.monotonic()
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if array.flat[0] == 13:
                os._exit(3)
            if array.flat[0] == 14:
                raise ValueError("unlucky")
            time.sleep(self.pause)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array + NUMBER)]))
        with open(LOG, "a") as log:
            line = (self.args["model_name"], os.getpid(), begin, time.monotonic(), len(requests), float(array.flat[0]))
            log.write(repr(line) + chr(10))
        return responses
"""


class Models:
    """A repository of models that note each of their executions."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "models"
        self.log = folder / "log"
        self.log.touch()

    def add(self, name: str, more: str = "", *, number: int = 1, dims: tuple[int, ...] = (-1,)) -> None:
        code = NOTING.replace("NUMBER", str(number)).replace("LOG", repr(str(self.log)))
        write_model(self.repository, name, code, config=identity_pbtxt("python", dims=dims, more=more))

    def executions(self, name: str) -> list[tuple[Any, ...]]:
        lines: list[tuple[Any, ...]] = [eval(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line[0] == name]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


CACHED = "response_cache { enable: true }"
LOCAL = "--cache-config=local,size=1048576"


def http_infer(server: ServeProcess, model: str, array: "np.ndarray", **more: Any) -> "np.ndarray":
    with httpclient.InferenceServerClient(server.http) as client:
        result = client.infer(model, [infer_input(httpclient, "INPUT0", array)], **more)
        assert result.get_response().get("id", "") == more.get("request_id", "")
        return np.asarray(result.as_numpy("OUTPUT0"))


def grpc_infer(server: ServeProcess, model: str, array: "np.ndarray", **more: Any) -> "np.ndarray":
    with grpcclient.InferenceServerClient(server.grpc) as client:
        return np.asarray(client.infer(model, [infer_input(grpcclient, "INPUT0", array)], **more).as_numpy("OUTPUT0"))


def ones(*shape: int, value: float = 1) -> "np.ndarray":
    return np.full(shape, value, np.float32)


def statistics(server: ServeProcess, model: str) -> dict[str, Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        (entry,) = client.get_inference_statistics(model)["model_stats"]
        counts = {key: value["count"] for key, value in entry["inference_stats"].items()}
        return {**counts, "executions": entry["execution_count"], "inferences": entry["inference_count"]}


def together(*calls: Callable[[], object]) -> list[object]:
    """Make calls at the same time and return what they return or raise."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except InferenceServerException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return results


def test_equal_requests_are_computed_once_over_both_protocols(models: Models) -> None:
    models.add("m", CACHED)
    with ServeProcess(models.repository, LOCAL) as server:
        for request_id in ("1", "2"):
            assert http_infer(server, "m", ones(1, 4), request_id=request_id).tolist() == [[2, 2, 2, 2]]
        assert grpc_infer(server, "m", ones(1, 4)).tolist() == [[2, 2, 2, 2]]
        assert http_infer(server, "m", ones(2, 2)).shape == (2, 2)  # the same bytes
        assert http_infer(server, "m", ones(1, 4), parameters={"a": 1}).shape == (1, 4)

        counts = statistics(server, "m")
        metrics = server.metrics_page()

    assert len(models.executions("m")) == 3
    assert counts == {
        "success": 5,
        "fail": 0,
        "queue": 5,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
        "cache_hit": 2,
        "cache_miss": 3,
        "executions": 3,
        "inferences": 4,
    }
    for line in (
        'nv_cache_num_hits_per_model{model="m",version="1"} 2',
        'nv_cache_num_misses_per_model{model="m",version="1"} 3',
        "nv_cache_num_lookups 5",
        "nv_cache_num_entries 3",
    ):
        assert line in metrics


def test_a_model_without_the_section_and_a_server_without_the_option_have_no_cache(models: Models) -> None:
    models.add("m")
    with ServeProcess(models.repository, LOCAL) as server:
        for _ in range(2):
            http_infer(server, "m", ones(1, 4))
        assert "per_model" not in server.metrics_page()
        assert "nv_cache_num_lookups 0" in server.metrics_page()
    assert len(models.executions("m")) == 2

    models.add("m", CACHED)
    with ServeProcess(models.repository) as server:
        for _ in range(2):
            http_infer(server, "m", ones(1, 4))
        assert "nv_cache" not in server.metrics_page()
        assert "asks for a response cache, and the server has none" in server.log
    assert len(models.executions("m")) == 4


def test_after_a_reload_nothing_from_before_is_found_of_the_model_and_of_its_ensemble(models: Models) -> None:
    models.add("m", CACHED, number=1)
    write_model(models.repository, "e", "", config=chain_pbtxt("m", dims=(-1,), more=CACHED))
    with (
        ServeProcess(models.repository, LOCAL, "--model-control-mode=explicit", "--load-model=e") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        for _ in range(2):
            assert http_infer(server, "e", ones(1, 1)).tolist() == [[2]]
        assert statistics(server, "e")["cache_hit"] == 1
        assert http_infer(server, "m", ones(1, 1)).tolist() == [[2]]
        assert statistics(server, "m")["cache_hit"] == 1

        models.add("m", CACHED, number=5)
        client.load_model("m")

        assert http_infer(server, "e", ones(1, 1)).tolist() == [[6]]
        assert http_infer(server, "m", ones(1, 1)).tolist() == [[6]]
        assert "nv_cache_num_entries 2" in server.metrics_page()


def test_servers_share_a_redis_and_go_on_without_it(models: Models, tmp_path: Path) -> None:
    models.add("m", CACHED)
    with RedisProcess(tmp_path) as redis:
        settings = (f"host=127.0.0.1,port={redis.port}", "pool_size=2", "socket_timeout=10000", "wait_timeout=10000")
        arguments = [f"--cache-config=redis,{setting}" for setting in settings]
        with ServeProcess(models.repository, *arguments) as one, ServeProcess(models.repository, *arguments) as other:
            assert http_infer(one, "m", ones(1, 1)).tolist() == [[2]]
            assert http_infer(one, "m", ones(1, 1)).tolist() == [[2]]
            assert http_infer(other, "m", ones(1, 1)).tolist() == [[2]]
            assert len(models.executions("m")) == 1
            assert statistics(other, "m")["cache_hit"] == 1

            redis.stop()
            for number in range(5):
                assert http_infer(one, "m", ones(1, 1)).tolist() == [[2]]
                assert len(models.executions("m")) == 2 + number
            assert "charonia_cache_up 0" in one.metrics_page()
            assert one.logs("requests run without it")


WARM = (
    'model_warmup {{ name: "{name}" batch_size: {batch} count: {count} '
    'inputs {{ key: "INPUT0" value {{ data_type: TYPE_FP32 dims: [ 2 ] {source} }} }} }} '
)


def sample(source: str, *, name: str = "s", batch: int = 1, count: int = 0) -> str:
    return WARM.format(name=name, batch=batch, count=count, source=source)


def test_every_instance_is_warm_before_the_model_is_ready_and_nothing_of_that_is_counted(models: Models) -> None:
    more = sample("zero_data: true", name="a", count=2) + sample('input_data_file: "x"', name="b", batch=3)
    models.add("m", f"{more} instance_group {{ count: 2 kind: KIND_CPU }}")
    (models.repository / "m" / "warmup").mkdir()
    (models.repository / "m" / "warmup" / "x").write_bytes(np.array([7, 8], "<f4").tobytes())

    with ServeProcess(models.repository) as server:
        executions = models.executions("m")
        counts = statistics(server, "m")

    by_worker = {pid: [line[4:] for line in executions if line[1] == pid] for pid in {line[1] for line in executions}}
    assert list(by_worker.values()) == [[(1, 0), (1, 0), (3, 7)]] * 2
    assert set(counts.values()) == {0}


def needs(count: int, *, instances: int = 1, priority: int = 1) -> str:
    resource = f'resources {{ name: "R" count: {count} }} priority: {priority}'
    return f"instance_group {{ count: {instances} kind: KIND_CPU rate_limiter {{ {resource} }} }}"


def overlap(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return bool(one[2] < other[3] and other[2] < one[3])


def test_models_that_need_the_same_resource_do_not_run_at_the_same_time(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAUSE", "0.1")
    models.add("a", needs(2))
    models.add("b", needs(1, instances=2))
    models.add("free")
    with ServeProcess(models.repository, "--rate-limit=execution_count") as server:
        view = server.ask("/v2/ratelimit")
        assert [(r["name"], r["device"], r["capacity"], r["in_use"]) for r in view["resources"]] == [("R", 0, 2, 0)]
        calls = [
            lambda m=m, i=i: http_infer(server, m, ones(1, 1, value=i)) for i in range(6) for m in ("a", "b", "free")
        ]
        sending = threading.Thread(target=together, args=calls)
        sending.start()
        peaks = set()
        while sending.is_alive():
            view = server.ask("/v2/ratelimit")
            peaks.add(view["resources"][0]["in_use"])
            assert sum(h["count"] for h in view["resources"][0]["holders"]) == view["resources"][0]["in_use"] <= 2
            time.sleep(0.02)
        metrics = server.metrics_page()

    assert max(peaks) == 2
    a, b = models.executions("a"), models.executions("b")
    assert len(a) == len(b) == len(models.executions("free")) == 6
    assert not any(overlap(one, other) for one in a for other in b)
    assert any(overlap(one, other) for one in b for other in b if one != other)
    assert 'charonia_rate_limit_executions_total{model="a",model_instance="a_0_0",version="1"} 6' in metrics
    assert 'charonia_rate_limit_in_use{device="0",resource="R"} 0' in metrics


def test_without_the_rate_limiter_sections_have_no_effect_and_there_is_nothing_to_see(models: Models) -> None:
    models.add("a", needs(3))
    with ServeProcess(models.repository, "--rate-limit-resource=R:1") as server:
        assert http_infer(server, "a", ones(1, 1)).tolist() == [[2]]
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask("/v2/ratelimit")
        assert caught.value.code == 503
        caught.value.close()
        assert "rate_limit" not in server.metrics_page()
