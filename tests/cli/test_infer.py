"""`charonia infer`: texts and files to tensors, and outputs as people read them."""

import io
from pathlib import Path

import numpy as np
import pytest

from charonia.cli.infer import LINE, _picture, classes, content_of, describe, file_hint, piece, tensors_of
from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.tensor import Tensor


def tensor(text: str, datatype: DataType, *dims: int, batch: int = 0, content: bytes = b"") -> Tensor:
    config = ModelConfig(name="m", max_batch_size=batch, input=(ModelInput("x", datatype, dims=dims),))
    return tensors_of(config, {"x": text}, lambda path: content, _picture)["x"]


def problem(text: str, datatype: DataType, *dims: int, content: bytes = b"") -> str:
    with pytest.raises(ServingError) as caught:
        tensor(text, datatype, *dims, content=content)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "datatype", "dims", "batch", "expected"),
    [
        ("0.5", DataType.FP32, (1,), 0, [0.5]),
        ("3", DataType.FP32, (1,), 4, [[3]]),
        ("1,2", DataType.INT64, (2,), 0, [1, 2]),
        ("[[1,2],[3,4]]", DataType.INT8, (2, 2), 0, [[1, 2], [3, 4]]),
        ("[[1,2],[3,4]]", DataType.INT8, (2,), 4, [[1, 2], [3, 4]]),
        ("[1,2]", DataType.INT8, (2,), 4, [[1, 2]]),
        ("[1,2,3,4]", DataType.INT8, (2, 2), 0, [[1, 2], [3, 4]]),
        ("True", DataType.BOOL, (1,), 0, [True]),
        ("hello [you]", DataType.BYTES, (1,), 0, [b"hello [you]"]),
        ('["a", "b"]', DataType.BYTES, (-1,), 0, [b"a", b"b"]),
        ('[{"a": 1}]', DataType.BYTES, (1,), 0, [b'[{"a":1}]']),
        ("[no JSON", DataType.BYTES, (1,), 0, [b"[no JSON"]),
        ("12", DataType.BYTES, (1,), 4, [[b"12"]]),
        ("16000", DataType.INT64, (), 0, 16000),
    ],
)
def test_a_text_is_an_element_or_json(
    text: str, datatype: DataType, dims: tuple[int, ...], batch: int, expected: object
) -> None:
    made = tensor(text, datatype, *dims, batch=batch)

    assert made.datatype is datatype
    assert made.array.tolist() == expected


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_files_are_read_by_their_names() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)

    assert tensor("@a.npy", DataType.FP32, 2, 3, content=npy(array)).array.tolist() == array.tolist()
    assert tensor("@a.json", DataType.INT32, 2, content=b"[1, 2]").array.tolist() == [1, 2]
    assert tensor("@a.json", DataType.BYTES, 1, content=b'{"a": 1}').array.tolist() == [b'{"a":1}']
    assert tensor("@a.txt", DataType.BYTES, 1, content=b"text").array.tolist() == [b"text"]
    assert tensor("@a.jpg", DataType.BYTES, 1, content=b"\xff\xd8").array.tolist() == [b"\xff\xd8"]
    assert tensor("@-", DataType.BYTES, 1, content=b"from a pipe").array.tolist() == [b"from a pipe"]


@pytest.mark.parametrize(
    ("datatype", "dims", "shape"),
    [
        (DataType.FP32, (1, 3, 4, 6), (1, 3, 4, 6)),
        (DataType.FP32, (-1, 3, -1, -1), (1, 3, 64, 32)),
        (DataType.FP32, (3, 7, -1), (3, 7, 32)),
        (DataType.UINT8, (-1, -1, 3), (70, 2, 3)),
        (DataType.UINT8, (1, 5, 5), (1, 5, 5)),
        (DataType.FP16, (3, 8, 8), (3, 8, 8)),
    ],
)
def test_an_image_takes_the_size_and_layout_of_its_input(
    datatype: DataType, dims: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 70), "white").save(file, "PNG")

    made = tensor("@cat.png", datatype, *dims, content=file.getvalue())

    assert made.shape == shape
    assert float(made.array.max()) == (255 if datatype is DataType.UINT8 else 1)


