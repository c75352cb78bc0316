"""Three servers behind Envoy, nginx and HAProxy as deploy/balancers configures them; clients are tritonclient's own."""

import http.client
import json
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tests.support.balancers import Balancer, every_balancer
from tests.support.models import COUNT_PBTXT, NUMBERS_BELOW, identity, identity_pbtxt, streaming, write_model
from tests.support.process import ServeProcess, eventually
from tests.support.sequence_models import RUNNING_SUM, sequence_pbtxt
from tests.support.stock_clients import infer_input

from charonia.core.dtypes import DataType

ROOT = Path(__file__).parents[2]
LARGE_BYTES = 16 << 20
STEPS = 5
SENDERS = 4  # for each protocol

Servers = Sequence[ServeProcess]

CLIENTS = [pytest.param(http_client, id="http"), pytest.param(grpc_client, id="grpc")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "identity", identity(DataType.FP32, ("n",)))
    counting = streaming(NUMBERS_BELOW, "NUMBER", pause_s=0.2)
    write_model(folder, "count", counting, config=COUNT_PBTXT)
    write_model(
        folder,
        "sum",
        RUNNING_SUM,
        config=sequence_pbtxt("max_sequence_idle_microseconds: 60000000 direct { }", max_batch_size=16),
    )
    return folder


