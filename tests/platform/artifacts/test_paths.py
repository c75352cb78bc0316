"""Names of files that come from elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.platform.artifacts.manifest import NAME_BYTES_MAX, PATH_CHARS_MAX, check_together, is_content, safe_path


@pytest.mark.parametrize(
    ("text", "path"),
    [("a", "a"), ("a/b.onnx", "a/b.onnx"), ("./a//b/", "a/b"), ("a b/ü.txt", "a b/ü.txt"), ("..a/b..", "..a/b..")],
)
def test_a_path_below_the_folder_comes_in_its_plain_form(text: str, path: str) -> None:
    assert safe_path(text) == path


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "/", "/etc/passwd", "..", "a/../../b", "a/..", "a\\b", "C:\\x", "a\0b", "a\nb", "\x7f", "\udc80"),
        *("x" * (NAME_BYTES_MAX + 1), "a/" * PATH_CHARS_MAX + "b"),
    ],
)
def test_other_paths_are_refused(text: str) -> None:
    with pytest.raises(ServingError, match="expected a path below a folder"):
        safe_path(text)


@given(st.text(max_size=50))
def test_what_is_accepted_stays_below_the_folder(text: str) -> None:
    try:
        names = safe_path(text).split("/")
    except ServingError:
        return

    assert all(name not in ("", ".", "..") for name in names)


def test_a_file_cannot_be_there_twice() -> None:
    with pytest.raises(ServingError, match="got it twice"):
        check_together(["a/b", "c", "a/b"])


def test_a_file_cannot_be_a_folder_as_well() -> None:
    with pytest.raises(ServingError, match="'a' is a file and also the folder of 'a/b/c'"):
        check_together(["a", "a/b/c"])


def test_what_systems_leave_behind_is_no_content() -> None:
    paths = [".git/config", "a/.DS_Store", "__MACOSX/a", "1/__pycache__/m.pyc", "1/model.py", "Thumbs.db"]

    assert [path for path in paths if is_content(path)] == ["1/model.py"]
