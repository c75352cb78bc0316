"""Runs tasks, a few at a time: each in a thread, with commands in separate processes.

A task that was running when the platform exited runs again, so handlers must be idempotent.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import event, func, select, update
from sqlalchemy.orm import Session

from charonia.core.errors import ServingError, internal
from charonia.die_with_parent import with_parent_death_signal
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import PlatformLease
from charonia.platform.database.tables import TaskRow

_log = logging.getLogger(__name__)

TASKS_MAX = 3
"""Tasks that run at the same time."""

PROJECT_TASKS_MAX = 2
"""Tasks of one project that run at the same time; the remaining slot is for other projects."""

WAITING_MAX = 1000
"""Tasks that may wait; more are refused."""

PROJECT_WAITING_MAX = 200
"""Tasks of one project that may wait; more are refused."""

ATTEMPTS_MAX = 3
"""How often a task is started that was running whenever the platform exited."""

LOG_BYTES_MAX = 16 * 2**20
"""Size limit of a task's log."""

LOOK_S = 0.2
"""Interval between checks for a cancellation."""

LINE_CHARS_MAX = 2**20
"""A longer line of a command's output counts as several."""


ADDED = "task added"
"""Mark of a session that has added a task."""


class CancelledTaskError(Exception):
    """The task was cancelled. Whatever takes a `TaskRun` raises it: docstrings do not repeat this."""


class TaskRun:
    """A task, as its handler sees it.

    Attributes:
        subject: Its object, for display.
    """

    def __init__(self, database: Database, task: TaskRow, folder: Path, is_over: Callable[[], bool]) -> None:
        self.id = task.id
        self.attempt = task.attempts
        self.project_id = task.project_id
        self.subject = task.subject
        self.arguments: Mapping[str, Any] = task.arguments
        self.folder = folder
        self._database = database
        self._is_over = is_over
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Add lines to its log."""
        path = self.folder / "log"
        if not path.exists() or path.stat().st_size < LOG_BYTES_MAX:
            with path.open("a", encoding="utf-8") as file:
                file.write(text.rstrip("\n") + "\n")

    def progress(self, done: float, doing: str) -> None:
        """Report progress from 0 to 1, and the current step."""
        with self._database.transaction() as session:
            task = session.get_one(TaskRow, self.id)
            task.progress, task.doing = done, doing
            is_cancelled = task.is_cancelled
        if is_cancelled or self._is_over():
            raise CancelledTaskError

    def check(self) -> None:
        """Raise `CancelledTaskError` if it was cancelled, or the platform exits."""
        if self._is_over():
            raise CancelledTaskError
        with self._database.reading() as session:
            if session.scalar(select(TaskRow.is_cancelled).where(TaskRow.id == self.id)):
                raise CancelledTaskError

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        enough: Callable[[str], bool] | None = None,
    ) -> int:
        """Run a command with its output in the log, and return its exit status.

        Args:
            environment: Its environment variables; inherited by default.
            folder: Its working folder; inherited by default.
            on_line: Called with each line of its output.
            enough: Called with each line of its output; when it returns true, the command is stopped and its exit
                status is 0.
        """
        started, is_enough = now(), threading.Event()

        def look(line: str) -> None:
            self.log(line)
            if on_line is not None:
                on_line(line)
            if enough is not None and enough(line):
                is_enough.set()

        def check() -> bool:
            if not is_enough.is_set():
                self.check()
                if now() - started > timeout_s:
                    raise internal(f"'{command[0]}' has not ended after {timeout_s:.0f} s")
            return is_enough.is_set()

        own = with_parent_death_signal(command)  # the task runs again, not beside its leftovers
        return run_process(own, look, check, environment, folder) or 0


def run_process(
    command: Sequence[str],
    on_line: Callable[[str], None],
    check: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> int | None:
    """Run a command in a separate session, and return its exit status, None if it was stopped.

    Args:
        on_line: Called with each line of its output, in another thread.
        check: Called every `LOOK_S`: returns whether to stop it. An exception stops it, too.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if environment is None else dict(environment),
        cwd=folder,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        reader = threading.Thread(target=_read, args=(process, on_line), daemon=True)
        reader.start()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(LOOK_S)
                if check():
                    return None
        finally:
            end_group(process)
            reader.join()


Handler = Callable[[TaskRun], Mapping[str, Any]]
"""Does the work of a task and returns its result; raises ServingError with the reason if it fails."""


