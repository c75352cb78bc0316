"""Processes of a server are killed at random under load: each request has one right answer, or one clear error.

The clients check every answer. `--killed-requests` says how many requests they send in all.
"""

import contextlib
import http.client
import itertools
import json
import os
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, eventually, shared_memory_of, started_by, wait_until_ended
from tests.support.sequence_models import SUM_BY_ID, sequence_pbtxt
from tritonclient.utils import InferenceServerException

COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "UPTO").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_PBTXT = """
backend: "python"
input { name: "UPTO" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
SUMS_PBTXT = sequence_pbtxt("max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 256 }")

WAIT_S = 60.0
"""A request without an answer for so long hangs."""

CLEAR = re.compile(
    r"the engine ended before the request was answered"
    r"|the engine is being started again"
    r"|the worker process was ended by SIGKILL"
    r"|is over: the process that remembered it has ended"
    r"|was lost: the engine that had its state has ended"
)
"""What a request may be told in place of its answer."""

# How a request ended.
ANSWERED, REFUSED, BROKEN = "answered", "refused", "broken"


class Clients:
    """Clients in threads, each of which sends one request after the other and checks what comes."""

    def __init__(self, server: ServeProcess, seed: int) -> None:
        self.ends: dict[str, Counter[str]] = {name: Counter() for name in ("echo", "worker", "count", "sums")}
        self.faults: list[str] = []
        self._server = server
        self._seed = seed
        self._left = itertools.count()
        self._requests = 0
        self._killer: Killer | None = None
        self._ids = itertools.count(1)

    def send(self, requests: int, killer: "Killer") -> None:
        """Send about so many requests, or more until a process of each kind was killed meanwhile."""
        self._left, self._requests, self._killer = itertools.count(), requests, killer
        kinds = [self._http, self._http, self._grpc, self._grpc, self._streams, self._sequences]
        threads = [
            threading.Thread(target=self._run, args=(kind, random.Random(f"{self._seed} {number}")), daemon=True)
            for number, kind in enumerate(kinds)
        ]
        is_over = threading.Event()
        other = threading.Thread(target=killer.run, args=(is_over,), daemon=True)
        for thread in (*threads, other):
            thread.start()
        deadline = time.monotonic() + 3 * WAIT_S + requests / 50
        for thread in threads:
            while thread.is_alive() and not self.faults:
                thread.join(0.1)
                if time.monotonic() > deadline:
                    self.faults.append(f"not over in time; killed {killer.killed}, answered {self.ends}")
        is_over.set()
        other.join()
        assert self.faults == []

    def _run(self, kind: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while self._goes_on():
                kind(rng)
        except Exception as error:
            self.faults.append(repr(error))

    def _goes_on(self) -> bool:
        return not self.faults and (next(self._left) < self._requests or not (self._killer and self._killer.is_done))

    def _ended(self, model: str, how: str, error: str = "") -> None:
        self.ends[model][how] += 1
        if how == REFUSED and not CLEAR.search(error):
            self.faults.append(f"{model}: {error}")
        if how == BROKEN or "is being started again" in error:
            time.sleep(0.05)

    def _failed(self, model: str, error: InferenceServerException) -> None:
        """A call failed: the server answered with an error, or the connection broke."""
        text = f"{error.status()} {error.message()}"
        if CLEAR.search(text):
            self._ended(model, REFUSED, text)
        elif "UNAVAILABLE" in text or "The stream is no longer in valid state" in text:
            self._ended(model, BROKEN)
        else:
            self.faults.append(f"{model}: {text}")

    def _http(self, rng: random.Random) -> None:
        """One connection, for as long as it lasts."""
        with contextlib.closing(http.client.HTTPConnection(self._server.http, timeout=WAIT_S)) as connection:
            while True:
                model, number = rng.choice(["echo", "worker"]), next(self._ids)
                tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [number, 1, 2, 3]}
                try:
                    body = json.dumps({"id": str(number), "inputs": [tensor]})
                    connection.request("POST", f"/v2/models/{model}/infer", body)
                    response = connection.getresponse()
                    answer = json.loads(response.read())
                except TimeoutError:
                    raise
                except (OSError, http.client.HTTPException):
                    self._ended(model, BROKEN)
                    return
                if response.status == 200:
                    self._check(answer["id"] == str(number), model, answer)
                    self._check(answer["outputs"][0]["data"] == [number, 1, 2, 3], model, answer)
                    self._ended(model, ANSWERED)
                else:
                    self._check(response.status in (500, 503), model, response.status)
                    self._ended(model, REFUSED, answer["error"])
                if not self._goes_on():
                    return

    def _grpc(self, rng: random.Random) -> None:
        with _client(self._server) as client:
            while True:
                model, number = rng.choice(["echo", "worker"]), next(self._ids)
                sent = np.array([[number, 1, 2, 3]], np.float32)
                given = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
                given.set_data_from_numpy(sent)
                try:
                    result = client.infer(model, [given], request_id=str(number), client_timeout=WAIT_S)
                except InferenceServerException as error:
                    self._failed(model, error)
                else:
                    self._check(result.get_response().id == str(number), model, result.get_response())
                    self._check(np.array_equal(result.as_numpy("OUTPUT0"), sent), model, result.get_response())
                    self._ended(model, ANSWERED)
                if not self._goes_on():
                    return

    def _streams(self, rng: random.Random) -> None:
        """One stream, for as long as it lasts."""
        came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with _client(self._server) as client:
            client.start_stream(lambda result, error: came.put((result, error)))
            while True:
                number, upto = str(next(self._ids)), rng.randrange(6)
                given = grpcclient.InferInput("UPTO", [1], "INT32")
                given.set_data_from_numpy(np.array([upto], np.int32))
                try:
                    client.async_stream_infer("count", [given], request_id=number, enable_empty_final_response=True)
                    is_whole = self._take_stream(came, number, upto)
                except InferenceServerException as error:
                    self._failed("count", error)
                    is_whole = False
                if not is_whole or not self._goes_on():
                    return

    def _take_stream(self, came: "queue.Queue[tuple[Any, Any]]", number: str, upto: int) -> bool:
        """Take the responses of one request of a stream; return whether the stream can go on."""
        numbers = []
        while True:
            result, error = came.get(timeout=WAIT_S)
            if error is not None:
                self._failed("count", error)
                return False
            response = result.get_response()
            self._check(response.id == number, "count", response)
            if result.as_numpy("NUMBER") is not None:
                numbers.append(int(result.as_numpy("NUMBER")[0]))
            if response.parameters["triton_final_response"].bool_param:
                self._check(numbers == list(range(upto)), "count", numbers)
                self._ended("count", ANSWERED)
                return True

    def _sequences(self, rng: random.Random) -> None:
        """One sequence, to its end or its loss."""
        key, total, length = next(self._ids), 0, rng.randrange(1, 20)
        with _client(self._server) as client:
            for index in range(length):
                value = rng.randrange(100)
                given = grpcclient.InferInput("INPUT", [1, 1], "INT32")
                given.set_data_from_numpy(np.array([[value]], np.int32))
                is_last = index == length - 1
                try:
                    result = client.infer(
                        *("sums", [given]), sequence_id=key, sequence_start=index == 0, sequence_end=is_last,
                        client_timeout=WAIT_S,
                    )  # fmt: skip
                except InferenceServerException as error:
                    self._failed("sums", error)
                    return
                total += value
                self._check(int(result.as_numpy("OUTPUT")[0, 0]) == total + is_last * key, "sums", result)
                self._ended("sums", ANSWERED)
                if not is_last:
                    next(self._left)

    def _check(self, holds: bool, model: str, found: object) -> None:
        if not holds:
            self.faults.append(f"{model}: wrong answer {found}")


def _client(server: ServeProcess) -> Any:
    quickly = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 200)]
    return grpcclient.InferenceServerClient(
        server.grpc, channel_args=[*quickly, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    )


class Killer:
    """Kills processes of the server at random, one after the other."""

    def __init__(self, server: ServeProcess, seed: int, engines: int) -> None:
        self.killed: Counter[str] = Counter()
        self._guard = psutil.Process(server.process.pid)
        self._server = server
        self._rng = random.Random(seed)
        self._engines = engines
        is_apart = processes_of(self._guard)[0] != []
        self._kinds = {"worker", *["front end"] * is_apart, *["engine"] * (is_apart and engines > 0)}
        self._back = self._seen_back()

    @property
    def is_done(self) -> bool:
        return self._kinds <= set(self.killed)

    @property
    def are_back(self) -> bool:
        """Whether the front ends and engines that were killed are ready again."""
        return self._seen_back() >= self._back

    def _seen_back(self) -> int:
        return self._server.log.count(") is ready again")

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(self._rng.uniform(0.1, 0.8)):
            back = self._seen_back()
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # an engine that is chosen from, or a victim, has just exited
                kind, victim = self._choose()
                if victim is None:
                    continue
                victim.kill()
                self.killed[kind] += 1
                if kind != "worker":
                    self._back = back + 1

    def _choose(self) -> tuple[str, psutil.Process | None]:
        front_ends, engine = processes_of(self._guard)
        kinds: dict[str, list[psutil.Process]] = {"worker": []}
        if self.are_back:  # So one front end is left, and on a slow machine an engine can load its models.
            kinds["worker"] = [] if engine is None else started_by(engine.pid)
            kinds["front end"] = front_ends
            if self.killed["engine"] < self._engines and engine not in (None, self._guard):
                kinds["engine"] = [engine]
        kind = self._rng.choice([kind for kind in kinds if not self.killed[kind]] or list(kinds))
        return kind, self._rng.choice(kinds[kind]) if kinds[kind] else None


def processes_of(guard: psutil.Process) -> tuple[list[psutil.Process], psutil.Process | None]:
    """Return the front ends and the engine of a server; the process itself if it is the only one."""
    named = {}
    for process in guard.children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "charonia.cli.serve_process" in process.cmdline():
                named[next(word for word in process.cmdline() if re.fullmatch(r"engine|front_end_\d+", word))] = process
    front_ends = [process for name, process in named.items() if name != "engine"]
    return front_ends, named.get("engine", None if front_ends else guard)


def is_ready(server: ServeProcess) -> bool:
    try:
        with urlopen(f"http://{server.http}/v2/health/ready", timeout=WAIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def has_statistics(server: ServeProcess) -> bool:
    """Whether the engine answers; a front end that has not met it again yet says 503."""
    try:
        counts(server)
    except HTTPError:
        return False
    return True


def counts(server: ServeProcess) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests that succeeded and failed, by model."""
    with urlopen(f"http://{server.http}/v2/models/stats", timeout=WAIT_S) as answer:
        found = json.load(answer)["model_stats"]
    return {
        each["name"]: (each["inference_stats"]["success"]["count"], each["inference_stats"]["fail"]["count"])
        for each in found
    }


