import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.repository import watch
from charonia.repository.scan import ModelFolder
from charonia.repository.watch import Changes, Settling, diff, fingerprint

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]
Look = dict[str, str]

FILES = {"config.pbtxt": b"", "labels.txt": b"cat", "1/model.onnx": b"abc", "1/weights/a.bin": b"xyz"}


def test_a_fingerprint_stays_while_nothing_changes(make_folder: MakeFolder) -> None:
    folder = make_folder(FILES)

    assert fingerprint(folder.path) == fingerprint(folder.path)


@pytest.mark.parametrize("path", ["config.pbtxt", "labels.txt", "1/weights/a.bin"])
def test_a_touched_file_changes_the_fingerprint_whatever_its_depth(make_folder: MakeFolder, path: str) -> None:
    folder = make_folder(FILES)
    before = fingerprint(folder.path)

    os.utime(folder.path / path, ns=(1, 1))

    assert fingerprint(folder.path) != before


def test_a_new_size_a_new_file_and_a_new_empty_version_change_the_fingerprint(make_folder: MakeFolder) -> None:
    folder = make_folder(FILES)
    model = folder.path / "1/model.onnx"
    times = model.stat()
    seen = {fingerprint(folder.path)}

    model.write_bytes(b"abcd")
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.add(fingerprint(folder.path))
    (folder.path / "1/model.bin").write_bytes(b"")
    seen.add(fingerprint(folder.path))
    (folder.path / "2").mkdir()
    seen.add(fingerprint(folder.path))
    (folder.path / "labels.txt").unlink()
    seen.add(fingerprint(folder.path))

    assert len(seen) == 5


def test_bytecode_and_hidden_files_do_not_change_the_fingerprint(make_folder: MakeFolder) -> None:
    folder = make_folder(FILES)
    before = fingerprint(folder.path)

    make_folder({"1/__pycache__/model.cpython-311.pyc": b"code", ".DS_Store": b"", "1/.model.swp": b""})

    assert fingerprint(folder.path) == before


def test_a_link_that_leads_back_up_does_not_make_a_look_endless(make_folder: MakeFolder) -> None:
    folder = make_folder(FILES)
    (folder.path / "1/loop").symlink_to(folder.path)

    assert len(fingerprint(folder.path)) == 32


def test_a_broken_link_a_file_in_place_of_a_folder_and_a_missing_folder_have_fingerprints(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder(FILES)
    (folder.path / "1/gone").symlink_to("nowhere")

    assert len({fingerprint(folder.path), fingerprint(folder.path / "labels.txt"), fingerprint(Path("/no/where"))}) == 2


def test_folders_deeper_than_the_limit_are_not_looked_at(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "DEPTH_MAX", 2)
    folder = make_folder({"1/a/b": b""})
    before = fingerprint(folder.path)

    make_folder({"1/a/c": b""})

    assert fingerprint(folder.path) == before


def test_the_difference_of_two_looks_names_what_came_changed_and_went() -> None:
    changes = diff({"same": 1, "touched": 1, "gone": 1}, {"same": 1, "touched": 2, "new": 1})

    assert changes == Changes(added=("new",), modified=("touched",), removed=("gone",))
    assert changes
    assert not diff({"same": 1}, {"same": 1})


def test_a_change_is_acted_on_at_the_second_look_that_shows_it_and_only_once() -> None:
    settling = Settling({"bert": "v1"})

    assert settling.look({"bert": "v2"}) == Changes()
    assert settling.is_pending
    assert settling.look({"bert": "v2"}) == Changes(modified=("bert",))
    assert not settling.is_pending
    assert settling.look({"bert": "v2"}) == Changes()


def test_a_model_that_is_being_copied_is_left_alone_until_it_stands_still() -> None:
    settling = Settling({})

    assert not settling.look({"big": "1 byte"})
    assert not settling.look({"big": "2 bytes"})
    assert not settling.look({"big": "3 bytes"})
    assert settling.look({"big": "3 bytes"}) == Changes(added=("big",))


def test_a_long_copy_does_not_hold_up_another_model() -> None:
    settling = Settling({})

    settling.look({"big": "1 byte", "small": "s"})

    assert settling.look({"big": "2 bytes", "small": "s"}) == Changes(added=("small",))


def test_a_model_that_vanishes_for_one_look_is_not_removed() -> None:
    settling = Settling({"bert": "v1"})

    assert not settling.look({})
    assert not settling.look({"bert": "v1"})
    assert not settling.look({})
    assert settling.look({}) == Changes(removed=("bert",))


LOOKS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("12"))


@given(start=LOOKS, looks=st.lists(LOOKS, max_size=8), final=LOOKS)
def test_acting_on_settled_changes_always_arrives_at_what_is_on_disk(
    start: Look, looks: list[Look], final: Look
) -> None:
    settling, served = Settling(start), dict(start)

    for look in [*looks, final, final]:
        changes = settling.look(look)
        for name in changes.removed:
            del served[name]
        served.update({name: look[name] for name in (*changes.added, *changes.modified)})

    assert served == final
    assert not settling.is_pending
