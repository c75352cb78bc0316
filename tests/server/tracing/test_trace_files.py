"""Trace files: their entries, their names, and that they are JSON at any time."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.scripted import TraceIds

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.core.trace import (
    REQUEST_START,
    TENSOR_BACKEND_OUTPUT,
    TENSOR_QUEUE_INPUT,
    TraceLevel,
    TraceTree,
)
from charonia.server.tracing import files
from charonia.server.tracing import files as entries
from charonia.server.tracing.files import TraceFiles
from charonia.server.tracing.files import entries as as_entries
from charonia.server.tracing.sampling import Sampling
from charonia.wire.trace_settings import TraceSettings

ids = TraceIds()


def tree(level: TraceLevel = TraceLevel.TIMESTAMPS) -> TraceTree:
    made = TraceTree(level, ids, lambda tree: None)
    made.root.model_name, made.root.model_version = "m", "1"
    made.root.mark(REQUEST_START, 10)
    return made


def sampling(log_frequency: int = 0, traces: int = -1) -> Sampling:
    return Sampling(TraceSettings(TraceLevel.TIMESTAMPS, 1, traces, log_frequency), allows_remote=False)


def read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def models(path: Path) -> int:
    return sum("model_name" in entry for entry in read(path))


def shown(tensor: Tensor) -> dict[str, str]:
    made = tree(TraceLevel.TENSORS)
    made.root.show(TENSOR_BACKEND_OUTPUT, [tensor])
    (entry,) = [e for e in json.loads(b"[%b]" % as_entries(made)) if "activity" in e]
    return dict(entry["tensor"])


def test_a_trace_is_its_request_then_its_times_in_order() -> None:
    made = tree()
    root = made.root
    root.request_id = 'a"b'
    made.mark("HTTP_RECV_START", 3)
    child = root.child()
    assert child is not None
    child.model_name, child.model_version = "other", "2"

    found = json.loads(b"[%b]" % as_entries(made))

    assert found == [
        {"id": root.id, "model_name": "m", "model_version": 1, "request_id": 'a"b'},
        {"id": root.id, "timestamps": [{"name": "HTTP_RECV_START", "ns": 3}]},
        {"id": root.id, "timestamps": [{"name": "REQUEST_START", "ns": 10}]},
        {"id": child.id, "model_name": "other", "model_version": 2, "parent_id": root.id},
    ]


def test_tensors_are_there_without_times_where_only_they_are_asked_for() -> None:
    made = tree(TraceLevel.TENSORS)
    made.root.show(TENSOR_QUEUE_INPUT, [Tensor("IN", DataType.INT32, np.array([[1, 2]], np.int32))])

    found = json.loads(b"[%b]" % as_entries(made))[1:]

    tensor = {"name": "IN", "data": "1,2", "shape": "1,2", "dtype": "INT32"}
    assert [(entry["activity"], entry["tensor"]) for entry in found] == [
        ("TENSOR_QUEUE_INPUT", tensor),
    ]


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (Tensor("T", DataType.FP32, np.array([0.1, 1e20, 3], np.float32)), "0.1,1e+20,3"),
        (Tensor("T", DataType.FP16, np.array([0.5], np.float16)), "0.5"),
        (Tensor("T", DataType.BF16, np.array([0x3FC0], np.uint16)), "1.5"),
        (Tensor("T", DataType.BOOL, np.array([True, False])), "1,0"),
        (Tensor("T", DataType.BYTES, np.array([b"x,y", b"\xff"], object)), '"x,y","\\xff"'),
        (Tensor("T", DataType.INT8, np.zeros(0, np.int8)), ""),
    ],
)
def test_data_are_text_with_commas(tensor: Tensor, data: str) -> None:
    assert shown(tensor)["data"] == data


def test_of_a_large_tensor_the_first_elements_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "ELEMENTS_MAX", 2)

    assert shown(Tensor("T", DataType.INT32, np.arange(5, dtype=np.int32)))["data"] == "0,1,..."


def test_all_traces_go_into_one_file_that_is_always_json(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    sink, setting = TraceFiles(str(path)), sampling()
    sink.write(setting, tree(), False)
    sink.flush()
    assert models(path) == 1

    sink.write(setting, tree(), False)
    sink.close()

    assert models(path) == 2


def test_so_many_traces_go_into_a_file_of_their_own(tmp_path: Path) -> None:
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling(log_frequency=2)
    for _ in range(5):
        sink.write(setting, tree(), False)
    sink.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1"]

    sink.close()

    assert [models(tmp_path / name) for name in ("t.0", "t.1", "t.2")] == [2, 2, 1]


def test_the_last_trace_of_a_count_writes_the_file(tmp_path: Path) -> None:
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling(traces=2)
    sink.write(setting, tree(), False)
    sink.flush()
    assert list(tmp_path.iterdir()) == []

    sink.write(setting, tree(), True)

    assert models(tmp_path / "t.0") == 2


def test_a_setting_that_is_over_is_written_and_so_is_what_follows_late(tmp_path: Path) -> None:
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling(traces=9)
    sink.write(setting, tree(), False)
    sink.retire(setting)
    assert models(tmp_path / "t") == 1
    setting.is_retired = True

    sink.write(setting, tree(), False)
    sink.close()

    assert models(tmp_path / "t") == 2


def test_what_is_held_in_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BUFFER_BYTES_MAX", 100)
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling(log_frequency=1_000_000)

    for _ in range(3):
        sink.write(setting, tree(), False)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1", "t.2"]


def test_a_file_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 150)
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling()

    for _ in range(9):
        sink.write(setting, tree(), False)
        sink.flush()

    assert models(tmp_path / "t") == 2
    assert [record.message for record in caplog.records] == [
        f"'{tmp_path}/t' has reached 150 bytes: no more traces are added to it"
    ]


def test_a_disk_that_fails_costs_the_traces_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = TraceFiles(str(tmp_path / "absent" / "t"))
    sink.write(sampling(), tree(), False)

    sink.close()

    assert "cannot be written: No such file or directory" in caplog.text


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond a size: writes end in part, then fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def long_tree(size: int) -> TraceTree:
    made = tree()
    made.root.request_id = "x" * size
    return made


@pytest.mark.parametrize("size", [2_000, 50_000])
def test_a_file_is_json_while_the_disk_is_full_and_goes_on_when_there_is_room(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t"
    sink, setting = TraceFiles(str(path)), sampling()
    sink.write(setting, tree(), False)
    sink.flush()

    with room_for(1_000):
        sink.write(setting, long_tree(size), False)
        sink.flush()
        assert models(path) == 1

    sink.write(setting, tree(), False)
    sink.close()

    assert models(path) == 2


@pytest.mark.parametrize("size", [2_000, 50_000])
def test_a_disk_that_is_full_from_the_start_gets_its_traces_when_there_is_room(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t"
    sink, setting = TraceFiles(str(path)), sampling()
    with room_for(1_000):
        sink.write(setting, long_tree(size), False)
        sink.flush()

    sink.write(setting, tree(), False)
    sink.close()

    assert models(path) == 1


def test_a_numbered_file_that_has_no_room_is_not_left_in_part(tmp_path: Path) -> None:
    sink, setting = TraceFiles(str(tmp_path / "t")), sampling(log_frequency=1)
    with room_for(1_000):
        sink.write(setting, long_tree(2_000), False)
    sink.write(setting, tree(), False)
    sink.close()

    assert [models(path) for path in tmp_path.iterdir()] == [1]
