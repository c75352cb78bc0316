"""`charonia upgrade`: a new engine takes the place of the one that runs while clients of both protocols go on."""

import contextlib
import http.client
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
from tests.process.test_guarded_server import ask, child, is_ready, kill_engine
from tests.support.fork_server import run_command
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually, started_by, wait_until_ended
from tests.support.running_load import Load, Opened, echo, over_both
from tests.support.sequence_models import SUM_BY_ID, sequence_pbtxt
from tests.support.stock_clients import infer_input

# Sends one response, waits at a gate, and sends two more.
STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        self.sender = request.get_response_sender()
        self.send(0)
        self.wait(requests)
        self.send(1)
        self.send(2)
        self.sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, number):
        tensor = pb_utils.Tensor("OUTPUT0", np.full(4, number, np.float32))
        self.sender.send(pb_utils.InferenceResponse([tensor]))

    def wait(self, requests):
        self.execute_gated(requests)

""" + gated("    def execute(self, requests):\n        pass\n").replace("def execute", "def execute_gated")
STREAM_CONFIG = identity_pbtxt(
    "python", dims=(4,), max_batch_size=0, more="model_transaction_policy { decoupled: true }"
)
SUMS = sequence_pbtxt("max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 8 }")
MOVED = "new requests go to it"

PAUSE_S = 0.015
"""Between requests of a client: without it, the clients take the processor from what they wait for."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    write_model(folder, "worker", PYTHON_IDENTITY, config=identity_pbtxt("python", dims=(4,)))
    write_model(folder, "held", gated(PYTHON_IDENTITY), config=identity_pbtxt("python", dims=(4,)))
    write_model(folder, "stream", STREAM, config=STREAM_CONFIG)
    write_model(folder, "sums", SUM_BY_ID, config=SUMS)
    return folder


@pytest.fixture
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--front-ends=2") as started:
        yield started


