"""One server of a deployment on this machine: `charonia serve` in a dedicated folder; it survives the platform.

The folder of a deployment:

address.json   ports of HTTP and gRPC; they stay as long as the deployment exists once they have answered
goal.json      the desired state: see `rollout.RolloutGoal`
stopping       marks that the deployment must stop
keys.txt, open-keys.txt  API keys of all its servers: see `api.key_files`; `platform.key` has that of the platform
rev-N/         a revision: its repository, its interpreter, and in `serve.json` how its servers are started
server-N/      a server:
        ports.json     ports of its HTTP endpoint and of its metrics
        races.json     how often another program took its ports first
        lock           held by the server while it lives, regardless of the process that started it
        pid            id of its process, which it writes itself
        applying.json  the revision being applied
    serving.json   the revision that answers
    starts.json    how often it was started, and when last
        stopping       marks that it must stop
        log            its output
        steps, exit    output and exit status of the last upgrade
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from charonia.core.errors import unavailable
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess
from charonia.platform.targets.api import Replica
from charonia.platform.targets.rollout import LOST_STARTS_MAX, ReplicaPhase, ServerState
from charonia.platform.targets.server_calls import change_traffic, reset_split, server_is_ready, traffic_of
from charonia.python_command import python_module

LOG_BYTES_MAX = 32 * 2**20
"""A longer log is truncated; the part that was cut stays as `log.1` until the next cut."""

LINES_MAX = 1000
"""Lines of a log that are searched for the reason of an exit."""

NOTES_MAX = 4096
"""Notes that are kept in memory."""

PRIVATE_MODE = 0o600


@lru_cache(NOTES_MAX)
def _note(path: str, *_identity: int) -> dict[str, Any]:
    """Return the values of a note; a change replaces its file, so each file is read one time."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


class NotesFolder:
    """A folder with named notes.

    Args:
        path: Its path; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stopping = path / "stopping"

    def read(self, name: str) -> dict[str, Any]:
        """Return the values of a note, {} if there is none."""
        path = f"{self.path}/{name}.json"
        try:
            status = os.stat(path)
            return _note(path, status.st_ino, status.st_mtime_ns, status.st_size).copy()
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}

    def write(self, name: str, **values: Any) -> None:
        write_whole(self.path / f"{name}.json", json.dumps(values))

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def stopping_since(self) -> float:
        """Return when it was marked as stopping, in seconds since the epoch; 0.0 if it was not."""
        try:
            return self._stopping.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def record_stopping(self) -> None:
        if self.path.exists():
            self._stopping.touch()

    def clear_stopping(self) -> None:
        self._stopping.unlink(missing_ok=True)


class DeploymentFolder(NotesFolder):
    """The folder of a deployment."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.served = path / "served"  # servers see only this folder
        self.platform_key = path / "platform.key"

    def revision(self, number: int) -> NotesFolder:
        return NotesFolder(self.served / f"rev-{number}")

    def server(self, number: int) -> "ServerFolder":
        return ServerFolder(self.path / f"server-{number}")

    def servers(self) -> list[int]:
        """Return the numbers of all servers that have a folder."""
        return sorted(number for number, _ in _numbered(self.path, "server"))

    def tidy(self, kept: Container[int]) -> None:
        """Remove the folders of all revisions but these."""
        for number, path in _numbered(self.served, "rev"):
            if number not in kept:
                shutil.rmtree(path, ignore_errors=True)


