from collections.abc import Callable, Mapping

import pytest

from charonia.config.model import ModelConfig, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository import data_files as labels
from charonia.server.lifecycle.repository.data_files import read_labels
from charonia.server.lifecycle.repository.scan import ModelFolder

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]


def configured(filename: str) -> ModelConfig:
    return ModelConfig(output=(ModelOutput(name="boxes"), ModelOutput(name="class", label_filename=filename)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"cat\ndog\n", ("cat", "dog")),
        (b"cat\r\ndog", ("cat", "dog")),
        (b"\xef\xbb\xbfcat\n\nbig dog \n", ("cat", "", "big dog ")),
        ("line\u2028separator\nform\x0cfeed".encode(), ("line\u2028separator", "form\x0cfeed")),
        (b"", ()),
    ],
)
def test_line_i_of_a_label_file_names_class_i(
    make_folder: MakeFolder, content: bytes, expected: tuple[str, ...]
) -> None:
    folder = make_folder({"text/labels.txt": content})

    assert read_labels(folder, configured("text/labels.txt")) == {"class": expected}


@pytest.mark.parametrize("filename", ["/etc/passwd", "../other/labels.txt", "text/../../x", "a\0b"])
def test_a_label_file_must_lie_in_the_models_folder(make_folder: MakeFolder, filename: str) -> None:
    with pytest.raises(ServingError, match="of output 'class' must stay within model directory"):
        read_labels(make_folder({}), configured(filename))


def test_a_missing_label_file_is_an_error_that_names_output_and_file(make_folder: MakeFolder) -> None:
    with pytest.raises(ServingError, match=r"model 'm': label_filename 'x\.txt' of output 'class': no such file"):
        read_labels(make_folder({}), configured("x.txt"))


def test_a_label_file_that_is_no_text_or_too_large_is_refused(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder({"binary": b"cat\n\xff", "long": b"123456789"})
    monkeypatch.setattr(labels, "LABEL_BYTES_MAX", 8)

    with pytest.raises(ServingError, match="byte 4 is not"):
        read_labels(folder, configured("binary"))
    with pytest.raises(ServingError, match="at most 8 bytes"):
        read_labels(folder, configured("long"))


@pytest.mark.parametrize(("dims", "is_warned"), [((3,), True), ((3, 1, 1), True), ((2,), False), ((-1,), False)])
def test_a_label_file_that_is_too_short_is_warned_about(
    dims: tuple[int, ...], is_warned: bool, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    output = ModelOutput("class", DataType.FP32, dims=dims, label_filename="labels.txt")

    read_labels(make_folder({"labels.txt": b"cat\ndog\n"}), ModelConfig(output=(output,)))

    expected = "model 'm': 'labels.txt' has 2 labels for the 3 classes of output 'class': the last 1 have none"
    assert caplog.messages == [expected] * is_warned
