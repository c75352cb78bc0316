"""Response cache, warm-up and rate limiter: the same requests to Charonia and to Triton."""

import re
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.models import chain_pbtxt, write_model
from tests.support.peers import Pair, once_counted

COUNTING = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.seen = []

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        self.seen.append((len(requests), arrays[0].shape[0], float(arrays[0].flat[0])))
        answer = np.array([str(self.seen).encode()] * 1, np.object_)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a), pb_utils.Tensor("SEEN", answer.reshape(1, 1))])
            for a in arrays
        ]
"""
CONFIG = """
backend: "python" max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }
"""
CACHED = "response_cache { enable: true }"


def warm(source: str, *, batch: int = 1, count: int = 0, dims: str = "[ 2 ]", data_type: str = "TYPE_FP32") -> str:
    value = f"data_type: {data_type} dims: {dims} {source}"
    inputs = f'inputs {{ key: "INPUT0" value {{ {value} }} }}'
    return f'model_warmup {{ name: "s" batch_size: {batch} count: {count} {inputs} }}'


def group(resource: str, *, count: int = 1, priority: int = 1) -> str:
    return f"instance_group {{ kind: KIND_CPU count: {count} rate_limiter {{ {resource} priority: {priority} }} }}"


FILE = 'input_data_file: "x"'
# A sample that fails when it is run is not among them: Triton sometimes ends of it.
MODELS = {
    "plain": "",
    "cached": CACHED,
    "cached_inner": CACHED,
    "cached_decoupled": f"{CACHED} model_transaction_policy {{ decoupled: true }}",
    "cached_sequence": f"{CACHED} sequence_batching {{ }}",
    "decoupled": "model_transaction_policy { decoupled: true }",
    "warm_zero": warm("zero_data: true", batch=3, count=2),
    "warm_none": warm("zero_data: true", batch=0),
    "warm_file": warm(FILE),
    "warm_short_file": warm(FILE, dims="[ 3 ]"),
    "warm_no_file": warm('input_data_file: "absent"'),
    "limited": group(
        'resources { name: "R" count: 2 } resources { name: "G" global: true count: 1 }', count=2, priority=2
    ),
    "limited_too_much": group('resources { name: "R" count: 5 }'),
    "limited_nothing": group(""),
}


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("sharing")
    for name, more in MODELS.items():
        warmup = write_model(folder, name, COUNTING, config=CONFIG + more) / "warmup"
        warmup.mkdir()
        (warmup / "x").write_bytes(bytes.fromhex("0000e040 0000803f 0000"))  # 7, 1 and half of another
    write_model(folder, "ensemble", "", config=chain_pbtxt("cached_inner", dims=(-1,), max_batch_size=4, more=CACHED))
    write_model(
        folder, "ensemble_decoupled", "", config=chain_pbtxt("decoupled", dims=(-1,), max_batch_size=4, more=CACHED)
    )
    started: Pair = start_pair(
        folder,
        *("--exit-on-error=false", "--cache-config=local,size=1048576"),
        *("--rate-limit=execution_count", "--rate-limit-resource=R:4"),
        "--rate-limit-resource=G:1",  # Triton has nothing of a resource that is not named where another one is
    )
    return started


def request(values: Sequence[float], shape: Sequence[int] | None = None, output: str = "OUTPUT0") -> dict[str, Any]:
    tensor = {"name": "INPUT0", "shape": shape or [1, len(values)], "datatype": "FP32", "data": list(values)}
    return {"inputs": [tensor], "outputs": [{"name": output}]}


def counted(pair: Pair, model: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return what both have counted, ours first."""
    found = []
    for answer in pair.ask("GET", f"/v2/models/{model}/stats"):
        (entry,) = answer.document["model_stats"]
        counts = {key: value["count"] for key, value in entry["inference_stats"].items()}
        found.append({**counts, "executions": entry["execution_count"], "inferences": entry["inference_count"]})
    return found[0], found[1]


def same_counts(pair: Pair, model: str) -> dict[str, int]:
    ours, theirs = once_counted(lambda: counted(pair, model))
    assert ours == theirs
    return ours


