"""The target `local`: a `charonia serve` of its own for each deployment, on this machine.

The server survives the platform, and is found again by its folder. Later revisions are brought about by
`charonia upgrade`, so no request is lost; how traffic is split is changed in the server that runs.
"""

import contextlib
import hashlib
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia.core.errors import unavailable
from charonia.platform.targets.api import Observed, Replica, RevisionPhase, Workload
from charonia.platform.targets.fit import LocalMachine, misfits
from charonia.platform.targets.live_traffic import change_traffic, forget_changes, traffic_of, without_traffic
from charonia.platform.targets.local_folder import PRIVATE_MODE, DeploymentFolder, Steps, tail, write_whole
from charonia.platform.targets.local_reasons import MOVED, last_line, why_ended, why_not_upgraded
from charonia.platform.targets.machine import this_machine
from charonia.platform.targets.model_folder import make_model_folder
from charonia.platform.targets.ports import FreePorts

HOST = "127.0.0.1"
PORTS = 3
"""A server has one for HTTP, the next one for gRPC, and the one after that for metrics."""

HEALTH_S_MAX = 2.0

UNWELL_S_MAX = 20.0
"""A server that has not answered for so long is not upgraded but replaced."""

KILL_S = 90.0
"""Time that a server has to end after SIGTERM."""

_KEY_BYTES = 32
_OWN = "CHARONIA_"
_SHARED = ("CHARONIA_CACHE",)
_taking_over = threading.Lock()


