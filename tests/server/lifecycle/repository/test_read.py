from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository import model_folder as read
from charonia.server.lifecycle.repository.model_folder import check_name, read_config, version_files
from charonia.server.lifecycle.repository.scan import ModelFolder

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]


def test_a_model_without_a_file_has_no_configuration(make_folder: MakeFolder) -> None:
    assert read_config(make_folder({})) == (None, None)


def test_config_pbtxt_is_read(make_folder: MakeFolder) -> None:
    folder = make_folder({"config.pbtxt": b'backend: "python"'})

    assert read_config(folder) == (ModelConfig(backend="python"), folder.path / "config.pbtxt")


def test_what_is_wrong_in_a_variant_is_said_of_its_own_file(make_folder: MakeFolder) -> None:
    folder = make_folder({"configs/gpu.pbtxt": b"\nmax_bach_size: 4"})

    with pytest.raises(ServingError) as refused:
        read_config(folder, config_name="gpu")

    assert refused.value.message.startswith(
        f"{folder.path / 'configs' / 'gpu.pbtxt'} line 2, column 1: ModelConfig has"
    )


def test_a_named_variant_is_used_where_it_exists_and_config_pbtxt_elsewhere(make_folder: MakeFolder) -> None:
    folder = make_folder({"config.pbtxt": b'backend: "python"', "configs/gpu.pbtxt": b'backend: "onnxruntime"'})

    variant, variant_path = read_config(folder, config_name="gpu")
    fallback, fallback_path = read_config(folder, config_name="tpu")

    assert variant == ModelConfig(backend="onnxruntime")
    assert variant_path == folder.path / "configs" / "gpu.pbtxt"
    assert fallback == ModelConfig(backend="python")
    assert fallback_path == folder.path / "config.pbtxt"


def test_a_comment_in_another_encoding_does_no_harm(make_folder: MakeFolder) -> None:
    folder = make_folder({"config.pbtxt": "# 你好\nmax_batch_size: 4".encode("gbk")})

    config, _ = read_config(folder)

    assert config is not None
    assert config.max_batch_size == 4


def test_a_huge_file_is_refused_before_it_is_parsed(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CONFIG_BYTES_MAX", 8)
    folder = make_folder({"config.pbtxt": b"# 9 bytes"})

    with pytest.raises(ServingError, match="expected at most 8 bytes"):
        read_config(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.pbtxt": b"max_bach_size: 4"}, r"^/.*/m/config\.pbtxt line 1, .*max_bach_size"),
        ({"config.pbtxt": b'name: "\xff"'}, r"config\.pbtxt line 1: byte 0xff is not UTF-8"),
        ({"config.pbtxt": "\ufeffname: 'a'".encode("utf-16-le")}, r"config\.pbtxt: expected UTF-8, got UTF-16"),
        ({"config.pbtxt": "\ufeffname: 'a'".encode("utf-16-be")}, r"config\.pbtxt: expected UTF-8, got UTF-16"),
        ({"config.pbtxt/": b""}, r"config\.pbtxt: is a directory"),
    ],
    ids=["mistake", "no text", "utf-16-le", "utf-16-be", "folder"],
)
def test_what_cannot_be_read_is_said_with_the_path(
    make_folder: MakeFolder, files: Mapping[str, bytes], message: str
) -> None:
    with pytest.raises(ServingError, match=message):
        read_config(make_folder(files))


def test_the_configured_name_must_be_the_folders(make_folder: MakeFolder) -> None:
    folder = make_folder({})

    check_name(folder, ModelConfig())
    check_name(folder, ModelConfig(name="m"))
    with pytest.raises(ServingError, match="unexpected directory name 'm' for model 'bert', directory name must equal"):
        check_name(folder, ModelConfig(name="bert"))


def test_the_files_of_a_version_are_listed_without_hidden_ones(make_folder: MakeFolder) -> None:
    folder = make_folder({"3/model.py": b"", "3/weights/a.bin": b"", "3/.git": b"", "2/model.onnx": b""})

    assert version_files(folder, 3) == ("model.py", "weights")


def test_a_version_that_is_not_there_has_no_list() -> None:
    with pytest.raises(ServingError, match="failed to load 'm'"):
        version_files(ModelFolder("m", Path("/no"), Path("/no/where")), 1)