@contextlib.contextmanager
def upgrading(server: ServeProcess, *arguments: str) -> Iterator[Callable[[], Any]]:
    """Run `charonia upgrade`; what is yielded waits for its end and returns it."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_command, "upgrade", str(server.process.pid), *arguments)
        yield lambda: ended.result(200)
        ended.result(200)


def upgrade(server: ServeProcess, *arguments: str) -> Any:
    return run_command("upgrade", str(server.process.pid), *arguments)


def clients_of(server: ServeProcess) -> dict[str, Opened]:
    return over_both(server, echo=partial(echo, "echo"), worker=partial(echo, "worker"))


def body(values: list[float]) -> bytes:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


def add(
    server: ServeProcess,
    id: int,
    value: int,
    *,
    start: bool = False,
    end: bool = False,
    connection: http.client.HTTPConnection | None = None,
) -> Any:
    """Send a value of a sequence, by default over a connection of its own, and return the sum, or the error."""
    tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    sent = {
        "inputs": [tensor],
        "parameters": {"sequence_id": id, "sequence_start": start, "sequence_end": end},
    }
    path = "/v2/models/sums/infer"
    if connection is None:
        status, text, _ = ask(server.http, "POST", path, json.dumps(sent).encode())
    else:
        connection.request("POST", path, json.dumps(sent).encode())
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
    found = json.loads(text)
    return found["outputs"][0]["data"][0] if status == 200 else found["error"]


def test_every_request_of_both_protocols_has_exactly_one_correct_answer(server: ServeProcess) -> None:
    before = child(server, "engine")
    with Load(clients_of(server), PAUSE_S) as load:
        for number in (2, 3):
            done = upgrade(server)
            assert done.returncode == 0, done.stderr
            load.goes_on(12)
            assert f"charonia.cli.serve_process engine_{number}" in " ".join(
                child(server, f"engine_{number}").cmdline()
            )

    assert load.errors == []
    # A front end that is started again finds the engine of now.
    front_end = child(server, "front_end_1_3")
    front_end.kill()
    assert eventually(lambda: not front_end.is_running())
    assert server.logs("front_end_1_3 (pid ", times=3)  # it was ready, has ended, and is ready again
    wait_until_ended(before)
    lines = done.stdout.splitlines()
    assert lines[0] == f"server {server.process.pid}: release {version('charonia')}"
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "a new engine starts",
        "the new engine",
        MOVED,
        "the previous engine has stopped",
        "front end 1 is renewed",
        "front end 2 is renewed",
        "the previous front ends have stopped",
        lines[-1],
    ]
    assert lines[-1].startswith("upgraded in ")
    assert server.stop() == 0


def test_what_was_begun_before_finishes_where_it_began(server: ServeProcess, repository: Path) -> None:
    before = child(server, "engine")
    streamed: queue.Queue[Any] = queue.Queue()
    held: list[int] = []
    waiting = threading.Thread(
        target=lambda: held.append(ask(server.http, "POST", "/v2/models/held/infer", body([1, 2, 3, 4]))[0])
    )
    assert add(server, 7, 10, start=True) == 10
    with (
        Gate(repository / "stream" / "1").closed(),
        Gate(repository / "held" / "1").closed() as gate,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        client.start_stream(lambda result, error: streamed.put(result if error is None else error))
        client.async_stream_infer("stream", [infer_input(grpcclient, "INPUT0", np.zeros(4, np.float32))])
        waiting.start()
        first = streamed.get(timeout=200)
        assert eventually(lambda: gate.runs > 0)
        with upgrading(server) as ended:
            assert eventually(lambda: MOVED in server.log)
            # New connections, over both front ends: what is new goes to the new engine, the sequence stays.
            for value in range(8):
                assert add(server, 7, 1) == 11 + value
            assert add(server, 8, 5, start=True) == 5
            for value in range(8):
                assert add(server, 8, 1) == 6 + value
            assert before.is_running()
            Gate(repository / "stream" / "1").open()
            numbers = [float(result.as_numpy("OUTPUT0")[0]) for result in (first, streamed.get(timeout=200))]
            numbers.append(float(streamed.get(timeout=200).as_numpy("OUTPUT0")[0]))
            assert numbers == [0, 1, 2]
            gate.open()
            waiting.join(200)
            assert held == [200]
            assert before.is_running()  # the sequence is open
            assert add(server, 7, 1, end=True) == 19 + 7  # the last answer has the id, too
            assert ended().returncode == 0
        client.stop_stream()
    wait_until_ended(before)
    assert add(server, 8, 0, end=True) == 13 + 8
    assert add(server, 7, 2, start=True, end=True) == 2 + 7
    assert server.stop() == 0


def test_a_configuration_that_cannot_be_loaded_changes_nothing(server: ServeProcess, repository: Path) -> None:
    before = child(server, "engine")
    config = repository / "worker" / "config.pbtxt"
    text = config.read_text()
    with Load(clients_of(server), PAUSE_S) as load:
        config.write_text("no configuration")
        failed = upgrade(server)
        config.write_text(text)
        arguments = [f"--model-repository={repository}", "--http-port=1", "--front-ends=2"]
        refused = upgrade(server, "--", "serve", *arguments)
        unknown = upgrade(server, "--", "--no-such-option")

    assert load.errors == []
    assert (failed.returncode, refused.returncode, unknown.returncode) == (1, 1, 1)
    assert "the new engine cannot start" in failed.stderr
    assert "worker" in failed.stderr
    assert "the previous engine continues to serve" in failed.stderr
    assert "where they listen: http.address, http.port" in refused.stderr
    assert "--no-such-option" in unknown.stderr
    assert child(server, "engine") == before
    assert upgrade(server).returncode == 0
    assert server.stop() == 0


def test_a_new_engine_that_still_loads_is_ended_when_the_upgrade_is_cancelled(
    server: ServeProcess, repository: Path
) -> None:
    write_model(repository, "slow", "import time\ntime.sleep(60)\n", config=identity_pbtxt("python", dims=(4,)))
    before = child(server, "engine")

    with upgrading(server) as ended:
        assert server.logs("upgrade: a new engine starts")
        assert eventually(lambda: any("engine_2" in " ".join(c.cmdline()) for c in started_by(server.process.pid)))
        cancelled = upgrade(server, "--cancel")
        done = ended()

    assert cancelled.returncode == 0, cancelled.stderr
    assert "the upgrade is cancelled: the previous engine continues to serve" in cancelled.stdout
    assert done.returncode == 1
    assert "the new engine cannot start: the upgrade was cancelled" in done.stderr
    assert child(server, "engine") == before
    assert is_ready(server)
    again = upgrade(server, "--cancel")
    assert again.returncode == 1
    assert "no upgrade can be cancelled" in again.stderr


def test_another_interpreter_runs_the_new_engine_and_the_new_front_end(repository: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nOF_THE_ENVIRONMENT=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    few = ("--model-control-mode=explicit", "--load-model=echo", "--load-model=worker")  # their processes start cold
    with ServeProcess(repository, "--front-ends=1", *few) as server:
        missing = upgrade(server, "--python", str(tmp_path / "missing"))
        with Load(clients_of(server), PAUSE_S) as load:
            done = upgrade(server, "--python", str(python))
            again = upgrade(server)

        assert missing.returncode == 1
        assert "--python: expected the path of an interpreter that has charonia" in missing.stderr
        assert done.returncode == 0, done.stderr
        assert again.returncode == 0, again.stderr
        assert load.errors == []
        for name in ("engine_3", "front_end_1_3"):
            assert child(server, name).environ().get("OF_THE_ENVIRONMENT") == "yes", name


def test_other_arguments_have_other_models_and_a_crash_keeps_them(server: ServeProcess, repository: Path) -> None:
    arguments = [f"--model-repository={repository.name}", "--front-ends=2", *ADDRESSES]
    explicit = ["--model-control-mode=explicit", "--load-model=echo"]
    # The relative path begins at the folder of the command, which is not that of the server.
    done = run_command("upgrade", str(server.process.pid), "--", *arguments, *explicit, folder=repository.parent)
    assert done.returncode == 0, done.stderr
    assert _ready_models(server) == {"echo"}

    kill_engine(server, "engine_2")
    assert _ready_models(server) == {"echo"}
    # Without arguments, those of the upgrade before hold.
    assert upgrade(server).returncode == 0
    assert _ready_models(server) == {"echo"}
    assert server.stop() == 0


ADDRESSES = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")] + [
    f"--{name}-port=0" for name in ("http", "grpc", "metrics")
]


def _ready_models(server: ServeProcess) -> set[str]:
    index = json.loads(ask(server.http, "POST", "/v2/repository/index")[1])
    return {model["name"] for model in index if model.get("state") == "READY"}


def test_the_engine_may_end_first_while_requests_wait(server: ServeProcess) -> None:
    before = child(server, "engine")
    statuses: list[int] = []
    with upgrading(server, "--stop-first") as ended:
        assert eventually(lambda: "new requests wait" in server.log)
        with contextlib.suppress(http.client.HTTPException):
            statuses.append(ask(server.http, "POST", "/v2/models/echo/infer", body([1, 2, 3, 4]))[0])
        done = ended()

    assert done.returncode == 0, done.stderr
    assert statuses in ([200], [503])  # where the models take more than 10 s
    assert not before.is_running() or before.status() == psutil.STATUS_ZOMBIE
    assert eventually(lambda: ask(server.http, "POST", "/v2/models/echo/infer", body([1, 2, 3, 4]))[0] == 200)
    assert server.stop() == 0


NUMBERED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.full((1, 4), NUMBER, np.float32))])
            for _ in requests
        ]
"""
HELD_LOAD = PYTHON_IDENTITY.replace(
    "    def execute", "    def initialize(self, args):\n        self.wait(())\n\n    def execute"
) + gated("    def execute(self, requests):\n        pass\n").replace("def execute", "def wait")