class TaskRunner:
    """Runs the tasks of a platform, while it holds the lease, which the caller starts after this."""

    def __init__(self, database: Database, folder: Path, handlers: Mapping[str, Handler], lease: PlatformLease) -> None:
        self._database = database
        self._folder = folder
        self._handlers = handlers
        self._wake = threading.Condition()
        self._claiming = threading.Lock()
        self._turns: dict[int, int] = {}
        self._closing = threading.Event()
        self._running: set[int] = set()
        self._lease = lease
        self._lease.on_taken.append(self._take_over)
        event.listen(database.writing, "after_commit", self._committed)
        self._threads = [threading.Thread(target=self._work, name=f"task-{n}", daemon=True) for n in range(TASKS_MAX)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; running commands are stopped, and their tasks run again after a restart."""
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * END_S_MAX)

    def _take_over(self) -> None:
        """Queue the tasks that were running when another platform, or an earlier process of this one, exited."""
        left = (TaskRow.state == "running") & TaskRow.id.not_in(self._running)
        values = {"state": "failed", "reason": "the platform ended each time while it ran", "ended": now()}
        with self._database.transaction(is_keyed=False) as session:
            session.execute(update(TaskRow).where(left, TaskRow.attempts >= ATTEMPTS_MAX).values(values))
            session.execute(update(TaskRow).where(left).values(state="waiting"))

    def _is_over(self) -> bool:
        return self._closing.is_set() or not self._lease.is_held()

    def _committed(self, session: Session) -> None:
        if session.info.pop(ADDED, False):
            with self._wake:
                self._wake.notify()

    def folder(self, task_id: int) -> Path:
        return self._folder / str(task_id)

    def _work(self) -> None:
        while not self._closing.is_set():
            run: TaskRun | None = None
            handler: Handler = _no_handler
            try:
                if self._lease.is_held():
                    run, handler = self._claim()
            except ServingError as error:
                _log.error("tasks: %s", error)
            if run is None:
                with self._wake:
                    self._wake.wait(1.0)
            else:
                self._running.add(run.id)
                self._carry_out(run, handler)
                self._running.discard(run.id)

    def _claim(self) -> tuple[TaskRun | None, Handler]:
        with self._claiming, self._database.transaction() as session:
            first = select(TaskRow.project_id, func.min(TaskRow.id)).where(TaskRow.state == "waiting")
            running = select(TaskRow.project_id, func.count()).where(TaskRow.state == "running")
            heads, busy = (
                {row[0]: row[1] for row in session.execute(query.group_by(TaskRow.project_id))}
                for query in (first, running)
            )
            project = next_project(heads, busy, self._turns)
            if project is None:
                return None, _no_handler
            self._turns = {each: turn for each, turn in self._turns.items() if each in heads}
            self._turns[project] = max(self._turns.values(), default=0) + 1
            task = session.get_one(TaskRow, heads[project], with_for_update=True)
            if task.state != "waiting":  # cancelled since
                return None, _no_handler
            task.state, task.started, task.attempts = "running", now(), task.attempts + 1
            return (
                TaskRun(self._database, task, self.folder(task.id), self._is_over),
                self._handlers.get(task.kind, _no_handler),
            )

    def _carry_out(self, run: TaskRun, handler: Handler) -> None:
        state, reason, result = "done", "", dict[str, Any]()
        try:
            run.check()
            result = dict(handler(run))
        except CancelledTaskError:
            state, reason = "cancelled", "it was cancelled"
        except ServingError as error:
            state, reason = "failed", str(error)
        except Exception as error:
            _log.exception("task %d failed", run.id)
            state, reason = "failed", f"{type(error).__name__}: {error}"
        if reason:
            run.log(reason)
        if self._is_over() and state != "done":
            return
        with self._database.transaction() as session:
            task = session.get_one(TaskRow, run.id, with_for_update=True)
            if task.attempts != run.attempt:  # another platform has taken over
                return
            task.state, task.reason, task.result, task.ended = state, reason, result, now()
            if state == "done":
                task.progress, task.doing = 1.0, ""


def next_project(heads: Mapping[int, int], busy: Mapping[int, int], turns: Mapping[int, int]) -> int | None:
    """Return the project whose task is next: of the projects with the fewest running tasks, the longest waiting one.

    Args:
        heads: Number of the first waiting task, by project.
        busy: How many tasks run, by project.
        turns: When a project last had its turn, by project; ascending.
    """
    waiting = [project for project in heads if busy.get(project, 0) < PROJECT_TASKS_MAX]
    return min(waiting, key=lambda each: (busy.get(each, 0), turns.get(each, 0), heads[each]), default=None)


def _no_handler(run: TaskRun) -> Mapping[str, Any]:
    raise internal(f"task {run.id} about '{run.subject}' has no handler")


def _read(process: subprocess.Popen[str], look: Callable[[str], None]) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline(LINE_CHARS_MAX):
        look(line.rstrip("\n"))


END_S_MAX = 5.0
"""Time for a command to exit after SIGTERM."""


def end_group(process: subprocess.Popen[str]) -> None:
    """Stop a command that leads a separate session: with SIGTERM, then with SIGKILL."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S_MAX)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
