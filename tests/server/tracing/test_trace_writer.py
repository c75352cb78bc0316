"""The thread that writes traces: limits of its queue, and what an error costs."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.scripted import TraceIds

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.core.trace import TENSOR_QUEUE_INPUT, TraceLevel, TraceTree
from charonia.server.tracing import files
from charonia.server.tracing.files import TraceFiles, TraceWriter
from charonia.server.tracing.sampling import Sampling
from charonia.wire.trace_settings import TraceSettings


class Blocked:
    """A sink that waits until it may go on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.may_go = threading.Event()
        self.flushed = threading.Event()
        self.seen: list[str] = []
        self.fails = fails

    def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
        self.may_go.wait(200)
        self.seen.append("trace")
        if self.fails:
            raise OSError("no room")

    def retire(self, sampling: Sampling) -> None:
        self.seen.append("retired")

    def flush(self) -> None:
        self.flushed.set()

    def close(self) -> None:
        self.seen.append("closed")


SAMPLING = Sampling(TraceSettings(TraceLevel.TIMESTAMPS), allows_remote=False)


def tree(tensor: Tensor | None = None) -> TraceTree:
    made = TraceTree(TraceLevel.TENSORS, TraceIds(), lambda tree: None)
    if tensor is not None:
        made.root.show(TENSOR_QUEUE_INPUT, [tensor])
    return made


def test_everything_is_written_in_order_before_the_end() -> None:
    sink = Blocked()
    made = TraceWriter(sink)
    made.add(SAMPLING, tree())
    made.retire(Sampling(TraceSettings(), allows_remote=False))
    made.add(SAMPLING, tree())
    sink.may_go.set()

    made.close()

    assert sink.seen == ["trace", "retired", "trace", "closed"]
    assert made.dropped == 0


def test_what_was_collected_is_written_while_traces_go_on_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FLUSH_S", 0.05)
    sink = Blocked()
    sink.may_go.set()
    made = TraceWriter(sink)

    until_s = time.monotonic() + 200
    while not sink.flushed.is_set() and time.monotonic() < until_s:
        made.add(SAMPLING, tree())
        time.sleep(0.001)
    made.close()

    assert sink.flushed.is_set()


def test_traces_that_wait_when_their_setting_is_over_stay_together(tmp_path: Path) -> None:
    blocked, setting = Blocked(), Sampling(TraceSettings(TraceLevel.TIMESTAMPS, log_frequency=9), allows_remote=False)

    class Slow(TraceFiles):
        def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
            blocked.may_go.wait(200)
            super().write(sampling, tree, is_complete)

    made = TraceWriter(Slow(str(tmp_path / "t")))
    for _ in range(5):
        one = tree()
        one.root.model_name, one.root.model_version = "m", "1"
        made.add(setting, one)
    made.retire(setting)
    blocked.may_go.set()
    made.close()

    assert [path.name for path in tmp_path.iterdir()] == ["t.0"]


def test_traces_that_come_faster_than_they_are_written_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "QUEUE_MAX", 2)
    sink = Blocked()
    made = TraceWriter(sink)

    for _ in range(20):
        made.add(SAMPLING, tree())
    sink.may_go.set()
    made.close()

    written = sink.seen.count("trace")
    assert 2 <= written <= 3
    assert made.dropped == 20 - written
    assert "1 traces were dropped" in caplog.text


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("T", DataType.FP32, np.zeros(20, np.float32)),
        Tensor("T", DataType.BYTES, np.array([b"x" * 80], object)),
    ],
)
def test_tensors_that_wait_have_a_limit(monkeypatch: pytest.MonkeyPatch, tensor: Tensor) -> None:
    monkeypatch.setattr(files, "QUEUE_TENSOR_BYTES_MAX", 100)
    sink = Blocked()
    made = TraceWriter(sink)
    made.add(SAMPLING, tree(tensor))
    made.add(SAMPLING, tree(tensor))
    sink.may_go.set()
    made.close()

    assert made.dropped == 1


def test_a_trace_that_cannot_be_written_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    sink = Blocked(fails=True)
    sink.may_go.set()
    made = TraceWriter(sink)
    made.add(SAMPLING, tree())
    made.add(SAMPLING, tree())

    made.close()

    assert sink.seen == ["trace", "trace", "closed"]
    assert caplog.text.count("one of the traces could not be written") == 2


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(files, "CLOSE_S_MAX", 0.01)
    sink = Blocked()
    made = TraceWriter(sink)
    made.add(SAMPLING, tree())

    made.close()

    assert "could not be written within 0.01 s" in caplog.text
    sink.may_go.set()
