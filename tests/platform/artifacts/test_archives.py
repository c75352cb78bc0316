"""Archives that somebody has sent: what comes out of them, and what does not."""

import contextlib
import errno
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.campaign.archive_bombs import FAMILIES, dictionaries, large_headers

from charonia import archives as reading
from charonia.core.errors import ServingError, TooLargeError
from charonia.platform.artifacts import archives, blobs
from charonia.platform.artifacts.archives import extract, is_archive, unpack
from charonia.platform.artifacts.blobs import StorageFullError
from charonia.platform.isolation.isolation import Isolation


@pytest.fixture
def isolation(tmp_path: Path) -> Isolation:
    return Isolation(tmp_path / "data", mode="available")


def make_zip(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, entries: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload] # a mode that the type does not know
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def link_in_tar(path: Path, kind: bytes, target: str) -> Path:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("1/model.onnx")
        info.type, info.linkname = kind, target
        archive.addfile(info)
    return path


def unpacked(archive: Path, folder: Path) -> dict[str, bytes]:
    """Unpack in this process, whose limits a test can change."""
    folder.mkdir()
    extract(archive, archive.name, folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"])
def test_files_come_out(tmp_path: Path, suffix: str) -> None:
    entries = {"m/1/model.onnx": b"weights", "m/config.pbtxt": b"", "m/.git/HEAD": b"ref", "__MACOSX/m": b"x"}
    path = tmp_path / f"m{suffix}"
    mode = {".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}.get(suffix, "w")
    archive = make_zip(path, entries) if suffix == ".zip" else make_tar(path, entries, mode)

    assert is_archive(path.name)
    assert unpacked(archive, tmp_path / "out") == {"m/1/model.onnx": b"weights", "m/config.pbtxt": b""}


@pytest.mark.parametrize("name", ["model.keras", "model.pt", "model.skops", "weights.npz", "model.onnx"])
def test_files_of_models_that_are_archives_inside_are_none(name: str) -> None:
    assert not is_archive(name)


@pytest.mark.parametrize("name", ["../evil", "/etc/cron.d/evil", "a/../../evil", "a\\..\\evil"])
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_names_that_lead_out_of_the_folder_are_refused(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], Path], name: str
) -> None:
    archive = make(tmp_path / ("m.zip" if make is make_zip else "m.tgz"), {"good": b"", name: b"evil"})

    with pytest.raises(ServingError, match="expected a path below a folder"):
        unpacked(archive, tmp_path / "out")

    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(ServingError, match=r"'1/model.onnx' is a link or a device"):
        unpacked(link_in_tar(tmp_path / "m.tar", kind, "/etc/passwd"), tmp_path / "out")


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        info = zipfile.ZipInfo("1")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc")

    with pytest.raises(ServingError, match="'1' is a link or a device"):
        unpacked(tmp_path / "m.zip", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_an_archive_that_grows_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, dict[str, bytes]], Path]
) -> None:
    monkeypatch.setattr(reading, "UNPACKED_BYTES_FREE", 1024 * 1024)
    archive = make(tmp_path / ("m.zip" if make is make_zip else "m.tgz"), {f"{n}": bytes(2**20) for n in range(40)})

    with pytest.raises(TooLargeError, match=r"its files have more than 4[0-9]{6} bytes"):
        unpacked(archive, tmp_path / "out")

    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 40 * 2**20


def test_a_zip_that_lies_about_its_sizes_yields_no_more_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNPACKED_BYTES_FREE", 1024 * 1024)
    archive = make_zip(tmp_path / "m.zip", {"1": bytes(4 * 2**20)})
    content = archive.read_bytes()
    real, said = struct.pack("<L", 4 * 2**20), struct.pack("<L", 10)
    assert content.count(real) == 2
    archive.write_bytes(content.replace(real, said))

    with pytest.raises(ServingError, match="cannot be read"):
        unpacked(archive, tmp_path / "out")


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "ENTRIES_MAX", 3)

    with pytest.raises(TooLargeError, match="at most 3 entries"):
        unpacked(make_zip(tmp_path / "m.zip", {f"{n}": b"" for n in range(4)}), tmp_path / "out")


