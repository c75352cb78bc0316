"""The memory that is left, by the machine and by control groups of both versions."""

from pathlib import Path

import psutil
import pytest

from charonia.server.machine.memory import available_memory, tree_bytes, usable_memory


@pytest.mark.parametrize(
    ("limit", "used"), [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]
)
def test_a_control_group_limits_it_and_gives_up_the_memory_of_files(tmp_path: Path, limit: str, used: str) -> None:
    process, group = tmp_path / "self", tmp_path / "groups" / "service"
    process.mkdir()
    group.mkdir(parents=True)
    (process / "cgroup").write_text("0::/service\n")
    (group / limit).write_text("1000000\n")
    (group / used).write_text("900000\n")
    assert available_memory(process, tmp_path / "groups") == 100_000

    (group / "memory.stat").write_text("anon 850000\ninactive_file 50000\n")
    assert available_memory(process, tmp_path / "groups") == 150_000
    assert usable_memory(process, tmp_path / "groups") == 1_000_000


def test_without_a_limit_it_is_that_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "cgroup").write_text("0::/service\n")
    (tmp_path / "service" / "memory.max").write_text("max\n")

    assert 0 < available_memory(tmp_path, tmp_path) <= psutil.virtual_memory().total


def test_the_memory_of_a_process_is_that_of_its_tree() -> None:
    assert tree_bytes(psutil.Process().pid) >= psutil.Process().memory_info().rss // 2