class LocalTarget:
    """Deployments on this machine. See `DeploymentTarget`.

    Args:
        folder: Where they are kept.
        ports: First and last port.
        machine: Returns what the machine has.
    """

    name = "local"

    def __init__(
        self, folder: Path, ports: tuple[int, int], *, machine: Callable[[], LocalMachine] = this_machine
    ) -> None:
        self._root = folder
        self._ports = FreePorts(ports, PORTS)
        self._machine = machine
        self._lock = threading.Lock()
        self._unwell: dict[str, float] = {}

    def problems(self, workload: Workload) -> Sequence[str]:
        """Return why a workload does not fit. See `DeploymentTarget`."""
        found = list(misfits(workload, self._machine()))
        if not self._folder(workload.deployment).read("ports") and not self._ports.find(self._taken()):
            found.append(
                f"ports: there are no {PORTS} free ones in a row from {self._ports.first} to {self._ports.last}"
            )
        return found

    def apply(self, workload: Workload) -> None:
        """Begin to bring a workload about. See `DeploymentTarget`."""
        folder, number = self._folder(workload.deployment), workload.revision
        seen = self.observe(workload.deployment)
        is_under_way = seen.phase is RevisionPhase.STARTING
        if (seen.serving == number and not is_under_way) or (is_under_way and seen.applying == number):
            return
        if seen.phase is RevisionPhase.ENDING:
            raise unavailable(f"the server of '{workload.deployment}' ends", hint="wait until it has ended")
        if is_under_way or _is_upgraded(folder):
            raise unavailable(f"revision {seen.applying} of '{workload.deployment}' is not over yet: {seen.doing}")
        with self._lock:
            self._prepare(folder, workload)
        if not folder.is_running():
            self._start(folder, workload)
        elif not self._is_well(workload.deployment, seen):
            self._replace(folder, workload.deployment)
        elif folder.read("serving").get("made") == _made(workload):
            self._change_traffic(folder, workload)
        else:
            self._upgrade(folder, workload)

    def abandon(self, deployment: str) -> None:
        """Give up what is being brought about. See `DeploymentTarget`."""
        folder = self._folder(deployment)
        applying = folder.read("applying")
        if applying and folder.is_running():
            if applying["is_upgrade"]:
                command = [sys.executable, "-m", "charonia", "upgrade", "--cancel", str(folder.pid())]
                subprocess.run(command, timeout=60, check=False, capture_output=True)
            else:
                folder.forget("applying")
                folder.signal(signal.SIGKILL)

    def observe(self, deployment: str) -> Observed:
        """Return what is there now. See `DeploymentTarget`."""
        folder = self._folder(deployment)
        ports = folder.read("ports").get("ports")
        if ports is None:
            return Observed()
        applying, serving = folder.read("applying"), folder.read("serving")
        if not folder.is_running():
            return _not_running(folder, applying, serving)
        if folder.stopping_since():
            return Observed(phase=RevisionPhase.ENDING, doing="requests in flight are finished")
        folder.cut_log()
        is_ready = _is_ready(ports[0])
        seen = _under_way(folder, applying, serving, is_ready) if applying else _steady(serving)
        reason = "" if is_ready or not seen.serving else "it does not answer, or not all of its models are ready"
        key = folder.platform_key
        return Observed(
            serving=seen.serving,
            applying=seen.applying,
            phase=seen.phase,
            doing=seen.doing,
            reason=seen.reason,
            http=f"http://{HOST}:{ports[0]}",
            grpc=f"{HOST}:{ports[1]}",
            metrics=f"http://{HOST}:{ports[2]}/metrics",
            key=key.read_text() if key.exists() else "",
            replicas=[
                Replica(f"pid {folder.pid()}", is_ready, max(0, folder.read("starts").get("count", 0) - 1), reason)
            ],
        )

    def stop(self, deployment: str) -> None:
        """Begin to end a deployment. See `DeploymentTarget`."""
        folder = self._folder(deployment)
        since = folder.stopping_since()
        if not folder.is_running():
            folder.forget("applying", "serving", "starts")
        elif not since:
            folder.note_stopping()
            folder.forget("applying", "serving", "starts")
            folder.signal(signal.SIGTERM)
        elif time.time() - since > KILL_S:
            folder.signal(signal.SIGKILL)

    def remove(self, deployment: str) -> None:
        """Remove what is left of a deployment. See `DeploymentTarget`."""
        folder = self._folder(deployment)
        if folder.is_running():
            raise unavailable(f"the server of '{deployment}' still runs")
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.path.parent.rmdir()

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        """Let these be the API keys. See `DeploymentTarget`."""
        folder = self._folder(deployment)
        if folder.path.exists():
            _write_keys(folder, keys)

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments. See `DeploymentTarget`."""
        return [f"{path.parent.name}/{path.name}" for path in self._root.glob("*/*") if path.is_dir()]

    def log(self, deployment: str, lines: int) -> str:
        """Return the last lines of the log. See `DeploymentTarget`."""
        return tail(self._folder(deployment).log, lines)

    def _folder(self, deployment: str) -> DeploymentFolder:
        return DeploymentFolder(self._root / deployment)

    def _taken(self) -> set[int]:
        """Return the ports that belong to deployments, also to those that do not run."""
        folders = map(self._folder, self.deployments())
        return {port for folder in folders for port in folder.read("ports").get("ports", ())}

    def _prepare(self, folder: DeploymentFolder, workload: Workload) -> None:
        """Write all that the revision needs."""
        folder.path.mkdir(parents=True, exist_ok=True)
        if not folder.read("ports"):
            found = self._ports.find(self._taken())
            if not found:
                raise unavailable(f"there are no {PORTS} free ports in a row", hint="--ports gives the platform others")
            folder.write("ports", ports=found)
        _write_keys(folder, workload.keys)
        target = folder.revision(workload.revision)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for model in workload.models:
            make_model_folder(target / "repository", model)
        (target / "repository").mkdir(exist_ok=True)
        launcher = target / "python"
        write_whole(launcher, _launcher(workload), 0o755)

    def _start(self, folder: DeploymentFolder, workload: Workload) -> None:
        starts = folder.read("starts").get("count", 0)
        folder.write("starts", count=starts + 1)
        folder.forget("serving")
        folder.write(
            "applying", revision=workload.revision, is_upgrade=False, made=_made(workload), log_from=folder.log_size()
        )
        python = str(folder.revision(workload.revision) / "python")
        command = [python, "-m", "charonia", "serve", *_arguments(folder, workload)]
        folder.start(command, _environment())

    def _upgrade(self, folder: DeploymentFolder, workload: Workload) -> None:
        folder.write("applying", revision=workload.revision, is_upgrade=True, made=_made(workload))
        revision = folder.revision(workload.revision)
        command = [sys.executable, "-m", "charonia", "upgrade", str(folder.pid()), "--python", str(revision / "python")]
        command += ["--", *_arguments(folder, workload)]
        Steps(revision).start(command, _environment())

    def _change_traffic(self, folder: DeploymentFolder, workload: Workload) -> None:
        """Change how traffic is split in the server that runs, and what it reads when it starts again."""
        serving, seen = folder.read("serving"), self.observe(workload.deployment)
        base = int(serving.get("base", serving["revision"]))
        for model in workload.models:
            change_traffic(seen.http, seen.key, model.name, traffic_of(model.config))
            write_whole(folder.revision(base) / "repository" / model.name / "config.pbtxt", model.config)
        folder.write("serving", revision=workload.revision, base=base, made=serving["made"])
        folder.tidy(base, workload.revision)

    def _is_well(self, deployment: str, seen: Observed) -> bool:
        """Return whether a server can be upgraded.

        Raises:
            ServingError: UNAVAILABLE if it does not answer, but not for long.
        """
        if all(replica.is_ready for replica in seen.replicas):
            self._unwell.pop(deployment, None)
            return True
        since = self._unwell.setdefault(deployment, time.monotonic())
        if time.monotonic() - since < UNWELL_S_MAX:
            raise unavailable(f"the server of '{deployment}' does not answer now, so it cannot be upgraded")
        del self._unwell[deployment]
        return False

    def _replace(self, folder: DeploymentFolder, deployment: str) -> None:
        """End a server that does not answer; the next call starts another one."""
        self.stop(deployment)
        raise unavailable(f"the server of '{deployment}' does not answer: it is ended, and another one started")


def _not_running(folder: DeploymentFolder, applying: Mapping[str, Any], serving: Mapping[str, Any]) -> Observed:
    if applying and not applying["is_upgrade"] and not folder.stopping_since():
        return Observed(
            applying=applying["revision"],
            phase=RevisionPhase.FAILED,
            reason=why_ended(folder.log_from(applying["log_from"])),
        )
    return Observed()


def _under_way(
    folder: DeploymentFolder, applying: Mapping[str, Any], serving: Mapping[str, Any], is_ready: bool
) -> Observed:
    """Return how far the revision is that is brought about, and write down what has come of it."""
    number, before = int(applying["revision"]), int(serving.get("revision", 0))
    if not applying["is_upgrade"]:
        if not is_ready:
            return Observed(applying=number, phase=RevisionPhase.STARTING, doing=last_line(tail(folder.log, 1)))
        _serves(folder, applying)
        return Observed(serving=number, phase=RevisionPhase.READY)
    steps = Steps(folder.revision(number))
    status, text = steps.status(), steps.text()
    if MOVED in text and before != number:
        _take_over(folder, applying)
    if status is None:
        if MOVED in text:
            return Observed(serving=number, applying=number, phase=RevisionPhase.READY, doing=last_line(text))
        return Observed(serving=before, applying=number, phase=RevisionPhase.STARTING, doing=last_line(text))
    if MOVED in text:
        _serves(folder, applying)
        return Observed(serving=number, phase=RevisionPhase.READY)
    reason = why_not_upgraded(text)
    return Observed(serving=before, applying=number, phase=RevisionPhase.FAILED, reason=reason)


def _take_over(folder: DeploymentFolder, applying: Mapping[str, Any]) -> None:
    """Write down that the new engine has all new requests, and let it split traffic as its revision says.

    It has kept what the one before was asked for. What it is asked for itself comes after this, and stays.
    """
    number = int(applying["revision"])
    with _taking_over:
        if folder.read("serving").get("revision") != number:
            _forget_traffic(folder, number)
            folder.write("serving", revision=number, base=number, made=applying["made"])


def _forget_traffic(folder: DeploymentFolder, number: int) -> None:
    address = f"http://{HOST}:{folder.read('ports')['ports'][0]}"
    for model in (folder.revision(number) / "repository").iterdir():
        forget_changes(address, folder.platform_key.read_text(), model.name)


def _steady(serving: Mapping[str, Any]) -> Observed:
    number = int(serving.get("revision", 0))
    return Observed(serving=number, phase=RevisionPhase.READY if number else RevisionPhase.STARTING)


def _serves(folder: DeploymentFolder, applying: Mapping[str, Any]) -> None:
    """Write down that a revision has been brought about."""
    number = applying["revision"]
    folder.write("serving", revision=number, base=number, made=applying["made"])
    folder.forget("applying")
    folder.tidy(number)


def _is_upgraded(folder: DeploymentFolder) -> bool:
    """Return whether an upgrade is under way, also one whose revision serves already."""
    applying = folder.read("applying")
    return bool(applying) and applying["is_upgrade"] and Steps(folder.revision(applying["revision"])).status() is None


def _is_ready(port: int) -> bool:
    """Return whether a server answers, with all of its models."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=HEALTH_S_MAX)) as connection:
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def _arguments(folder: DeploymentFolder, workload: Workload) -> list[str]:
    """Return the arguments of `charonia serve`."""
    spec = workload.spec
    arguments = [
        f"--model-repository={folder.revision(workload.revision) / 'repository'}",
        "--front-ends=1",
        f"--host={HOST}",
        f"--port={folder.read('ports')['ports'][0]}",
        f"--id={workload.deployment}",
    ]
    if spec.cpu_cores:
        arguments.append(f"--cpu-cores={spec.cpu_cores}")
    if spec.keys:
        arguments.append(f"--api-keys={folder.keys}")
    return arguments


