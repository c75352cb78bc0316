"""Hostile archives of every kind: each is a few kilobytes, and asks for far more memory, disk or time."""

import bz2
import gzip
import io
import lzma
import resource
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from tests.campaign.figures import Context, Figures

from charonia.archives import UNPACKED_BYTES_FREE
from charonia.core.errors import ServingError
from charonia.platform.artifacts.archives import ENTRIES_MAX, unpack
from charonia.platform.isolation.isolation import Isolation

MIB = 1024 * 1024
BLOCK = 512
CHAIN = 1000


@dataclass(frozen=True, slots=True)
class HostileArchive:
    """An archive that asks for too much, or for what it must not have.

    Attributes:
        name: Its file name, whose suffix tells the format.
        is_refused: Whether it must be refused. What comes out of the others must stay within the limits.
    """

    name: str
    content: bytes
    is_refused: bool = True


class Stream(Protocol):
    """Of the standard library."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class Compressor:
    """Compresses pieces: the content of a bomb never is in memory as a whole."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._out = bytearray()

    def add(self, piece: bytes, times: int = 1) -> None:
        for _ in range(times):
            self._out += self._stream.compress(piece)

    def end(self) -> bytes:
        return bytes(self._out + self._stream.flush())


COMPRESSIONS: dict[str, Callable[[], Compressor]] = {
    ".tar.gz": lambda: Compressor(zlib.compressobj(9, zlib.DEFLATED, 31)),
    ".tar.bz2": lambda: Compressor(bz2.BZ2Compressor()),
    ".tar.xz": lambda: Compressor(lzma.LZMACompressor(preset=0)),
}


