"""The journal: measurements are found again, even after damage to the file."""

from pathlib import Path

import pytest
from tests.support.runs import synthetic_run

from charonia.core.errors import ServingError
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Measured, TrialFailed
from charonia.tools.tune.profile import Entry, Journal, content_of, scope_of

MEASURED = Measured({"m": {"perf_throughput": Estimate(100.0, 90.0, 110.0)}}, 1.5, ("A note.",))


def entry(key: str) -> Entry:
    return Entry("scope", key, measured=MEASURED)


def written(folder: Path, *keys: str) -> Path:
    with Journal(folder) as journal:
        for key in keys:
            journal.append(entry(key))
    return journal.path


def test_an_entry_is_found_again_with_everything(tmp_path: Path) -> None:
    full = Entry("scope", "key", measured=MEASURED, levels={"m": synthetic_run().levels[0]})
    failed = Entry("scope", "other", failed=TrialFailed("out of memory", loading=True, elapsed_s=2.0))
    with Journal(tmp_path) as journal:
        journal.append(full)
        journal.append(failed)

    with Journal(tmp_path) as journal:
        assert journal.find("scope", "key") == full
        assert journal.find("scope", "other") == failed
        assert journal.find("another scope", "key") is None


def test_the_last_line_of_a_key_counts(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(Entry("scope", "key", failed=TrialFailed("lost")))
        journal.append(entry("key"))

    with Journal(tmp_path) as journal:
        assert journal.find("scope", "key") == entry("key")


def test_a_journal_cut_off_at_any_byte_keeps_all_whole_lines_and_goes_on(tmp_path: Path) -> None:
    content = written(tmp_path / "whole", "a", "b").read_bytes()
    first_end = content.index(b"\n") + 1
    for length in range(len(content)):
        path = tmp_path / "cut" / "charonia-tune.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[:length])

        with Journal(path.parent) as journal:
            journal.append(entry("c"))
        with Journal(path.parent) as journal:
            # A line that lacks nothing but its end is whole.
            assert (journal.find("scope", "a") is not None) == (length >= first_end - 1)
            assert (journal.find("scope", "b") is not None) == (length >= len(content) - 1)
            assert journal.find("scope", "c") == entry("c")


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"null", b"\xff\xfe", b'{"version": 99}', b'{"version": 1, "scope": 3}', b"[" * 9000]
)
def test_lines_that_are_not_ours_are_passed_over(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path, "a")
    path.write_bytes(line + b"\n" + path.read_bytes())

    with Journal(tmp_path) as journal:
        assert journal.find("scope", "a") == entry("a")


def test_one_run_at_a_time_has_the_journal(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(ServingError, match="in use by another run"), Journal(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ServingError, match="cannot be written"), Journal(tmp_path / "file"):
        pass


def test_the_digest_of_a_model_follows_names_and_content_and_nothing_else(tmp_path: Path) -> None:
    model = tmp_path / "1" / "model.onnx"
    model.parent.mkdir()
    model.write_bytes(b"a")
    before = content_of(tmp_path)
    (tmp_path / "1" / "__pycache__").mkdir()
    (tmp_path / "1" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (tmp_path / ".hidden").write_text("x")
    assert content_of(tmp_path) == before

    model.write_bytes(b"b")

    assert content_of(tmp_path) != before


def test_the_scope_does_not_depend_on_the_order_of_facts() -> None:
    assert scope_of({"a": 1, "b": [2]}) == scope_of({"b": [2], "a": 1})
    assert scope_of({"a": 1}) != scope_of({"a": 2})
