"""The target `local`: guarded `charonia serve` processes for each deployment, behind one address.

The servers survive the platform, which finds them again by their folders. They share their listening sockets, so they
can start and stop without a lost request. `charonia upgrade` applies later revisions, one server after the other; a new
traffic split is applied to running servers. `rollout.py` decides the next step.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

import psutil

from charonia.core.errors import Code, ServingError, unavailable
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.targets.api import Observed, RevisionPhase, Workload, key_file, key_files, make_model_folder
from charonia.platform.targets.fit import LocalGpu, LocalMachine, Needs, misfits, needs_of, obstacle
from charonia.platform.targets.local_server import (
    HOST,
    PRIVATE_MODE,
    DeployedServer,
    DeploymentFolder,
    NotesFolder,
    tail,
    write_whole,
)
from charonia.platform.targets.rollout import (
    RUNNING,
    ActionKind,
    ReplicaPhase,
    RolloutGoal,
    ServerState,
    abandoned,
    answering,
    judged,
    next_acts,
)
from charonia.platform.targets.server_calls import content_of

_DEVICE = re.compile(r"nvidia[0-9]+")


def this_machine() -> LocalMachine:
    """Return the resources of this machine: the driver of GPUs creates one device file for each."""
    count = sum(1 for entry in Path("/dev").glob("nvidia*") if _DEVICE.fullmatch(entry.name))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LocalMachine(
        cores,
        psutil.virtual_memory().available,
        gpus_of() or [LocalGpu(cuda=str(number)) for number in range(count)] if count else (),
        idle_cores=cores * (1.0 - psutil.cpu_percent() / 100.0),
    )


def gpus_of(api: Any = None) -> Sequence[LocalGpu]:
    """Return the GPUs and slices, nothing if unknown.

    Args:
        api: The module `pynvml` of the package nvidia-ml-py (extra `gpu`), None to import it.
    """
    try:
        api = api or import_module("pynvml")
        api.nvmlInit()
    except Exception:  # no package, or no driver: the library has its own error class
        return ()
    try:
        count = api.nvmlDeviceGetCount()
        return [each for number in range(count) for each in _gpus(api, number)]
    except api.NVMLError:
        return ()
    finally:
        api.nvmlShutdown()


def _gpus(api: Any, number: int) -> Iterator[LocalGpu]:
    """Yield the slices of a GPU, or the GPU itself if it is not divided."""
    handle = api.nvmlDeviceGetHandleByIndex(number)
    is_divided = False
    with contextlib.suppress(api.NVMLError):  # it cannot be divided
        is_divided = api.nvmlDeviceGetMigMode(handle)[0] == api.NVML_DEVICE_MIG_ENABLE
    if not is_divided:
        yield _gpu(api, handle, str(number))
        return
    for part in range(api.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(api.NVMLError):  # fewer slices than there may be
            part_handle = api.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
            yield _gpu(api, part_handle, _text(api.nvmlDeviceGetUUID(part_handle)))


def _gpu(api: Any, handle: Any, cuda: str) -> LocalGpu:
    memory = api.nvmlDeviceGetMemoryInfo(handle)
    return LocalGpu(_text(api.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), cuda)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


PORTS = 2
"""A deployment has one for HTTP and the next one for gRPC; each of its servers one for HTTP, and one for metrics."""

PORT_RACES_MAX = 5
"""How often a server is restarted with other ports because another program took its ports first."""

_KEY_BYTES = 32


class LocalTarget:
    """Deployments on this machine. See `DeploymentTarget`.

    Args:
        isolation: Confines servers; by default, as `charonia platform` does.
    """

    name = "local"

    def __init__(
        self,
        folder: Path,
        ports: tuple[int, int],
        isolation: Isolation | None = None,
        *,
        machine: Callable[[], LocalMachine] = this_machine,
    ) -> None:
        self._root = folder
        self._ports = FreePorts(ports, PORTS)
        self._isolation = isolation or Isolation(folder.parent, reserved=ports)
        self._machine = machine
        self._lock = threading.Lock()
        self._locks: dict[str, threading.RLock] = {}
        self._unwell: dict[str, float] = {}

    def problems(self, workload: Workload) -> Sequence[str]:
        folder = self._folder(workload.deployment)
        running = len(folder.servers())
        found = list(misfits(workload, self._machine(), self._reserved_resources(workload.deployment), running))
        pairs = max(0, workload.spec.replicas.min - running) + (not folder.read("address"))
        if len(self._ports.find_many(self._taken(), pairs)) < pairs:
            found.append(
                f"ports: there are no {pairs} pairs of free ones from {self._ports.first} to {self._ports.last}"
            )
        return found

    def apply(self, workload: Workload) -> None:
        name, number, spec = workload.deployment, workload.revision, workload.spec
        with self._held(name):
            folder = self._folder(name)
            goal, servers = self._poll(folder)
            is_there = any(one.phase is not ReplicaPhase.GONE for one in servers)
            if is_there and goal.revision == number and not goal.failed:
                return
            if folder.stopping_since() and is_there:
                raise unavailable(f"the servers of '{name}' are stopping", hint="wait until they have stopped")
            moving = any(one.phase in (ReplicaPhase.MOVING, ReplicaPhase.FINISHING) for one in servers)
            if is_there and (moving or not (goal.is_reached or goal.failed)):
                raise unavailable(f"revision {goal.revision} of '{name}' is still being applied")
            with self._lock:
                self._prepare(folder, workload)
            for one in servers:
                if one.phase is ReplicaPhase.GONE or one.failure:
                    folder.server(one.number).remove("applying")
            folder.clear_stopping()
            count = min(max(goal.count, spec.replicas.min), spec.replicas.max)
            _write_goal(folder, RolloutGoal(number, count if is_there else spec.replicas.min, goal.revision * is_there))
            self._step(folder)

    def scale(self, deployment: str, replicas: int) -> str:
        """Scale the servers, and take the next step of the rollout. See `DeploymentTarget`."""
        with self._held(deployment):
            folder = self._folder(deployment)
            goal, servers = self._poll(folder)
            if not goal.revision or folder.stopping_since():
                return ""
            least = int(folder.revision(goal.revision).read("serve").get("least", 1))
            if replicas > max(goal.count, least) and goal.is_reached:
                missing = self._obstacle(folder, goal, replicas - max(goal.count, len(servers)))
                if missing:
                    self._step(folder)
                    return missing
            if replicas != goal.count and goal.is_reached:
                goal = replace(goal, count=replicas)
                _write_goal(folder, goal)
            self._step(folder, (goal, servers))
            return ""

    def abandon(self, deployment: str) -> None:
        with self._held(deployment):
            folder = self._folder(deployment)
            goal, _ = self._poll(folder)
            if goal.is_reached or not goal.revision:
                return
            if goal.before != goal.revision:
                _write_goal(folder, abandoned(goal, ""))
            self._step(folder)

    def observe(self, deployment: str) -> Observed:
        with self._held(deployment):
            folder = self._folder(deployment)
            goal, servers = self._poll(folder)
            living = [one for one in servers if one.phase is not ReplicaPhase.GONE]
            if not living and goal.failed:
                return Observed(applying=goal.failed, phase=RevisionPhase.FAILED, reason=goal.reason)
            if not living:
                return Observed()
            if folder.stopping_since() or all(one.phase is ReplicaPhase.ENDING for one in living):
                return Observed(phase=RevisionPhase.ENDING, doing="requests in flight are finished")
            return self._seen(folder, goal, servers)

    def stop(self, deployment: str) -> None:
        with self._held(deployment):
            folder = self._folder(deployment)
            folder.record_stopping()
            folder.remove("goal")
            for number in folder.servers():
                self._server(folder, number).end()

    def remove(self, deployment: str) -> None:
        with self._held(deployment):
            folder = self._folder(deployment)
            if any(folder.server(number).is_running() for number in folder.servers()):
                raise unavailable(f"the servers of '{deployment}' still run")
            for number in folder.servers():
                self._server(folder, number).remove()
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.path.parent.rmdir()

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        folder = self._folder(deployment)
        if folder.served.exists():
            self._write_keys(
                folder, keys, int(folder.revision(_read_goal(folder).revision).read("serve").get("project", 0))
            )

    def deployments(self) -> Sequence[str]:
        return [f"{path.parent.name}/{path.name}" for path in self._root.glob("*/*") if path.is_dir()]

    def temporary_folders(self) -> set[Path]:
        """Return the temporary folders of all servers, which outlive the platform."""
        folders = map(self._folder, self.deployments())
        notes = (folder.server(number).read("room") for folder in folders for number in folder.servers())
        return {Path(note["temporary"]) for note in notes if note}

    def log(self, deployment: str, lines: int) -> str:
        folder = self._folder(deployment)
        logs = {number: tail(folder.server(number).log, lines) for number in folder.servers()}
        if len(logs) == 1:
            return "".join(logs.values())
        parts = (f"==> server {number} <==\n{text}" for number, text in logs.items())
        return "\n".join(parts)

    def _folder(self, deployment: str) -> DeploymentFolder:
        return DeploymentFolder(self._root / deployment)

    def _server(self, folder: DeploymentFolder, number: int) -> DeployedServer:
        return DeployedServer(folder, number, self._unwell, self._isolation)

    @contextmanager
    def _held(self, deployment: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(deployment, threading.RLock())
        with lock:
            yield

    def _taken(self) -> set[int]:
        """Return the ports of all deployments and servers, whether they run or not."""
        notes = [self._folder(name) for name in self.deployments()]
        owners: list[NotesFolder] = [
            *notes,
            *(folder.server(number) for folder in notes for number in folder.servers()),
        ]
        return {port for owner in owners for name in ("address", "ports") for port in owner.read(name).get("ports", ())}

    def _reserved_resources(self, deployment: str) -> list[Needs]:
        """Return the resources of all servers of the other deployments."""
        found = []
        for name in self.deployments():
            folder = self._folder(name)
            goal = _read_goal(folder)
            if name != deployment and goal.revision:
                needs = folder.revision(goal.revision).read("serve").get("needs", {})
                found += [Needs(**needs)] * goal.count if needs else []
        return found

    def _obstacle(self, folder: DeploymentFolder, goal: RolloutGoal, more: int) -> str:
        """Return why this machine has no room for `more` servers of a deployment, "" if it has."""
        if more <= 0:
            return ""
        name = f"{folder.path.parent.name}/{folder.path.name}"
        needs = Needs(**folder.revision(goal.revision).read("serve")["needs"])
        own = [needs] * goal.count
        if len(self._ports.find_many(self._taken(), more)) < more:
            return "there are no free ports"
        return obstacle(needs, more, self._machine(), [*self._reserved_resources(name), *own])

    def _prepare(self, folder: DeploymentFolder, workload: Workload) -> None:
        folder.served.mkdir(parents=True, exist_ok=True)
        if not folder.read("address"):
            folder.write("address", ports=self._free_ports())
        self._write_keys(folder, workload.keys, workload.project_id)
        target = folder.revision(workload.revision)
        shutil.rmtree(target.path, ignore_errors=True)
        target.path.mkdir()
        for model in workload.models:
            make_model_folder(target.path / "repository", model)
        (target.path / "repository").mkdir(exist_ok=True)
        write_whole(target.path / "python", _launcher(workload, target.path / "variables", self._machine().gpus), 0o755)
        if workload.variables:
            lines = [f"export {name}={quote(text)}\n" for name, text in workload.variables.items()]
            give = partial(self._isolation.give, project=workload.project_id)
            write_whole(target.path / "variables", "".join(lines), PRIVATE_MODE, give)
        arguments, needs = _arguments(folder, workload), asdict(needs_of(workload))
        how = {
            "arguments": arguments,
            "made": _workload_digest(workload),
            "needs": needs,
            "least": workload.spec.replicas.min,
        }
        target.write("serve", **how, project=workload.project_id, python=str(workload.python or ""))

    def _write_keys(self, folder: DeploymentFolder, keys: Sequence[str], project: int) -> None:
        if not folder.platform_key.exists():
            write_whole(folder.platform_key, secrets.token_urlsafe(_KEY_BYTES), PRIVATE_MODE)
        for name, text in key_files(folder.platform_key.read_text(), keys).items():
            write_whole(folder.served / name, text, PRIVATE_MODE, lambda path: self._isolation.give(path, project))

    def _free_ports(self) -> list[int]:
        found = self._ports.find_many(self._taken(), 1)
        if not found:
            raise unavailable(f"there are no {PORTS} free ports in a row", hint="--ports gives the platform others")
        return found[0]

    def _poll(self, folder: DeploymentFolder) -> tuple[RolloutGoal, list[ServerState]]:
        before = _read_goal(folder)
        looked = [self._server(folder, number).poll() for number in folder.servers()]
        servers = [self._after_race(folder, before, one, looked) for one in looked]
        goal = judged(before, servers)
        if goal != before:
            _write_goal(folder, goal)
        address = folder.read("address")
        if goal.is_reached and not address.get("is_proven"):
            folder.write("address", ports=address["ports"], is_proven=True)
        return goal, servers

    def _after_race(
        self, folder: DeploymentFolder, goal: RolloutGoal, one: ServerState, servers: Sequence[ServerState]
    ) -> ServerState:
        """Restart a server with other ports after another program has taken its ports."""
        server = self._server(folder, one.number)
        races = int(server.folder.read("races").get("count", 0))
        if not one.failure or one.applying != goal.revision or races >= PORT_RACES_MAX or not server.has_lost_port():
            return one
        server.folder.write("races", count=races + 1)
        server.folder.remove("ports")
        if not folder.read("address").get("is_proven"):  # clients may know an address that has answered
            with self._lock:
                folder.write("address", ports=self._free_ports())
        self._start(folder, server, goal.revision, next((each.number for each in servers if each.phase in RUNNING), 0))
        return replace(server.poll(), failure="")  # the next pass notices if it has lost again

    def _step(self, folder: DeploymentFolder, looked: tuple[RolloutGoal, list[ServerState]] | None = None) -> None:
        goal, servers = looked or self._poll(folder)
        made = str(folder.revision(goal.revision).read("serve").get("made", "")) if goal.revision else ""
        for act in next_acts(goal, servers, made):
            server = self._server(folder, act.number)
            match act.kind:
                case ActionKind.START:
                    self._start(folder, server, goal.revision, act.beside)
                case ActionKind.UPGRADE:
                    server.upgrade(goal.revision)
                case ActionKind.RETUNE:
                    self._retune(folder, server, goal)
                case ActionKind.CANCEL:
                    server.cancel()
                case ActionKind.END:
                    server.end()
                case ActionKind.FORGET:
                    server.remove()
        for one in servers:  # kill servers that are overdue
            if one.phase is ReplicaPhase.ENDING:
                self._server(folder, one.number).end()
        numbers = folder.servers()
        kept = set().union(*(self._server(folder, number).revisions() for number in numbers))
        folder.tidy(kept | {goal.revision, goal.before})

    def _start(self, folder: DeploymentFolder, server: DeployedServer, revision: int, beside: int) -> None:
        with self._lock:
            server.folder.path.mkdir(exist_ok=True)
            if not self._ports.are_free(server.folder.read("ports").get("ports", ())):
                server.folder.write("ports", ports=self._free_ports())
        server.start(revision, self._server(folder, beside) if beside else None)

    def _retune(self, folder: DeploymentFolder, server: DeployedServer, goal: RolloutGoal) -> None:
        try:
            server.retune(goal.revision)
        except ServingError as error:
            if error.code is Code.UNAVAILABLE:
                raise
            _write_goal(folder, abandoned(goal, str(error)))

    def _seen(self, folder: DeploymentFolder, goal: RolloutGoal, servers: Sequence[ServerState]) -> Observed:
        serving, ports = answering(goal, servers), folder.read("address")["ports"]
        is_failed = bool(goal.failed)
        phase = RevisionPhase.READY if goal.is_reached and serving else RevisionPhase.STARTING
        if is_failed:
            phase = RevisionPhase.FAILED
        busy = [one for one in servers if one.phase in (ReplicaPhase.MOVING, ReplicaPhase.FINISHING)]
        busy += [one for one in servers if one.phase is ReplicaPhase.STARTING]
        shown = [self._server(folder, one.number).shown(one) for one in servers]
        up = [self._server(folder, one.number) for one in servers if one.phase in RUNNING]
        return Observed(
            serving=serving,
            applying=goal.failed or (0 if phase is RevisionPhase.READY else goal.revision),
            phase=phase,
            doing=self._server(folder, busy[0].number).doing() if busy else "",
            reason=goal.reason if is_failed else "; ".join(one.reason for one in shown if one.reason),
            http=f"http://{HOST}:{ports[0]}" if serving else "",
            grpc=f"{HOST}:{ports[1]}" if serving else "",
            metrics=up[0].metrics if serving and up else "",
            key=folder.platform_key.read_text(),
            replicas=shown if serving else (),
            wanted_replicas=goal.count,
        )


def _read_goal(folder: DeploymentFolder) -> RolloutGoal:
    return RolloutGoal(**folder.read("goal"))


def _write_goal(folder: DeploymentFolder, goal: RolloutGoal) -> None:
    folder.write("goal", **asdict(goal))


def _arguments(folder: DeploymentFolder, workload: Workload) -> list[str]:
    spec = workload.spec
    arguments = [
        f"--model-repository={folder.revision(workload.revision).path / 'repository'}",
        "--front-ends=1",
        f"--host={HOST}",
        f"--id={workload.deployment}",
    ]
    if spec.device.cpu_cores:
        arguments.append(f"--cpu-cores={spec.device.cpu_cores}")
    if spec.device.memory_mib:
        arguments.append(f"--memory-limit-mib={spec.device.memory_mib}")
    if spec.idle_unload_s:
        arguments.append(f"--model-idle-unload={spec.idle_unload_s}")
    return [*arguments, f"--api-keys={folder.served / key_file(spec)}"]


def _launcher(workload: Workload, variables: Path, gpus: Sequence[LocalGpu]) -> str:
    """Return a script that runs the interpreter of a revision with its visible GPUs and its variables."""
    python = str(workload.python or sys.executable)
    names = [gpus[number].cuda if number < len(gpus) else str(number) for number in workload.spec.device.gpus]
    given = f". {quote(str(variables))}\n" if workload.variables else ""
    return f"#!/bin/sh\n{given}CUDA_VISIBLE_DEVICES='{','.join(names)}' exec {quote(python)} \"$@\"\n"


def _workload_digest(workload: Workload) -> str:
    """Return a digest of a workload without its traffic: servers with equal digests are interchangeable."""
    spec = workload.spec
    rest = [key_file(spec), str(workload.python), spec.device.cpu_cores, list(spec.device.gpus), spec.device.memory_mib]
    rest += [sorted(workload.variables.items())] if workload.variables else []
    rest += [spec.idle_unload_s] if spec.idle_unload_s else []
    return hashlib.sha256(json.dumps([content_of(workload), rest]).encode()).hexdigest()


class FreePorts:
    """Finds free ports in a row."""

    def __init__(self, ports: tuple[int, int], count: int) -> None:
        self.first, self.last = ports
        self._count = count

    def find_many(self, taken: Container[int], rows: int) -> list[list[int]]:
        """Return at most `rows` rows of ports that are neither taken nor in use."""
        found: list[list[int]] = []
        for first in range(self.first, self.last - self._count + 2, self._count):
            ports = list(range(first, first + self._count))
            if len(found) < rows and not any(port in taken for port in ports) and all(map(_is_free, ports)):
                found.append(ports)
        return found

    def are_free(self, ports: Sequence[int]) -> bool:
        """Return whether the number of ports is right and nothing listens on any of them."""
        return len(ports) == self._count and all(map(_is_free, ports))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
        return True
