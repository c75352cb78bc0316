"""Traffic between versions on real servers: both protocols, load, killed engines, canary plans, keys, the command."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tests.process.test_guarded_server import ask, kill_engine
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.running_load import Load, echo, over_both
from tests.support.stock_clients import infer_input

from charonia.client.async_client import AsyncClient
from charonia.client.sync_client import Client
from charonia.core.errors import Code, ServingError
from charonia.wire.transport import WireOptions

ALL = "version_policy: { all { } }\n"
SENT = np.arange(4, dtype=np.float32).reshape(1, 4)

TELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        told = pb_utils.Tensor("text_output", np.array([[self.version.encode()]], object))
        return [pb_utils.InferenceResponse([told]) for _ in requests]
"""
CALLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.call(request) for request in requests]

    def call(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "text_input")
        made = pb_utils.InferenceRequest(model_name="tells", requested_output_names=["text_output"], inputs=[given])
        return pb_utils.InferenceResponse(made.exec().output_tensors())
"""
FAILS = PYTHON_IDENTITY.replace("responses = []", 'raise RuntimeError("broken")')
TEXT = """
backend: "python" max_batch_size: 4
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
STREAMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.Tensor("OUTPUT0", np.full(4, self.version, np.float32))
            for _ in range(3):
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    in_front = 'parameters { key: "front_end" value { string_value: "yes" } }'
    for version in (1, 2, 3):
        write_model(folder, "echo", b"", config=identity_pbtxt(dims=(4,), more=ALL + in_front), version=version)
        write_model(folder, "tells", TELLS, config=TEXT + ALL, version=version)
    write_model(folder, "calls", CALLS, config=TEXT)
    write_model(folder, "ensemble", b"", config=chain_pbtxt("echo", dims=(4,)))
    decoupled = ALL + "model_transaction_policy { decoupled: true }"
    for version in (1, 2):
        config = identity_pbtxt("python", dims=(4,), max_batch_size=0, more=decoupled)
        write_model(folder, "streams", STREAMS, config=config, version=version)
    python = identity_pbtxt("python", dims=(4,), more=ALL)
    write_model(folder, "risky", PYTHON_IDENTITY, config=python)
    write_model(folder, "risky", FAILS, version=2)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(repository, *request.param) as started:
        yield started


@pytest.fixture
def client(server: ServeProcess) -> Iterator[Client]:
    with Client(server.http) as made:
        yield made
        for model in ("echo", "tells", "risky", "streams"):
            made.traffic.reset(model)


def versions(client: Client, number: int, model: str = "echo") -> Counter[str]:
    return Counter(client.infer(model, {"INPUT0": SENT}).model_version for _ in range(number))


def settings(document: Any) -> dict[str, Any]:
    return {name: document[name] for name in ("weights", "sticky", "shadow")}


def test_both_protocols_set_and_show_the_same(server: ServeProcess, client: Client) -> None:
    with Client(f"grpc://{server.grpc}") as over_grpc:
        changed = over_grpc.traffic.update("echo", {"weights": {"1": 3, "2": 1}, "shadow": {"3": 0.5}})
        assert settings(changed) == settings(client.traffic.get("echo")) == settings(over_grpc.traffic.get("echo"))
        assert changed["weights"] == {"1": 3.0, "2": 1.0}
        assert versions(client, 40) + versions(over_grpc, 40) == pytest.approx({"1": 60, "2": 20}, abs=2)
        with pytest.raises(ServingError, match="version 9 of 'echo' is not ready") as refused:
            over_grpc.traffic.update("echo", {"weights": {"9": 1}})
        assert refused.value.code is Code.INVALID_ARG
        with pytest.raises(ServingError, match="'nothing' is not ready"):
            over_grpc.traffic.get("nothing")
        assert over_grpc.traffic.reset("echo")["source"] == "default"
    assert versions(client, 5) == {"3": 5}


def test_a_client_is_known_by_a_header_over_both_protocols(server: ServeProcess, client: Client) -> None:
    client.traffic.update("echo", {"weights": {"1": 50, "2": 50}, "sticky": "header:X-User"})
    found: dict[str, set[str]] = {}
    for number in range(12):
        user = f"user-{number}"
        for address in (server.http, f"grpc://{server.grpc}"):
            with Client(address, options=WireOptions(headers=(("x-user", user),))) as own:
                found.setdefault(user, set()).update(versions(own, 3))

    assert all(len(each) == 1 for each in found.values())
    assert set.union(*found.values()) == {"1", "2"}


def test_a_stream_keeps_its_client_too(server: ServeProcess, client: Client) -> None:
    client.traffic.update("echo", {"weights": {"1": 50, "2": 50}, "sticky": "header:x-user"})
    answers: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as stream:
        stream.start_stream(lambda result, error: answers.append((result, error)), headers={"x-user": "somebody"})
        for _ in range(8):
            given = infer_input(grpcclient, "INPUT0", SENT)
            stream.async_stream_infer("echo", [given])
        assert eventually(lambda: len(answers) == 8)
        stream.stop_stream()

    assert [error for _, error in answers if error] == []
    assert len({result.get_response().model_version for result, _ in answers}) == 1