@pytest.mark.parametrize(
    ("text", "datatype", "dims", "content", "reason"),
    [
        ("x", DataType.FP32, (1,), b"", "input 'x': expected a number or JSON for FP32, got 'x'"),
        ("1.5", DataType.INT8, (1,), b"", "input 'x': expected an integer from -128 to 127 (INT8), got 1.5"),
        ("[1,2,3]", DataType.INT8, (2,), b"", "input 'x': expected shape [2], got [3] (hint: for example [2])"),
        ("@a.npy", DataType.INT8, (1,), b"no array", "input 'x': 'a.npy' cannot be read"),
        ("@a.json", DataType.INT8, (1,), b"{", "input 'x': 'a.json' is not JSON"),
        ("@a.bin", DataType.INT8, (1,), b"", "expected a file that is .npy, .json or an image for INT8, got 'a.bin'"),
        ("@a.png", DataType.FP32, (3, 4, 4), b"no image", "expected an image"),
        ("@a.png", DataType.FP32, (5,), b"", "an image has height, width and colours, got dims [5]"),
    ],
)
def test_what_is_no_value_says_what_is_expected(
    text: str, datatype: DataType, dims: tuple[int, ...], content: bytes, reason: str
) -> None:
    assert reason in problem(text, datatype, *dims, content=content)


def test_an_unknown_input_names_those_that_there_are() -> None:
    config = ModelConfig(name="m", input=(ModelInput("x", DataType.FP32, dims=(1,)),))

    with pytest.raises(ServingError, match="model 'm' has no input 'y': it has x"):
        tensors_of(config, {"y": "1"}, lambda path: b"", _picture)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([1.5], np.float32), "y T[1]: 1.5"),
        (np.array([], np.float32), "y T[0]"),
        (np.array([[1, 20], [300, 4]]), "y T[2,2]\n    1   20\n  300    4"),
        (np.array([b"hello"], object), "y T[1]: hello"),
        (np.array([b"a", b"\xff\xfe"], object), "y T[2]\n  a\n  2 bytes"),
        (np.array([b"data:image/png;base64,AAAA"], object), "y T[1]: image/png, 3 bytes"),
        (
            np.array([[0.0] * 99 + [7.0]]),
            "y T[1,100]\n  0  0  0  0  0  0  0  0  ... 92 more\n  from 0 to 7, mean 0.07\n  largest: 7 at 99",
        ),
    ],
)
def test_an_output_is_printed_whole_where_it_is_short(array: np.ndarray, expected: str) -> None:
    assert describe("y", "T", array) == expected


def test_classes_are_a_table() -> None:
    assert classes("y", np.array([b"0.900000:3:cat", b"0.100000:1"], object)) == "y\n      0.9000  cat\n      0.1000  1"


def test_a_stream_of_text_is_printed_piece_by_piece() -> None:
    assert piece({"text": np.array([b" word"], object)}) == " word"
    assert piece({"text": np.array([b"\xff"], object)}) is None
    assert piece({"n": np.array([1])}) is None
    assert piece({"text": np.array([b"a"], object), "n": np.array([1])}) is None


def test_the_content_of_a_data_url_goes_to_a_file() -> None:
    assert content_of(b"data:image/png;base64,AAAA") == b"\0\0\0"
    assert content_of(b"data:text/plain,hello") == b"data:text/plain,hello"
    assert content_of("text") == b"text"


def test_options_are_read() -> None:
    given = LINE.parse(["m", "-i", "x=1", "--input", "y=@a.npy", "-o", "z=z.npy", "--timeout", "5s"])

    assert (given.model, given.inputs, given.outputs, given.timeout_s) == (
        "m",
        (("x", "1"), ("y", "@a.npy")),
        (("z", "z.npy"),),
        5.0,
    )
    with pytest.raises(ServingError, match="--input: expected NAME=VALUE, got 'x'"):
        LINE.parse(["m", "-i", "x"])


def test_the_name_of_a_file_in_place_of_its_content_has_a_hint(tmp_path: Path) -> None:
    cat = tmp_path / "my cat.jpg"
    cat.write_bytes(b"")
    inputs = [("size", "16"), ("image", str(cat)), ("long", "x" * 10_000)]

    assert file_hint("input 'image': expected an image", inputs) == f"-i 'image=@{cat}' sends the content of the file"
    assert not file_hint("input 'size': expected at most 8", inputs)
    assert not file_hint("input 'long': too long", inputs)
