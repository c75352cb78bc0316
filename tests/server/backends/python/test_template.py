"""Templates: processes that workers are forked from."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.process import eventually, until

from charonia.core.errors import ServingError
from charonia.server.backends.workers import template as template_module
from charonia.server.backends.workers.process import Environment, WorkerProcess, ask_worker
from charonia.server.backends.workers.template import WorkerTemplate

pytestmark = pytest.mark.skipif(not WorkerTemplate.is_possible(), reason="needs Linux")

MODEL = """
import os
import sys

import triton_python_backend_utils as pb_utils

print("its last words")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        if config.as_dict().get("die"):
            os._exit(7)
        names = ("OMP_NUM_THREADS", "LATER")
        return pb_utils.ModelConfig(
            {
                "parent": os.getppid(),
                "variables": {name: os.environ.get(name, "") for name in names},
                "cores": sorted(os.sched_getaffinity(0)),
                "group": os.getpgrp() == os.getpid(),
                "imported": "colorsys" in sys.modules,
                "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)),
            }
        )
"""


@asynccontextmanager
async def running(*modules: str, **variables: str) -> AsyncIterator[WorkerTemplate]:
    template = WorkerTemplate("the library", modules or ["colorsys"], variables)
    try:
        await template.acquire()
        yield template
    finally:
        await template.aclose()


async def ask(template: WorkerTemplate, folder: Path, question: str = "{}") -> dict[str, object]:
    (folder / "model.py").write_text(MODEL)
    answer = await ask_worker(
        "asked",
        Environment(template=template),
        ("complete", str(folder / "model.py"), str(folder), str(folder), question),
        failed="failed",
        lost="lost",
        late="late",
    )
    found: dict[str, object] = json.loads(answer)
    return found


async def test_a_fork_is_a_worker_of_its_own_with_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(LATER="set before") as template:
        monkeypatch.setenv("LATER", "set after the import")
        found, pid = await ask(template, tmp_path), template.pid

    assert found == {
        "parent": pid,
        "variables": {"OMP_NUM_THREADS": "1", "LATER": "set after the import"},
        "cores": sorted(os.sched_getaffinity(0)),
        "group": True,
        "imported": True,
        "descriptors": ["/dev/null", "pipe", "pipe"],
    }


async def test_a_fork_is_bound_to_its_cores() -> None:
    core = min(os.sched_getaffinity(0))

    async with running() as template, asyncio.timeout(200):
        process = WorkerProcess(
            "m",
            environment=Environment(template=template),
            cores=[core],
            on_message=lambda _: None,
            on_end=lambda _: None,
        )
        try:
            await until(lambda: os.sched_getaffinity(process.pid) == {core})
        finally:
            process.kill("enough")
            await process.stop(0)


async def test_the_end_of_a_fork_is_told_with_its_status_and_its_last_output(tmp_path: Path) -> None:
    async with running() as template:
        with pytest.raises(ServingError, match="the worker process exited with status 7") as caught:
            await ask(template, tmp_path, '{"die": true}')
    assert "its last words" in caught.value.message


async def test_an_import_that_fails_is_an_error_with_the_reason_and_can_be_tried_again(tmp_path: Path) -> None:
    template = WorkerTemplate("the library", ["late_library"], {"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(ServingError) as caught:
            await template.acquire()
        assert "the library cannot be imported: ModuleNotFoundError" in caught.value.message
        (tmp_path / "late_library.py").write_text("")
        await template.acquire()
    finally:
        await template.aclose()


async def test_an_import_that_ends_the_process_is_an_error_with_its_last_output(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nprint('no such instruction', flush=True)\nos.abort()")

    with pytest.raises(ServingError) as caught:
        async with running("deadly", PYTHONPATH=str(tmp_path)):
            pass
    message = caught.value.message

    assert f"the process ended with status -{signal.SIGABRT.value}" in message
    assert "no such instruction" in message


async def test_a_library_that_starts_threads_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )

    with pytest.raises(ServingError, match="1 threads run after the import of busy, so workers cannot be forked"):
        async with running("busy", PYTHONPATH=str(tmp_path)):
            pass


async def test_an_import_that_does_not_finish_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(template_module, "IMPORT_S_MAX", 0.2)

    with pytest.raises(ServingError, match=r"^the import of the library did not finish within 0\.2 s$"):
        async with running("slow", PYTHONPATH=str(tmp_path)):
            pass


async def test_a_template_that_ends_is_started_again_and_its_workers_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as template:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process = WorkerProcess(
            "m", environment=Environment(template=template), on_message=lambda _: None, on_end=ended.set_result
        )
        first = template.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: template.pid not in (0, first))
        with pytest.raises(BlockingIOError, match="the library is being imported"):
            WorkerProcess(
                "n", environment=Environment(template=template), on_message=lambda _: None, on_end=lambda _: None
            )
        await template.acquire()
        assert (await ask(template, tmp_path))["parent"] == template.pid
        os.kill(process.pid, signal.SIGKILL)
        reason = await asyncio.wait_for(ended, 30)
        assert reason.startswith("the worker process closed its connection, and how it ended is not known")
    assert "the process that has imported the library has ended; its workers go on" in caplog.text


async def test_a_template_ends_a_while_after_it_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "IDLE_S", 0.1)

    async with running() as template:
        pid = template.pid
        await template.acquire()
        template.release()
        await asyncio.sleep(0.3)
        assert template.pid == pid
        template.release()
        await until(lambda: not template.pid)
        assert not Path(f"/proc/{pid}").exists()
        await template.acquire()
        assert template.pid not in (0, pid)


async def test_a_template_that_hangs_is_given_up_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "FORK_S_MAX", 0.2)

    async with running() as template:
        hanging = template.pid
        os.kill(hanging, signal.SIGSTOP)
        with pytest.raises(OSError, match="timed out"):
            WorkerProcess(
                "n", environment=Environment(template=template), on_message=lambda _: None, on_end=lambda _: None
            )
        assert not Path(f"/proc/{hanging}").exists()
        await template.acquire()
        assert (await ask(template, tmp_path))["parent"] == template.pid


def test_a_template_ends_with_the_server_that_it_works_for() -> None:
    reading, writing = os.pipe()
    server = os.fork()
    if not server:

        async def work() -> None:
            async with running() as template:
                os.write(writing, str(template.pid).encode())
                await asyncio.sleep(60)

        try:
            asyncio.run(work())
        finally:
            os._exit(1)
    os.close(writing)
    pid = int(os.read(reading, 32))
    os.close(reading)

    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)

    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
