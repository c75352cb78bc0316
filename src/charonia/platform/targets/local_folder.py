"""The folder of a deployment on this machine: its state and its processes.

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
import shutil
import signal
import subprocess
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from charonia.core.errors import unavailable

LOG_BYTES_MAX = 32 * 2**20
"""A longer log is truncated; the part that was cut stays as `log.1` until the next cut."""

LINES_MAX = 1000
"""Lines of a log that are searched for the reason of an exit."""

PRIVATE_MODE = 0o600


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
        try:
            found = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, **values: Any) -> None:
        """Write a note atomically."""
        write_whole(self.path / f"{name}.json", json.dumps(values))

    def forget(self, *names: str) -> None:
        for name in names:
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def stopping_since(self) -> float:
        """Return when it was marked as stopping, in seconds since the epoch; 0.0 if it was not."""
        try:
            return self._stopping.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def note_stopping(self) -> None:
        """Mark it as stopping, if it exists."""
        if self.path.exists():
            self._stopping.touch()

    def forget_stopping(self) -> None:
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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, if it lives."""
        pid = self.pid()
        if pid and self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server, which survives this process."""
        with _held(self.path / "lock") as lock, self.log.open("ab") as log:
            self.forget_pid()
            self.forget_stopping()
            # The process writes its id itself: nothing is lost if this process dies right here.
            script = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'
            command = ["/bin/sh", "-c", script, str(self._pid), *command]
            _start(command, self.path, log, environment, pass_fds=[lock.fileno()])

    def forget_pid(self) -> None:
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

    def forget(self) -> None:
        """Remove the results of the previous command."""
        self._exit.unlink(missing_ok=True)
        self._output.unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Return whether a command was started since the last `forget`."""
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
    found = [(path.name.removeprefix(f"{kind}-"), path) for path in folder.glob(f"{kind}-*")]
    return [(int(number), path) for number, path in found if number.isdecimal()]


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
