"""Reads the chat template and the tokenizer in the folder of a model, for the adapter.

A chat template turns a conversation into the prompt of a model. It is the model parameter `chat_template`, else the
file `chat_template.jinja`, else the one in `tokenizer_config.json`, each in the folder of the version or of the model.
Without one, the prompt has a line `ROLE: TEXT` for each message, an empty line after each, and ends with `assistant:`.

Templates run in Jinja's sandbox, with what transformers gives them: `messages`, `add_generation_prompt`, `bos_token`,
`eos_token`, `raise_exception`, `strftime_now` and loop controls.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.config.model import ModelConfig
from charonia.config.parameters import CHAT_TEMPLATE, EMBEDDING_TOKENS_MAX
from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.install_hint import extra_hint
from charonia.wire.json_text import Object
from charonia.wire.openai_models import is_sentence_encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

TOKENS_MAX = 512
"""Tokens of a text that count for a sentence encoder, where neither its configuration nor its tokenizer limits them."""

TOKEN_BYTES = 4
"""Bytes of a token of text in an estimate."""

TOKENIZER_FILE = "tokenizer.json"

REMEMBERED_MAX = 256
"""Models whose files are kept; with more, all are read again when needed."""

Folders = Callable[[str, str], Awaitable[Sequence[str]]]
"""Returns the folders of a model version, given by name and version ("" for any): of the version, of the model."""

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_BYTES_MAX = 16 * 2**20
"""Largest file with a template."""

Render = Callable[[Sequence[Object]], str]
"""Returns the prompt of a conversation. Raises ServingError where the template refuses it."""


def plain_prompt(messages: Sequence[Object]) -> str:
    """Return the prompt of a conversation without a template."""
    lines = (f"{message['role']}: {_text(message['content'])}\n\n" for message in messages)
    return "".join(lines) + "assistant:"


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def read_template(config: ModelConfig, folders: Sequence[Path]) -> Render:
    """Return what makes the prompts of a model."""
    settings = _json_file(folders, TOKENIZER_CONFIG)
    template = config.parameters.get(CHAT_TEMPLATE, "")
    text = _file(folders, template) if template.endswith(".jinja") else template
    if template and not text:
        raise invalid(f"model '{config.name}': chat_template: its folder does not have the file '{template}'")
    text = text or _file(folders, TEMPLATE_FILE) or _named(settings.get("chat_template"))
    return _compiled(config.name, text, settings) if text else plain_prompt


def find_file(folders: Sequence[Path], name: str) -> Path | None:
    """Return the file of a model with this name, None where there is none."""
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _file(folders: Sequence[Path], name: str) -> str:
    path = find_file(folders, Path(name).name)
    if path is None:
        return ""
    if path.stat().st_size > TEMPLATE_BYTES_MAX:
        raise invalid(f"'{path.name}': expected at most {TEMPLATE_BYTES_MAX} bytes")
    return path.read_text(encoding="utf-8")


def _json_file(folders: Sequence[Path], name: str) -> Mapping[str, Any]:
    text = _file(folders, name)
    try:
        document = json.loads(text) if text else {}
    except ValueError as error:
        raise internal(f"'{name}' of the model is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _named(templates: object) -> str:
    """Return the template for chats: the only one, or the one named "default"."""
    if isinstance(templates, list):
        named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else ""


def _compiled(model: str, text: str, settings: Mapping[str, Any]) -> Render:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise unsupported(f"the chat template of model '{model}' needs Jinja", hint=extra_hint("openai")) from error

    def refuse(message: str) -> None:
        raise invalid(f"messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    names = {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.fromtimestamp(time.time()).strftime(form),
        "add_generation_prompt": True,
        **{token: _token(settings.get(token)) for token in ("bos_token", "eos_token", "unk_token", "pad_token")},
    }
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise internal(f"the chat template of model '{model}' cannot be read: {error}") from error

    def render(messages: Sequence[Object]) -> str:
        try:
            return template.render(names, messages=messages)
        except ServingError:
            raise
        except Exception as error:  # a template computes with data of the client
            raise invalid(f"messages: the chat template of model '{model}' does not take them: {error}") from error

    return render


def _token(value: object) -> str:
    """Return a special token, which is its text or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Converts text to the inputs of a model.

    Attributes:
        config: Configuration of the model.
        render: Makes the prompt of a conversation.
        tokenizer: Its tokenizer, None without one.
    """

    config: ModelConfig
    render: Render
    tokenizer: "Tokenizer | None"

    def count(self, text: str) -> int | None:
        """Return the number of tokens of a text, None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, member: str, content: str | Sequence[int], *, keeps_special: bool) -> str:
        """Return a text, also one that the member of a request gives as tokens, with or without the special ones.

        Raises:
            ServingError: UNSUPPORTED: There is no tokenizer.
        """
        if isinstance(content, str):
            return content
        if self.tokenizer is None:
            raise unsupported(
                f"{member}: model '{self.config.name}' takes text, and has no tokenizer.json to decode tokens"
            )
        return self.tokenizer.decode(list(content), skip_special_tokens=not keeps_special)

    def first(self, text: str, count: int) -> str:
        """Return the first tokens of a text, those of `TOKEN_BYTES` without a tokenizer."""
        if self.tokenizer is None:
            return text.encode()[: count * TOKEN_BYTES].decode(errors="ignore")
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[count - 1][1]] if 0 < count <= len(offsets) else text if count else ""


class ModelTexts:
    """The files of models, read once."""

    def __init__(self, folders: Folders | None) -> None:
        self._folders = folders
        self._known: dict[str, ModelText] = {}

    async def of(self, config: ModelConfig) -> ModelText:
        """Return the template and tokenizer of the model with this configuration.

        Raises:
            ServingError: A file cannot be used.
        """
        known = self._known.get(config.name)
        if known is not None and known.config is config:
            return known
        folders = await self._folders(config.name, "") if self._folders is not None else ()
        found = await asyncio.to_thread(_read, config, [Path(folder) for folder in folders])
        if len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        self._known[config.name] = found
        return found


def _read(config: ModelConfig, folders: Sequence[Path]) -> ModelText:
    return ModelText(config, read_template(config, folders), _tokenizer(config, folders))


def _tokenizer(config: ModelConfig, folders: Sequence[Path]) -> "Tokenizer | None":
    """Return the tokenizer, which truncates to the model's limit, and does not pad."""
    path = find_file(folders, TOKENIZER_FILE)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        if not is_sentence_encoder(config):
            _log.warning("the tokens of model '%s' are not counted: %s", config.name, extra_hint("openai"))
            return None
        raise unsupported(
            f"the tokenizer of model '{config.name}' needs a library", hint=extra_hint("openai")
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        most = config.parameters.get(EMBEDDING_TOKENS_MAX)
        if most is not None:
            tokenizer.enable_truncation(int(most))
        elif not is_sentence_encoder(config):
            tokenizer.no_truncation()
        elif tokenizer.truncation is None:
            tokenizer.enable_truncation(TOKENS_MAX)
        return tokenizer
    except Exception as error:  # the library raises nothing narrower
        raise internal(f"'{TOKENIZER_FILE}' of model '{config.name}' cannot be read: {error}") from error
