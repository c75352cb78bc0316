"""Command lines of `charonia perf` as a user types them, against a real server."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import tritonclient.http as httpclient
import trustme
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, streaming, write_model
from tests.support.process import ServeProcess

from charonia.core.dtypes import DataType
from charonia.tools.perf import schedule

SECONDS_MAX = 200

FAST = ("--measurement-interval", "100", "--stability-percentage", "1e9", "--max-trials", "1000")
"""Short windows, and any of them are stable as soon as three one after the other have answers."""

SLOW = PYTHON_IDENTITY.replace("import triton", "import time\nimport triton").replace(
    "        responses = []", "        time.sleep(0.02)\n        responses = []"
)


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def number(self, name: str) -> float:
        found = re.search(rf"^\s*{re.escape(name)}: ([\d.e+]+)", self.out, re.MULTILINE)
        assert found is not None, f"no '{name}' in:\n{self.out}\n{self.err}"
        return float(found[1])


def perf(*arguments: str | Path) -> Outcome:
    done = run_command("perf", *arguments, seconds_max=SECONDS_MAX)
    return Outcome(done.returncode, done.stdout, done.stderr)


def write_models(repository: Path) -> None:
    write_model(repository, "identity", "", config=identity_pbtxt())
    write_model(repository, "flat", "", config=identity_pbtxt(max_batch_size=0))
    write_model(repository, "text", "", config=identity_pbtxt(datatype=DataType.BYTES, dims=(-1,)))
    write_model(repository, "ensemble", "", config=chain_pbtxt("identity", "python"))
    write_model(repository, "python", PYTHON_IDENTITY, config=identity_pbtxt("python"))
    write_model(repository, "slow", SLOW, config=identity_pbtxt("python", max_batch_size=0))
    decoupled = identity_pbtxt("python", more="model_transaction_policy { decoupled: true }")
    write_model(repository, "decoupled", streaming("[array] * 3"), config=decoupled)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    with ServeProcess(repository) as running:
        yield running


def test_a_sweep_over_http_prints_every_level_and_writes_a_row_for_each(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "perf.csv"

    done = perf("-m", "identity", "-u", server.http, "-b", "16", "-a", "--concurrency-range", "1:3", "-f", file, *FAST)

    assert (done.status, done.err) == (0, "")
    assert re.findall(r"^Request concurrency: (\d)$", done.out, re.MULTILINE) == ["1", "2", "3"]
    summary = re.findall(
        r"^Concurrency: (\d), throughput: [\d.e+]+ infer/sec, latency \d+ usec$", done.out, re.MULTILINE
    )
    assert summary == ["1", "2", "3"]
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert sorted(row["Concurrency"] for row in rows) == ["1", "2", "3"]
    assert all(float(row["Inferences/Second"]) > 0 and int(row["p50 latency"]) > 0 for row in rows)
    assert {row["Verdict"] for row in rows} == {"stable"}


def test_a_condition_that_is_true_fails_the_run_and_is_told(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    conditions = ("--fail-if", "p99 > 1ns", "--fail-if", "throughput < 0.001", "--fail-if", "errors > 0%")

    done = perf("-m", "identity", "-u", server.http, "--json", file, *conditions, *FAST)

    (line,) = done.err.splitlines()
    assert done.status == 3
    assert line.startswith("failed: p99 > 1ns: ")
    assert line.endswith(" at concurrency 1.")
    assert line.partition(": ")[2] not in done.out
    assert json.loads(file.read_text())["notes"][-1] == line.replace("failed", "Failed")


def test_an_ensemble_over_grpc_with_data_names_its_models(server: ServeProcess, tmp_path: Path) -> None:
    data = tmp_path / "real_data.json"
    steps = [{"INPUT0": [number] * 16} for number in range(3)]
    data.write_text(json.dumps({"data": steps, "validation_data": [{"OUTPUT0": step["INPUT0"]} for step in steps]}))

    done = perf(
        *("-m", "ensemble", "-b", "16", "--input-data", data, "--concurrency-range", "1:2", "--percentile=90"),
        *("-i", "grpc", "-u", server.grpc, "-f", tmp_path / "perf.csv", *FAST),
    )

    assert (done.status, done.err) == (0, "")
    assert "Inferences/Second vs. Client p90 Batch Latency" in done.out
    assert "  Composing models: \n  identity, version: 1\n      Inference count: " in done.out
    assert "  python, version: 1\n" in done.out
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == [
        *("identity_v1.perf.csv", "perf.csv", "python_v1.perf.csv"),
    ]


def test_a_rate_is_kept_and_the_result_is_json(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "run.json"

    done = perf(
        *("-m", "identity", "-u", server.http, "--request-rate-range=40", "--request-distribution", "poisson"),
        *("--request-count", "45", "--seed", "5", "--goodput", "latency:60s"),
        *("--json", file, "--html", tmp_path / "r.html"),
    )

    assert done.status == 0, done.err
    assert "  Using poisson distribution on request generation\n" in done.out
    planned_ns = list(islice(schedule.poisson(40, seed=5), 45))
    assert 0 < done.number("Throughput") <= 45 * 1e9 / (planned_ns[-1] - planned_ns[0])
    run = json.loads(file.read_text())
    assert run["levels"][0]["goodput"]["share"] == 1
    assert run["options"]["seed"] == "5"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_responses_of_a_stream_are_counted_and_exported(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"

    done = perf(
        *("-m", "decoupled", "-i", "grpc", "-u", server.grpc, "--async", "--streaming", "-v", *FAST),
        *("--profile-export-file", file),
    )

    assert done.status == 0, done.err
    assert done.number("Response Throughput") == pytest.approx(3 * done.number("Throughput"), rel=0.01)
    assert "  Pass [1] throughput: " in done.out
    experiment = json.loads(file.read_text())["experiments"][0]
    assert experiment["experiment"] == {"mode": "concurrency", "value": 1}
    assert all(len(request["response_timestamps"]) == 3 for request in experiment["requests"][:20])
    assert len(experiment["requests"][0]["request_inputs"]["INPUT0"]) == 16


@pytest.mark.parametrize("load", [("--concurrency-range", "5"), ("--request-rate-range", "150")])
def test_several_load_processes_send_exactly_what_was_asked_for(server: ServeProcess, load: tuple[str, str]) -> None:
    done = perf("-m", "flat", "-u", server.http, *load, "--processes", "3", "--request-count", "200", "--json", "-")

    assert "Request count: 200" in done.err
    run = json.loads(done.out)  # alone there
    (level,) = run["levels"]
    assert level["request_count"] == 200
    assert level["errors"] == []


def test_quiet_says_nothing(server: ServeProcess) -> None:
    done = perf("-m", "identity", "-u", server.http, "--request-count", "20", "--quiet")

    assert (done.status, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("-m", "missing"), "failed to get model metadata: Request for unknown model: 'missing' is not found"),
        (("-m", "identity", "-b", "65"), "-b: expected at most 64, the max_batch_size of model 'identity', got 65"),
        (("-m", "flat", "-b", "2"), "-b: expected 1, as model 'flat' does not support batching, got 2"),
        (
            ("-m", "decoupled"),
            "model 'decoupled' is decoupled: expected --streaming and -i grpc, got -i http",
        ),
        (("-m", "text"), "input 'INPUT0' of model 'text': expected fixed dimensions, got [-1]"),
        (("-m", "identity", "--streaming"), "--streaming: expected -i grpc with it, got -i http"),
    ],
)
def test_what_cannot_be_measured_is_one_line(server: ServeProcess, arguments: tuple[str, ...], problem: str) -> None:
    done = perf("-u", server.http, *arguments)

    assert (done.status, done.out) == (99, "")
    assert done.err.splitlines()[0].startswith(f"error: {problem}")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_of_a_repository_is_served_while_it_is_measured(protocol: str, tmp_path: Path) -> None:
    write_models(tmp_path)

    done = perf(tmp_path, "-m", "identity", "-i", protocol, *FAST)

    assert (done.status, done.err) == (0, "")
    assert done.number("Request count") > 0
    several = perf(tmp_path)
    assert (several.status, several.out) == (99, "")
    assert several.err.startswith(f"error: expected the name of a model, got none (hint: '{tmp_path}' has decoupled, ")
    assert perf("resnet").err == (
        "error: there is no file or folder 'resnet' (hint: a model of a running server is named with -m)\n"
    )


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = perf("-m", "identity", "-u", "127.0.0.1:1")

    assert (done.status, done.out) == (99, "")
    assert done.err == (
        "error: failed to get model metadata: no connection to http://127.0.0.1:1: Connection refused "
        "(hint: -u names the server)\n"
    )


def test_the_port_of_the_other_protocol_is_said(server: ServeProcess) -> None:
    http = perf("-m", "identity", "-u", server.grpc)
    grpc = perf("-m", "identity", "-i", "grpc", "-u", server.http)
    secure = perf("-m", "identity", "-u", f"https://{server.http}")

    assert (http.status, grpc.status, secure.status) == (99, 99, 99)
    assert (
        "this port speaks gRPC over HTTP/2: grpc://HOST:PORT (hint: does another protocol have that port? " in http.err
    )
    assert "(hint: does another protocol have that port? HTTP has 8000, -i grpc 8001" in grpc.err
    assert "Traceback" not in secure.err


def start(*arguments: str | Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "charonia", "perf", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(line):
            return
    raise AssertionError(f"it ended without '{line}'")


def test_an_interrupted_run_reports_what_was_measured(server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "perf.csv"
    # Windows that each have a request.
    windows = ("--measurement-mode", "count_windows", "--measurement-request-count", "1", "-s", "0", "-r", "1000")
    with start("-m", "identity", "-u", server.http, *windows, "-v", "-f", file) as running:
        wait_for(running, "  Pass [1] throughput: ")
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=SECONDS_MAX)

    assert running.returncode == 130
    assert "  Verdict: interrupted: " in out
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0


def wait_for_inferences(server: ServeProcess, count: int) -> None:
    """Wait until the model has answered so many requests: on a busy machine load begins late."""
    deadline = time.monotonic() + SECONDS_MAX
    with httpclient.InferenceServerClient(server.http) as client:
        while client.get_inference_statistics("identity")["model_stats"][0]["inference_count"] < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "identity", "", config=identity_pbtxt())
    file = tmp_path / "run.json"
    with ServeProcess(tmp_path / "models") as server:
        arguments = ("-m", "identity", "-u", server.http, "-p", "20000", "--json", file)
        with start(*arguments) as running:
            wait_for(running, "Request concurrency: 1")
            wait_for_inferences(server, 100)
            server.kill()
            out, _ = running.communicate(timeout=SECONDS_MAX)

    assert running.returncode == 1
    assert "  Verdict: server lost: " in out
    (level,) = json.loads(file.read_text())["levels"]
    assert level["verdict"] == "server_lost"
    assert level["request_count"] > 0


def test_both_protocols_go_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key, root = (tmp_path / name for name in ("cert.pem", "key.pem", "root.pem"))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    root.write_bytes(authority.cert_pem.bytes())
    write_model(tmp_path / "models", "identity", "", config=identity_pbtxt())
    flags = [
        f"--{kind}-{name}"
        for kind in ("http", "grpc")
        for name in ("use-ssl=true", f"server-cert={certificate}", f"server-key={key}")
    ]

    with ServeProcess(tmp_path / "models", *flags) as server:
        https = perf(
            *("-m", "identity", "-u", f"https://{server.http}", "--ssl-https-ca-certificates-file", root),
            *("--request-count", "20"),
        )
        grpcs = perf(
            *("-m", "identity", "-i", "grpc", "-u", server.grpc, "--ssl-grpc-use-ssl"),
            *("--ssl-grpc-root-certifications-file", root, "--request-count", "20"),
        )
        distrusted = perf("-m", "identity", "-u", f"https://{server.http}", "--request-count", "20")

    assert (https.status, https.number("Request count")) == (0, 20)
    assert (grpcs.status, grpcs.number("Request count")) == (0, 20)
    assert distrusted.status == 99
    assert "certificate" in distrusted.err
