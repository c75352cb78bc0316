"""Tokenizers that lie on this machine: they count the tokens of a text, offline."""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from charonia.core.errors import invalid, unsupported
from charonia.install_hint import extra_hint

TOKENIZER_FILE = "tokenizer.json"


class FileTokenizer:
    """A tokenizer in the form of Hugging Face.

    Args:
        place: `tokenizer.json`, or a folder with one.

    Raises:
        ServingError: INVALID_ARG for another file, UNSUPPORTED without the package.
    """

    def __init__(self, place: str) -> None:
        path = Path(place)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if path.suffix == ".gguf":
            raise invalid(
                f"tokenizer '{path}': expected {TOKENIZER_FILE}, got a GGUF file",
                hint="the folder of the original model has one; without a tokenizer, the server's counts are used",
            )
        if not path.is_file():
            raise invalid(f"tokenizer '{place}': expected {TOKENIZER_FILE} or a folder with one, got neither")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            library = import_module("tokenizers")
        except ImportError:
            raise unsupported("the package 'tokenizers' is not installed", hint=extra_hint("llm")) from None
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise invalid(f"tokenizer '{path}': cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [len(each.ids) for each in encoded]

    def words(self) -> list[str]:
        """Return the tokens that are words of plain letters."""
        found = (self._tokenizer.decode([number]).strip() for number in range(self._tokenizer.get_vocab_size()))
        return list(dict.fromkeys(word for word in found if word.isascii() and word.isalpha() and word.islower()))
