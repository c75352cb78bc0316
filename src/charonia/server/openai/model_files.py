"""What the adapter reads in the folder of a model: its chat template, and its tokenizer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.config.model import ModelConfig
from charonia.config.parameters import EMBEDDING_TOKENS_MAX
from charonia.core.errors import internal, unsupported
from charonia.install_hint import extra_hint
from charonia.server.openai.chat_template import Render, find_file, read_template
from charonia.wire.openai_models import is_sentence_encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

TOKENS_MAX = 512
"""Tokens of a text that count for a sentence encoder, where neither its configuration nor its tokenizer says."""

TOKENIZER_FILE = "tokenizer.json"

REMEMBERED_MAX = 256
"""Models whose files are kept; with more, all are read again when needed."""

Folders = Callable[[str, str], Awaitable[Sequence[str]]]
"""Returns the folders of a model version, given by name and version ("" for any): of the version, of the model."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """How text becomes what a model takes.

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


class ModelTexts:
    """The files of models, read once."""

    def __init__(self, folders: Folders | None) -> None:
        """Start without any.

        Args:
            folders: Returns the folders of a model; None where they are not known.
        """
        self._folders = folders
        self._known: dict[str, ModelText] = {}

    async def of(self, config: ModelConfig) -> ModelText:
        """Return what is in the folder of the model with this configuration.

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
    """Return the tokenizer, which cuts off what the model does not take, and pads nothing."""
    path = find_file(folders, TOKENIZER_FILE)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
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
