"""`charonia explain` of a server that stock clients keep busy."""

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import trustme
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

SLEEP_S = 0.2
SLOW = PYTHON_IDENTITY.replace("import triton", "import time\nimport triton").replace(
    "        responses = []", "        time.sleep(SLEEP_S)\n        responses = []".replace("SLEEP_S", str(SLEEP_S))
)
CLIENTS, SECONDS = 6, 4.0
VALUE = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "slow", SLOW, config=identity_pbtxt("python", dims=(4,), max_batch_size=8))
    write_model(folder, "parent", b"", config=chain_pbtxt("slow", dims=(4,), max_batch_size=8))
    with ServeProcess(folder) as running:
        keep_busy(running)
        yield running


def keep_busy(server: ServeProcess) -> None:
    """Call the ensemble, and with it the model, from stock clients of both protocols."""
    end = time.monotonic() + SECONDS
    started = threading.Barrier(CLIENTS)

    def over_http() -> None:
        given = infer_input(httpclient, "INPUT0", VALUE)
        with httpclient.InferenceServerClient(server.http) as client:
            started.wait()
            while time.monotonic() < end:
                client.infer("parent", [given])

    def over_grpc() -> None:
        given = infer_input(grpcclient, "INPUT0", VALUE)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            started.wait()
            while time.monotonic() < end:
                client.infer("parent", [given])

    with ThreadPoolExecutor(CLIENTS) as threads:
        for done in [threads.submit(over_grpc if number % 2 else over_http) for number in range(CLIENTS)]:
            done.result()
    wait_for_mark(server)


def wait_for_mark(server: ServeProcess) -> None:
    """Wait until the explanation has all requests that were answered: it looks once a second."""
    with httpclient.InferenceServerClient(server.http) as client:
        (statistics,) = client.get_inference_statistics("slow")["model_stats"]
    give_up = time.monotonic() + 200
    while explained(server)["requests"]["success"] < statistics["inference_stats"]["success"]["count"]:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def explained(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.ask("/v2/models/slow/explain")
    return found


def explain(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_command("explain", *arguments)


def test_what_limits_a_busy_model_is_said_first(server: ServeProcess) -> None:
    done = explain("slow", "-u", server.http, "--json")

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    with httpclient.InferenceServerClient(server.http) as client:
        (statistics,) = client.get_inference_statistics("slow")["model_stats"]
    assert found["requests"]["success"] == statistics["inference_stats"]["success"]["count"]
    assert found["batches"]["count"] == statistics["execution_count"]
    slept_s = SLEEP_S * found["batches"]["count"]
    assert 0.9 * slept_s / found["seconds"] <= found["instances"]["busy"] <= 1
    kinds = [finding["kind"] for finding in found["findings"]]
    assert {"busy", "cores", "unbatched"} & set(kinds), found


def test_the_text_is_for_people(server: ServeProcess) -> None:
    done = explain("slow", "--url", f"http://{server.http}", "--model-version", "1")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("slow, version 1, in the last ")
    assert "  -> " in done.stdout
    assert "Instances    1 on the CPU" in done.stdout


def test_an_ensemble_names_the_step_that_limits_it(server: ServeProcess) -> None:
    found = server.ask("/v2/models/parent/explain")

    (step,) = found["steps"]
    assert step["model_name"] == "slow"
    assert found["requests"]["success"] > 0
    if step["instances"]["busy"] >= 0.85:
        assert found["findings"][0]["kind"] == "step"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nobody",), "'nobody' is not found"),
        (("slow", "--model-version", "9"), "9"),
    ],
)
def test_what_cannot_be_explained_is_said(server: ServeProcess, arguments: tuple[str, ...], expected: str) -> None:
    done = explain(*arguments, "-u", server.http)

    assert done.returncode == 1
    assert done.stderr.startswith("charonia explain: ")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_of_grpc_is_told_from_that_of_http(server: ServeProcess) -> None:
    done = explain("slow", "-u", server.grpc)

    assert done.stderr == "charonia explain: this port speaks gRPC (hint: -u names that of HTTP, 8000 by default)\n"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:1", "no charonia server answers at http://127.0.0.1:1: Connection refused (hint: -u names"),
        ("ftp://x", "expected HOST:PORT"),
        ("http://", "charonia explain: "),
    ],
)
def test_an_address_that_leads_nowhere_is_said(url: str, expected: str) -> None:
    done = explain("m", "-u", url)

    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_certificate_without_a_trusted_issuer_is_reported() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:

        def refuse() -> None:
            connection, _ = listening.accept()
            with connection, pytest.raises(OSError, match=r"(?i)ssl"):
                context.wrap_socket(connection, server_side=True).recv(1)

        refused = pool.submit(refuse)
        done = explain("m", "-u", f"https://127.0.0.1:{listening.getsockname()[1]}")
        refused.result()

    assert done.returncode == 1
    assert "its certificate is not trusted: " in done.stderr
    assert "(hint: --ssl-ca names certificates to trust)" in done.stderr
