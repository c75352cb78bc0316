"""Headers of GGUF files: the context, and how long the file must be."""

import struct
from pathlib import Path

import pytest
from tests.support import smollm2

from charonia.server.backends.llama_cpp.backend import read_header


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def uint32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


WORDS = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
FLAGS = text("flags") + struct.pack("<IIQ", 9, 7, 3) + b"\0\1\0"
NAME = text("general.name") + struct.pack("<I", 8) + text("a model")
RATE = text("rate") + struct.pack("<If", 6, 0.5)
F32, Q8_0 = 0, 8


def header(*pairs: bytes, tensors: list[tuple[int, int, int]]) -> bytes:
    """Return a header with pairs, and tensors of a type, with these elements, at an offset."""
    infos = b"".join(text("t") + struct.pack("<IQQIQ", 2, count // 2, 2, kind, at) for kind, count, at in tensors)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + infos


def test_the_size_is_the_end_of_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    head = header(NAME, WORDS, FLAGS, RATE, uint32("llama.context_length", 8192), tensors=[(Q8_0, 64, 0), (F32, 6, 96)])
    path.write_bytes(head)

    start = -(-len(head) // 32) * 32
    assert read_header(path) == (8192, start + 96 + 6 * 4)


def test_an_alignment_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(uint32("general.alignment", 1024), tensors=[(Q8_0, 64, 0)]))

    assert read_header(path) == (0, 1024 + 2 * 34)


@pytest.mark.parametrize("length", [5, 20, 40, 70])
def test_a_file_may_end_within_its_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(NAME, WORDS, FLAGS, tensors=[(F32, 6, 0)])[:length])

    with pytest.raises(EOFError):
        read_header(path)


@smollm2.needed
def test_a_real_file_is_as_long_as_it_must_be() -> None:
    path = smollm2.gguf()
    assert path is not None
    assert read_header(path) == (8192, path.stat().st_size)