def _launcher(workload: Workload) -> str:
    """Return a script that runs the interpreter of a revision, with the GPUs that it may see."""
    python = str(workload.python or sys.executable)
    gpus = ",".join(map(str, workload.spec.gpus))
    return f"#!/bin/sh\nCUDA_VISIBLE_DEVICES='{gpus}' exec {_quoted(python)} \"$@\"\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _environment() -> dict[str, str]:
    """Return the environment of servers: without what the platform alone is told, such as passwords."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWN) or name in _SHARED}


def _write_keys(folder: DeploymentFolder, keys: Sequence[str]) -> None:
    if not folder.platform_key.exists():
        write_whole(folder.platform_key, secrets.token_urlsafe(_KEY_BYTES), PRIVATE_MODE)
    digest = hashlib.sha256(folder.platform_key.read_bytes()).hexdigest()
    lines = [f"platform admin sha256:{digest}", *keys]
    write_whole(folder.keys, "\n".join(lines) + "\n", PRIVATE_MODE)


def _made(workload: Workload) -> str:
    """Return what stands for all of a workload but its traffic: servers of equal ones are the same."""
    spec = workload.spec
    models = [
        [model.name, sorted((str(n), digest) for n, digest in model.digests.items()), without_traffic(model.config)]
        for model in sorted(workload.models, key=lambda model: model.name)
    ]
    rest = [str(workload.python), spec.cpu_cores, list(spec.gpus), spec.keys]
    return hashlib.sha256(json.dumps([models, rest]).encode()).hexdigest()