def summed(block: bytearray) -> bytes:
    """Return the header of a tar entry with its checksum."""
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def header(kind: bytes, size: int, name: str = "a", *, link: str = "") -> bytes:
    """Return the header of a tar entry; a size beyond 8 GiB is written as GNU tar does."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = f"{size:011o}\0".encode() if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    return summed(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    content = b""
    for key, value in records.items():
        text = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        length = len(text) + len(str(len(text)))
        length = len(text) + len(str(length))
        content += str(length).encode() + text
    return header(kind, len(content)) + padded(content)


FILE = header(tarfile.REGTYPE, 4) + padded(b"data")
END = bytes(2 * BLOCK)


def large_headers(size_bytes: int) -> Iterator[HostileArchive]:
    """Yield archives with one header of `size_bytes`: a long name, a long link, PAX records; in each compression."""
    kinds = {
        "long-name": tarfile.GNUTYPE_LONGNAME,
        "long-link": tarfile.GNUTYPE_LONGLINK,
        "pax": tarfile.XHDTYPE,
        "pax-global": tarfile.XGLTYPE,
        "pax-solaris": tarfile.SOLARIS_XHDTYPE,
    }
    for title, kind in kinds.items():
        for suffix, begin in COMPRESSIONS.items():
            stream = begin()
            stream.add(header(kind, size_bytes))
            if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
                stream.add(f"{size_bytes} path=".encode().ljust(MIB, b"a"))
            else:
                stream.add(b"a" * MIB)
            stream.add(b"a" * MIB, size_bytes // MIB - 1)
            stream.add(FILE + END)
            yield HostileArchive(f"{title}{suffix}", stream.end())


def many_headers(count: int) -> Iterator[HostileArchive]:
    """Yield archives whose headers are many: chains that a reader follows by recursion, records, global records."""
    many = pax({"comment": "x"}) * CHAIN + FILE + END
    yield HostileArchive("pax-chain.tar.gz", gzip.compress(many))
    names = (header(tarfile.GNUTYPE_LONGNAME, 2) + padded(b"a\0")) * CHAIN + FILE + END
    yield HostileArchive("long-name-chain.tar.gz", gzip.compress(names))
    stream = COMPRESSIONS[".tar.bz2"]()
    for number in range(100):
        stream.add(pax({f"key{number}.{each}": "v" * 400 for each in range(100)}, tarfile.XGLTYPE))
        stream.add(header(tarfile.REGTYPE, 0, f"f{number}"))
    stream.add(END)
    yield HostileArchive("pax-global-many.tar.bz2", stream.end())
    entries = b"".join(header(tarfile.REGTYPE, 0, f"f{number}") for number in range(count))
    is_refused = count > ENTRIES_MAX
    yield HostileArchive("entries.tar.gz", gzip.compress(entries + END), is_refused)
    folders = b"".join(header(tarfile.DIRTYPE, 0, f"d{number}") for number in range(count))
    yield HostileArchive("folders.tar.gz", gzip.compress(folders + END), is_refused)
    hidden = b"".join(header(tarfile.REGTYPE, 0, f".h{number}") for number in range(count))
    yield HostileArchive("hidden.tar.gz", gzip.compress(hidden + END), is_refused)


def sparse_files(blocks: int) -> Iterator[HostileArchive]:
    """Yield archives with sparse files: 8 EiB that take no room, and maps without end."""
    real = (2**62).to_bytes(11, "big")
    info = bytearray(header(tarfile.GNUTYPE_SPARSE, 0, "sparse"))
    info[386:410] = b"%011o\0" % 0 * 2
    info[482], info[483:495] = 1, b"\x80" + real
    more = (b"%011o\0" % 1) * 42 + b"\1" + bytes(7)
    stream = COMPRESSIONS[".tar.bz2"]()
    stream.add(summed(info))
    stream.add(more, blocks)
    stream.add(more[:504] + bytes(8) + END)
    yield HostileArchive("sparse-map.tar.bz2", stream.end())
    info[482] = 0
    yield HostileArchive("sparse.tar", summed(info) + END)
    for title, records in {
        "sparse-pax-0.0": {"GNU.sparse.size": str(2**62), "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0"},
        "sparse-pax-0.1": {"GNU.sparse.size": str(2**62), "GNU.sparse.map": "0,1," * 100 + "0,0"},
        "sparse-pax-1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**62)},
    }.items():
        content = padded(b"1\n0\n4\n") + padded(b"data")
        file = header(tarfile.REGTYPE, len(content)) + content
        more_records = {"GNU.sparse.numbytes": "4"} if title.endswith("0.0") else {}
        yield HostileArchive(f"{title}.tar", pax({**records, **more_records}) + file + END)
    stream = COMPRESSIONS[".tar.bz2"]()
    stream.add(pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}))
    stream.add(header(tarfile.REGTYPE, (blocks + 1) * BLOCK))
    stream.add(b"999999999\n".ljust(BLOCK, b"0"))
    stream.add(b"0\n" * 256, blocks)
    stream.add(END)
    yield HostileArchive("sparse-pax-1.0-map.tar.bz2", stream.end())


def tar_entries() -> Iterator[HostileArchive]:
    """Yield archives with links, devices, sizes and names that must not be."""
    for title, kind in {
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
        "character-device": tarfile.CHRTYPE,
        "block-device": tarfile.BLKTYPE,
        "fifo": tarfile.FIFOTYPE,
        "unknown-type": b"Z",
        "volume": b"V",
    }.items():
        entry = header(kind, 0, "1", link="/etc" if kind != tarfile.LNKTYPE else "../../etc/passwd")
        yield HostileArchive(f"{title}.tar", entry + header(tarfile.REGTYPE, 0, "1/passwd") + END)
    for title, name in {
        "parent": "../evil",
        "parent-inside": "a/../../evil",
        "absolute": "/tmp/evil",
        "backslash": "a\\..\\evil",
        "control": "a\x01b",
        "dots": ".",
    }.items():
        yield HostileArchive(f"name-{title}.tar", header(tarfile.REGTYPE, 0, name) + END)
        records = pax({"path": name}) + header(tarfile.REGTYPE, 0, "good")
        yield HostileArchive(f"name-pax-{title}.tar", records + END)
    yield HostileArchive("name-nul.tar", pax({"path": "a\0/../../evil"}) + FILE + END)
    yield HostileArchive("name-not-utf8.tar", header(tarfile.REGTYPE, 0, "a\udcff") + END)
    yield HostileArchive("name-long.tar", pax({"path": "a" * 100_000}) + FILE + END)
    yield HostileArchive("name-deep.tar", pax({"path": "a/" * 40_000 + "a"}) + FILE + END)
    yield HostileArchive("twice.tar", FILE + FILE + END)
    yield HostileArchive("file-and-folder.tar", FILE + header(tarfile.REGTYPE, 0, "a/b") + END)
    yield HostileArchive("size-huge.tar", header(tarfile.REGTYPE, 2**70) + bytes(BLOCK) + END)
    yield HostileArchive("size-negative.tar", pax({"size": "-1"}) + FILE + END, is_refused=False)
    yield HostileArchive("size-digits.tar", pax({"size": "9" * 5000}) + FILE + END, is_refused=False)
    yield HostileArchive("mtime.tar", pax({"mtime": "1e999", "uid": "-1"}) + FILE + END, is_refused=False)
    broken = header(tarfile.XHDTYPE, 20) + padded(b"999999999999999 a=b\n")
    yield HostileArchive("pax-length.tar", broken + FILE + END, is_refused=False)
    yield HostileArchive(
        "pax-length-digits.tar", header(tarfile.XHDTYPE, 6000) + padded(b"9" * 5990 + b" a=b\n") + FILE
    )


def large_contents(size_bytes: int) -> Iterator[HostileArchive]:
    """Yield archives whose files, or what is skipped of them, have `size_bytes`."""
    for title, name in {"zeros": "1/model.onnx", "zeros-hidden": ".git/objects"}.items():
        for suffix, begin in COMPRESSIONS.items():
            stream = begin()
            stream.add(header(tarfile.REGTYPE, size_bytes, name))
            stream.add(bytes(MIB), size_bytes // MIB)
            stream.add(END)
            yield HostileArchive(f"{title}{suffix}", stream.end(), size_bytes > UNPACKED_BYTES_FREE)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        buffer = io.BytesIO()
        with (
            zipfile.ZipFile(buffer, "w", method) as archive,
            archive.open("1/model.onnx", "w", force_zip64=True) as file,
        ):
            for _ in range(size_bytes // MIB):
                file.write(bytes(MIB))
        yield HostileArchive(f"zeros-{method}.zip", buffer.getvalue(), size_bytes > UNPACKED_BYTES_FREE)


def zip_record(name: bytes, *, flags: int = 0, method: int = 0, size: int = 0, packed: int = 0, at: int = 0) -> bytes:
    fields = (20, 20, flags, method, 0, 0, 0, packed, size, len(name), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name


def zip_of(directory: bytes, count: int, *, before: bytes = b"", size: int | None = None) -> bytes:
    length = len(directory) if size is None else size
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, length, len(before), 0)
    return before + directory + end


def zip_directories(count: int) -> Iterator[HostileArchive]:
    """Yield zips whose directories are large, or do not fit to what follows."""
    yield HostileArchive("directory.zip", zip_of(zip_record(b"a") * count, count))
    yield HostileArchive("directory-empty-names.zip", zip_of(zip_record(b"") * count, count))
    yield HostileArchive("directory-size.zip", zip_of(zip_record(b"a"), 1, size=2**32 - 1))
    yield HostileArchive("directory-none.zip", zip_of(b"", 0), is_refused=False)
    yield HostileArchive("entry-without-file.zip", zip_of(zip_record(b"a", size=4, packed=4, at=2**31), 1))


def zip_entries() -> Iterator[HostileArchive]:
    """Yield zips with names, kinds and contents that must not be."""
    for title, name in {
        "empty": b"",
        "parent": b"../evil",
        "absolute": b"/tmp/evil",
        "backslash": b"a\\..\\evil",
        "control": b"a\x01b",
        "nul": b"\0a",
        "long": b"a" * 65_000,
        "blank-folders": b"///a",
    }.items():
        local = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        yield HostileArchive(f"name-{title}.zip", zip_of(zip_record(name), 1, before=local))
    local = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0x800, 0, 0, 0, 0, 0, 0, 2, 0) + b"\xff\xfe"
    yield HostileArchive("name-not-utf8.zip", zip_of(zip_record(b"\xff\xfe", flags=0x800), 1, before=local))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        link = zipfile.ZipInfo("1")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc")
    yield HostileArchive("symlink.zip", buffer.getvalue())
    yield HostileArchive("encrypted.zip", zip_of(zip_record(b"a", flags=1), 1))
    yield HostileArchive("method.zip", zip_of(zip_record(b"a", method=99), 1, before=local))
    yield overlapping(200, MIB * 8)


def overlapping(count: int, size_bytes: int) -> HostileArchive:
    """Return a zip whose entries are all made of the same compressed bytes."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(stream.compress(bytes(MIB)) for _ in range(size_bytes // MIB)) + stream.flush()
    crc = 0
    for _ in range(size_bytes // MIB):
        crc = zlib.crc32(bytes(MIB), crc)
    before, directory = b"", b""
    for number in range(count):
        name = f"f{number:05}".encode()
        at = len(before)
        before += (
            struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 8, 0, 0, crc, len(packed), size_bytes, len(name), 0) + name
        )
        fields = (20, 20, 0, 8, 0, 0, crc, len(packed), size_bytes, len(name), 0, 0, 0, 0, 0, at)
        directory += struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name
    return HostileArchive("overlapping.zip", zip_of(directory, count, before=before + packed))