@pytest.mark.parametrize("name", ["m.zip", "m.tar", "m.tar.gz", "m.tar.xz", "m.tar.bz2"])
@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04" + bytes(40), b"\x1f\x8b\x08" + bytes(9)])
def test_what_is_no_archive_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ServingError, match="it cannot be read"):
        unpacked(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_a_damaged_archive_is_refused(tmp_path: Path, make: Callable[[Path, dict[str, bytes]], Path]) -> None:
    archive = make(tmp_path / ("m.zip" if make is make_zip else "m.tgz"), {"a": os.urandom(50_000)})
    content = bytearray(archive.read_bytes())
    content[20_000:20_100] = bytes(100)
    archive.write_bytes(content)

    with pytest.raises(ServingError, match="cannot be read"):
        unpacked(archive, tmp_path / "out")


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "m.zip", {"a": b"x"})
    content = bytearray(archive.read_bytes())
    for start in (b"PK\x03\x04", b"PK\x01\x02"):
        at = content.index(start) + (6 if start.endswith(b"\x04") else 8)
        content[at] |= 1
    archive.write_bytes(content)

    with pytest.raises(ServingError, match="'a' is encrypted"):
        unpacked(archive, tmp_path / "out")


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a"))

    with pytest.raises(ServingError, match="two of its entries are 'a'"):
        unpacked(tmp_path / "m.tar", tmp_path / "out")


def test_a_full_disk_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_zip(tmp_path / "m.zip", {"a": b"x"})

    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", is_full)
    os.makedirs(out := tmp_path / "out")

    with pytest.raises(StorageFullError, match="no room left"):
        extract(archive, "m.zip", out)


def test_there_must_be_room_before_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "RESERVE_BYTES", 2**62)

    with pytest.raises(StorageFullError, match="needs 1 bytes"):
        unpacked(make_zip(tmp_path / "m.zip", {"a": b"x"}), tmp_path / "out")


def test_it_can_be_cancelled(tmp_path: Path, isolation: Isolation) -> None:
    archive = make_tar(tmp_path / "m.tgz", {"a": b"x"})

    def cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(archive, archive.name, tmp_path, isolation, cancelled)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"dictionaries"}))
def test_hostile_archives_are_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(archives, "ENTRIES_MAX", 500)
    for number, archive in enumerate(FAMILIES[family](1)):
        place = tmp_path / str(number)
        place.mkdir()
        (place / archive.name).write_bytes(archive.content)

        with pytest.raises(ServingError) if archive.is_refused else contextlib.suppress(ServingError):
            unpacked(place / archive.name, place / "out")
            if archive.is_refused:
                pytest.fail(archive.name)

        assert not any(file.is_symlink() or file.is_fifo() for file in (place / "out").rglob("*"))
        assert {file.name for file in place.iterdir()} == {archive.name, "out"}


def test_a_header_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    archive = next(large_headers(64 * 2**20))
    (tmp_path / archive.name).write_bytes(archive.content)
    tracemalloc.start()

    with pytest.raises(TooLargeError, match="one entry has headers of more than 262144 bytes"):
        unpacked(tmp_path / archive.name, tmp_path / "out")

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * 2**20


def test_the_process_that_unpacks_has_little_memory(tmp_path: Path, isolation: Isolation) -> None:
    for archive in dictionaries():
        (tmp_path / archive.name).write_bytes(archive.content)

        with pytest.raises(TooLargeError, match=rf"archive '{archive.name}': it needs more than 512 MiB of memory"):
            unpack(tmp_path / archive.name, archive.name, tmp_path, isolation, lambda: None)


def test_errors_of_the_process_that_unpacks_keep_their_kind(tmp_path: Path, isolation: Isolation) -> None:
    archive = make_zip(tmp_path / "m.zip", {".m": bytes(2**20)})
    content = archive.read_bytes()
    archive.write_bytes(content.replace(struct.pack("<L", 2**20), struct.pack("<L", 2**31)))

    with pytest.raises(TooLargeError, match=r"archive 'm.zip': its files have more than 1073741824 bytes"):
        unpack(archive, "m.zip", tmp_path, isolation, lambda: None)


def test_a_process_that_unpacks_and_is_killed_says_nothing(tmp_path: Path) -> None:
    assert "was killed" in reading.failure("archive 'm.zip'", "").message
    assert "was killed" in reading.failure("archive 'm.zip'", '{"kind": 1}').message


def test_files_come_out_of_the_process_that_unpacks(tmp_path: Path, isolation: Isolation) -> None:
    (tmp_path / "out").mkdir()

    unpack(make_tar(tmp_path / "m.tgz", {"1/a": b"x"}), "m.tgz", tmp_path / "out", isolation, lambda: None)

    assert (tmp_path / "out" / "1" / "a").read_bytes() == b"x"
