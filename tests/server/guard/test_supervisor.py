"""The guard's processes as real processes: readiness, restarts, stops, orphans, and the end of the guard."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from tests.support.process import until, wait_until_ended

from charonia.server.app import new_event_loop
from charonia.server.guard.notify import RECORD_VARIABLE, read_record
from charonia.server.guard.restarts import ProcessRole
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
from charonia.server.metrics.processes import ProcessRecord, from_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the processes of a server end with it on Linux only")

# Says that it is ready, sends heartbeats until SIGUSR1, and ends with status 0 at SIGTERM.
PROCESS = """\
import os, signal, socket, sys, time
manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
tell = lambda text: manager.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
tell("STATUS=all models ready\\nREADY=1")
while True:
    time.sleep(0.05)
    tell("WATCHDOG=1")
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PROCESS.replace(
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", ""
)
FAILING = "import sys; sys.exit(3)"
# Leaves a process behind, which then ends.
PARENT_OF_ORPHAN = PROCESS.replace(
    "while True:",
    """\
import subprocess
orphan = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
open(os.environ["PIDS"], "w").write(str(orphan.pid))
while True:""",
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="charonia-") as path:
        yield Path(path)


def spec(name: str, program: str = PROCESS, **environment: str) -> ProcessSpec:
    role = ProcessRole.ENGINE if name == "engine" else ProcessRole.FRONT_END
    return ProcessSpec(name, role, [sys.executable, "-I", "-S", "-c", program], {**os.environ, **environment})


def records(folder: Path) -> dict[str, ProcessRecord]:
    try:
        return {record.name: record for record in from_text((folder / "processes.json").read_text())}
    except FileNotFoundError:
        return {}


def log_shows(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return re.search(text, caplog.text) is not None


def serve(
    folder: Path,
    *specs: ProcessSpec,
    act: Callable[[], Awaitable[None]] | None = None,
    heartbeat_s: float = 0.0,
    exit_timeout_s: float = 0.1,
) -> int:
    """Run a server, do something while it is ready, stop it, and return its exit status."""

    async def run() -> int:
        supervisor = Supervisor(specs, folder, exit_timeout_s=exit_timeout_s, heartbeat_s=heartbeat_s)
        with contextlib.closing(supervisor):
            if await supervisor.start():
                if act is not None:
                    await act()
                supervisor.stop()
            return await supervisor.ended

    return asyncio.run(run())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, new_event_loop])