def _lzma_zip() -> bytes:
    """Return a zip whose LZMA stream asks for a dictionary of 4 GiB."""
    content = struct.pack("<BBH", 9, 4, 5) + struct.pack("<BL", 93, 2**32 - 1) + bytes(64)
    name = b"1"
    local = struct.pack("<4s5H3L2H", b"PK\x03\x04", 63, 0, 14, 0, 0, 0, len(content), 2**20, len(name), 0)
    record = zip_record(name, method=14, size=2**20, packed=len(content))
    return zip_of(record, 1, before=local + name + content)


def _xz_with_dictionary(content: bytes) -> bytes:
    """Return an xz stream whose block header asks for a dictionary of 1.5 GiB."""
    packed = bytearray(lzma.compress(content, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32))
    size = (packed[12] + 1) * 4  # of the block's header, with its checksum
    at = packed.index(b"\x21\x01", 12, 12 + size) + 2  # LZMA2, one byte of properties
    packed[at] = 39
    packed[12 + size - 4 : 12 + size] = struct.pack("<L", zlib.crc32(packed[12 : 12 + size - 4]))
    return bytes(packed)


def dictionaries() -> Iterator[HostileArchive]:
    """Yield archives whose decompression needs more memory than a process that unpacks has."""
    yield HostileArchive("dictionary.zip", _lzma_zip())
    yield HostileArchive("dictionary.tar.xz", _xz_with_dictionary(FILE + END))


