"""The target of this machine, with real servers."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.models import identity_pbtxt
from tests.support.ports import free_ports
from tests.support.process import eventually

from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec, Device, Replicas
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.targets import local_server
from charonia.platform.targets.api import Observed, PlacedModel, RevisionPhase, Workload
from charonia.platform.targets.fit import MIB, LocalGpu, LocalMachine
from charonia.platform.targets.local import PORT_RACES_MAX, LocalTarget, _workload_digest
from charonia.platform.targets.local_server import (
    MOVED,
    SOCKETS,
    DeployedServer,
    DeploymentFolder,
    ServerFolder,
    Steps,
)
from charonia.platform.targets.rollout import LOST_STARTS_MAX
from charonia.testing.target_suite import TargetCase, TargetSuite

PORTS = free_ports(40)
SLOW = "import time\ntime.sleep(3600)\n"
BROKEN = "raise RuntimeError('there is no such file')\n"


def workload(folder: Path, revision: int, code: str = "") -> Workload:
    """Return a workload with one model: of Python where there is code."""
    source = folder / "versions" / str(revision)
    (source / "1").mkdir(parents=True, exist_ok=True)
    if code:
        (source / "1" / "model.py").write_text(code)
    config = identity_pbtxt("python" if code else "identity", dims=(4,), max_batch_size=revision)
    model = PlacedModel("echo", {1: source}, config, 1, {1: str(revision)})
    spec = DeploymentSpec(name="reader", models=(DeployedModel(name="echo", versions=(1,)),))
    return Workload("default/reader", revision, spec, (model,))


class TestLocalTarget(TargetSuite):
    @pytest.fixture
    def target_case(self, tmp_path: Path) -> Iterator[TargetCase]:
        yield TargetCase(
            make=lambda: LocalTarget(tmp_path / "deployments", PORTS, machine=lambda: LocalMachine(8, 4096 * MIB)),
            workload=lambda revision: workload(tmp_path, revision),
            broken=lambda revision: workload(tmp_path, revision, BROKEN),
            slow=lambda revision: workload(tmp_path, revision, SLOW),
            wait=lambda condition: eventually(condition, 100),
        )
        with contextlib.suppress(OSError, ValueError):
            for pid in (tmp_path / "deployments" / "default" / "reader").glob("server-*/pid"):
                os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_does_not_fit_is_said_all_at_once(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path, (22000, 22001), machine=lambda: LocalMachine(2, 100 * MIB, [LocalGpu(cuda="0")]))
    asked = workload(tmp_path, 1)
    device = Device(cpu_cores=3, gpus=(0, 1), memory_mib=60)
    spec = asked.spec.model_copy(update={"device": device, "replicas": Replicas(min=2, max=2)})

    found = target.problems(Workload(asked.deployment, 1, spec, asked.models))

    assert list(found) == [
        "device.cpu_cores: this machine has 2, got 3",
        "device.gpus: this machine has GPU 0, got 1",
        "memory: each of 2 servers may use 60 MiB, besides what runs now, and 100 MiB are free on this machine",
        "ports: there are no 3 pairs of free ones from 22000 to 22001",
    ]


def test_what_a_new_engine_is_asked_for_while_the_one_before_still_ends_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(local_server, "server_is_ready", lambda address: True)
    monkeypatch.setattr(local_server, "reset_split", lambda address, key, model: forgotten.append(model))
    monkeypatch.setattr(ServerFolder, "is_running", lambda self: True)
    monkeypatch.setattr(ServerFolder, "pid", lambda self: os.getpid())
    folder = DeploymentFolder(tmp_path / "default" / "reader")
    (folder.revision(2).path / "repository" / "echo").mkdir(parents=True)
    folder.platform_key.write_text("key")
    folder.write("address", ports=[22000, 22001])
    folder.write("goal", revision=2, before=1)
    server = folder.server(1)
    server.path.mkdir()
    server.write("ports", ports=[22002, 22003])
    server.write("serving", revision=1, base=1, made="one")
    server.write("applying", revision=2, is_upgrade=True, made="two")
    steps, target = server.path / "steps", LocalTarget(tmp_path, PORTS)

    with steps.open("w") as output:
        fcntl.flock(output, fcntl.LOCK_EX)  # the command is under way
        output.write(f"{MOVED}\n")
        output.flush()
        moved = target.observe("default/reader")
        before_the_end = list(forgotten)
    (server.path / "exit").write_text("0")
    ended = target.observe("default/reader")

    assert (moved.serving, moved.applying, ended.serving, ended.applying) == (2, 0, 2, 0)
    assert (before_the_end, forgotten) == (["echo"], ["echo"])


def test_commands_to_a_server_have_no_variable_of_the_platform_and_no_home_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[Mapping[str, str]] = []
    monkeypatch.setenv("CHARONIA_DATABASE", "postgresql://user:secret@host/name")
    monkeypatch.setattr(ServerFolder, "is_running", lambda self: True)
    monkeypatch.setattr(ServerFolder, "pid", lambda self: os.getpid())
    monkeypatch.setattr(Steps, "start", lambda self, command, environment: environments.append(environment))
    monkeypatch.setattr(subprocess, "run", lambda command, env, **_: environments.append(env))
    folder = DeploymentFolder(tmp_path / "default" / "reader")
    folder.revision(2).path.mkdir(parents=True)
    folder.revision(2).write("serve", arguments=[], made="two")
    folder.write("address", ports=[22000, 22001])
    server = DeployedServer(folder, 1, {}, Isolation(tmp_path, mode="off"))
    server.folder.path.mkdir()
    server.folder.write("ports", ports=[22002, 22003])

    server.upgrade(2)
    server.cancel()

    assert len(environments) == 2
    for environment in environments:
        assert "CHARONIA_DATABASE" not in environment
        assert environment["HOME"] == str(server.folder.path)  # models write to "home" in it


IN_USE = "  cannot listen on 127.0.0.1:22000: Address already in use\n"


class Race:
    """A deployment whose server has just ended because another program had taken its port, as often as it starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, said: str = IN_USE) -> None:
        self.commands: list[list[str]] = []
        self.target = LocalTarget(folder, PORTS)
        self.folder = DeploymentFolder(folder / "default" / "reader")
        monkeypatch.setattr(ServerFolder, "is_running", lambda self: False)
        monkeypatch.setattr(ServerFolder, "pid", lambda self: os.getpid())

        def start(server: ServerFolder, command: list[str], environment: dict[str, str]) -> None:
            self.commands.append(command)
            with server.log.open("a") as log:
                log.write(said)

        monkeypatch.setattr(ServerFolder, "start", start)
        revision = self.folder.revision(1)
        revision.path.mkdir(parents=True)
        revision.write("serve", arguments=["serve"], made="one", needs={}, least=1, project=0, python="")
        self.folder.platform_key.write_text("key")
        self.folder.write("address", ports=[22000, 22001])
        self.folder.write("goal", revision=1)
        self.server = self.folder.server(1)
        self.server.path.mkdir()
        self.server.write("ports", ports=[22002, 22003])
        self.server.write("applying", revision=1, is_upgrade=False, made="one", log_from=0)
        self.server.log.write_text(said)

    def observe(self) -> Observed:
        return self.target.observe("default/reader")


