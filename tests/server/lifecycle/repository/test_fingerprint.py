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


def write(path: Path, content: bytes, times: os.stat_result) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def grow(folder: Path) -> None:
    """Give a file another size and the modification time that it had."""
    model = folder / "1/model.onnx"
    write(model, b"abcd", model.stat())


def replace(folder: Path) -> None:
    """Put a file in the place of another one of its size and modification time."""
    model, new = folder / "1/model.onnx", folder.parent / "new.onnx"
    write(new, b"abd", model.stat())
    new.replace(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: os.utime(m / "config.pbtxt", ns=(1, 1)),
        lambda m: os.utime(m / "1/weights/a.bin", ns=(1, 1)),
        grow,
        replace,
        lambda m: (m / "1/model.bin").write_bytes(b""),
        lambda m: (m / "2").mkdir(),
        lambda m: (m / "labels.txt").unlink(),
        lambda m: (m / "1/model.onnx").chmod(0),  # or that it may be read again
    ],
)
def test_any_change_changes_the_fingerprint(make_folder: MakeFolder, change: Callable[[Path], object]) -> None:
    folder = make_folder(FILES)
    before = fingerprint(folder.path)

    change(folder.path)

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