def test_the_same_models_load_and_the_same_are_refused(pair: Pair) -> None:
    ours, theirs = (
        {entry["name"]: (entry.get("state") == "READY", entry.get("reason", "")) for entry in answer.document}
        for answer in pair.ask("POST", "/v2/repository/index", {})
    )

    assert {name: ready for name, (ready, _) in ours.items()} == {name: ready for name, (ready, _) in theirs.items()}
    for name, said in (
        ("cached_decoupled", "Response Cache does not currently support model cached_decoupled with 'decoupled'"),
        ("cached_sequence", "Response Cache does not currently support model cached_sequence with sequence batching"),
        ("ensemble_decoupled", "Response Cache does not currently support model ensemble_decoupled with 'decoupled'"),
        ("limited_too_much", 'Resource count for "R" is limited to 4'),
        ("warm_short_file", "12 bytes"),
    ):
        assert said in ours[name][1]
        if theirs[name][1]:  # the index of Triton has no reason where the configuration is refused
            assert said in theirs[name][1]


@pytest.mark.parametrize("model", ["plain", "cached", "ensemble"])
def test_equal_requests_give_equal_answers_and_count_alike(pair: Pair, same_http: Any, model: str) -> None:
    for values in ([1, 2], [1, 2], [3, 4], [1, 2], [3, 4, 5]):
        # Triton's ensembles answer with the parameters of a sequence that is none.
        same_http(pair, "POST", f"/v2/models/{model}/infer", request(values), absent=["parameters"])

    counts = same_counts(pair, model)
    assert (counts["success"], counts["queue"]) == (5, 5)
    assert (counts["cache_hit"], counts["cache_miss"]) == ((0, 0) if model == "plain" else (2, 3))
    assert counts["executions"] == counts["compute_infer"] == (5 if model == "plain" else 3)


def test_the_metrics_of_the_cache_have_the_same_names_and_labels(pair: Pair) -> None:
    names = []
    for server in (pair.ours, pair.theirs):
        with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
            text = page.read().decode()
        names.append({re.sub(r" [0-9.e+-]+$", "", line) for line in text.splitlines() if line.startswith("nv_cache_")})
    ours, theirs = names

    assert ours == theirs
    assert len(ours) > 8


def test_here_two_shapes_of_the_same_bytes_are_two_requests_and_in_triton_they_are_one(pair: Pair) -> None:
    body = request([6, 6, 6, 6])
    pair.ask("POST", "/v2/models/cached/infer", body)

    ours, theirs = pair.ask("POST", "/v2/models/cached/infer", request([6, 6, 6, 6], [2, 2]))

    assert ours.document["outputs"][0]["shape"] == [2, 2]
    assert theirs.document["outputs"][0]["shape"] == [1, 4]


@pytest.mark.parametrize("model", ["warm_zero", "warm_none", "warm_file"])
def test_instances_run_the_same_samples_which_triton_counts_and_we_do_not(
    pair: Pair, same_http: Any, model: str
) -> None:
    ours, theirs = counted(pair, model)
    assert set(ours.values()) == {0}
    assert theirs["executions"] == {"warm_zero": 2, "warm_none": 0, "warm_file": 1}[model]

    answer = same_http(pair, "POST", f"/v2/models/{model}/infer", request([9, 9], output="SEEN"))

    seen = answer.document["outputs"][0]["data"][0]
    before = {"warm_zero": "(3, 1, 0.0), (3, 1, 0.0), ", "warm_none": "", "warm_file": "(1, 1, 7.0), "}[model]
    assert seen == f"[{before}(1, 1, 9.0)]"


def test_limited_models_answer_and_show_the_same_configuration(pair: Pair, same_http: Any) -> None:
    for model in ("limited", "limited_nothing"):
        same_http(pair, "GET", f"/v2/models/{model}/config")
        for value in range(4):
            same_http(pair, "POST", f"/v2/models/{model}/infer", request([value, 0]))
        assert same_counts(pair, model)["executions"] == 4
