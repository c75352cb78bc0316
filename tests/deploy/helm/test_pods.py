"""The pods of the chart as processes: the default release serves and its test infers; who is deleted loses nothing."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tests.support.chart import Manifest, objects, objects_of, of_kind, server_of
from tests.support.fork_server import run_command
from tests.support.kubelet import Service, delete, mount_config_map
from tests.support.models import identity_pbtxt, write_model
from tests.support.ports import free_port
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.stock_clients import infer_input

from charonia.cli.infer import run as infer

HERE = Path(__file__).parent
HTTP_TIMEOUT_S = 200.0
TENSOR = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY = json.dumps({"inputs": [TENSOR]})


def pod_of(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = server_of(manifests)["spec"]["template"]["spec"]
    return spec


def arguments_of(spec: Manifest) -> list[str]:
    """The server's arguments but its repository."""
    repository, *others = spec["containers"][0]["args"]
    assert repository == "/models"
    return [argument.replace("$(CHARONIA_REQUESTED_CORES)", "1") for argument in others]


def test_the_default_release_serves_and_its_test_infers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = objects(HERE / "values" / "default.yaml")
    spec = pod_of(manifests)
    (data,) = [made["data"] for made in of_kind(manifests, "ConfigMap")]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    (test,) = of_kind(manifests, "Pod")
    models = mount_config_map(data, volume["configMap"]["items"], tmp_path / "models")

    with ServeProcess(models, *arguments_of(spec)) as server:
        (url,) = [a for a in test["spec"]["containers"][0]["args"] if a.startswith("--url=")]
        others = [a for a in test["spec"]["containers"][0]["args"] if a != url]
        status = infer([*others, f"--url=http://{server.http}"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert get(server.http, spec["containers"][0][probe]["httpGet"]["path"]) == 200
        assert server.process.poll() is None
        server.kill()

    assert status == 0
    assert "OUTPUT0" in capsys.readouterr().out


def test_where_keys_are_asked_for_probes_need_none_and_the_test_of_the_release_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = objects(HERE / "values" / "api-keys.yaml")
    spec = pod_of(manifests)
    (data,) = [made["data"] for made in of_kind(manifests, "ConfigMap")]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    models = mount_config_map(data, volume["configMap"]["items"], tmp_path / "models")
    key = run_command("key", "ci", "infer,read", "--file", tmp_path / "keys.txt").stdout.split()[-1]
    (test,) = of_kind(manifests, "Pod")
    arguments = [a for a in test["spec"]["containers"][0]["args"] if not a.startswith("--url=")]

    with ServeProcess(models, *(a.replace("/etc/charonia/keys", str(tmp_path)) for a in arguments_of(spec))) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert get(server.http, spec["containers"][0][probe]["httpGet"]["path"]) == 200
        assert infer([*arguments, f"--url=http://{server.http}"]) == 1
        monkeypatch.setenv("CHARONIA_API_KEY", key)
        assert infer([*arguments, f"--url=http://{server.http}"]) == 0
        server.kill()


def test_a_model_that_cannot_be_loaded_stops_the_roll_out_and_restarts_nothing(tmp_path: Path) -> None:
    spec = pod_of(objects(HERE / "values" / "default.yaml"))
    write_model(tmp_path, "good", b"", config=identity_pbtxt("identity", dims=(4,)))
    write_model(tmp_path, "bad", b"", config='backend: "there_is_none"')
    probes = spec["containers"][0]

    with ServeProcess(tmp_path, *arguments_of(spec)) as server:
        assert get(server.http, probes["startupProbe"]["httpGet"]["path"]) == 200
        assert get(server.http, probes["livenessProbe"]["httpGet"]["path"]) == 200
        assert get(server.http, probes["readinessProbe"]["httpGet"]["path"]) >= 400  # which is a failure of a probe
        server.kill()


def started_job(manifests: list[Manifest], ports: dict[str, int], scratch: Path) -> "subprocess.Popen[str]":
    """Start the container of the tune Job, where the services are ports of this machine, and its volume is a folder."""
    (job,) = of_kind(manifests, "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (home,) = [entry["value"] for entry in container["env"] if entry["name"] == "HOME"]
    assert home == container["workingDir"] == "/scratch"
    words = [argument.replace("/scratch", str(scratch)) for argument in (*container["command"], *container["args"])]
    words = [re.sub(r"demo-charonia(?:-headless)?:(\d+)", lambda m: f"127.0.0.1:{ports[m[1]]}", w) for w in words]
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=scratch,
        env={**os.environ, "HOME": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_tune_job_waits_for_the_server_of_its_release_and_prints_what_it_found(tmp_path: Path) -> None:
    quick = [
        "--measurement-time=0.2",
        "--run-config-search-max-concurrency=2",
        "--run-config-search-max-instance-count=2",
    ]
    tune = {"enabled": True, "models": ["echo"], "timeBudget": "5s", "args": quick}
    manifests = objects_of(
        {"server": {"modelControlMode": "explicit", "loadModels": ["*"]}, "tune": tune, "cpuCores": 1}
    )
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "4" } }'
    write_model(tmp_path / "models", "echo", b"", config=identity_pbtxt("identity", dims=(4,), more=delay))
    (tmp_path / "scratch").mkdir()
    ports = {port: free_port() for port in ("8000", "8001", "8002")}
    listening = [
        f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports.values(), strict=True)
    ]

    # Helm makes both at once.
    with started_job(manifests, ports, tmp_path / "scratch") as job:
        assert job.stderr is not None
        first = job.stderr.readline()
        with ServeProcess(tmp_path / "models", *arguments_of(pod_of(manifests)), *listening):
            out, log = job.communicate(timeout=200)

    assert first.startswith("waiting for a server: no connection to ")
    assert job.returncode == 0, log
    (line,) = [line for line in out.splitlines() if line.startswith('{"format"')]  # as the manual tells to find it
    (group,) = json.loads(line)["groups"]
    assert group["decision"]["best"]["variant"] in [variant["variant"] for variant in group["variants"]]
    assert re.search(r"^\[1\] echo_config_default, concurrency 1: \d+ infer/s", log, re.MULTILINE)


def get(address: str, path: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=HTTP_TIMEOUT_S)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def in_flight(address: str) -> int:
    with urlopen(f"http://{address}/v2/load") as answer:
        return int(json.load(answer)["named_metrics"]["requests_in_flight"])


class Clients:
    """Clients that send requests, without ever trying one again, until they are told to stop."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.answered: dict[str, list[float]] = {}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, kind: str, ask: Callable[[], object], pause_s: float = 0.0) -> None:
        self.answered[kind] = []
        thread = threading.Thread(target=self._run, args=(kind, ask, pause_s))
        self._threads.append(thread)
        thread.start()

    def wait_for_answers(self) -> None:
        """Wait until each kind of client has had another answer to a request that it has sent meanwhile."""
        before = {kind: len(times) + 1 for kind, times in self.answered.items()}
        assert eventually(lambda: all(len(self.answered[kind]) > count for kind, count in before.items())), self.lost

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(HTTP_TIMEOUT_S)

    def _run(self, kind: str, ask: Callable[[], object], pause_s: float) -> None:
        while not self._is_over.is_set():
            try:
                ask()
                self.answered[kind].append(time.monotonic())
            except Exception as error:
                self.lost.append(f"{kind}: {type(error).__name__}: {error}")
                time.sleep(0.01)
            self._is_over.wait(pause_s)


class Keeping:
    """A client that keeps its connection for as long as the server lets it."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=HTTP_TIMEOUT_S)

    def __call__(self) -> None:
        try:
            self._connection.request("POST", "/v2/models/echo/infer", BODY)
            answer = self._connection.getresponse()
            content = answer.read()
        except BaseException:
            self.close()
            raise
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {content!r}")

    def close(self) -> None:
        self._connection.close()


def ask_anew(address: str) -> None:
    with closing(Keeping(address)) as ask:
        ask()


def over_grpc(address: str, stack: ExitStack) -> Callable[[], object]:
    client = stack.enter_context(grpcclient.InferenceServerClient(address))
    tensor = infer_input(grpcclient, "INPUT0", np.ones((1, 4), np.float32))
    return lambda: client.infer("echo", [tensor])


@contextmanager
def under_load(clients: Clients, services: dict[Service, str]) -> Iterator[None]:
    http_address, grpc_address = (service.address for service in services)
    with ExitStack() as stack:
        clients.add("keeps its connection", stack.enter_context(closing(Keeping(http_address))))
        clients.add("keeps it, and is slow", stack.enter_context(closing(Keeping(http_address))), pause_s=0.7)
        clients.add("connects anew", partial(ask_anew, http_address))
        clients.add("gRPC", over_grpc(grpc_address, stack))
        clients.add("another gRPC", over_grpc(grpc_address, stack))
        stack.callback(clients.stop)
        yield


def spec_for(**drain: int) -> dict[str, Any]:
    return pod_of(objects_of({"drain": drain, "cpuCores": 1}))


@contextmanager
def two_pods(folder: Path, spec: dict[str, Any], shape: Shape) -> Iterator[tuple[ServeProcess, dict[Service, str]]]:
    """Two pods behind services of HTTP and gRPC, with a model that takes 50 ms: one pod, and its addresses there."""
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "50" } } instance_group { count: 4 }'
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,), more=delay))
    more = (*arguments_of(spec), *shape)
    with ServeProcess(folder, *more) as first, ServeProcess(folder, *more) as second:
        with Service(first.http, second.http) as http_service, Service(first.grpc, second.grpc) as grpc_service:
            yield first, {http_service: first.http, grpc_service: first.grpc}
        second.kill()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pod_that_is_deleted_loses_no_request_though_its_endpoint_stays_for_a_while(
    tmp_path: Path, shape: Shape
) -> None:
    spec = spec_for(preStopSeconds=1, leaveSeconds=3, limitSeconds=30)
    clients = Clients()

    with two_pods(tmp_path, spec, shape) as (pod, services), under_load(clients, services):
        clients.wait_for_answers()
        begun_s = time.monotonic()
        end = delete(pod, spec, services, lag_s=2.0)
        ended_s = time.monotonic()
        clients.wait_for_answers()

    assert clients.lost == []
    for kind, times in clients.answered.items():
        assert [at for at in times if at < begun_s], kind
        assert [at for at in times if at > ended_s], kind
    assert (end.status, end.was_killed) == (0, False)
    assert end.seconds >= 1 + 3


def test_a_request_that_takes_longer_than_the_other_steps_is_answered(tmp_path: Path) -> None:
    spec = spec_for(preStopSeconds=0, leaveSeconds=0, limitSeconds=30)
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "2500" } }'
    write_model(tmp_path, "echo", b"", config=identity_pbtxt("identity", dims=(4,), more=delay))
    clients = Clients()

    with ServeProcess(tmp_path, *arguments_of(spec)) as server, Service(server.http) as service:
        clients.add("slow model", partial(ask_anew, service.address), pause_s=60)
        assert eventually(lambda: in_flight(server.http) == 1)
        end = delete(server, spec, {service: server.http}, lag_s=0.0)
        clients.stop()

    assert clients.lost == []
    assert len(clients.answered["slow model"]) == 1
    assert (end.status, end.was_killed) == (0, False)