@pytest.fixture(scope="module")
def servers(repository: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield [stack.enter_context(ServeProcess(repository)) for _ in range(3)]


@pytest.fixture(params=every_balancer())
def balancer(servers: Servers, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Balancer]:
    with Balancer(request.param, tmp_path, servers) as balancer:
        yield balancer


def ask(client: Any, module: Any, array: np.ndarray[Any, Any]) -> None:
    """Send one request to `identity` and check its answer."""
    assert np.array_equal(client.infer("identity", [infer_input(module, "INPUT0", array)]).as_numpy("OUTPUT0"), array)


def address(balancer: Balancer, module: Any) -> str:
    return balancer.http if module is http_client else balancer.grpc


def executed(server: ServeProcess, model: str) -> int:
    with grpc_client.InferenceServerClient(server.grpc) as client:
        statistics = client.get_inference_statistics(model, as_json=True)
    return int(statistics["model_stats"][0].get("inference_count", 0))


@pytest.mark.parametrize("module", CLIENTS)
def test_requests_go_to_all_servers_and_large_tensors_pass(servers: Servers, balancer: Balancer, module: Any) -> None:
    before = [executed(server, "identity") for server in servers]
    with module.InferenceServerClient(address(balancer, module)) as client:
        for _ in range(30):
            ask(client, module, np.arange(16, dtype=np.float32)[None])
        for _ in range(3):
            ask(client, module, np.zeros((1, LARGE_BYTES // 4), np.float32))

    counts = [executed(server, "identity") - earlier for server, earlier in zip(servers, before, strict=True)]
    assert sum(counts) == 33
    assert min(counts) > 0


def test_events_of_a_stream_come_one_by_one(balancer: Balancer) -> None:
    connection = http.client.HTTPConnection(balancer.http, timeout=200)
    connection.request("POST", "/v2/models/count/generate_stream", json.dumps({"UPTO": 5}))
    with connection.getresponse() as response:
        times = [time.monotonic() for line in response if line.startswith(b"data:")]
    connection.close()

    assert len(times) == 5
    assert times[-1] - times[0] > 0.5


def test_responses_of_a_grpc_stream_come_one_by_one_in_both_directions(balancer: Balancer) -> None:
    answers: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
    upto = infer_input(grpc_client, "UPTO", np.array([3], np.int32))
    with grpc_client.InferenceServerClient(balancer.grpc) as client:
        client.start_stream(lambda result, error: answers.put((time.monotonic(), result, error)))
        for _ in range(2):  # the second one while the stream is open
            client.async_stream_infer("count", [upto])
            found = [answers.get(timeout=200) for _ in range(3)]
            assert [error for _, _, error in found] == [None] * 3
            assert [int(result.as_numpy("NUMBER")[0]) for _, result, _ in found] == [0, 1, 2]
            assert found[-1][0] - found[0][0] > 0.2
        client.stop_stream()


@pytest.mark.parametrize("module", CLIENTS)
def test_a_sequence_stays_on_its_server(servers: Servers, balancer: Balancer, module: Any) -> None:
    before = [executed(server, "sum") for server in servers]
    names = range(1, 13)
    value = infer_input(module, "INPUT", np.array([[2]], np.int32))
    with module.InferenceServerClient(address(balancer, module)) as client:
        for step in range(1, STEPS + 1):
            for name in names:
                answer = client.infer(
                    "sum",
                    [value],
                    headers={"x-sequence-id": str(name)},
                    sequence_id=name,
                    sequence_start=step == 1,
                    sequence_end=step == STEPS,
                )
                assert answer.as_numpy("OUTPUT")[0, 0] == 2 * step

    counts = [executed(server, "sum") - earlier for server, earlier in zip(servers, before, strict=True)]
    assert sum(counts) == len(names) * STEPS
    assert sum(count > 0 for count in counts) > 1


@dataclass
class Load:
    """Clients of both protocols that send small requests until they are told to end."""

    balancer: Balancer
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def send(self, module: Any) -> None:
        array = np.arange(16, dtype=np.float32)[None]
        with module.InferenceServerClient(address(self.balancer, module)) as client:
            while not self.over.is_set():
                try:
                    ask(client, module, array)
                    self.answered += 1
                except Exception as error:
                    self.failures.append(f"{module.__name__}: {error!r} {error}")
                time.sleep(0.002)

    def goes_on(self, requests: int = 500) -> None:
        wanted = self.answered + requests
        assert eventually(lambda: self.answered >= wanted, 60), self.failures[-3:]


@pytest.mark.parametrize("name", every_balancer())
def test_a_drained_server_loses_nothing_and_a_killed_one_what_it_had(
    name: str, repository: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ServeProcess(repository)) for _ in range(3)]
        balancer = stack.enter_context(Balancer(name, tmp_path, servers))
        load = Load(balancer)
        threads = [threading.Thread(target=load.send, args=(param.values[0],)) for param in CLIENTS * SENDERS]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(load.over.set)

        load.goes_on()
        balancer.drain(servers[0])
        assert servers[0].stop() == 0
        load.goes_on()
        # A reload of nginx closes connections on which it has read no request; the client may be about to send one.
        refused = [found for found in load.failures if name == "nginx" and "HTTPConnectionClosed" in found]
        assert load.failures == refused
        assert len(refused) <= SENDERS
        load.failures.clear()

        servers[1].kill()
        load.goes_on()
        lost = list(load.failures)
        load.goes_on()

    # Of each client the request in flight, and one on a connection opened while the system still closes the server's.
    assert len(lost) <= 2 * len(threads), lost
    assert load.failures == lost


@pytest.mark.parametrize("name", every_balancer("nginx", "haproxy"))
def test_a_server_that_delays_its_exit_is_taken_out_by_the_checks(name: str, repository: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ServeProcess(repository, "--exit-delay-secs=5")) for _ in range(3)]
        load = Load(stack.enter_context(Balancer(name, tmp_path, servers)))
        threads = [threading.Thread(target=load.send, args=(param.values[0],)) for param in CLIENTS * SENDERS]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(load.over.set)

        load.goes_on()
        assert servers[0].stop() == 0
        load.goes_on()

    assert load.failures == []


@pytest.mark.parametrize("name", every_balancer("nginx", "haproxy"))
def test_what_a_server_says_it_has_not_executed_is_sent_to_another_one(
    name: str, repository: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ServeProcess(repository)) for _ in range(3)]
        load = Load(stack.enter_context(Balancer(name, tmp_path, servers)))
        threads = [threading.Thread(target=load.send, args=(param.values[0],)) for param in CLIENTS * SENDERS]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(load.over.set)

        load.goes_on()
        for server in servers[:2]:
            assert server.stop() == 0
            load.goes_on()

    # Over HTTP/1.1 a server may close an idle connection while a request is on its way there.
    closed = [
        found for found in load.failures if found.startswith("tritonclient.http") and "connection termination" in found
    ]
    assert load.failures == closed
    assert len(closed) <= 2 * SENDERS


def with_load_reports(text: str) -> str:
    """Return a file of Envoy's as docs/balancers.md changes it."""
    page = (ROOT / "docs/balancers.md").read_text(encoding="utf-8")
    policy, header = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    text = text.replace("      lb_policy: LEAST_REQUEST\n", indent(policy, " " * 6))
    return re.sub(r'( *)domains: \["\*"\]\n', lambda found: found[0] + indent(header, found[1]), text)


@pytest.mark.parametrize("module", CLIENTS)
@pytest.mark.parametrize("name", every_balancer("nginx", "haproxy"))
def test_a_server_that_reports_to_get_less_done_gets_fewer_requests(name: str, module: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = []
        for number, delay_ms in enumerate((5, 5, 50)):
            config = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}'
            write_model(tmp_path / str(number), "identity", b"", config=identity_pbtxt() + config)
            servers.append(stack.enter_context(ServeProcess(tmp_path / str(number))))
        load = Load(stack.enter_context(Balancer(name, tmp_path, servers, with_load_reports)))
        for _ in range(SENDERS):
            thread = threading.Thread(target=load.send, args=(module,))
            thread.start()
            stack.callback(thread.join)
        stack.callback(load.over.set)

        def are_weights_used() -> bool:
            before = [executed(server, "identity") for server in servers]
            load.goes_on()
            counts = [executed(server, "identity") - earlier for server, earlier in zip(servers, before, strict=True)]
            return 0 < counts[2] < min(counts[:2]) / 2

        assert eventually(are_weights_used)

    assert load.failures == []


@pytest.mark.parametrize("name", every_balancer())
def test_errors_are_json_whoever_gives_them(name: str, servers: Servers, tmp_path: Path) -> None:
    with Balancer(name, tmp_path, servers) as balancer, httpx.Client(base_url=f"http://{balancer.http}") as client:
        unknown = client.post("/v2/models/missing/infer", json={"inputs": []})
        large = client.post("/v2/models/identity/infer", content=b"x" * (65 * 2**20), timeout=200)

    assert [found.headers["content-type"].split(";")[0] for found in (unknown, large)] == ["application/json"] * 2
    assert "67108864" in large.json()["error"]


@pytest.mark.parametrize("name", every_balancer())
def test_a_balancer_without_servers_answers_in_json(name: str, repository: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(ServeProcess(repository)) for _ in range(3)]
        balancer = stack.enter_context(Balancer(name, tmp_path, processes))
        for process in processes:
            process.kill()
        found = httpx.get(f"http://{balancer.http}/v2/health/ready", timeout=200)

    assert found.status_code == (502 if name == "nginx" else 503)
    assert found.json().keys() == {"error"}
