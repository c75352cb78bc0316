from collections.abc import Callable, Mapping

import pytest

from charonia.server.lifecycle.repository.model_folder import MODELS_LISTED_MAX, mistaken_config, version_hint
from charonia.server.lifecycle.repository.scan import ModelFolder

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]

USUAL = "versions are folders with a number for a name, such as m/1"


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({}, USUAL),
        ({"config.pbtxt": b"", "labels.txt": b"", "configs/": b"", "vocabulary/": b""}, USUAL),
        ({"model.onnx": b""}, "a model lies in the folder of its version: move m/model.onnx to m/1/model.onnx"),
        ({"v1/": b""}, "a version's name is its number alone: rename m/v1 to m/1"),
        ({"01/": b""}, "a version's name is its number alone: rename m/01 to m/1"),
        ({"Version_3/": b""}, "a version's name is its number alone: rename m/Version_3 to m/3"),
        ({"2.0/": b""}, "a version's name is its number alone: rename m/2.0 to m/2"),
        ({"0/": b""}, "versions begin with 1: rename m/0 to m/1"),
        ({"1": b""}, "m/1 is a file; a version is a folder that holds the model"),
        ({"b/1/": b"", "a/2/": b"", "c/": b""}, "'m' is a repository, not a model; its models are m/a, m/b"),
    ],
)
def test_a_hint_says_what_a_folder_without_a_version_holds(
    make_folder: MakeFolder, files: Mapping[str, bytes], hint: str
) -> None:
    assert version_hint(make_folder(files)) == hint


def test_a_version_that_is_a_link_to_nothing_is_told(make_folder: MakeFolder) -> None:
    folder = make_folder({})
    (folder.path / "1").symlink_to("/no/where")

    assert version_hint(folder) == "m/1 is a link to '/no/where', which is not there"


def test_a_version_that_is_taken_for_a_model_says_where_the_repository_is(make_folder: MakeFolder) -> None:
    path = make_folder({"1/model.onnx": b""}).path / "1"

    assert "one folder further up" in version_hint(ModelFolder("1", path.parent, path))


def test_a_repository_that_is_taken_for_a_model_lists_some_of_its_models(make_folder: MakeFolder) -> None:
    hint = version_hint(make_folder({f"net{number}/1/": b"" for number in range(MODELS_LISTED_MAX + 5)}))

    assert hint.count("m/net") == MODELS_LISTED_MAX


@pytest.mark.parametrize(
    ("files", "mistaken"),
    [
        ({"1/model.onnx": b"", "labels.txt": b"", "notes.pbtxt": b""}, ""),
        ({"config.json": b"{}", "1/": b""}, "config.json"),
        ({"Config.pbtxt.txt": b"", "1/": b""}, "Config.pbtxt.txt"),
        ({"1/config.pbtxt": b""}, "1/config.pbtxt"),
    ],
)
def test_a_file_that_may_be_meant_as_the_configuration_is_found(
    make_folder: MakeFolder, files: Mapping[str, bytes], mistaken: str
) -> None:
    assert mistaken_config(make_folder(files), 1) == mistaken
