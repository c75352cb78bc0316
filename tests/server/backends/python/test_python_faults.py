"""Faults of the server in callbacks of the event loop, and of either end with what it reads: nothing waits for ever."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support import python_model
from tests.support.server_end import ServerEnd

from charonia.core.errors import Code, ServingError
from charonia.server.backends.api import Result
from charonia.server.backends.python.worker.connection import WorkerConnection
from charonia.server.backends.python.worker.errors import TritonError
from charonia.server.backends.python.worker.host import Inbox, ModelCall
from charonia.server.backends.python.worker.requests import first_of_async
from charonia.server.backends.workers.process import WorkerProcess
from charonia.testing.backend_suite import StreamSink

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


class BrokenSink(StreamSink):
    def respond(self, index: int, result: Result | None, final: bool) -> None:
        raise AttributeError("a fault")


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_a_batch_whose_results_cannot_be_handed_on_fails_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setattr(python_model, "default_mode", mode)

    loaded = await python_model.load(tmp_path, ECHO)
    errors: list[ServingError | None] = []

    class Broken(BrokenSink):
        def finish(
            self, input_end: int, output_start: int, error: ServingError | None = None, *, leaves_open: bool = False
        ) -> None:
            errors.append(error)

    loaded.start([python_model.request(np.ones(2, np.float32))], Broken(1))
    (result,) = await loaded.run([python_model.request(np.ones(2, np.float32))])
    assert not isinstance(result, ServingError)
    (error,) = errors
    assert error is not None
    assert error.code is Code.INTERNAL
    assert "fault of its own" in error.message
    await loaded.close()
    assert "a fault" in caplog.text


async def test_a_worker_whose_message_meets_a_fault_of_the_server_is_ended_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def message(_: object) -> None:
        raise AttributeError("a fault")

    process = WorkerProcess("m_0_0", on_message=message, on_end=ended.set_result)
    assert repr(process) == f"<WorkerProcess 'm_0_0' pid={process.pid} running unsent=0>"
    process.send(("initialize", "nowhere", "", "", {}, "m_0_0", {}))  # is answered that it failed
    reason = await asyncio.wait_for(ended, 30)
    assert reason.startswith("the server met a fault of its own with one of its messages: AttributeError: a fault")
    assert repr(process).endswith("ended unsent=0>")
    assert "a fault" in caplog.text


@pytest.fixture
def server() -> Iterator[ServerEnd]:
    server = ServerEnd(timeout_s=200)
    yield server
    server.close()


def test_a_fault_of_the_worker_with_a_message_fails_what_waits_and_says_why(
    server: ServerEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = WorkerConnection(*server.theirs, "m_0_0")
    assert repr(connection) == "<WorkerConnection 'm_0_0' open batches=0 calls=0>"
    call = ModelCall(0, "other", "", False, ("", 0, 0, 0, 0, "{}", (), ""), [])
    connection.begin(call)
    assert repr(connection) == "<WorkerConnection 'm_0_0' open batches=0 calls=1>"
    # Of the shape of a batch, but with an input that has no place.
    server.send(("execute", [(1, [((), [("IN", "FP32", (1,), None)])])], [], []))

    with pytest.raises(TypeError):
        connection.wait(Inbox())

    ((failure, final),) = call.inbox.items
    assert final
    assert failure is not None
    assert failure[0] == TritonError.UNAVAILABLE
    assert str(failure[1]).startswith("a message of the server cannot be read: TypeError")
    assert list(connection.tasks.items) == [("end",)]
    assert repr(connection) == "<WorkerConnection 'm_0_0' closed batches=0 calls=1>"
    assert "a message of the server cannot be read" in capsys.readouterr().err


def test_an_event_loop_that_is_closed_while_it_waits_does_not_end_the_connection(server: ServerEnd) -> None:
    connection = WorkerConnection(*server.theirs, "m_0_0")
    call = ModelCall(0, "other", "", False, ("", 0, 0, 0, 0, "{}", (), ""), [])

    async def start() -> None:
        task = asyncio.ensure_future(first_of_async(connection, call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(start())
    server.send(("reply", call.number, (TritonError.UNAVAILABLE, "no"), True, [], []))
    connection.poll()

    assert list(call.inbox.items) == [((TritonError.UNAVAILABLE, "no"), True)]
    assert not connection.reader.is_over