def numbered(number: int) -> str:
    return NUMBERED.replace("NUMBER", str(number), 1)


def answer_of(server: ServeProcess, model: str) -> float:
    status, text, _ = ask(server.http, "POST", f"/v2/models/{model}/infer", body([0, 0, 0, 0]))
    return float(json.loads(text)["outputs"][0]["data"][0]) if status == 200 else -status


@pytest.fixture
def explicit(repository: Path) -> Iterator[ServeProcess]:
    for name in ("plain", "given", "broken"):
        write_model(repository, name, numbered(1), config=identity_pbtxt("python", dims=(4,)))
    write_model(repository, "last", HELD_LOAD, config=identity_pbtxt("python", dims=(4,)))
    for number in (1, 2):
        config = identity_pbtxt("python", dims=(4,), more="version_policy { all { } }")
        write_model(repository, "split", numbered(number), config=config, version=number)
    flags = ("--front-ends=2", "--model-control-mode=explicit", "--load-model=echo", "--allow-client-shm=true")
    with ServeProcess(repository, *flags) as started:
        yield started


GIVEN = json.dumps(
    {
        "backend": "python",
        "max_batch_size": 8,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
    }
)


def test_what_is_loaded_again_while_the_new_engine_loads_serves_its_new_files(
    explicit: ServeProcess, repository: Path
) -> None:
    server, gate = explicit, Gate(repository / "last" / "1")
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.load_model("plain")
        client.load_model("given", config=GIVEN, files={"file:1/model.py": numbered(1).encode()})
        client.load_model("last")
        for number in (2, 3):
            with gate.closed():
                before = gate.runs
                with upgrading(server) as ended:
                    assert eventually(lambda count=before: gate.runs > count)  # type: ignore[misc]
                    # The new engine has loaded the two models; now they change in the one that serves.
                    (repository / "plain" / "1" / "model.py").write_text(numbered(number))
                    client.load_model("plain")
                    client.load_model("given", config=GIVEN, files={"file:1/model.py": numbered(number).encode()})
                    gate.open()
                    done = ended()

            assert done.returncode == 0, done.stderr
            assert [answer_of(server, name) for name in ("plain", "given")] == [number, number]
        engine = child(server, "engine_3")
        engine.send_signal(signal.SIGKILL)
        assert eventually(lambda: not engine.is_running())
        assert eventually(lambda: [answer_of(server, name) for name in ("plain", "given")] == [3, 3])
    assert server.stop() == 0


