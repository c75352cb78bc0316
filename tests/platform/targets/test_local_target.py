"""The target of this machine, with real servers."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.models import identity_pbtxt
from tests.support.ports import free_ports
from tests.support.process import eventually

from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.targets import local_server
from charonia.platform.targets.api import PlacedModel, Workload
from charonia.platform.targets.fit import MIB, LocalMachine
from charonia.platform.targets.local import LocalTarget
from charonia.platform.targets.local_folder import DeploymentFolder, ServerFolder
from charonia.platform.targets.local_reasons import MOVED
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
    spec = DeploymentSpec("reader", models=(DeployedModel("echo", (1,)),))
    return Workload("default/reader", revision, spec, (model,))


@pytest.mark.timeout(240)
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
    target = LocalTarget(tmp_path, (22000, 22001), machine=lambda: LocalMachine(2, 100 * MIB, gpus=1))
    asked = workload(tmp_path, 1)
    spec = DeploymentSpec(
        "reader", models=asked.spec.models, cpu_cores=3, gpus=(0, 1), memory_mib=60, replicas_min=2, replicas_max=2
    )

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
    monkeypatch.setattr(local_server, "is_healthy", lambda port: True)
    monkeypatch.setattr(local_server, "forget_changes", lambda address, key, model: forgotten.append(model))
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
