"""What the states of sequences start from."""

from pathlib import Path

import numpy as np
import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository.data_files import read_state_files
from charonia.server.lifecycle.repository.scan import ModelFolder
from charonia.server.sequences.tensors import initial_states


def config(state: str, batch: int = 0, datatype: str = "TYPE_INT32") -> ModelConfig:
    names = f"input_name: 'PAST' output_name: 'NEXT' data_type: {datatype}"
    return parse(f"name: 'm' max_batch_size: {batch} sequence_batching {{ state {{ {names} {state} }} }}")


def folder(path: Path, **files: bytes) -> ModelFolder:
    for name, content in files.items():
        (path / "initial_state").mkdir(exist_ok=True)
        (path / "initial_state" / name).write_bytes(content)
    return ModelFolder(name="m", repository=path.parent, actual_path=path, fingerprint="")


@pytest.mark.parametrize(
    ("state", "batch", "datatype", "expected"),
    [
        ("dims: [ 2 ]", 0, "TYPE_INT32", [0, 0]),
        ("dims: [ 2 ]", 4, "TYPE_INT32", [[0, 0]]),
        ("dims: [ -1, 2 ]", 0, "TYPE_FP16", [[0.0, 0.0]]),
        ("dims: [ -1 ] initial_state { zero_data: true dims: [ 3 ] }", 0, "TYPE_BOOL", [False] * 3),
        ("dims: [ 2 ]", 1, "TYPE_STRING", [[b"", b""]]),
        ("dims: [ 2 ] initial_state { data_file: 'two' }", 1, "TYPE_INT32", [[7, -1]]),
        ("dims: [ 2 ] initial_state { data_file: 'words' }", 0, "TYPE_STRING", [b"ab", b""]),
    ],
)
def test_a_state_starts_from_zeros_or_a_file(
    tmp_path: Path, state: str, batch: int, datatype: str, expected: object
) -> None:
    given = config(state, batch, datatype)
    files = folder(tmp_path, two=np.array([7, -1], "<i4").tobytes(), words=b"\2\0\0\0ab\0\0\0\0")

    states = initial_states(given, read_state_files(files, given))

    assert states["PAST"].tolist() == expected


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("none", "no such file"),
        ("../config.pbtxt", "must stay within the model's folder 'initial_state'"),
        ("/etc/hosts", "must stay within the model's folder"),
        ("short", "expected 8 bytes for dims [2], got 5"),
    ],
)
def test_a_wrong_file_is_refused_with_the_path(tmp_path: Path, file: str, message: str) -> None:
    given = config(f"dims: [ 2 ] initial_state {{ data_file: '{file}' }}")

    with pytest.raises(ServingError) as caught:
        initial_states(given, read_state_files(folder(tmp_path, short=b"12345"), given))

    assert caught.value.message.startswith("sequence_batching.state[0].initial_state[0].data_file: ")
    assert message in caught.value.message


def test_a_model_without_sequences_has_no_states(tmp_path: Path) -> None:
    given = parse("name: 'm'")

    assert initial_states(given, read_state_files(folder(tmp_path), given)) == {}
