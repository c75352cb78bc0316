"""What the adapter reads in the folder of a model, and what it does without the libraries for it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.server.openai.model_files import ModelText, ModelTexts
from charonia.wire.json_text import Object

MESSAGES: list[Object] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
IDS = tuple(ModelInput(name, DataType.INT64, dims=(-1,)) for name in ("input_ids", "attention_mask"))
ENCODER = ModelConfig(name="m", input=IDS, output=(ModelOutput("vector", DataType.FP32, (3,)),))


def language_model(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


def read(folder: Path, config: ModelConfig) -> ModelText:
    async def folders(name: str, version: str) -> list[str]:
        assert (name, version) == ("m", "")
        return [str(folder / "1"), str(folder)]

    return asyncio.run(ModelTexts(folders).of(config))


def prompt(folder: Path, **parameters: str) -> str:
    return read(folder, language_model(**parameters)).render(MESSAGES)


def test_a_template_is_looked_for_from_the_nearest_place(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert prompt(tmp_path) == "system: S\n\nuser: U\n\nassistant:"

    settings = {"chat_template": "{{ bos_token }}{{ messages | length }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert prompt(tmp_path) == "<s>2"

    (tmp_path / "chat_template.jinja").write_text("model")
    assert prompt(tmp_path) == "model"
    (tmp_path / "1" / "chat_template.jinja").write_text("version{% if add_generation_prompt %}!{% endif %}")
    assert prompt(tmp_path) == "version!"
    (tmp_path / "own.jinja").write_text("{{ messages[1].content }}")
    assert prompt(tmp_path, chat_template="own.jinja") == "U"
    assert prompt(tmp_path, chat_template="<{{ messages[0]['role'] }}>") == "<system>"


def test_of_several_templates_the_default_one_counts(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))

    assert prompt(tmp_path) == "default"


@pytest.mark.parametrize(
    ("template", "code", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", Code.INVALID_ARG, "messages: roles must alternate"),
        ("{{ messages[7].content }}", Code.INVALID_ARG, "does not take them"),
        ("{{ ''.__class__.__mro__ }}", Code.INVALID_ARG, "does not take them"),
        ("{% for %}", Code.INTERNAL, "cannot be read"),
        ("missing.jinja", Code.INVALID_ARG, "its folder does not have the file 'missing.jinja'"),
    ],
)
def test_what_a_template_refuses_and_what_is_wrong_with_it(
    tmp_path: Path, template: str, code: Code, message: str
) -> None:
    with pytest.raises(ServingError) as refused:
        prompt(tmp_path, chat_template=template)

    assert refused.value.code is code
    assert message in refused.value.message


def test_a_model_without_a_folder_has_its_parameter() -> None:
    text = asyncio.run(ModelTexts(None).of(language_model(chat_template="{{ messages[0].content }}")))

    assert text.render(MESSAGES) == "S"
    assert text.count("some words") is None


def test_files_are_read_again_when_the_model_was_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text("one")
    first, second = language_model(), language_model()

    async def folders(name: str, version: str) -> list[str]:
        return [str(tmp_path)]

    async def ask() -> list[str]:
        texts = ModelTexts(folders)
        answers = [(await texts.of(first)).render(MESSAGES)]
        path.write_text("two")
        answers.append((await texts.of(first)).render(MESSAGES))
        return [*answers, (await texts.of(second)).render(MESSAGES)]

    assert asyncio.run(ask()) == ["one", "one", "two"]


def test_without_libraries_only_what_needs_them_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (tmp_path / "tokenizer.json").write_text("{}")

    assert read(tmp_path, language_model()).tokenizer is None
    with pytest.raises(ServingError, match="chat template of model 'm' needs Jinja"):
        read(tmp_path, language_model(chat_template="x"))
    with pytest.raises(ServingError, match="tokenizer of model 'm' needs a library") as refused:
        read(tmp_path, ENCODER)
    assert "openai" in refused.value.hint


def test_a_tokenizer_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ServingError, match=r"'tokenizer\.json' of model 'm' cannot be read"):
        read(tmp_path, ENCODER)
