import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from charonia.server.lifecycle.repository import scan as module
from charonia.server.lifecycle.repository.scan import ModelFolder, fingerprint

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]

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


def test_a_file_in_the_place_of_another_of_its_size_and_modification_time_changes_the_fingerprint(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder(FILES)
    model = folder.path / "1/model.onnx"
    times = model.stat()
    before = fingerprint(folder.path)
    new = folder.path.parent / "new.onnx"
    new.write_bytes(b"abd")
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))

    new.replace(model)

    assert fingerprint(folder.path) != before


def test_a_file_that_may_be_read_again_changes_the_fingerprint(make_folder: MakeFolder) -> None:
    folder = make_folder(FILES)
    model = folder.path / "1/model.onnx"
    model.chmod(0)
    before = fingerprint(folder.path)

    model.chmod(0o644)

    assert fingerprint(folder.path) != before


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
    monkeypatch.setattr(module, "DEPTH_MAX", 2)
    folder = make_folder({"1/a/b": b""})
    before = fingerprint(folder.path)

    make_folder({"1/a/c": b""})

    assert fingerprint(folder.path) == before