def test_all_responses_of_a_request_come_from_one_version(server: ServeProcess, client: Client) -> None:
    client.traffic.update("streams", {"weights": {"1": 1, "2": 1}})
    found: Counter[str] = Counter()
    with Client(f"grpc://{server.grpc}") as over_grpc:
        for _ in range(10):
            answers = list(over_grpc.stream_infer("streams", {"INPUT0": SENT[0]}))
            assert len(answers) == 3
            assert {answer["OUTPUT0"][0] for answer in answers} == {float(answers[0].model_version)}
            found[answers[0].model_version] += 1

    assert found == {"1": 5, "2": 5}
    shown: Any = client.traffic.get("streams")["versions"]
    assert [(each["requests"], each["errors"], each["in_flight"]) for each in shown] == [(5, 0, 0)] * 2
    with pytest.raises(ServingError, match="a decoupled model cannot have shadow versions"):
        client.traffic.update("streams", {"shadow": {"2": 1}})


def test_ensembles_calls_of_models_and_openai_follow_the_traffic(server: ServeProcess, client: Client) -> None:
    client.traffic.update("echo", {"weights": {"1": 1, "2": 1}})
    for _ in range(20):
        assert client.infer("ensemble", {"INPUT0": SENT})["OUTPUT0"].tolist() == SENT.tolist()
    shown: Any = client.traffic.get("echo")["versions"]
    assert [each["requests"] for each in shown] == pytest.approx([10, 10, 0], abs=1)

    client.traffic.update("tells", {"weights": {"1": 1}})
    assert client.infer("calls", {"text_input": [["hello"]]})["text_output"].tolist() == [[b"1"]]
    client.traffic.update("tells", {"weights": {"2": 1}})
    assert client.infer("calls", {"text_input": [["hello"]]})["text_output"].tolist() == [[b"2"]]
    body = json.dumps({"model": "tells", "prompt": "which?"}).encode()
    status, answer, _ = ask(server.http, "POST", "/v1/completions", body)
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "2")


def test_explain_and_metrics_show_it(server: ServeProcess, client: Client) -> None:
    client.traffic.update("echo", {"weights": {"1": 1, "2": 1}, "shadow": {"3": 1}})
    versions(client, 10)
    (line, shadow) = json.loads(ask(server.http, "GET", "/v2/models/echo/explain")[1])["traffic"]

    assert line == "Requests without a version go 50.0% to version 1, 50.0% to version 2"
    assert shadow.startswith("Version 3 gets copies of 100.0%: 0 of ")
    page = ask(server.metrics, "GET", "/metrics")[1]
    assert 'charonia_traffic_requests_total{model="echo",version="1"} 5' in page
    assert 'charonia_traffic_share{model="echo",version="2"} 0.5' in page
    text = run_command("explain", "echo", "-u", server.http).stdout
    assert "Traffic      Requests without a version go 50.0% to version 1" in text


def test_the_command_sets_shows_and_resets(server: ServeProcess, client: Client) -> None:
    def command(*arguments: str) -> str:
        done = run_command("traffic", *arguments, "-u", server.http)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert "echo: set by request, sticky by key" in command("set", "echo", "--weights", "1=1,2=3", "--sticky", "key")
    versions(client, 8)
    status = command("status", "echo")
    assert [line.split()[:4] for line in status.splitlines()[3:6]] == [
        *(["1", "yes", "25.0%", "2"], ["2", "yes", "75.0%", "6"], ["3", "yes", "0.0%", "0"])
    ]
    canary = ("--canary-version", "3", "--steps", "5,100", "--step-seconds", "60", "--p99-ratio-max", "any")
    assert "canary of version 3 against version 2: running" in command("canary", "echo", *canary)
    plan: Any = client.traffic.get("echo")["canary"]
    assert (plan["plan"]["steps"], plan["plan"]["p99_ratio_max"]) == ([5.0, 100.0], None)
    assert "aborted at 5 % by an operator" in command("abort", "echo")
    assert "echo: not split" in command("reset", "echo")
    wrong = run_command("traffic", "pause", "echo", "-u", server.http)
    assert (wrong.returncode, "there is no canary plan of 'echo' to pause" in wrong.stderr) == (1, True)


def load_of(server: ServeProcess, model: str = "echo") -> Load:
    ask = partial(echo, model)
    return Load(over_both(server, one=ask, another=ask))


