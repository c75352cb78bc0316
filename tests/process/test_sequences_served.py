"""Sequences over the wire, with the stock clients: both strategies, controls, states, iterative models, a reload."""

import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.models import write_model
from tests.support.process import SHAPES, ServeProcess, eventually
from tests.support.sequence_models import (
    COUNTDOWN,
    RUNNING_SUM,
    SUM_BY_ID,
    implicit_sum,
    sequence_pbtxt,
)
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

IDLE = "max_sequence_idle_microseconds: 60000000 "
STATE = 'state { input_name: "INPUT_STATE" output_name: "OUTPUT_STATE" data_type: TYPE_INT32 dims: [ 1 ] %s }'
DECOUPLED = "model_transaction_policy { decoupled: true }"
THREAD = 'parameters { key: "EXECUTION_MODE" value { string_value: "thread" } }'

ECHO_CONTROLS = """
backend: "identity"
max_batch_size: 2
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT_START" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "OUTPUT_ID" data_type: TYPE_STRING dims: [ 1 ] }
sequence_batching {
  control_input { name: "INPUT_START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "INPUT_ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: "INPUT0_KEPT" output_name: "OUTPUT0_KEPT" data_type: TYPE_INT32 dims: [ 1 ] }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    write_model(folder, "rows", RUNNING_SUM, config=sequence_pbtxt(IDLE + "direct { }", id_type=""))
    write_model(folder, "ids", SUM_BY_ID, config=sequence_pbtxt(IDLE + "oldest { max_candidate_sequences: 8 }"))
    write_model(folder, "threaded", SUM_BY_ID, config=sequence_pbtxt(IDLE + "oldest { }", more=THREAD))
    write_model(folder, "texts", SUM_BY_ID, config=sequence_pbtxt(IDLE + "oldest { }", id_type="TYPE_STRING"))
    for name, batching in (("sum_direct", "direct { }"), ("sum_oldest", "oldest { }")):
        config = sequence_pbtxt(f"{IDLE} {batching} {STATE % ''}", backend="onnxruntime", id_type="", controls="")
        write_model(folder, name, implicit_sum(), config=config)
    ten = 'initial_state { name: "ten" data_type: TYPE_INT32 dims: [ 1 ] data_file: "ten" }'
    config = sequence_pbtxt(STATE % ten, backend="onnxruntime", id_type="", controls="", max_batch_size=0)
    (write_model(folder, "sum_file", implicit_sum(batches=False), config=config) / "initial_state").mkdir()
    (folder / "sum_file" / "initial_state" / "ten").write_bytes(np.int32(10).tobytes())
    (write_model(folder, "echo", "", config=ECHO_CONTROLS) / "1").mkdir(exist_ok=True)
    iterative = "iterative_sequence: true oldest { max_candidate_sequences: 4 } "
    write_model(folder, "countdown", COUNTDOWN, config=sequence_pbtxt(iterative, id_type="", more=DECOUPLED))
    threaded = sequence_pbtxt(iterative, id_type="", more=DECOUPLED + THREAD)
    write_model(folder, "countdown_thread", COUNTDOWN, config=threaded)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=*", *request.param) as process:
        yield process


Send = Callable[..., Any]


def http_send(server: ServeProcess, model: str, id: int | str, value: int, **more: Any) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        given = infer_input(
            httpclient, "INPUT0" if model == "echo" else "INPUT", np.full(_shape(model), value, np.int32)
        )
        return client.infer(model, [given], sequence_id=id, **more)


def grpc_send(server: ServeProcess, model: str, id: int | str, value: int, **more: Any) -> Any:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        return client.infer(model, [_grpc_input(model, value)], sequence_id=id, **more)


def _grpc_input(model: str, value: int) -> Any:
    return infer_input(grpcclient, "INPUT0" if model == "echo" else "INPUT", np.full(_shape(model), value, np.int32))


def _shape(model: str) -> list[int]:
    return [1] if model == "sum_file" else [1, 1]


def sums(send: Send, server: ServeProcess, model: str, id: int | str, values: list[int]) -> list[int]:
    last = len(values) - 1
    results = [
        send(server, model, id, value, sequence_start=index == 0, sequence_end=index == last)
        for index, value in enumerate(values)
    ]
    return [int(result.as_numpy("OUTPUT").reshape(-1)[0]) for result in results]


def shown(server: ServeProcess, model: str) -> Any:
    return server.ask(f"/v2/models/{model}/sequences")


@pytest.mark.parametrize("send", [http_send, grpc_send])
@pytest.mark.parametrize("model", ["rows", "sum_direct", "sum_oldest"])
def test_a_model_sums_up_over_a_sequence(send: Send, server: ServeProcess, model: str) -> None:
    assert sums(send, server, model, 5, [1, 2, 3]) == [1, 3, 6]
    assert sums(send, server, model, 5, [4, 1]) == [4, 5]


@pytest.mark.parametrize("send", [http_send, grpc_send])
@pytest.mark.parametrize(
    ("model", "id", "added"), [("ids", 700, 700), ("threaded", 7, 7), ("texts", "abcd", 4), ("texts", 123456, 6)]
)
def test_a_model_is_told_the_id_and_the_end(
    send: Send, server: ServeProcess, model: str, id: int | str, added: int
) -> None:
    assert sums(send, server, model, id, [1, 2, 3]) == [1, 3, 6 + added]


def test_a_state_starts_from_a_file(server: ServeProcess) -> None:
    assert sums(http_send, server, "sum_file", 1, [1, 2]) == [11, 13]


def test_what_is_kept_is_no_output_and_controls_can_be_outputs(server: ServeProcess) -> None:
    result = http_send(server, "echo", "me", 3, sequence_start=True, sequence_end=True)

    assert {o["name"] for o in result.get_response()["outputs"]} == {"OUTPUT0", "OUTPUT_START", "OUTPUT_ID"}
    assert result.as_numpy("OUTPUT_ID").tolist() == [[b"me"]]
    assert result.as_numpy("OUTPUT_START").tolist() == [[True]]


@pytest.mark.parametrize(
    ("model", "id", "more", "words"),
    [
        ("ids", 99, {}, "inference request for sequence 99 to model 'ids' must specify the START flag on the first"),
        ("ids", 0, {"sequence_start": True}, "must specify a non-zero or non-empty correlation ID"),
        ("ids", "text", {"sequence_start": True}, "data-type is 'BYTES', but model 'ids' expects 'UINT64'"),
    ],
)
def test_wrong_requests_are_refused(
    server: ServeProcess, model: str, id: int | str, more: dict[str, bool], words: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http_send(server, model, id, 1, **more)
    assert caught.value.status() == "400"
    assert words in caught.value.message()
    with pytest.raises(InferenceServerException) as caught:
        grpc_send(server, model, id, 1, **more)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_request_has_batch_size_one(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        given = infer_input(httpclient, "INPUT", np.zeros((2, 1), np.int32))
        with pytest.raises(InferenceServerException, match="must specify batch-size 1") as caught:
            client.infer("ids", [given], sequence_id=1, sequence_start=True)
    assert caught.value.status() == "400"


class Stream:
    """A stream of the stock client and what comes back."""

    def __init__(self, server: ServeProcess) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put(error or result))

    def send(self, model: str, id: int | str, value: int, **more: Any) -> None:
        self.client.async_stream_infer(model, [_grpc_input(model, value)], sequence_id=id, **more)

    def value(self) -> int:
        result = self.answers.get(timeout=200)
        assert not isinstance(result, Exception), result
        return int(result.as_numpy("OUTPUT").reshape(-1)[0])

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def test_a_whole_sequence_goes_into_a_stream_at_once(server: ServeProcess) -> None:
    stream = Stream(server)
    for index in range(20):
        stream.send("ids", 31, 1, sequence_start=index == 0, sequence_end=index == 19)

    assert [stream.value() for _ in range(20)] == [*range(1, 20), 51]
    stream.close()


def test_the_slots_and_the_backlog_are_shown(server: ServeProcess) -> None:
    http_send(server, "rows", 61, 1, sequence_start=True)
    http_send(server, "rows", 62, 1, sequence_start=True)

    view = shown(server, "rows")

    assert (view["model_name"], view["model_version"], view["strategy"]) == ("rows", "1", "direct")
    (instance,) = view["instances"]
    assert (instance["name"], instance["slots"]) == ("rows_0", 4)
    assert [(s["slot"], s["sequence_id"], s["executions"]) for s in instance["sequences"]] == [(0, 61, 1), (1, 62, 1)]
    assert view["backlog"] == []
    for number in (61, 62):
        http_send(server, "rows", number, 1, sequence_end=True)
    for model, code in (("nobody", 404), ("rows/versions/2", 404), ("rows/versions/x", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            shown(server, model)
        assert caught.value.code == code
        caught.value.close()


@pytest.mark.parametrize("model", ["countdown", "countdown_thread"])
def test_an_iterative_model_is_given_a_request_until_it_is_done(server: ServeProcess, model: str) -> None:
    stream = Stream(server)
    for count in (3, 5):
        given = _grpc_input(model, count)
        stream.client.async_stream_infer(model, [given], request_id=str(count))

    found: dict[str, list[int]] = {"3": [], "5": []}
    for _ in range(8):
        result = stream.answers.get(timeout=200)
        assert not isinstance(result, Exception), result
        found[result.get_response().id].append(int(result.as_numpy("OUTPUT").reshape(-1)[0]))
    stream.close()

    assert found == {"3": [2, 1, 0], "5": [4, 3, 2, 1, 0]}
    assert eventually(lambda: shown(server, model)["instances"][0]["sequences"] == [])  # the response leaves first


def test_pytorch_models_have_states_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Adder(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, INPUT, INPUT_STATE):  # type: ignore[no-untyped-def] # noqa: N803 # names of the inputs
            total = INPUT + INPUT_STATE
            return total, total

    exported = torch.jit.trace(Adder(), (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)))
    state = (STATE % "").replace("OUTPUT_STATE", "OUTPUT_STATE__1")
    config = sequence_pbtxt(f"{IDLE} oldest {{ }} {state}", backend="pytorch", id_type="", controls="")
    config = config.replace('output { name: "OUTPUT"', 'output { name: "OUTPUT__0"')
    (write_model(tmp_path, "adder", "", config=config) / "1").mkdir(exist_ok=True)
    exported.save(str(tmp_path / "adder" / "1" / "model.pt"))
    with ServeProcess(tmp_path) as pytorch:
        results = [
            http_send(pytorch, "adder", 1, 5, sequence_start=n == 0).as_numpy("OUTPUT__0").tolist() for n in range(3)
        ]

    assert results == [[[5]], [[10]], [[15]]]
