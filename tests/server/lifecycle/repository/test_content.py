from pathlib import Path

import pytest

from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository.model_folder import content_digest
from charonia.server.lifecycle.repository.scan import ModelFolder


def made(folder: Path, **files: str) -> bytes:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return content_digest(ModelFolder(name="m", repository=folder, actual_path=folder, fingerprint=""), 1)


FILES = {"1__model": "weights", "labels": "a", "warmup__x": "data"}


def test_the_same_files_have_the_same_digest_wherever_they_are(tmp_path: Path) -> None:
    assert made(tmp_path / "a", **FILES) == made(tmp_path / "b", **FILES)


def test_what_belongs_to_other_versions_or_is_no_content_does_not_matter(tmp_path: Path) -> None:
    before = made(tmp_path, **FILES)

    assert made(tmp_path, **{"2__model": "other", ".hidden": "x", "1__.hidden": "x"}) == before
    (tmp_path / "1" / "__pycache__").mkdir()
    (tmp_path / "1" / "__pycache__" / "m.pyc").write_text("x")
    assert made(tmp_path) == before


@pytest.mark.parametrize("change", [{"1__model": "Weights"}, {"labels": "b"}, {"1__more": ""}, {"1__sub__2__x": ""}])
def test_any_other_change_makes_another_digest(tmp_path: Path, change: dict[str, str]) -> None:
    before = made(tmp_path, **FILES)

    assert made(tmp_path, **change) != before


def test_names_and_contents_cannot_be_mistaken_for_one_another(tmp_path: Path) -> None:
    assert made(tmp_path / "a", **{"1__ab": "c"}) != made(tmp_path / "b", **{"1__a": "bc"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    made(tmp_path, **FILES)
    (tmp_path / "1" / "gone").symlink_to(tmp_path / "nowhere")

    with pytest.raises(ServingError, match="gone: no such file"):
        made(tmp_path)
