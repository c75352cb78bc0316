"""What paths of a command line are, and the repository that is made for them."""

import asyncio
import importlib.util
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.config.model import ModelConfig
from charonia.config.onnx_file import OnnxFile
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, invalid
from charonia.server.files.options import FileOptions, Mount
from charonia.server.files.repository import FileRepository
from charonia.server.files.served_files import UnsupportedFiles, sort


def made(
    folder: Path, *paths: Path | str, options: FileOptions | None = None, models: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the files of the repository for paths: what a link leads to, or the text of a configuration."""

    async def describe(path: Path, start: ModelConfig) -> Mapping[str, ModelConfig]:
        return {name: replace(start, name=name) for name in models}

    repository = folder / "made"
    repository.mkdir()
    given = sort([str(path) for path in paths])
    asyncio.run(FileRepository(given, options or FileOptions(), repository, describe).make())
    return {
        str(path.relative_to(repository)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(repository.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def file(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refusal(*paths: object) -> ServingError:
    with pytest.raises(ServingError) as caught:
        sort([str(path) for path in paths])
    return caught.value


def test_options_of_gguf_files_are_parameters_of_the_model(tmp_path: Path) -> None:
    template = file(tmp_path / "own.jinja", b"{{ messages }}")
    options = FileOptions(ctx=512, threads=2, slots=1, chat_template=str(template), gpu_layers=0)

    files = made(tmp_path, file(tmp_path / "a.gguf"), options=options)

    found = parse(files["a/config.pbtxt"]).parameters
    assert found["chat_template"] == "{{ messages }}"
    numbers = {name: found[name] for name in ("n_ctx", "n_threads", "n_parallel", "n_gpu_layers")}
    assert numbers == {"n_ctx": "512", "n_threads": "2", "n_parallel": "1", "n_gpu_layers": "0"}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("a.onnx", FileOptions(ctx=512), "--ctx: expected a GGUF file"),
        ("a.gguf", FileOptions(chat_template="none.jinja"), "--chat-template: expected a template or a file with one"),
    ],
)
def test_an_option_of_gguf_files_that_does_not_apply(
    tmp_path: Path, name: str, options: FileOptions, reason: str
) -> None:
    with pytest.raises(ServingError, match=reason):
        made(tmp_path, file(tmp_path / name), options=options)


def test_files_become_models_of_their_names(tmp_path: Path) -> None:
    onnx, torch = file(tmp_path / "a.onnx"), file(tmp_path / "b.pth")

    files = made(tmp_path, onnx, torch, options=FileOptions(max_batch_size=8, workers=3))

    assert files["a/1/a.onnx"] == str(onnx)
    assert files["b/1/b.pth"] == str(torch)
    config, other = (parse(files[f"{name}/config.pbtxt"]) for name in "ab")
    assert (config.name, config.max_batch_size, config.instance_group[0].count) == ("a", 8, 3)
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "a.onnx")
    assert (other.backend, other.default_model_filename) == ("pytorch", "b.pth")
    assert [each.parameters for each in (config, other)] == [{"TRY_EXAMPLE": "true"}] * 2


def test_a_name_may_be_given(tmp_path: Path) -> None:
    files = made(tmp_path, file(tmp_path / "model.onnx"), options=FileOptions(name="resnet"))

    assert list(files) == ["resnet/1/model.onnx", "resnet/config.pbtxt"]


def test_weights_beside_a_model_stay_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = file(tmp_path / "data" / "net.onnx")
    monkeypatch.setattr(OnnxFile, "weight_files", lambda file: ("net.data",))

    files = made(tmp_path, onnx)

    assert files["net/1"] == str(onnx.parent)
    assert parse(files["net/config.pbtxt"]).default_model_filename == "net.onnx"


def test_a_service_file_becomes_its_models_and_is_imported_from_where_it_is(tmp_path: Path) -> None:
    service = file(tmp_path / "code" / "service.py")
    helper = file(tmp_path / "code" / "helper.py")

    files = made(tmp_path, service, models=("f", "g"))

    assert {name: target for name, target in files.items() if "pbtxt" not in name} == {
        f"{model}/1/{path.name}": str(path) for model in ("f", "g") for path in (service, helper)
    }
    config = parse(files["f/config.pbtxt"])
    assert (config.backend, config.parameters) == ("python", {"SERVICE_PATH": str(service)})


def test_another_python_file_is_one_model(tmp_path: Path) -> None:
    files = made(tmp_path, file(tmp_path / "net.py"), options=FileOptions(max_batch_size=4))

    assert parse(files["net/config.pbtxt"]).max_batch_size == 4


@pytest.mark.parametrize(
    ("models", "options", "reason"),
    [
        (("f", "g"), FileOptions(name="h"), "'h': a name is for one model, and service.py has 2: f, g"),
        (("f",), FileOptions(max_batch_size=4), "--max-batch-size: service.py says it itself"),
        (("a",), FileOptions(), "two models would be called 'a'"),
    ],
)
def test_options_that_a_service_file_contradicts_are_refused(
    tmp_path: Path, models: tuple[str, ...], options: FileOptions, reason: str
) -> None:
    paths = [file(tmp_path / "service.py"), *([] if options.explicit else [file(tmp_path / "a.onnx")])]

    with pytest.raises(ServingError) as caught:
        made(tmp_path, *paths, options=options, models=models)

    assert caught.value.message == reason


def test_a_name_is_for_one_file(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="--name: expected one file that it is the name of, got 2"):
        made(tmp_path, file(tmp_path / "a.onnx"), file(tmp_path / "b.onnx"), options=FileOptions(name="c"))


def test_folders_of_models_and_repositories_are_told_apart(tmp_path: Path) -> None:
    file(tmp_path / "models" / "resnet" / "1" / "model.onnx")

    given = sort([str(tmp_path / "models"), "s3://bucket/models", str(tmp_path / "models" / "resnet")])

    assert given.repositories == (str(tmp_path / "models"), "s3://bucket/models")
    assert given.models == (tmp_path / "models" / "resnet",)
    assert made(tmp_path, tmp_path / "models" / "resnet") == {"resnet": str(tmp_path / "models" / "resnet")}


def test_a_folder_may_be_one_model_of_tensorflow(tmp_path: Path) -> None:
    file(tmp_path / "exported" / "saved_model.pb")

    files = made(tmp_path, tmp_path / "exported")

    assert files["exported/1/exported"] == str(tmp_path / "exported")
    config = parse(files["exported/config.pbtxt"])
    assert (config.backend, config.default_model_filename) == ("tensorflow", "exported")


def test_what_no_backend_serves_is_recognised_with_lines_to_paste(tmp_path: Path) -> None:
    error = refusal(file(tmp_path / "a.safetensors"))

    assert isinstance(error, UnsupportedFiles)
    assert (
        error.message
        == f"'{tmp_path / 'a.safetensors'}' is weights without their model, which cannot be served directly"
    )
    assert error.lines.startswith("cat > service.py <<'EOF'")


def test_a_checkpoint_is_recognised_whatever_its_suffix(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "weights.pt", "w") as archive:
        archive.writestr("weights/data.pkl", b"")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("script/data.pkl", b"")
        archive.writestr("script/constants.pkl", b"")

    error = refusal(tmp_path / "weights.pt")

    assert isinstance(error, UnsupportedFiles)
    assert "a checkpoint of PyTorch" in error.message
    assert "torch.load(" in error.lines
    assert sort([str(tmp_path / "script.pt")]).files[0][0] == tmp_path / "script.pt"


def test_a_pickled_module_is_told_from_a_checkpoint_and_its_class_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    network = torch.nn.Sequential(torch.nn.Linear(2, 3))
    torch.save(network, tmp_path / "whole.pt")
    torch.save({"epoch": 3, "model": network}, tmp_path / "inside.pth")
    torch.save({"state_dict": network.state_dict(), "epoch": 3}, tmp_path / "weights.pt")

    whole, inside, weights = (refusal(tmp_path / name) for name in ("whole.pt", "inside.pth", "weights.pt"))

    for each in (whole, inside):
        assert "is a pickled module of PyTorch, of class torch.nn.modules.container.Sequential, " in each.message
    assert isinstance(whole, UnsupportedFiles)
    assert "\nimport torch.nn.modules.container  # " in whole.lines
    assert "map_location=device, weights_only=False).eval()  # runs code of the file\n" in whole.lines
    assert "is a checkpoint of PyTorch, " in weights.message


def test_a_module_of_a_script_needs_the_class_in_the_service_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        archive.writestr(
            "net/data.pkl", b"\x80\x02c__main__\nNet\n)\x81}(X\x0b\0\0\0_parametersNX\x08\0\0\0_modulesNub."
        )

    error = refusal(tmp_path / "net.pt")

    assert isinstance(error, UnsupportedFiles)
    assert "of class __main__.Net, " in error.message
    assert "\nfrom train import Net  # the script that defines it\n__main__.Net = Net\n" in error.lines


def test_a_folder_of_sentence_transformers_is_served_by_its_library(tmp_path: Path) -> None:
    for name in ("modules.json", "config_sentence_transformers.json", "config.json", "model.safetensors"):
        file(tmp_path / "mini-lm" / name)

    files = made(tmp_path, tmp_path / "mini-lm", models=("Sentences",), options=FileOptions(workers=2))

    service = files[".mini-lm.service/mini-lm.py"]
    assert f"SentenceTransformer({json.dumps(str(tmp_path / 'mini-lm'))}, device=device" in service
    has_library = importlib.util.find_spec("sentence_transformers") is not None
    assert has_library != service.startswith('# /// script\n# dependencies = ["sentence-transformers"]\n# ///\n')
    config = parse(files["mini-lm/config.pbtxt"])
    assert (config.name, config.instance_group[0].count) == ("mini-lm", 2)
    assert config.parameters["SERVICE_PATH"].endswith("/.mini-lm.service/mini-lm.py")


def test_names_come_with_paths(tmp_path: Path) -> None:
    one, other = file(tmp_path / "model.onnx"), file(tmp_path / "sub" / "model.onnx")
    folder, service = file(tmp_path / "f" / "net.onnx").parent, file(tmp_path / "service.py")

    files = made(*(tmp_path, f"first={one}", f"second={other}", f"third={folder}", f"fourth={service}"), models=("f",))

    assert [files[f"{name}/1/{path.name}"] for name, path in (("first", one), ("second", other))] == [
        str(one),
        str(other),
    ]
    assert files["third/1/net.onnx"] == str(folder / "net.onnx")
    assert parse(files["fourth/config.pbtxt"]).name == "fourth"


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = file(tmp_path / "lr=0.1.onnx")

    assert sort([str(path)]).files[0][0] == path
    assert not sort([str(path)]).names


def test_a_name_is_for_one_model_that_has_no_other_name(tmp_path: Path) -> None:
    path = file(tmp_path / "a.onnx")

    assert refusal(f"x={path}", f"y={path}").message == f"'{path}' has two names, 'x' and 'y'"
    assert refusal("x=s3://bucket/models").message == (
        "'x=s3://bucket/models': a name is for one model, and 's3://bucket/models' is a repository"
    )


def test_a_folder_of_files_serves_each(tmp_path: Path) -> None:
    paths = [file(tmp_path / "models" / name) for name in ("a.onnx", "b.pt")]
    file(tmp_path / "models" / "notes.txt")
    file(tmp_path / "models" / "train.py")

    given = sort([str(tmp_path / "models")])

    assert [path for path, _ in given.files] == paths
    assert not given.repositories


def test_a_file_that_is_compressed_says_how_to_unpack_it(tmp_path: Path) -> None:
    path = file(tmp_path / "a.onnx.gz", b"\x1f\x8b\x08")

    assert (refusal(path).message, refusal(path).hint) == (f"'{path}' is compressed with gzip", f"gunzip {path}")


def test_a_hugging_face_folder_gets_the_task_of_its_configuration(tmp_path: Path) -> None:
    file(tmp_path / "bert" / "config.json", b'{"architectures": ["BertForMaskedLM"]}')
    file(tmp_path / "bert" / "model.safetensors")

    error = refusal(tmp_path / "bert")

    assert isinstance(error, UnsupportedFiles)
    assert '"fill-mask"' in error.lines


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_language_model_of_hugging_face_goes_to_vllm_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    folder = file(tmp_path / "smol" / "config.json", b'{"architectures": ["LlamaForCausalLM"]}').parent
    file(folder / "model.safetensors")
    monkeypatch.setattr("charonia.server.files.served_files.find_spec", lambda name: is_installed and name == "vllm")

    if is_installed:
        files = made(tmp_path, folder)
        assert json.loads(files["smol/1/model.json"]) == {"model": str(folder)}
        assert parse(files["smol/config.pbtxt"]).backend == "vllm"
    else:
        assert refusal(folder).hint == "vLLM serves it as it is: pip install 'charonia[vllm]'"


def test_a_file_of_no_known_form_says_what_is_expected(tmp_path: Path) -> None:
    assert refusal(file(tmp_path / "a.xyz")).message == (
        f"'{tmp_path / 'a.xyz'}': unsupported file type, expected a folder of models or a file that ends with "
        ".keras, .plan, .engine, .trt, .onnx, .tflite, .xml, .pdmodel, .pt, .pth, .jit, .torchscript, .pt2, "
        ".py, .ubj, .xgb, .bst, .tl, .gguf, .skops, .joblib, .pkl, .pickle, .cbm"
    )


@pytest.mark.parametrize("name", ["model.onnx", "models"])
def test_a_link_to_nothing_is_named_with_its_target(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("gone")

    error = refusal(tmp_path / name)

    assert (error.message, error.hint) == (f"'{tmp_path / name}' is a link to 'gone', and nothing is there", "")
    assert name not in refusal(tmp_path / "other.onnx").hint


def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    file(tmp_path / "resnet50.onnx")

    error = refusal(tmp_path / "resnet.onnx")

    assert (error.message, error.hint) == (
        f"there is no file '{tmp_path / 'resnet.onnx'}'",
        f"'{tmp_path}' has resnet50.onnx",
    )


def test_a_missing_folder_is_a_repository_that_is_reported_later() -> None:
    assert sort(["no/such/models"]).repositories == ("no/such/models",)


async def test_models_follow_a_service_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service, other = file(tmp_path / "service.py", b"f g"), file(tmp_path / "taken.onnx")
    folder = tmp_path / "made"
    folder.mkdir()

    async def describe(path: Path, start: ModelConfig) -> Mapping[str, ModelConfig]:
        names = path.read_text().split()
        if "(" in names:
            raise invalid("'(' was never closed")
        return {name: replace(start, name=name) for name in names}

    async def becomes(text: str, names: set[str], *, logged: str = "") -> None:
        service.write_text(text)
        async with asyncio.timeout(200):
            while {path.name for path in folder.iterdir()} != names or logged not in caplog.text:
                await asyncio.sleep(0.01)

    repository = FileRepository(sort([str(service), str(other)]), FileOptions(), folder, describe)
    assert await repository.make() == ("f", "g", "taken")
    following = asyncio.create_task(repository.follow(0.001))
    await becomes("f h", {"f", "h", "taken"})
    await becomes("f ( more", {"f", "h", "taken"}, logged="stay as they are: '(' was never closed")
    await becomes("f h taken", {"f", "h", "taken"}, logged="stay as they are: two models would be called 'taken'")
    service.unlink()
    await asyncio.sleep(0.01)
    await becomes("h last", {"h", "last", "taken"})
    following.cancel()

    assert (folder / "last" / "1" / "service.py").readlink() == service
    assert parse((folder / "last" / "config.pbtxt").read_text()).parameters == {"SERVICE_PATH": str(service)}


def named(folder: Path, path: Path, name: str = "iris") -> dict[str, str]:
    """Return the files of the repository for a path that is one model with a name of its own."""

    async def describe(path: Path, start: ModelConfig) -> Mapping[str, ModelConfig]:
        return {}

    repository = folder / "made"
    repository.mkdir()
    given = sort([str(path)], is_named=True)
    if given.needs_repository:
        asyncio.run(FileRepository(given, FileOptions(model_name=name), repository, describe).make())
    return {
        str(path.relative_to(repository)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(repository.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_the_file_of_a_folder_is_served_by_a_name_from_outside(tmp_path: Path) -> None:
    onnx = file(tmp_path / "models" / "net.onnx")
    file(tmp_path / "models" / "README.md")
    file(tmp_path / "models" / "helper.py")

    files = named(tmp_path, tmp_path / "models")

    assert files["iris/1/net.onnx"] == str(onnx)
    assert parse(files["iris/config.pbtxt"]).default_model_filename == "net.onnx"


def test_a_configuration_beside_the_file_counts_and_gets_the_name(tmp_path: Path) -> None:
    models = tmp_path / "models"
    file(models / "model.onnx")
    file(models / "config.pbtxt", b'name: "other" max_batch_size: 3')

    files = named(tmp_path, models)

    assert files["iris/1"] == str(models)
    assert (parse(files["iris/config.pbtxt"]).name, parse(files["iris/config.pbtxt"]).max_batch_size) == ("iris", 3)


def test_the_versions_of_a_folder_are_served_by_a_name_from_outside(tmp_path: Path) -> None:
    models = tmp_path / "models"
    file(models / "2" / "model.onnx")
    config = file(models / "config.pbtxt", b"max_batch_size: 3")
    file(models / "labels.txt")

    files = named(tmp_path, models)

    assert files == {
        "iris/2": str(models / "2"),
        "iris/config.pbtxt": str(config),
        "iris/labels.txt": str(models / "labels.txt"),
    }


def test_the_models_of_a_repository_keep_their_names(tmp_path: Path) -> None:
    file(tmp_path / "models" / "a" / "1" / "model.onnx")
    file(tmp_path / "models" / "stray.onnx")

    assert named(tmp_path, tmp_path / "models") == {}
    assert sort([str(tmp_path / "models")], is_named=True).repositories == (str(tmp_path / "models"),)


def test_several_files_in_a_folder_are_no_model(tmp_path: Path) -> None:
    file(tmp_path / "models" / "a.onnx")
    file(tmp_path / "models" / "b.onnx")

    with pytest.raises(ServingError, match=r"expected the file of one model, got a\.onnx, b\.onnx"):
        sort([str(tmp_path / "models")], is_named=True)


def test_a_name_from_outside_is_that_of_one_model(tmp_path: Path) -> None:
    files = [file(tmp_path / "a.onnx"), file(tmp_path / "b.onnx")]

    with pytest.raises(ServingError, match="--model_name: expected one model that it is the name of, got 2"):
        made(tmp_path, *files, options=FileOptions(model_name="iris"))


def test_two_applications_have_two_paths() -> None:
    apart, together = Mount("app", "/ui"), Mount("other", "/ui/")

    assert list(FileOptions(mounts=(apart, Mount("other", "/admin"))).problems()) == []
    assert list(FileOptions(mounts=(apart, together)).problems()) == ["--mount: expected one application at /ui, got 2"]