def port_options(command: list[str]) -> set[str]:
    return {argument for argument in command if "-port=" in argument}


def test_a_server_that_loses_its_ports_to_another_program_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = Race(tmp_path, monkeypatch)

    race.observe()

    (command,) = race.commands
    first = {"--http-port=22000", "--grpc-port=22001", "--replica-port=22002", "--metrics-port=22003"}
    assert len(port_options(command)) == 4
    assert not port_options(command) & first


def test_another_program_that_answers_at_the_port_of_a_server_is_not_that_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = Race(tmp_path, monkeypatch)
    monkeypatch.setattr(ServerFolder, "is_running", lambda self: True)
    monkeypatch.setattr(local_server, "server_is_ready", lambda address: True)
    assert race.observe().phase is RevisionPhase.STARTING

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.bind(f"\0{SOCKETS}{os.getpid()}")
        own.listen()
        assert race.observe().phase is RevisionPhase.READY


def test_after_some_lost_races_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, monkeypatch)

    seen = [race.observe() for _ in range(PORT_RACES_MAX + 2)]

    assert len(race.commands) == PORT_RACES_MAX
    assert (seen[-1].phase, seen[-1].applying) == (RevisionPhase.FAILED, 1)


def test_an_address_that_has_answered_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, monkeypatch)
    race.folder.write("address", ports=[22000, 22001], is_proven=True)

    race.observe()

    assert {"--http-port=22000", "--grpc-port=22001"} < port_options(race.commands[0])
    assert "--replica-port=22002" not in race.commands[0]


def test_a_server_that_ends_for_another_reason_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, monkeypatch, said="the model cannot be loaded\n")

    assert race.observe().phase is RevisionPhase.FAILED
    assert race.commands == []


@pytest.mark.parametrize(("starts", "failure"), [(1, ""), (LOST_STARTS_MAX, "sh: cannot create pid")])
def test_a_server_that_always_exits_before_its_process_is_known_has_failed(
    tmp_path: Path, starts: int, failure: str
) -> None:
    server = DeploymentFolder(tmp_path / "default" / "reader").server(1)
    server.path.mkdir(parents=True)
    server.write("ports", ports=[22002, 22003])
    server.write("starts", count=starts, time=0.0)
    server.write("applying", revision=1, is_upgrade=False, made="one", log_from=0)
    server.log.write_text("sh: cannot create pid\n")

    folder, isolation = DeploymentFolder(tmp_path / "default" / "reader"), Isolation(tmp_path, mode="off")
    state = DeployedServer(folder, 1, {}, isolation).poll()

    assert (state.failure, state.starts) == (failure, starts)


def test_a_server_with_another_idle_time_is_not_interchangeable(tmp_path: Path) -> None:
    one = workload(tmp_path, 1)

    assert (
        len(
            {
                _workload_digest(replace(one, spec=one.spec.model_copy(update={"idle_unload_s": idle_s})))
                for idle_s in (0, 60, 900)
            }
        )
        == 3
    )


def test_variables_reach_the_interpreter_of_a_revision_by_a_private_file(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path / "deployments", PORTS, machine=lambda: LocalMachine(8, 4096 * MIB))
    folder = DeploymentFolder(tmp_path / "deployments" / "default" / "reader")
    values = {"HF_TOKEN": "it's $(secret) `x`", "LOG_LEVEL": "debug"}
    target._prepare(folder, replace(workload(tmp_path, 1), variables=values))
    python = folder.revision(1).path / "python"

    code = "import json, os; print(json.dumps({name: os.environ[name] for name in ('HF_TOKEN', 'LOG_LEVEL')}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout

    assert json.loads(found) == values
    assert (python.with_name("variables").stat().st_mode & 0o777, "secret" in python.read_text()) == (0o600, False)
