from pathlib import Path

import pytest
from examples.demo.repository import build_repository
from examples.ocr.make_repository import place, shipped_file

from charonia import Code, ServingError


def test_the_repository_has_the_ocr_pipeline_a_model_with_labels_and_one_in_python(tmp_path: Path) -> None:
    build_repository(tmp_path)

    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "detection_preprocessing/config.pbtxt",
        "detection_preprocessing/1/model.py",
        "detection_preprocessing/1/picture.py",
        "text_detection/config.pbtxt",
        "text_detection/1/model.onnx",
        "detection_postprocessing/config.pbtxt",
        "detection_postprocessing/1/model.py",
        "detection_postprocessing/1/boxes.py",
        "detection_postprocessing/1/lines.py",
        "angle_classification/config.pbtxt",
        "angle_classification/1/model.onnx",
        "text_recognition/config.pbtxt",
        "text_recognition/1/model.onnx",
        "recognition_postprocessing/config.pbtxt",
        "recognition_postprocessing/1/model.py",
        "recognition_postprocessing/1/decoding.py",
        "recognition_postprocessing/1/characters.txt",
        "ocr/config.pbtxt",
        "ocr_bls/config.pbtxt",
        "ocr_bls/1/model.py",
        "content_type/config.pbtxt",
        "content_type/labels.txt",
        "content_type/1/model.onnx",
        "add_sub/config.pbtxt",
        "add_sub/1/model.py",
    }
    assert (tmp_path / "ocr" / "1").is_dir()


def test_building_it_again_changes_nothing(tmp_path: Path) -> None:
    build_repository(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    build_repository(tmp_path)

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_models_come_with_the_names_of_their_classes(tmp_path: Path) -> None:
    build_repository(tmp_path)

    characters = (tmp_path / "recognition_postprocessing" / "1" / "characters.txt").read_text(encoding="utf-8")
    labels = (tmp_path / "content_type" / "labels.txt").read_text(encoding="utf-8").splitlines()
    assert "A" in characters.split("\n")
    assert {"python", "png", "onnx"} <= set(labels)
    assert f"dims: [ {len(labels)} ]" in (tmp_path / "content_type" / "config.pbtxt").read_text(encoding="utf-8")


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(ServingError) as caught:
        shipped_file("charonia-has-no-such-package", "model.onnx")

    assert caught.value.code is Code.NOT_FOUND
    assert "charonia-has-no-such-package" in caught.value.message
    assert caught.value.hint == "pip install 'charonia[demo]'"


def test_a_file_that_a_package_ships_no_longer_is_named() -> None:
    with pytest.raises(ServingError, match=r"magika/models/none\.onnx"):
        shipped_file("magika", "magika/models/none.onnx")


def test_a_network_is_copied_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "network").write_bytes(b"content")

    def no_link(source: Path, target: Path) -> None:
        raise OSError("Invalid cross-device link")

    for _ in range(2):
        place(tmp_path / "network", tmp_path / "1" / "model.onnx")
        monkeypatch.setattr("os.link", no_link)

    assert (tmp_path / "1" / "model.onnx").read_bytes() == b"content"
    assert not (tmp_path / "1" / "model.onnx").samefile(tmp_path / "network")
