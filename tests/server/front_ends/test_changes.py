"""What an engine hands down to the one that follows it: the record, and its way over the disk."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.fake_engine import FakeEngine

from charonia.core.errors import invalid
from charonia.server.facade import Services
from charonia.server.front_ends import keeper
from charonia.server.front_ends.changes import ChangeLog, RequestedLoad
from charonia.server.front_ends.keeper import Keeper, read_changes
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.wire.log_settings import LogOptions
from charonia.wire.shared_memory import CudaRegion, SystemRegion


class Log:
    """A log whose settings change."""

    def __init__(self) -> None:
        self.options = LogOptions(file="/var/log/own")

    async def change(self, options: LogOptions) -> None:
        """Take new options."""
        self.options = options


class NoMemory:
    """Memory of a region that a test does not touch."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return nothing."""
        return memoryview(b"")

    def write(self, offset: int, data: memoryview) -> None:
        """Do nothing."""


def next_engine(folder: Path, services: Services | None = None) -> tuple[FakeEngine, list[str]]:
    """Return the engine that follows in this folder, after the replay, and what could not be loaded."""
    engine = FakeEngine()
    return engine, asyncio.run(Keeper(folder).replay(engine, services or Services()))


def loaded(
    kept: Keeper, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None, over: bool = False
) -> None:
    asyncio.run(kept.model_loaded(name, config, files, over))


def test_models_are_loaded_and_unloaded_again_in_the_order_of_the_last_requests(tmp_path: Path) -> None:
    kept = Keeper(tmp_path)
    loaded(kept, "a")
    loaded(kept, "b", '{"max_batch_size": 2}', over=True)
    kept.model_unloaded("c")
    kept.model_unloaded("a")

    engine, failures = next_engine(tmp_path)

    assert engine.loads == [("b", '{"max_batch_size": 2}', None)]
    assert engine.unloads == [("c", False), ("a", False)]
    assert failures == []
    assert list(read_changes(tmp_path).models) == ["b", "c", "a"]


def test_a_model_that_is_loaded_again_keeps_the_configuration_of_the_request_before_where_the_engine_does() -> None:
    changes = ChangeLog()
    changes.model_loaded("m", RequestedLoad("{}"), is_overridden=True)
    changes.model_loaded("m", RequestedLoad(), is_overridden=True)
    assert changes.models == {"m": RequestedLoad("{}")}

    changes.model_loaded("m", RequestedLoad(), is_overridden=False)
    assert changes.models == {"m": RequestedLoad()}


def test_files_of_a_request_are_kept_until_the_model_is_loaded_otherwise(tmp_path: Path) -> None:
    kept = Keeper(tmp_path)
    files = {"1/model.onnx": b"weights", "labels.txt": b""}
    loaded(kept, "m", "{}", files)
    assert next_engine(tmp_path)[0].loads == [("m", "{}", files)]

    loaded(kept, "m")
    assert next_engine(tmp_path)[0].loads == [("m", None, None)]
    assert [path.name for path in tmp_path.iterdir()] == [keeper.CHANGES_NAME]


def test_files_that_are_too_large_are_lost_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "KEPT_FILES_BYTES_MAX", 3)
    with caplog.at_level(logging.WARNING):
        loaded(Keeper(tmp_path), "m", "{}", {"1/model.onnx": b"long"})
        engine, failures = next_engine(tmp_path)

    assert (engine.loads, engine.unloads, failures) == ([], [], [])
    assert "an engine that follows does not load it" in caplog.text
    assert "'m' is not loaded again" in caplog.text


def test_a_model_that_cannot_be_loaded_again_is_reported_and_the_others_are(tmp_path: Path) -> None:
    kept = Keeper(tmp_path)
    loaded(kept, "a")
    loaded(kept, "b")
    engine = FakeEngine(control_error=invalid("there is no such model folder"))

    assert asyncio.run(Keeper(tmp_path).replay(engine, Services())) == ["there is no such model folder"] * 2


def test_a_second_replay_makes_only_what_is_new(tmp_path: Path) -> None:
    kept, follower, engine = Keeper(tmp_path), Keeper(tmp_path), FakeEngine()
    loaded(kept, "a")
    asyncio.run(follower.replay(engine, Services()))
    loaded(kept, "b")
    asyncio.run(follower.replay(engine, Services()))

    assert [name for name, *_ in engine.loads] == ["a", "b"]


def test_settings_of_the_log_hold_except_for_its_file(tmp_path: Path) -> None:
    Keeper(tmp_path).log_changed(LogOptions(verbose=3, info=False, file="/var/log/before"))
    log = Log()
    next_engine(tmp_path, Services(log=log))

    assert log.options == LogOptions(verbose=3, info=False, file="/var/log/own")


def test_settings_of_traces_are_the_sum_of_their_changes(tmp_path: Path) -> None:
    kept = Keeper(tmp_path)
    kept.trace_changed("", {"rate": 5, "count": 7})
    kept.trace_changed("m", {"rate": 2})
    kept.trace_changed("", {"count": None})
    kept.trace_changed("m", {"rate": None})

    assert read_changes(tmp_path).trace == {"": {"rate": 5}}


def test_regions_are_known_again(tmp_path: Path) -> None:
    system, cuda = SystemRegion("s", "/key", 8, 64), CudaRegion("c", b"handle", 0, 32)

    def registry() -> RegionRegistry:
        return RegionRegistry(100, open_system=lambda _: NoMemory(), open_cuda=lambda _: NoMemory())

    before = Services(regions=registry())
    assert before.regions is not None
    asyncio.run(before.regions.register_system(system))
    asyncio.run(before.regions.register_cuda(cuda))
    Keeper(tmp_path).regions_changed(before)
    after = Services(regions=registry())
    next_engine(tmp_path, after)

    assert after.regions is not None
    assert (after.regions.system(), after.regions.cuda()) == ([system], [cuda])
    asyncio.run(after.regions.unregister_system("s"))
    assert after.regions.system() == []