def changed(server: ServeProcess) -> list[object]:
    """Return the settings, the registered memory, and which version of `split` answers."""
    paths = ("/v2/logging", "/v2/trace/setting", "/v2/models/echo/trace/setting", "/v2/systemsharedmemory/status")
    found = [json.loads(ask(server.http, "GET", path)[1]) for path in paths]
    settings = [found[0]["log_verbose_level"], found[1]["trace_rate"], found[2]["trace_rate"]]
    return [*settings, [region["byte_size"] for region in found[3]], answer_of(server, "split")]


def test_every_change_while_the_new_engine_loads_holds_in_it(explicit: ServeProcess, repository: Path) -> None:
    server, gate = explicit, Gate(repository / "last" / "1")
    region = shm.create_shared_memory_region("region", f"/charonia-upgrade-{server.process.pid}", 64)

    def change(number: int) -> None:
        memory = "/v2/systemsharedmemory/region/r"
        key = f"/charonia-upgrade-{server.process.pid}"
        changes: list[tuple[str, dict[str, object]]] = [
            ("/v2/logging", {"log_verbose_level": number}),
            ("/v2/trace/setting", {"trace_rate": str(number)}),
            ("/v2/models/echo/trace/setting", {"trace_rate": str(10 * number)}),
            (f"{memory}/unregister", {}),
            (f"{memory}/register", {"key": key, "offset": 0, "byte_size": 16 * number}),
            ("/v2/models/split/traffic", {"weights": {str(number): 1}}),
        ]
        for path, sent in changes:
            assert ask(server.http, "POST", path, json.dumps(sent).encode())[0] == 200, path

    try:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            client.load_model("split")
            client.load_model("last")
            for number in (1, 2, 1):
                with gate.closed(), upgrading(server) as ended:
                    before = gate.runs
                    assert eventually(lambda count=before: gate.runs > count)  # type: ignore[misc]
                    change(number)
                    gate.open()
                    done = ended()
                assert done.returncode == 0, done.stderr
                assert changed(server) == [number, str(number), str(10 * number), [16 * number], number]
    finally:
        shm.destroy_shared_memory_region(region)
    assert server.stop() == 0


def test_a_load_that_the_new_engine_cannot_repeat_ends_the_upgrade(explicit: ServeProcess, repository: Path) -> None:
    server, gate = explicit, Gate(repository / "last" / "1")
    before = child(server, "engine")
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.load_model("broken")
        client.load_model("last")
        with gate.closed(), upgrading(server) as ended:
            count = gate.runs
            assert eventually(lambda: gate.runs > count)
            path = repository / "broken" / "1" / "model.py"
            path.write_text(numbered(2))
            client.load_model("broken")
            path.write_text("no Python")
            gate.open()
            failed = ended()

        assert failed.returncode == 1
        assert "the new engine cannot start" in failed.stderr
        assert "load failed for model 'broken'" in failed.stderr
        assert "the previous engine continues to serve" in failed.stderr
        assert child(server, "engine") == before
        assert answer_of(server, "broken") == 2
        path.write_text(numbered(3))
        client.load_model("broken")
        assert upgrade(server).returncode == 0
        assert answer_of(server, "broken") == 3
    assert server.stop() == 0


def test_a_signal_upgrades_too(server: ServeProcess) -> None:
    server.process.send_signal(signal.SIGUSR2)

    assert server.logs("upgrade: upgraded in ")
    assert ask(server.http, "POST", "/v2/models/echo/infer", body([1, 2, 3, 4]))[0] == 200
    assert server.stop() == 0


def test_a_server_of_one_process_says_what_it_lacks(repository: Path) -> None:
    with ServeProcess(repository) as server:
        refused = upgrade(server)
        gone = run_command("upgrade", "--pid=4194305")
        server.process.send_signal(signal.SIGUSR2)
        assert server.logs("the server cannot be upgraded")
        assert server.stop() == 0

    assert (refused.returncode, gone.returncode) == (1, 1)
    assert "process" in refused.stderr
    assert "process 4194305 does not exist" in gone.stderr
