"""Command lines of `charonia tune` as a user types them, against real servers."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import ServeProcess, wait_until_ended

from charonia.client import Client
from charonia.config.pbtxt import parse

SECONDS_MAX = 200
Tuned = tuple[Path, "subprocess.CompletedProcess[str]"]
QUICK = ("--measurement-time", "0.2", "--run-config-search-max-concurrency", "1", "--run-config-search-mode", "brute")
HEADER = (
    "Model,Batch,Concurrency,Model Config Path,Instance Group,Max Batch Size,Satisfies Constraints,"
    "Throughput (infer/sec),p99 Latency (ms)"
)

# Models that rest leave the machine to other tests: what answers at once is busy for as long as it is measured.
REST_MS = 4
RESTING = PYTHON_IDENTITY.replace("import triton", "import time\nimport triton").replace(
    "        responses = []", f"        time.sleep({REST_MS / 1000})\n        responses = []"
)
RESTS = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{REST_MS}" }} }}'
DIES_WITH_TWO = RESTING.replace(
    "    def execute(",
    """    def initialize(self, args):
        import json, psutil
        if json.loads(args["model_config"])["instance_group"][0]["count"] == 2:
            for process in psutil.Process().parents():
                if "serve" in process.cmdline():
                    process.kill()

    def execute(""",
)
FAILS_WITH_TWO = RESTING.replace(
    "    def execute(",
    """    def initialize(self, args):
        import json
        if json.loads(args["model_config"])["instance_group"][0]["count"] == 2:
            raise ValueError("no room for two")

    def execute(""",
)


def write(folder: Path, code: str = "", *, name: str = "m") -> Path:
    """Write a Python model, or without code one that needs no worker processes, which start slowly."""
    backend, more = ("python", "") if code else ("identity", RESTS)
    write_model(folder / "models", name, code, config=identity_pbtxt(backend, dims=(4,), max_batch_size=0, more=more))
    return folder / "models"


def options(folder: Path, *arguments: str) -> list[str]:
    return [
        *("tune", "profile", "--profile-models", "m", "-e", str(folder / "results")),
        *("--output-model-repository-path", str(folder / "out"), "-s", str(folder / "journal"), *QUICK, *arguments),
    ]


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "charonia", *options(folder, *arguments)]


def tune(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_command(*options(folder, *arguments), seconds_max=SECONDS_MAX)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results" / "results" / "charonia-tune.json").read_text())
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The folder of a run that tried two variants, and the run."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, tune(folder, "-m", str(write(folder, RESTING)), "--run-config-search-max-instance-count", "2", "-v")


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[ServeProcess]:
    repository = write(tmp_path)
    write(tmp_path, name="other")
    write_model(repository, "parent", b"", config=chain_pbtxt("m", dims=(4,), max_batch_size=0))
    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


def at(server: ServeProcess) -> tuple[str, ...]:
    return (
        *("--triton-launch-mode", "remote", "--triton-http-endpoint", server.http),
        *("--triton-grpc-endpoint", server.grpc, "--triton-metrics-url", f"http://{server.metrics}/metrics"),
    )


def state(server: ServeProcess) -> dict[str, object]:
    with Client(server.http) as client:
        ready = {entry.name for entry in client.repository_index(ready=True)}
        return {name: client.model_config(name) for name in ready}


def test_a_model_is_tuned_and_everything_is_written(
    tuned: Tuned,
) -> None:
    folder, done = tuned

    assert done.returncode == 0, done.stderr
    table = (folder / "results" / "results" / "metrics-model-inference.csv").read_text()
    assert table.splitlines()[0] == HEADER
    assert table.endswith("\n\n")
    rows = list(csv.DictReader(table.splitlines()[:-1]))
    assert {row["Model Config Path"] for row in rows} == {"m_config_default", "m_config_0"}
    assert {row["Instance Group"] for row in rows} == {"1:CPU", "2:CPU"}
    assert float(rows[0]["Throughput (infer/sec)"]) > 0
    assert HEADER in done.stdout
    assert "m: " in done.stdout
    assert "the same configuration as 'default configuration'" in done.stdout  # one instance, written out
    variant = folder / "out" / "m_config_0"
    assert parse((variant / "config.pbtxt").read_text()).instance_group[0].count == 2
    assert (variant / "1" / "model.py").is_file()


def test_nothing_is_left_beside_what_was_asked_for(tuned: Tuned) -> None:
    folder, _ = tuned

    assert {path.name for path in folder.iterdir()} == {"models", "out", "results", "journal"}


def test_a_second_run_measures_nothing_again_and_a_changed_model_everything(tmp_path: Path) -> None:
    repository = write(tmp_path, RESTING)
    arguments = ("-m", str(repository), "--run-config-search-disable", "-c", "1")
    assert tune(tmp_path, *arguments).returncode == 0

    assert tune(tmp_path, *arguments).returncode == 0
    assert all(trial["is_resumed"] for trial in result(tmp_path)["groups"][0]["trials"])

    (repository / "m" / "1" / "model.py").write_text(RESTING + "\n# changed\n")
    assert tune(tmp_path, *arguments, "--override-output-model-repository").returncode == 0
    assert not any(trial["is_resumed"] for trial in result(tmp_path)["groups"][0]["trials"])


def test_a_remote_server_is_left_as_it_was(tmp_path: Path, remote: ServeProcess) -> None:
    with Client(remote.http) as client:
        own = {**client.model_config("m"), "parameters": {"creation_delay_sec": {"string_value": "0"}}}
        client.load_model("m", config=own)
    before = state(remote)

    done = tune(tmp_path, *at(remote), "--run-config-search-max-instance-count", "2")

    assert done.returncode == 0, done.stderr
    assert state(remote) == before
    assert "parent" in before


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_remote_server_of_which_one_protocol_is_reachable_is_tuned_over_that_alone(
    tmp_path: Path, remote: ServeProcess, protocol: str
) -> None:
    before = state(remote)
    nowhere = "--triton-http-endpoint" if protocol == "grpc" else "--triton-grpc-endpoint"

    done = tune(
        tmp_path,
        *(*at(remote), nowhere, "127.0.0.1:9", "--triton-metrics-url", "http://127.0.0.1:9/metrics"),
        *("--client-protocol", protocol, "--run-config-search-max-instance-count", "2"),
    )

    assert done.returncode == 0, done.stderr
    assert result(tmp_path)["server"]["protocol"] == protocol
    assert len(result(tmp_path)["groups"][0]["variants"]) > 1
    assert state(remote) == before


def test_without_an_answer_both_addresses_are_named(tmp_path: Path) -> None:
    nowhere = ("--triton-http-endpoint", "127.0.0.1:9", "--triton-grpc-endpoint", "127.0.0.1:10", "-r", "2")

    done = tune(tmp_path, "--triton-launch-mode", "remote", *nowhere)

    assert done.returncode == 99
    assert "no server answers" in done.stderr
    assert "grpc://127.0.0.1:10" in done.stderr
    assert "http://127.0.0.1:9" in done.stderr


def test_a_remote_server_is_left_as_it_was_after_ctrl_c_and_the_run_goes_on_later(
    tmp_path: Path, remote: ServeProcess
) -> None:
    before = state(remote)
    arguments = (*at(remote), "--run-config-search-max-instance-count", "3", "--measurement-time", "1")
    process = subprocess.Popen(command(tmp_path, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[3]"):
            break
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=SECONDS_MAX)

    assert process.returncode == 130
    assert "Interrupted. The measurements are kept" in out
    assert state(remote) == before
    measured = len(result(tmp_path)["groups"][0]["trials"])
    assert measured >= 3

    assert tune(tmp_path, *arguments).returncode == 0
    assert sum(trial["is_resumed"] for trial in result(tmp_path)["groups"][0]["trials"]) >= measured


def test_a_server_that_does_not_load_on_request_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with ServeProcess(write(tmp_path)) as server:
        done = tune(tmp_path, *at(server))
        assert done.returncode == 99
        assert "--model-control-mode=explicit" in done.stderr

        loads_only = tune(tmp_path, *at(server), "--reload-model-disable", "-c", "1,2")
        assert loads_only.returncode == 0, loads_only.stderr


def test_a_variant_that_does_not_load_is_skipped_with_its_reason(tmp_path: Path) -> None:
    repository = write(tmp_path, FAILS_WITH_TWO)

    done = tune(tmp_path, "-m", str(repository), "--run-config-search-max-instance-count", "3")

    assert done.returncode == 0, done.stderr
    assert "no room for two" in done.stdout
    names = {variant["name"] for variant in result(tmp_path)["groups"][0]["variants"]}
    assert names == {"m_config_default", "m_config_0", "m_config_1"}


def test_a_server_of_ours_that_dies_with_a_variant_is_started_again_for_the_others(tmp_path: Path) -> None:
    repository = write(tmp_path, DIES_WITH_TWO)

    done = tune(tmp_path, "-m", str(repository), "--run-config-search-max-instance-count", "3")

    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stdout
    assert "it is started again" in done.stderr
    trials = result(tmp_path)["groups"][0]["trials"]
    measured = [trial["trial"]["variant"]["changes"] for trial in trials if trial["measured"]]
    assert [] in measured
    assert any(change["instance_count"] == 3 for changes in measured for change in changes)


def test_ctrl_c_reports_what_was_measured_and_leaves_no_server_behind(tmp_path: Path) -> None:
    arguments = ("-m", str(write(tmp_path)), "--run-config-search-max-instance-count", "3", "--measurement-time", "1")
    process = subprocess.Popen(command(tmp_path, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[1]"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=SECONDS_MAX)

    assert process.returncode == 130
    assert "config_default" in out
    assert children
    assert [child for child in children if child.is_running()] == []


def test_a_run_that_is_killed_leaves_no_server_behind_either(tmp_path: Path) -> None:
    arguments = ("-m", str(write(tmp_path)), "--run-config-search-max-instance-count", "3", "--measurement-time", "1")
    process = subprocess.Popen(
        command(tmp_path, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[1]"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("serve" in child.cmdline() for child in children)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS_MAX)

    for child in children:
        wait_until_ended(child)


def test_a_remote_server_that_dies_ends_the_run_and_keeps_what_was_measured(
    tmp_path: Path, remote: ServeProcess
) -> None:
    arguments = (*at(remote), "--run-config-search-max-instance-count", "3", "--measurement-time", "1")
    process = subprocess.Popen(command(tmp_path, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[2]"):
            remote.kill()
            break
    out, _ = process.communicate(timeout=SECONDS_MAX)

    assert process.returncode == 1
    assert "The run ended early" in out
    assert len([trial for trial in result(tmp_path)["groups"][0]["trials"] if trial["measured"]]) >= 2


def test_a_slow_model_gets_the_time_that_it_needs(tmp_path: Path) -> None:
    slow = RESTING.replace(f"time.sleep({REST_MS / 1000})", "time.sleep(0.1)")

    done = tune(tmp_path, "-m", str(write(tmp_path, slow)), "--run-config-search-disable")

    assert done.returncode == 0, done.stderr
    levels = [trial["levels"]["m"] for trial in result(tmp_path)["groups"][0]["trials"]]
    assert min(level["request_count"] for level in levels) >= 8


def test_a_report_is_made_again_from_the_result(tuned: Tuned) -> None:
    folder, _ = tuned
    report = ("tune", "report", "-e", folder / "results", "-n")

    done = run_command(*report, "m_config_default")
    wrong = run_command(*report, "m_config_defalt")

    assert done.returncode == 0, done.stderr
    assert " config_default" in done.stdout
    assert wrong.returncode == 99
    assert "did you mean m_config_default?" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "nowhere"), f"expected a folder, got '{Path.cwd() / 'nowhere'}'"),
        (("-m", "{models}", "--profile-models", "n"), "the server does not have the model 'n'; its models are: m"),
        (("-m", "{models}", "--triton-server-path", "no-such-program"), "expected a program, got 'no-such-program'"),
        (("-m", "{models}", "-e", "/proc/nowhere"), "cannot be written"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    repository = write(tmp_path)

    done = tune(tmp_path, *(argument.format(models=repository) for argument in arguments))

    assert done.returncode == 99
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shape_that_is_missing_is_asked_for_where_it_can_be_given(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", "", config=identity_pbtxt(dims=(-1,), max_batch_size=0))

    done = tune(tmp_path, "-m", str(tmp_path / "models"), "--run-config-search-disable")

    assert done.returncode == 99
    assert done.stderr.count("--shape INPUT0:D1,D2,... says which to send") == 1
    assert done.stdout == ""

    # Nothing of the run that failed is in the way of the next one.
    done = tune(tmp_path, "-m", str(tmp_path / "models"), "--run-config-search-disable", "--shape", "INPUT0:4")

    assert done.returncode == 0, done.stderr
