import contextlib
import errno
import os
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.repository.scan import folder_at, scan


def folders(repository: Path, *names: str) -> Path:
    for name in names:
        (repository / name).mkdir(parents=True)
    return repository


def test_every_folder_of_a_repository_is_a_model(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", "resnet", "bert")

    found = scan([repository])

    assert list(found.models) == ["bert", "resnet"]
    assert found.models["bert"].path == repository / "bert"
    assert found.models["bert"].repository == repository
    assert not found.ambiguous
    assert not found.notes


def test_hidden_folders_and_plain_files_are_no_models(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", ".git", "..2026_data", "bert")
    (repository / "README.md").write_text("about")

    assert list(scan([repository]).models) == ["bert"]


def test_a_link_that_leads_nowhere_or_in_a_circle_takes_no_model_with_it(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", "bert")
    for name in ("circle", "circle.onnx", "gone"):
        (repository / name).symlink_to(repository / ("nothing" if name == "gone" else name))

    found = scan([repository])

    assert list(found.models) == ["bert"]
    assert [note.partition(": ")[2] for note in sorted(found.notes)] == [
        "'circle' is ignored, it is a link that leads in a circle",
        "'circle.onnx' is ignored, it is a link that leads in a circle",
    ]


def test_a_symbolic_link_to_a_folder_is_a_model(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r")
    repository.mkdir()
    actual_path = folders(tmp_path, "store/bert-v3") / "store" / "bert-v3"
    (repository / "bert").symlink_to(actual_path)

    assert list(scan([repository]).models) == ["bert"]


def test_a_name_in_two_repositories_is_ambiguous_and_the_others_are_not(tmp_path: Path) -> None:
    one = folders(tmp_path / "one", "bert", "resnet")
    two = folders(tmp_path / "two", "bert")

    found = scan([one, two])

    assert list(found.models) == ["resnet"]
    assert found.ambiguous == {"bert": (str(one / "bert"), str(two / "bert"))}


def test_a_repository_given_twice_counts_once(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", "bert")

    found = scan([repository, f"{tmp_path}/r/../r/"])

    assert list(found.models) == ["bert"]
    assert not found.ambiguous


def test_a_look_at_names_alone_takes_no_fingerprints(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", "bert")

    assert scan([repository], fingerprints=False).models["bert"].fingerprint == ""
    assert scan([repository]).models["bert"].fingerprint != ""


def test_a_missing_repository_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"poll from model repository .*/missing': no such file") as caught:
        scan([tmp_path / "missing"])

    assert caught.value.code is Code.NOT_FOUND


def test_a_repository_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")

    with pytest.raises(ServingError, match="not a directory"):
        scan([tmp_path / "model.onnx"])


def test_a_repository_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)

    with pytest.raises(ServingError, match="permission denied") as caught:
        scan([tmp_path])

    assert caught.value.code is Code.UNAVAILABLE


def test_a_configuration_file_in_the_repository_itself_is_remarked_on(tmp_path: Path) -> None:
    repository = folders(tmp_path / "bert", "1")
    (repository / "config.pbtxt").write_text("")

    (note,) = scan([repository]).notes

    assert "a repository is the folder around the model folders" in note


def test_a_model_without_a_folder_is_remarked_on_and_a_script_is_not(tmp_path: Path) -> None:
    for name in ("bert.onnx", "gpt.onnx", "t5.onnx"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "make_models.py").write_text("")

    (note,) = scan([tmp_path]).notes

    assert "holds the file 'bert.onnx', which is not read there, nor are 2 more: a model lies" in note
    assert f"mymodel/1/model.onnx; `charonia serve '{tmp_path}/bert.onnx'` takes the file itself" in note


def test_a_misspelt_repository_has_the_nearest_name_as_hint(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")

    with pytest.raises(ServingError, match="no such file or directory") as caught:
        scan([tmp_path / "model.onx"])

    assert caught.value.hint == f"did you mean '{tmp_path}/model.onnx'?"


def test_a_folder_whose_name_is_no_text_is_passed_over_and_remarked_on(tmp_path: Path) -> None:
    repository = folders(tmp_path / "r", "bert")
    os.mkdir(os.fsencode(repository) + b"/\xff\xfe")

    found = scan([repository])

    assert list(found.models) == ["bert"]
    assert "is not UTF-8" in found.notes[0]


def test_the_folder_of_one_model_knows_its_name_and_repository(tmp_path: Path) -> None:
    folders(tmp_path / "r", "bert")

    folder = folder_at(f"{tmp_path}/r/bert/")

    assert (folder.name, folder.repository) == ("bert", tmp_path / "r")


def test_the_folder_of_one_model_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ServingError, match="no such folder"):
        folder_at(tmp_path / "missing")
    with pytest.raises(ServingError, match="not a folder"):
        folder_at(tmp_path / "file")


def test_a_disk_that_fails_takes_no_model_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "bert"

        def is_dir(self) -> bool:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext([Entry()]))

    with pytest.raises(ServingError, match=r"failed to poll from model repository .*: input/output error"):
        scan([tmp_path], fingerprints=False)