def test_a_server_is_ready_when_all_its_processes_are_and_stops_when_told(
    folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> int:
        supervisor = Supervisor([spec("engine"), spec("front_end_0")], folder, exit_timeout_s=0.1)
        assert await supervisor.start()
        processes = [psutil.Process(record.pid) for record in records(folder).values()]
        supervisor.stop()
        status = await supervisor.ended
        assert len(processes) == 2
        assert not any(process.is_running() for process in processes)
        supervisor.close()
        return status

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == 0


def test_the_report_of_a_process_that_has_ended_for_good_is_removed_a_while_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.server.guard.supervisor.REPORT_S", 0.2)
    reports = [folder / "engine.report", folder / "engine_2.report"]
    for report in reports:
        report.write_text("started")

    async def run() -> None:
        with contextlib.closing(Supervisor([spec("engine")], folder, exit_timeout_s=0.1)) as supervisor:
            assert await supervisor.start()
            supervisor.upgrade(spec("engine_2", FAILING), stops_first=False, finish_s=0.1)
            await until(lambda: supervisor.may_upgrade)
            assert [report.exists() for report in reports] == [True, True]
            await until(lambda: not reports[1].exists())
            supervisor.stop()
            await supervisor.ended

    asyncio.run(run())

    assert [report.exists() for report in reports] == [True, False]


@pytest.mark.parametrize("name", ["engine", "front_end_0"])
def test_a_process_that_is_killed_is_started_again_and_the_other_goes_on(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def act() -> None:
        before = records(folder)
        os.kill(before[name].pid, signal.SIGKILL)
        await until(lambda: log_shows(caplog, rf"{name} \(pid \d+\) is ready again"))
        after = records(folder)
        (other,) = before.keys() - {name}
        assert after[name].pid not in (0, before[name].pid)
        assert after[name].restarts == {"SIGKILL": 1}
        assert after[other] == before[other]

    assert serve(folder, spec("engine"), spec("front_end_0"), act=act) == 0
    assert log_shows(caplog, rf"{name} \(pid \d+\) ended after [\d.]+ s: SIGKILL; it restarts in 0.05 s")


def test_a_process_that_fails_at_the_first_start_ends_the_server_with_its_status(folder: Path) -> None:
    assert serve(folder, spec("engine"), spec("front_end_0", FAILING)) == 3


def test_a_bug_ends_the_server_too(folder: Path) -> None:
    broken = ProcessSpec("engine", ProcessRole.ENGINE, ["/bin/true"], {"X": "\0"} | dict(os.environ))

    with pytest.raises(ValueError, match="null byte"):
        serve(folder, broken)


def test_a_process_that_ignores_the_signal_is_killed_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.server.guard.restarts.FRONT_END_STOP_MARGIN_NS", 0)

    assert serve(folder, spec("engine"), spec("front_end_0", STUBBORN)) == 1


def test_a_process_whose_loop_hangs_is_replaced(folder: Path) -> None:
    async def act() -> None:
        os.kill(records(folder)["engine"].pid, signal.SIGUSR1)
        await until(lambda: records(folder)["engine"].restarts == {"hung": 1})

    assert serve(folder, spec("engine"), act=act, heartbeat_s=2.0, exit_timeout_s=5.0) == 0


def test_orphans_are_reaped_and_the_guards_own_processes_only_once(folder: Path) -> None:
    # In a process of its own, which the kernel hands orphans to, as it does to process 1.
    program = f"""
import asyncio, ctypes, json, os, signal, sys
from pathlib import Path
import psutil
import charonia.server.guard.supervisor as supervisor
from charonia.server.guard.restarts import ProcessRole
from charonia.server.metrics.processes import from_text
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
supervisor.ORPHANS_S = 0.01
folder = Path({str(folder)!r})
command = [sys.executable, "-I", "-S", "-c", {PARENT_OF_ORPHAN!r}]
environment = dict(os.environ, PIDS=str(folder / "orphan"))
specs = [supervisor.ProcessSpec("engine", ProcessRole.ENGINE, command, environment)]
async def main():
    guard = supervisor.Supervisor(specs, folder, exit_timeout_s=1, reaps_orphans=True)
    assert await guard.start()
    orphan = 0
    while not orphan:
        await asyncio.sleep(0.01)
        text = (folder / "orphan").read_text() if (folder / "orphan").exists() else ""
        orphan = int(text or 0)
    engine, = from_text((folder / "processes.json").read_text())
    os.kill(engine.pid, signal.SIGKILL)
    while psutil.pid_exists(orphan):  # a zombie exists
        await asyncio.sleep(0.01)
    while not (restarts := from_text((folder / "processes.json").read_text())[0].restarts):
        await asyncio.sleep(0.01)
    print(json.dumps(restarts), flush=True)
    guard.stop()
    status = await guard.ended
    guard.close()
    return status
sys.exit(asyncio.run(main()))
"""

    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {"SIGKILL": 1}


def test_when_the_guard_is_killed_its_processes_end(folder: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from charonia.server.guard.restarts import ProcessRole as Role
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
command = [sys.executable, "-I", "-S", "-c", {STUBBORN!r}]
processes = [ProcessSpec("engine", Role.ENGINE, command), ProcessSpec("front_end_0", Role.FRONT_END, command)]
async def main():
    await Supervisor(processes, Path({str(folder)!r}), exit_timeout_s=1).start()
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"ready\n"
        processes = [psutil.Process(record.pid) for record in records(folder).values()]
        guard.kill()

        for process in processes:
            wait_until_ended(process)


def test_processes_know_where_the_record_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import os; open(os.environ['SEEN'], 'w').write(os.environ['{RECORD_VARIABLE}'])\n" + PROCESS
    serve(folder, spec("engine", program, SEEN=str(tmp_path / "seen")))

    monkeypatch.setenv(RECORD_VARIABLE, (tmp_path / "seen").read_text())
    assert [record.name for record in read_record()] == ["engine"]
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "gone"))
    assert read_record() == ()
    monkeypatch.delenv(RECORD_VARIABLE)
    assert read_record() == ()