def test_a_canary_that_fails_is_rolled_back_and_one_that_works_takes_over(server: ServeProcess, client: Client) -> None:
    client.traffic.update("risky", {"weights": {"1": 1}})
    plan = {"version": 2, "steps": [10, 100], "step_seconds": 30, "samples_min": 20}
    client.traffic.update("risky", {"canary": plan})
    with load_of(server, "risky") as load:
        assert eventually(lambda: state_of(client, "risky") == "rolled_back", 30)
        failed = len(load.errors)
        time.sleep(0.5)
        later: Any = client.traffic.get("risky")
    assert len(load.errors) <= failed + 4  # what was in flight
    assert all("broken" in error for error in load.errors)
    assert later["weights"] == {"1": 100.0}
    assert "requests failed with version 2, 0 of" in later["history"][-1]["text"]

    client.traffic.update("echo", {"weights": {"1": 1}})
    plan = {"version": 2, "steps": [30, 100], "step_seconds": 1, "samples_min": 20, "p99_ratio_max": None}
    client.traffic.update("echo", {"canary": plan})
    with load_of(server) as load:
        assert eventually(lambda: state_of(client, "echo") == "finished", 30)
    assert load.errors == []
    assert client.traffic.get("echo")["weights"] == {"2": 100.0}
    assert versions(client, 5) == {"2": 5}


def state_of(client: Client, model: str) -> str:
    document: Any = client.traffic.get(model)
    return str(document["canary"]["state"])


async def test_the_asynchronous_client_has_the_same(server: ServeProcess, client: Client) -> None:
    async with AsyncClient(server.http) as own:
        assert (await own.traffic.update("echo", {"weights": {"1": 1}}))["source"] == "request"
        assert (await own.traffic.get("echo"))["weights"] == {"1": 1.0}
        assert (await own.traffic.reset("echo"))["source"] == "default"
        with pytest.raises(ServingError, match="expected a change, got none"):
            await own.traffic.update("echo", {})


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_may_not_change_traffic_may_read_it(repository: Path, tmp_path: Path, shape: Shape) -> None:
    keys = {name: letter * 20 for name, letter in (("read", "r"), ("infer", "i"), ("admin", "a"))}
    (tmp_path / "keys").write_text("".join(f"{name} {name} {key}\n" for name, key in keys.items()))
    with ServeProcess(repository, f"--api-keys={tmp_path / 'keys'}", *shape) as server:
        for address in (server.http, f"grpc://{server.grpc}"):
            with (
                Client(address, options=WireOptions(headers=(("x-api-key", keys["read"]),))) as reader,
                Client(address, options=WireOptions(headers=(("x-api-key", keys["infer"]),))) as sender,
                Client(address, options=WireOptions(headers=(("x-api-key", keys["admin"]),))) as admin,
            ):
                assert reader.traffic.get("echo")["source"] == "default"
                for change in ({"sticky": "key"}, None):
                    with pytest.raises(ServingError, match="needs the scope 'admin', the key 'read' has read"):
                        _ = reader.traffic.update("echo", change) if change else reader.traffic.reset("echo")
                with pytest.raises(ServingError, match="needs the scope 'read'"):
                    sender.traffic.get("echo")
                admin.traffic.update("echo", {"weights": {"1": 50, "2": 50}, "sticky": "key"})
                assert len(versions(sender, 12)) == len(versions(admin, 12)) == 1
                admin.traffic.reset("echo")


def test_an_engine_that_follows_a_killed_one_has_the_traffic_and_the_canary(repository: Path) -> None:
    with ServeProcess(repository, "--front-ends=2") as server, Client(server.http) as client:
        client.traffic.update("echo", {"weights": {"1": 1}, "sticky": "header:x-user", "shadow": {"3": 0.25}})
        client.traffic.update("tells", {"weights": {"1": 1}})
        client.traffic.reset("tells")
        plan = {"version": 2, "steps": [40, 100], "step_seconds": 600}
        client.traffic.update("echo", {"canary": plan})
        client.traffic.update("echo", {"action": "pause"})
        before: Any = client.traffic.get("echo")
        for state in ("paused", "rolled_back"):  # the second one gets what the first one got
            kill_engine(server)
            after: Any = client.traffic.get("echo")
            assert after["canary"]["state"] == state
            assert [after["sticky"], after["shadow"]] == [before["sticky"], before["shadow"]]
            assert after["history"][: len(before["history"])] == before["history"]
            assert client.traffic.get("tells")["source"] == "default"
            if state == "paused":
                assert after["weights"] == before["weights"]
                assert after["history"][-1]["text"] == "the engine ended at 40 %: the step begins again"
                assert versions(client, 20) == pytest.approx({"1": 12, "2": 8}, abs=1)
        assert "the engine has ended 2 times during this plan" in after["history"][-1]["text"]
        assert versions(client, 20) == {"1": 20}
        client.traffic.update("echo", {"weights": {"1": 1, "2": 1}})
        with Client(server.http, options=WireOptions(headers=(("x-user", "somebody"),))) as own:
            assert len(versions(own, 12)) == 1


def test_an_upgrade_keeps_the_traffic_and_loses_no_request(repository: Path) -> None:
    with ServeProcess(repository, "--front-ends=2") as server, Client(server.http) as client:
        client.traffic.update("echo", {"weights": {"1": 1, "2": 1}})
        with ThreadPoolExecutor(1) as pool, load_of(server) as load:
            done = pool.submit(run_command, "upgrade", str(server.process.pid)).result(200)
            assert done.returncode == 0, done.stderr
        assert load.errors == []
        assert set(load.results) == {"1", "2"}
        assert client.traffic.get("echo")["weights"] == {"1": 1.0, "2": 1.0}
