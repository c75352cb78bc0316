"""The memory that is left, by the machine and by control groups of both versions."""

from pathlib import Path

import psutil
import pytest

from charonia.server.machine.memory import available_memory, limit_before_kill_mib, tree_bytes, usable_memory


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


@pytest.mark.parametrize(("group", "limit_mib"), [("1\n", 921), ("0\n", 0), ("", 0)])
def test_the_limit_is_below_that_at_which_the_kernel_ends_the_whole_group(
    tmp_path: Path, group: str, limit_mib: int
) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "cgroup").write_text("0::/service\n")
    (tmp_path / "service" / "memory.max").write_text(f"{2**30}\n")
    if group:
        (tmp_path / "service" / "memory.oom.group").write_text(group)

    assert limit_before_kill_mib(tmp_path, tmp_path) == limit_mib


def test_without_a_limit_it_is_that_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "cgroup").write_text("0::/service\n")
    (tmp_path / "service" / "memory.max").write_text("max\n")

    assert 0 < available_memory(tmp_path, tmp_path) <= psutil.virtual_memory().total


def test_the_memory_of_a_process_is_that_of_its_tree() -> None:
    assert tree_bytes(psutil.Process().pid) >= psutil.Process().memory_info().rss // 2