def in_flight(server: ServeProcess) -> int:
    """Return the number of requests that wait or run."""
    with urlopen(f"http://{server.metrics}/metrics", timeout=WAIT_S) as page:
        found = re.findall(r"^nv_inference_pending_request_count\{.*\} (\d+)", page.read().decode(), re.M)
    return sum(map(int, found))


@pytest.fixture(params=SHAPES)
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    folder = tmp_path / "models"
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    write_model(folder, "worker", PYTHON_IDENTITY, config=identity_pbtxt("python", dims=(4,)))
    write_model(folder, "count", COUNT, config=COUNT_PBTXT)
    write_model(folder, "sums", SUM_BY_ID, config=SUMS_PBTXT)
    with ServeProcess(folder, *request.param) as started:
        yield started


@pytest.mark.timeout(3600)
def test_each_request_has_one_answer_or_one_clear_error(server: ServeProcess, pytestconfig: pytest.Config) -> None:
    requests = pytestconfig.getoption("killed_requests")
    guard = psutil.Process(server.process.pid)
    files = guard.num_fds()
    clients = Clients(server, seed=1)

    killer = Killer(server, seed=2, engines=1 + requests // 20_000)
    clients.send(requests // 2, killer)
    assert eventually(lambda: killer.are_back and is_ready(server) and in_flight(server) == 0), server.log
    assert eventually(lambda: all(has_statistics(server) for _ in range(20))), server.log
    ends, before = {name: Counter(end) for name, end in clients.ends.items()}, counts(server)
    # From here on the engine lives, so its statistics can be compared with what the clients saw.
    last = Killer(server, seed=3, engines=0)
    clients.send(requests // 2, last)
    assert eventually(lambda: last.are_back and is_ready(server) and in_flight(server) == 0), server.log

    print(f"killed: {dict(killer.killed + last.killed)}; requests: { {n: dict(c) for n, c in clients.ends.items()} }")
    is_apart = processes_of(guard)[0] != []
    for name, (succeeded, failed) in counts(server).items():
        since = clients.ends[name] - ends[name]
        broken = since[BROKEN]
        # "echo" runs in the front ends, too, and one that is killed loses the counts of its last second.
        least = 0 if is_apart and name == "echo" else since[ANSWERED]
        assert least <= succeeded - before[name][0] <= since[ANSWERED] + broken, name
        assert since[REFUSED] <= failed - before[name][1] <= since[REFUSED] + broken, name
    assert is_apart or not any(end[BROKEN] for end in clients.ends.values())
    # A connection or a region may take a moment to go.
    assert eventually(lambda: guard.num_fds() <= files + (0 if is_apart else 4)), (guard.num_fds(), files)
    processes = [guard, *guard.children(recursive=True)]
    regions = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # A worker that was killed last.
            regions |= shared_memory_of(process.pid)
    assert server.stop() == 0
    for process in processes:
        wait_until_ended(process)
    assert not any(map(os.path.exists, regions))