class ServerFolder(NotesFolder):
    """The folder of a server."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.log = path / "log"
        self._pid = path / "pid"

    def is_running(self) -> bool:
        return is_locked(self.path / "lock")

    def pid(self) -> int:
        """Return the id of the server's process, 0 if it has not written it yet."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._pid.read_text())
        return 0

    def has_bound(self) -> bool:
        """Return whether the server has started, and listens at its own ports."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            return asking.connect_ex(f"\0{SOCKETS}{self.pid()}") == 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, if it lives."""
        pid = self.pid()
        if pid and self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server, which survives this process."""
        with _held(self.path / "lock") as lock, self.log.open("ab") as log:
            self.remove_pid()
            self.clear_stopping()
            # The process writes its id itself: nothing is lost if this process dies right here.
            script = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'
            command = ["/bin/sh", "-c", script, str(self._pid), *command]
            _start(command, self.path, log, environment, pass_fds=[lock.fileno()])

    def remove_pid(self) -> None:
        self._pid.unlink(missing_ok=True)

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_from(self, start: int) -> str:
        """Return the end of the log, from byte `start` on."""
        size = self.log_size()
        return tail(self.log, LINES_MAX, bytes_max=size - start if size >= start else size)

    def cut_log(self) -> None:
        """Keep the log within its limit. The server appends to it, and continues at its new end."""
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_BYTES_MAX:
                shutil.copyfile(self.log, self.log.with_suffix(".1"))
                os.truncate(self.log, 0)


class Steps:
    """A command about a server that outlives this process: `steps` has its output, `exit` its status."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "steps"
        self._exit = folder / "exit"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin."""
        self._exit.unlink(missing_ok=True)
        with _held(self._output) as output:
            output.truncate(0)
            script = '"$@"; echo $? > "$0.new"; mv "$0.new" "$0"'
            _start(["/bin/sh", "-c", script, str(self._exit), *command], self._exit.parent, output, environment)

    def remove(self) -> None:
        """Remove the results of the previous command."""
        self._exit.unlink(missing_ok=True)
        self._output.unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Return whether a command was started since the last `remove`."""
        return self._output.exists()

    def text(self) -> str:
        return tail(self._output, LINES_MAX)

    def status(self) -> int | None:
        """Return its exit status, None while it is under way; 1 if it was killed."""
        is_over = not is_locked(self._output)  # looked at first: the status is written while it is locked
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._exit.read_text())
        return 1 if is_over else None


def _numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    with contextlib.suppress(FileNotFoundError):
        found = [name.partition("-") for name in os.listdir(folder)]
        return [
            (int(number), folder / f"{kind}-{number}") for own, _, number in found if own == kind and number.isdecimal()
        ]
    return []


def write_whole(path: Path, text: str, mode: int = 0o644, finish: Callable[[Path], None] | None = None) -> None:
    """Write a file atomically, so that no reader sees a part of it; `finish` is called before the rename."""
    new = path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    if finish is not None:
        finish(new)
    new.replace(path)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def tail(path: Path, lines: int, bytes_max: int = 2**20) -> str:
    """Return the last lines of a file, "" where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - bytes_max))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "".join(text.splitlines(keepends=True)[-lines:])


def _start(
    command: Sequence[str],
    folder: Path,
    output: IO[bytes],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
) -> None:
    """Start a detached command: this process need not wait for it."""
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
        check=True,
    )


@contextmanager
def _held(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that is locked until every handle of it is closed, including inherited ones."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise unavailable(f"'{path}' is held by another process", hint="wait until it has ended") from None
        yield file


MOVED = "new requests go to it"
"""Message of `charonia upgrade` when the new engine receives all new requests."""

_LOGGED = re.compile(r'^E\d{4} [^\]]*\] "(.*)"$', re.MULTILINE)
_SAID = re.compile(r'[A-Z]\d{4} [\d:.]+ +\d+ \S+\] "(.*?)"?')
_TOLD = re.compile(r"^charonia serve: (.*)$", re.MULTILINE)
_OF_THE_GUARD = re.compile(r"(engine|front_end)\S* \(pid \d+\) ended")
_UPGRADE = "charonia upgrade: "
_IN_USE = re.compile(r"cannot listen on \S+: Address already in use")
_REST = " (hint: the previous engine continues to serve"


def why_ended(log: str) -> str:
    """Return why a server has exited, from its log since it was started."""
    errors = [text for text in _LOGGED.findall(log) or _TOLD.findall(log) if not _OF_THE_GUARD.match(text)]
    return "\n".join(dict.fromkeys(errors)) or last_line(log) or "the server has ended without a word"


def has_lost_port(log: str) -> bool:
    """Whether a server has exited because another program had taken one of its ports, from its log."""
    return _IN_USE.search(log) is not None


def why_not_upgraded(steps: str) -> str:
    """Return why an upgrade has failed, from the output of `charonia upgrade`."""
    lines = [line.removeprefix(_UPGRADE.strip()).strip() for line in steps.partition(_UPGRADE)[2].splitlines()]
    reason = "\n".join(line for line in lines if line).removeprefix("the new engine cannot start: ")
    return reason.partition(_REST)[0] or last_line(steps) or "the upgrade was cut off"


def last_line(text: str) -> str:
    """Return the last line of a text, "" for none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def last_log_line(log: str) -> str:
    """Return the text of the last line of a log, without time and source."""
    line = last_line(log)
    found = _SAID.fullmatch(line)
    return found[1] if found is not None else line


