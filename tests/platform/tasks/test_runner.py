"""Tasks: run, reported, cancelled, and taken up again after the platform has ended."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.platform.conftest import on_both
from tests.support.process import waited_for

from charonia.core.errors import TooManyError, invalid
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import PlatformLease
from charonia.platform.database.tables import ProjectRow, TaskRow
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.tasks import queue
from charonia.platform.tasks import runner as module
from charonia.platform.tasks.runner import Handler, TaskRun, TaskRunner, next_project


class Tasks:
    """A runner with a project, and what tests ask of it."""

    def __init__(self, database: Database, folder: Path, handlers: Mapping[str, Handler]) -> None:
        self.database = database
        self.lease = PlatformLease(database)
        self.runner = TaskRunner(database, folder, handlers, self.lease)
        with database.transaction() as session:
            project = session.query(ProjectRow).filter_by(name="p").one_or_none()
            if project is None:
                project = ProjectRow(name="p", created=now())
                session.add(project)
            session.flush()
            self.project = project.id

    def start(self) -> None:
        self.lease.start()
        self.runner.start()

    def close(self) -> None:
        self.runner.close()
        self.lease.close()

    def add(self, kind: str, **arguments: Any) -> int:
        with self.database.transaction() as session:
            return queue.add(session, kind, self.project, "x", arguments).id

    def get(self, number: int) -> TaskRow:
        with self.database.reading() as session:
            return session.get_one(TaskRow, number)

    def when(self, number: int, *states: str) -> TaskRow:
        return waited_for(lambda: self.get(number), lambda task: task.state in states)

    def log(self, number: int) -> str:
        return (self.runner.folder(number) / "log").read_text()


ROOT = Principal("root", ProjectRole.ADMIN)
Make = Callable[[Mapping[str, Handler]], Tasks]


@pytest.fixture
def make(database: Database, tmp_path: Path) -> Iterator[Make]:
    made: list[Tasks] = []

    def start(handlers: Mapping[str, Handler]) -> Tasks:
        tasks = Tasks(database, tmp_path / "tasks", handlers)
        tasks.start()
        made.append(tasks)
        return tasks

    yield start
    for tasks in made:
        tasks.close()


def sleep(run: TaskRun) -> Mapping[str, Any]:
    run.progress(0.5, "sleeps")
    run.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=200)
    return {}


def test_a_task_reports_what_it_does_and_its_result(make: Make) -> None:
    def work(run: TaskRun) -> Mapping[str, Any]:
        run.progress(0.5, "half")
        lines = list[str]()
        assert run.run([sys.executable, "-c", "print('one'); print('two')"], timeout_s=200, on_line=lines.append) == 0
        return {"lines": lines, "given": run.arguments["n"]}

    tasks = make({"work": work})
    number = tasks.add("work", n=3)

    task = tasks.when(number, "done")
    assert (task.result, task.progress, task.reason) == ({"lines": ["one", "two"], "given": 3}, 1.0, "")
    assert tasks.log(number) == "one\ntwo\n"
    assert 0 < task.started <= task.ended


def test_a_task_that_fails_has_the_reason(make: Make) -> None:
    def refuse(run: TaskRun) -> Mapping[str, Any]:
        raise invalid("it cannot be", hint="try another")

    def crash(run: TaskRun) -> Mapping[str, Any]:
        raise ZeroDivisionError("by zero")

    tasks = make({"refuse": refuse, "crash": crash})
    numbers = [tasks.add(kind) for kind in ("refuse", "crash", "unknown")]

    reasons = [tasks.when(number, "failed").reason for number in numbers]
    assert reasons[:2] == ["it cannot be (hint: try another)", "ZeroDivisionError: by zero"]
    assert "has no handler" in reasons[2]
    assert tasks.log(numbers[0]) == "it cannot be (hint: try another)\n"


def test_a_task_that_runs_is_cancelled_with_its_command(make: Make) -> None:
    tasks = make({"sleep": sleep})
    number = tasks.add("sleep")
    tasks.when(number, "running")

    with tasks.database.transaction() as session:
        queue.cancel(session, ROOT, number)

    assert tasks.when(number, "cancelled").reason == "it was cancelled"


@on_both
def test_a_task_that_waits_is_cancelled_at_once(make: Make) -> None:
    tasks = make({"sleep": sleep})
    numbers = [tasks.add("sleep") for _ in range(3)]
    tasks.when(numbers[1], "running")

    with tasks.database.transaction() as session:
        assert queue.cancel(session, ROOT, numbers[2]).state == "cancelled"
        for number in numbers[:2]:
            queue.cancel(session, ROOT, number)

    assert [tasks.when(number, "cancelled").started > 0 for number in numbers] == [True, True, False]


def test_a_command_that_takes_too_long_is_ended(make: Make) -> None:
    def work(run: TaskRun) -> Mapping[str, Any]:
        return {"status": run.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3)}

    tasks = make({"work": work})

    assert "has not ended after" in tasks.when(tasks.add("work"), "failed").reason


def test_a_command_that_has_said_enough_is_ended(make: Make) -> None:
    script = "import time; print('almost', flush=True); print('there', flush=True); time.sleep(60)"

    def handle(run: TaskRun) -> Mapping[str, Any]:
        status = run.run([sys.executable, "-c", script], timeout_s=200, enough=lambda line: line == "there")
        return {"status": status}

    tasks = make({"talk": handle})

    number = tasks.add("talk")

    assert tasks.when(number, "done", "failed").result == {"status": 0}
    assert tasks.log(number) == "almost\nthere\n"


@on_both
def test_what_ran_when_the_platform_ended_runs_again(make: Make) -> None:
    first = make({"sleep": sleep})
    number = first.add("sleep")
    first.when(number, "running")
    first.close()
    assert first.get(number).state == "running"

    second = make({"sleep": lambda run: {"again": True}})

    task = second.when(number, "done")
    assert (task.result, task.attempts) == ({"again": True}, 2)


@on_both
def test_what_ends_the_platform_each_time_is_given_up(make: Make, database: Database) -> None:
    tasks = make({})
    with database.transaction() as session:
        task = queue.add(session, "deadly", tasks.project, "x", {})
        task.state, task.attempts = "running", module.ATTEMPTS_MAX
    tasks.close()

    again = make({"deadly": sleep})

    assert "the platform ended each time" in again.when(task.id, "failed").reason


@on_both
def test_there_is_a_limit_of_tasks_that_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WAITING_MAX", 0)
    tasks = make({})

    with pytest.raises(Exception, match="expected fewer than 0"):
        tasks.add("sleep")


def test_the_log_of_a_task_has_a_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES_MAX", 100)

    def work(run: TaskRun) -> Mapping[str, Any]:
        for _ in range(100):
            run.log("0123456789")
        return {}

    tasks = make({"work": work})
    number = tasks.add("work")
    tasks.when(number, "done")

    assert len(tasks.log(number)) <= 111


@pytest.mark.parametrize(
    ("heads", "busy", "turns", "expected"),
    [
        ({}, {}, {}, None),
        ({1: 10, 2: 11}, {}, {}, 1),
        ({1: 10, 2: 11}, {1: 1}, {}, 2),
        ({1: 10, 2: 11}, {}, {1: 1}, 2),
        ({1: 10, 2: 11}, {1: 1, 2: 1}, {1: 2, 2: 1}, 2),
        ({1: 10}, {1: module.PROJECT_TASKS_MAX - 1}, {1: 9}, 1),
        ({1: 10}, {1: module.PROJECT_TASKS_MAX}, {}, None),
    ],
)
def test_the_project_with_the_least_work_is_next(
    heads: dict[int, int], busy: dict[int, int], turns: dict[int, int], expected: int | None
) -> None:
    assert next_project(heads, busy, turns) == expected


@on_both
def test_one_project_does_not_take_all_slots(make: Make, database: Database) -> None:
    release = threading.Event()
    order = list[int]()

    def work(run: TaskRun) -> Mapping[str, Any]:
        order.append(run.project_id)
        assert release.wait(200)
        return {}

    tasks = make({"work": work})
    with database.transaction() as session:
        other = ProjectRow(name="other", created=now())
        session.add(other)
        session.flush()
        numbers = [queue.add(session, "work", tasks.project, "x", {}).id for _ in range(6)]
        numbers.append(queue.add(session, "work", other.id, "x", {}).id)
        last = other.id
    tasks.when(numbers[-1], "running")
    running = [number for number in numbers if tasks.get(number).state == "running"]
    release.set()
    for number in numbers:
        tasks.when(number, "done")

    assert len(running) <= module.TASKS_MAX
    assert order.index(last) <= module.PROJECT_TASKS_MAX
    assert order.count(tasks.project) == 6


def test_there_is_a_limit_of_tasks_of_one_project_that_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "PROJECT_WAITING_MAX", 0)
    tasks = make({})

    with pytest.raises(TooManyError, match="0 tasks of this project wait already, expected fewer than 0"):
        tasks.add("sleep")
