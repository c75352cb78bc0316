"""What an engine hands down to the one that follows it: the record, and its way over the disk."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.linked_engine import ServedFake

from charonia.core.errors import ServingError, invalid
from charonia.server.facade import Services
from charonia.server.front_ends import engine_changes
from charonia.server.front_ends.engine_changes import (
    ChangeLog,
    EngineChanges,
    RequestedChange,
    RequestedLoad,
    read_changes,
)
from charonia.server.front_ends.messages import MOVED
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


def next_engine(folder: Path, services: Services | None = None) -> ServedFake:
    """Return the engine that follows in this folder, after the replay."""
    engine = ServedFake()
    asyncio.run(EngineChanges(folder).take_over(engine, services or Services(), has_ended=True))
    return engine


def taken_over(kept: EngineChanges, engine: ServedFake) -> None:
    """Let an engine take over from one that hands over."""
    asyncio.run(kept.take_over(engine, Services(), has_ended=False))


def loaded(
    kept: EngineChanges,
    name: str,
    config: str | None = None,
    files: Mapping[str, bytes] | None = None,
    over: bool = False,
) -> None:
    asyncio.run(kept.model_loaded(name, config, files, over))


def test_models_are_loaded_and_unloaded_again_in_the_order_of_the_last_requests(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
    loaded(kept, "a")
    loaded(kept, "b", '{"max_batch_size": 2}', over=True)
    kept.model_unloaded("c", True)
    kept.model_unloaded("a", False)

    engine = next_engine(tmp_path)

    assert engine.loads == [("b", '{"max_batch_size": 2}', None)]
    assert engine.unloads == [("c", True), ("a", False)]
    assert list(read_changes(tmp_path).models) == ["b", "c", "a"]


def test_a_model_that_is_loaded_again_keeps_the_configuration_of_the_request_before_where_the_engine_does() -> None:
    changes = ChangeLog()
    changes.model_loaded("m", RequestedLoad("{}"), is_overridden=True)
    changes.model_loaded("m", RequestedLoad(), is_overridden=True)
    assert changes.models == {"m": RequestedChange(2, RequestedLoad("{}"))}

    changes.model_loaded("m", RequestedLoad(), is_overridden=False)
    assert changes.models == {"m": RequestedChange(3, RequestedLoad())}


def test_files_of_a_request_are_kept_until_the_model_is_loaded_otherwise(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
    files = {"1/model.onnx": b"weights", "labels.txt": b""}
    loaded(kept, "m", "{}", files)
    assert next_engine(tmp_path).loads == [("m", "{}", files)]

    loaded(kept, "m")
    assert next_engine(tmp_path).loads == [("m", None, None)]
    assert [path.name for path in tmp_path.iterdir()] == [engine_changes.CHANGES_NAME]


def test_files_that_are_too_large_are_lost_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_changes, "KEPT_FILES_BYTES_MAX", 3)
    with caplog.at_level(logging.WARNING):
        loaded(EngineChanges(tmp_path), "m", "{}", {"1/model.onnx": b"long"})
        engine = next_engine(tmp_path)

    assert (engine.loads, engine.unloads) == ([], [])
    assert "the next engine will not load it" in caplog.text
    assert "failed to load 'm'" in caplog.text
    with pytest.raises(ServingError, match="the files of its request could not be kept"):
        taken_over(EngineChanges(tmp_path, is_strict=True), ServedFake())


def test_a_model_that_cannot_be_loaded_again_is_reported_and_the_others_are(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
    loaded(kept, "a")
    loaded(kept, "b")
    engine = ServedFake(control_error=invalid("there is no such model folder"))

    with pytest.raises(ServingError) as caught:
        taken_over(EngineChanges(tmp_path, is_strict=True), engine)
    assert caught.value.message.splitlines()[1:] == ["there is no such model folder"] * 2
    taken_over(EngineChanges(tmp_path), engine)  # the log has the reasons
    assert engine.requests is not None


def test_what_changes_during_the_replay_is_made_when_the_engine_takes_over_and_nothing_else(tmp_path: Path) -> None:
    kept, follower, engine = EngineChanges(tmp_path), EngineChanges(tmp_path), ServedFake()
    for name in ("same", "plain", "given", "twice", "gone", "back"):
        loaded(kept, name, "{}", {"1/x": b"1"} if name == "given" else None)
    kept.model_unloaded("back", False)
    asyncio.run(follower.replay_models(engine))
    engine.loads.clear()
    engine.unloads.clear()

    loaded(kept, "plain", "{}")  # its files have changed, the request has not
    loaded(kept, "given", "{}", {"1/x": b"2"})
    kept.model_unloaded("twice", False)
    loaded(kept, "twice", "{}")
    loaded(kept, "gone", "{}")
    kept.model_unloaded("gone", True)
    loaded(kept, "back", "{}")
    asyncio.run(kept.close())
    taken_over(follower, engine)

    assert engine.loads == [
        *(("plain", "{}", None), ("given", "{}", {"1/x": b"2"}), ("twice", "{}", None), ("back", "{}", None))
    ]
    assert engine.unloads == [("gone", True)]


def test_numbers_go_on_over_engines_that_follow_one_another(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
    loaded(kept, "a")
    for count in (1, 2, 3):
        follower, engine = EngineChanges(tmp_path), ServedFake()
        asyncio.run(follower.replay_models(engine))
        loaded(kept, "a")  # during the replay
        asyncio.run(kept.close())
        taken_over(follower, engine)
        assert [name for name, *_ in engine.loads] == ["a", "a"]
        assert read_changes(tmp_path).number == 1 + count
        kept = follower


async def test_a_keeper_that_is_closed_leaves_the_record_to_the_next_engine(tmp_path: Path) -> None:
    before, follower = EngineChanges(tmp_path), EngineChanges(tmp_path)
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def change() -> None:
        async with before.model_change("a"):
            begun.set()
            await may_end.wait()
            await before.model_loaded("a", None, None, False)

    changing = asyncio.ensure_future(change())
    await begun.wait()
    closing = asyncio.ensure_future(before.close())
    await asyncio.sleep(0)
    assert not closing.done()  # it waits for the change under way
    may_end.set()
    await asyncio.gather(changing, closing)
    await follower.take_over(ServedFake(), Services(), has_ended=False)
    await follower.model_loaded("b", None, None, False)

    with pytest.raises(ServingError, match=MOVED):
        async with before.model_change("c"):
            pass
    before.traffic_changed("m", "of the engine before")
    now = read_changes(tmp_path)
    assert (list(now.models), now.traffic) == (["a", "b"], {})

    follower.reopen()
    before.reopen()  # the next engine has gone
    assert read_changes(tmp_path).traffic == {"m": "of the engine before"}


async def test_changes_of_one_model_are_kept_in_the_order_in_which_they_are_made(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
    begun, may_end = asyncio.Event(), asyncio.Event()
    made: list[str] = []

    async def load() -> None:
        async with kept.model_change("m"):
            made.append("load")
            begun.set()
            await may_end.wait()
            await kept.model_loaded("m", "{}", {"1/x": b"large"}, True)

    async def unload() -> None:
        async with kept.model_change("m"):
            made.append("unload")
            kept.model_unloaded("m", False)

    loading = asyncio.ensure_future(load())
    await begun.wait()
    unloading = asyncio.ensure_future(unload())
    async with kept.model_change("other"):  # another model does not wait
        pass
    assert made == ["load"]
    may_end.set()
    await asyncio.gather(loading, unloading)

    assert made == ["load", "unload"]
    assert read_changes(tmp_path).models == {"m": RequestedChange(2)}


def test_files_that_the_engine_before_has_removed_meanwhile_are_those_of_an_earlier_load(tmp_path: Path) -> None:
    class Changing(ServedFake):
        """Loads `first`; meanwhile, the engine before loads `second` again."""

        async def load_model(
            self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None
        ) -> None:
            if name == "first":
                await kept.model_loaded("second", "{}", {"1/x": b"2"}, False)
            await super().load_model(name, config, files)

    kept, follower, engine = EngineChanges(tmp_path), EngineChanges(tmp_path, is_strict=True), Changing()
    loaded(kept, "first")
    loaded(kept, "second", "{}", {"1/x": b"1"})

    asyncio.run(follower.replay_models(engine))
    assert engine.loads == [("first", None, None)]
    taken_over(follower, engine)
    assert engine.loads == [("first", None, None), ("second", "{}", {"1/x": b"2"})]


def test_traffic_is_restored_when_the_engine_takes_over(tmp_path: Path) -> None:
    class Traffic:
        """Traffic that notes what it is told."""

        def __init__(self) -> None:
            self.told: list[str] = []

        def restore(self, key: str, text: str) -> None:
            self.told.append(f"{key}: {text}")

        def engine_ended(self) -> None:
            self.told.append("ended")

    kept, handed, crashed = EngineChanges(tmp_path), Traffic(), Traffic()
    kept.traffic_changed("m", "half")
    kept.traffic_changed("n", "all")
    kept.traffic_changed("n", "")
    for traffic, has_ended in ((handed, False), (crashed, True)):
        engine = ServedFake()
        engine.traffic = traffic  # type: ignore[assignment]
        engine_changes = EngineChanges(tmp_path)
        asyncio.run(engine_changes.take_over(engine, Services(), has_ended=has_ended))
        assert engine.requests is engine_changes

    assert (handed.told, crashed.told) == (["m: half"], ["m: half", "ended"])


def test_settings_of_the_log_hold_except_for_its_file(tmp_path: Path) -> None:
    EngineChanges(tmp_path).log_changed(LogOptions(verbose=3, info=False, file="/var/log/before"))
    log = Log()
    next_engine(tmp_path, Services(log=log))

    assert log.options == LogOptions(verbose=3, info=False, file="/var/log/own")


def test_settings_of_traces_are_the_sum_of_their_changes(tmp_path: Path) -> None:
    kept = EngineChanges(tmp_path)
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
    EngineChanges(tmp_path).regions_changed(before)
    after = Services(regions=registry())
    next_engine(tmp_path, after)

    assert after.regions is not None
    assert (after.regions.system(), after.regions.cuda()) == ([system], [cuda])
    asyncio.run(after.regions.unregister_system("s"))
    assert after.regions.system() == []
