"""Headers of GGUF files."""

import struct
from pathlib import Path

import pytest
from tests.support import smollm2

from charonia.server.backends.llama_cpp.backend import context_length


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def uint32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


WORDS = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
FLAGS = text("flags") + struct.pack("<IIQ", 9, 7, 3) + b"\0\1\0"
NAME = text("general.name") + struct.pack("<I", 8) + text("a model")
RATE = text("rate") + struct.pack("<If", 6, 0.5)
WHOLE = b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + NAME + WORDS + FLAGS + RATE + uint32("llama.context_length", 8192)


@pytest.mark.parametrize(
    ("content", "expected"), [(WHOLE, 8192), (WHOLE[:70], 0), (WHOLE[:20], 0), (WHOLE[:5], 0), (b"", 0)]
)
def test_the_context_is_in_the_header_unless_the_file_ends_before(
    tmp_path: Path, content: bytes, expected: int
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)

    assert context_length(path) == expected


@smollm2.needed
def test_a_real_file_has_its_context() -> None:
    path = smollm2.gguf()
    assert path is not None
    assert context_length(path) == 8192