HOST = "127.0.0.1"

KILL_S = 90.0
"""Time for a server to exit after SIGTERM."""

SOCKETS = "charonia-sockets-"
"""Prefix of the abstract socket at which a server shares its listening sockets; its process id follows."""

_taking_over = threading.Lock()

_DOING = {
    ReplicaPhase.STARTING: "it starts",
    ReplicaPhase.ENDING: "requests in flight are finished",
}


class DeployedServer:
    """A server of a deployment.

    Args:
        unwell: When servers stopped answering, by their folder, in seconds of the monotonic clock.
    """

    def __init__(
        self, deployment: DeploymentFolder, number: int, unwell: dict[str, float], isolation: Isolation
    ) -> None:
        self.number = number
        self._deployment = deployment
        self._unwell = unwell
        self._isolation = isolation
        self.folder: ServerFolder = deployment.server(number)

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self._ports[0]}"

    @property
    def metrics(self) -> str:
        return f"http://{HOST}:{self._ports[1]}/metrics"

    def poll(self) -> ServerState:
        """Return its state, and record the outcome of its steps."""
        applying, serving = self.folder.read("applying"), self.folder.read("serving")
        starts = self.folder.read("starts")
        count, since_s = int(starts.get("count", 0)), max(0.0, time.time() - float(starts.get("time", 0.0)))
        state = ServerState(self.number, starts=count, since_start_s=since_s)
        if not self.folder.is_running():
            return self._ended(applying, state)
        revision = int(serving.get("revision", 0))
        if self.folder.stopping_since():
            return replace(state, phase=ReplicaPhase.ENDING, revision=revision)
        self.folder.cut_log()
        # Before its sockets are known to be its own, another program could answer at its port.
        is_ready = (revision > 0 or self.folder.has_bound()) and server_is_ready(self.http)
        if is_ready:
            self._unwell.pop(str(self.folder.path), None)
        elif revision:
            since = self._unwell.setdefault(str(self.folder.path), time.monotonic())
            state = replace(state, unwell_s=time.monotonic() - since)
        state = replace(state, is_ready=is_ready, revision=revision, made=serving.get("made", ""))
        if applying and (not applying["is_upgrade"] or Steps(self.folder.path).is_begun()):
            return self._under_way(applying, state)
        return replace(state, phase=ReplicaPhase.UP if revision else ReplicaPhase.STARTING)

    def has_lost_port(self) -> bool:
        return has_lost_port(self.folder.log_from(int(self.folder.read("applying").get("log_from", 0))))

    def shown(self, state: ServerState) -> Replica:
        """Return it for display."""
        reason = state.failure if state.phase is ReplicaPhase.GONE else ""
        doing = _DOING.get(state.phase, "")
        if not state.is_ready and not reason and not doing:
            reason = "it does not answer, or not all of its models are ready"
        if state.phase is ReplicaPhase.GONE and not reason:
            reason = "it has ended, and is started again"
        return Replica(
            f"pid {self.folder.pid()}",
            state.is_ready,
            max(0, state.starts - 1),
            reason,
            doing=doing,
            http=self.http,
            metrics=self.metrics,
        )

    def doing(self) -> str:
        """Return its report on the current step."""
        applying = self.folder.read("applying")
        if applying.get("is_upgrade"):
            return last_line(Steps(self.folder.path).text())
        return last_log_line(tail(self.folder.log, 1))

    def start(self, revision: int, beside: "DeployedServer | None") -> None:
        """Start it with a revision."""
        starts, how = int(self.folder.read("starts").get("count", 0)), self._how(revision)
        self.folder.write("starts", count=starts + 1, time=time.time())
        self.folder.remove("serving")
        self.folder.remove_pid()  # without a process id it was never started
        self.folder.write(
            "applying", revision=revision, is_upgrade=False, made=how["made"], log_from=self.folder.log_size()
        )
        extra = [f"--beside={beside.folder.pid()}"] if beside is not None else []
        command = python_module("charonia", "serve", *self._arguments(revision), *extra, python=self._python(revision))
        self._leave_room()
        room = self._isolation.prepare_room(self.folder.path / "home", how["project"])
        self.folder.write("room", temporary=str(room.temporary))
        access = SandboxAccess(
            read=[self._deployment.served],
            python=Path(how["python"]) if how["python"] else None,
            ports=[*self._deployment.read("address")["ports"], *self._ports],
            beside=f"{SOCKETS}{beside.folder.pid()}" if beside is not None else "",
            project=how["project"],
            ends_with_platform=False,
        )
        self.folder.start(self._isolation.command(command, room, access), self._isolation.environment(room))

    def upgrade(self, revision: int) -> None:
        """Upgrade it in place to a revision."""
        steps = Steps(self.folder.path)
        steps.remove()  # an upgrade that never started is started again
        self.folder.write("applying", revision=revision, is_upgrade=True, made=self._how(revision)["made"])
        command = python_module("charonia", "upgrade", str(self.folder.pid()))
        command += ["--python", self._python(revision), "--", *self._arguments(revision)]
        steps.start(command, self._control_environment())

    def retune(self, revision: int) -> None:
        """Split traffic as a revision says, now and after restarts."""
        serving = self.folder.read("serving")
        base, key = int(serving["base"]), self._deployment.platform_key.read_text()
        for model in (self._repository(revision)).iterdir():
            config = (model / "config.pbtxt").read_text(encoding="utf-8")
            change_traffic(self.http, key, model.name, traffic_of(config))
            write_whole(self._repository(base) / model.name / "config.pbtxt", config)
        self.folder.write("serving", revision=revision, base=base, made=serving["made"])

    def cancel(self) -> None:
        """Cancel the revision being applied."""
        applying = self.folder.read("applying")
        if applying and self.folder.is_running():
            if applying["is_upgrade"]:
                command = python_module("charonia", "upgrade", "--cancel", str(self.folder.pid()))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    environment = self._control_environment()
                    subprocess.run(command, timeout=60, check=False, capture_output=True, env=environment)
            else:
                self.folder.remove("applying")
                self.folder.signal(signal.SIGKILL)

    def end(self) -> None:
        """Send SIGTERM, or SIGKILL if it is overdue."""
        since = self.folder.stopping_since()
        if not self.folder.is_running():
            self.folder.remove("applying", "serving", "starts")
        elif not since:
            self.folder.record_stopping()
            self.folder.remove("applying", "serving", "starts")
            self.folder.signal(signal.SIGTERM)
        elif time.time() - since > KILL_S:
            self.folder.signal(signal.SIGKILL)

    def remove(self) -> None:
        """Remove its leftovers."""
        self._unwell.pop(str(self.folder.path), None)
        self._leave_room()
        shutil.rmtree(self.folder.path, ignore_errors=True)

    def revisions(self) -> set[int]:
        """Return the revisions whose folders it needs."""
        serving, applying = self.folder.read("serving"), self.folder.read("applying")
        return {int(note[name]) for note in (serving, applying) for name in ("revision", "base") if name in note}

    def _control_environment(self) -> dict[str, str]:
        """Return the variables of a command that controls the server.

        The command is not confined: the kernel would deny it the server's socket. It is the platform's own program,
        executes nothing that the server answers, and has no variable of the platform and no home of a model.
        """
        return self._isolation.environment(PrivateFolders(self.folder.path, self.folder.path), installs=False)

    def _leave_room(self) -> None:
        """Remove the temporary files of a process that has ended."""
        temporary = self.folder.read("room").get("temporary")
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)

    @property
    def _ports(self) -> list[int]:
        return list(self.folder.read("ports")["ports"])

    def _how(self, revision: int) -> dict[str, Any]:
        return self._deployment.revision(revision).read("serve")

    def _python(self, revision: int) -> str:
        return str(self._deployment.revision(revision).path / "python")

    def _repository(self, revision: int) -> Path:
        return self._deployment.revision(revision).path / "repository"

    def _arguments(self, revision: int) -> list[str]:
        (http, grpc), (own, metrics) = self._deployment.read("address")["ports"], self._ports
        ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--replica-port={own}", f"--metrics-port={metrics}"]
        return [*self._how(revision)["arguments"], *ports]

    def _ended(self, applying: Mapping[str, Any], state: ServerState) -> ServerState:
        if not applying or applying["is_upgrade"] or self.folder.stopping_since():
            return state
        if (
            not self.folder.pid() and state.starts < LOST_STARTS_MAX
        ):  # the platform may have been killed before its start
            return state
        reason = why_ended(self.folder.log_from(applying["log_from"]))
        return replace(state, applying=int(applying["revision"]), failure=reason)

    def _under_way(self, applying: Mapping[str, Any], state: ServerState) -> ServerState:
        """Return the progress of the revision being applied, and record its outcome."""
        number, made = int(applying["revision"]), str(applying["made"])
        state = replace(state, applying=number)
        if not applying["is_upgrade"]:
            if not state.is_ready:
                return replace(state, phase=ReplicaPhase.STARTING)
            self._serves(applying)
            return replace(state, phase=ReplicaPhase.UP, revision=number, made=made)
        steps = Steps(self.folder.path)
        status, text = steps.status(), steps.text()
        if MOVED in text:
            self._take_over(applying)
            if status is None:
                return replace(state, phase=ReplicaPhase.FINISHING, revision=number, made=made)
            self._serves(applying)
            return replace(state, phase=ReplicaPhase.UP, revision=number, made=made)
        if status is None:
            return replace(state, phase=ReplicaPhase.MOVING)
        return replace(state, phase=ReplicaPhase.UP, failure=why_not_upgraded(text))

    def _take_over(self, applying: Mapping[str, Any]) -> None:
        """Record that the new engine receives all new requests, and let it split traffic as its revision says.

        It has inherited the traffic settings made at the previous engine. Settings made at itself come later, and stay.
        """
        number = int(applying["revision"])
        with _taking_over:
            if self.folder.read("serving").get("revision") != number:
                key = self._deployment.platform_key.read_text()
                for model in self._repository(number).iterdir():
                    reset_split(self.http, key, model.name)
                self._record_serving(applying)

    def _serves(self, applying: Mapping[str, Any]) -> None:
        """Record that a revision has been applied."""
        self._record_serving(applying)
        self.folder.remove("applying", "races")

    def _record_serving(self, applying: Mapping[str, Any]) -> None:
        number = int(applying["revision"])
        self.folder.write("serving", revision=number, base=number, made=applying["made"])