def truncated() -> Iterator[HostileArchive]:
    """Yield archives that were cut, in headers and in contents."""
    plain = header(tarfile.REGTYPE, 4 * BLOCK) + bytes(range(256)) * 8 + FILE + END
    for suffix, packed in {
        ".tar": plain,
        ".tar.gz": gzip.compress(plain),
        ".tar.bz2": bz2.compress(plain),
        ".tar.xz": lzma.compress(plain),
    }.items():
        for share in (0.1, 0.3, 0.6):
            yield HostileArchive(f"truncated-{share}{suffix}", packed[: int(len(packed) * share)])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", bytes(1000))
    for share in (0.1, 0.5, 0.95):
        yield HostileArchive(f"truncated-{share}.zip", buffer.getvalue()[: int(len(buffer.getvalue()) * share)])


def nested(depth: int) -> Iterator[HostileArchive]:
    """Yield archives in archives: the inner ones stay files."""
    content = b"data"
    for level in range(depth):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(4):
                archive.writestr(f"{level}-{number}.zip", content)
        content = buffer.getvalue()
    yield HostileArchive("nested.zip", content, is_refused=False)
    packed = header(tarfile.REGTYPE, len(content), "nested.zip") + padded(content) + END
    for _ in range(depth):
        packed = gzip.compress(packed)
    yield HostileArchive("nested.tar.gz", packed)


FAMILIES: dict[str, Callable[[int], Iterator[HostileArchive]]] = {
    "large headers": lambda scale: large_headers(2 * MIB * scale),
    "many headers": lambda scale: many_headers(min(30_000, 1000 * scale)),
    "sparse files": lambda scale: sparse_files(4096 * scale),
    "entries of tars": lambda _: tar_entries(),
    "directories of zips": lambda _: zip_directories(400_000),
    "entries of zips": lambda _: zip_entries(),
    "large contents": lambda scale: large_contents(2 * MIB * scale),
    "dictionaries": lambda _: dictionaries(),
    "truncated": lambda _: truncated(),
    "nested": lambda _: nested(5),
}
"""All of them, by family. The argument is a scale: 1 for archives made in a moment, 1024 for 2 GiB each."""


MIB_MAX = 1024
"""Most memory that unpacking an archive may take, of all processes together."""


def run(context: Context) -> Figures:
    """Unpack hostile archives."""
    figures = Figures()
    made = (make(context.archive_mib // 2) for make in FAMILIES.values())
    for number, each in enumerate(chain.from_iterable(made)):
        place = context.folder / str(number)
        (place / "out").mkdir(parents=True)
        path = place / each.name
        path.write_bytes(each.content)
        try:
            unpack(path, each.name, place / "out", Isolation(place / "data", mode="available"), lambda: None)
            figures.counts["archives unpacked within the limits"] += 1
            if each.is_refused:
                figures.found(f"{each.name} is not refused")
        except ServingError:
            figures.counts["archives refused"] += 1
        shutil.rmtree(place)
    largest = figures.counts["MiB in the largest process"] = (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    )
    if largest > MIB_MAX:
        figures.found(f"a process that unpacks takes {largest} MiB")
    return figures
