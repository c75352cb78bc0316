from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.demo.models import build_repository, content_type_labels, recognition_characters, shipped_file


def test_the_repository_has_a_model_without_configuration_one_with_labels_and_one_in_python(tmp_path: Path) -> None:
    build_repository(tmp_path)

    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "text_recognition/1/model.onnx",
        "content_type/config.pbtxt",
        "content_type/labels.txt",
        "content_type/1/model.onnx",
        "add_sub/config.pbtxt",
        "add_sub/1/model.py",
    }


def test_building_it_again_changes_nothing(tmp_path: Path) -> None:
    build_repository(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    build_repository(tmp_path)

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_models_come_with_the_names_of_their_classes() -> None:
    assert {"python", "png", "onnx"} <= set(content_type_labels())
    assert recognition_characters()[0] == ""
    assert "A" in recognition_characters()


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(ServingError) as caught:
        shipped_file("charonia-has-no-such-package", "model.onnx")

    assert caught.value.code is Code.NOT_FOUND
    assert "charonia-has-no-such-package" in caught.value.message
    assert caught.value.hint == "pip install 'charonia[demo]'"


def test_a_file_that_a_package_ships_no_longer_is_named() -> None:
    with pytest.raises(ServingError, match=r"magika/models/none\.onnx"):
        shipped_file("magika", "magika/models/none.onnx")
