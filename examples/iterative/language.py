"""Texts that grow by a token at a time. Both models use it; it knows nothing of the server."""

import json

import torch
from network import Network, Part, Shape
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

LENGTH_MAX = 1024
"""Most tokens of a text, the prompt included."""

TOKENS_DEFAULT = 16
"""Tokens that are made unless a request says how many."""


class Text:
    """A text of a client.

    Attributes:
        row: Its row in the network's cache.
        part: The part that the network reads next.
        piece: Its last step's addition; "" in the middle of a character.
        is_done: Whether it is complete.
    """

    def __init__(self, row, prompt, wanted, ends):
        self.row, self.part = row, Part(row, 0, prompt)
        self.piece, self.is_done = "", False
        self._left, self._ends = wanted, ends
        self._decoder = DecodeStream(skip_special_tokens=True)

    def add(self, token, tokenizer):
        """Take in its next token."""
        self.piece = self._decoder.step(tokenizer, token) or ""
        self.part = Part(self.row, self.part.start + len(self.part.tokens), [token])
        self._left -= 1
        self.is_done = self._left == 0 or token in self._ends


class Language:
    """A network and its tokenizer.

    Args:
        folder: Where `model.safetensors` and `tokenizer.json` are.
        rows: Texts at a time.
    """

    def __init__(self, folder, rows):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with safe_open(folder / "model.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])
            weights = {name: file.get_tensor(name).to(torch.float32) for name in file.keys()}  # noqa: SIM118 - no dict
        self._ends = frozenset(about["ends"])
        self._network = Network(Shape(**about["shape"]), weights, rows, LENGTH_MAX)

    def begin(self, row, prompt, max_tokens=TOKENS_DEFAULT, ignore_eos=False):
        """Return a new text in a row. Raises ValueError where the request cannot be fulfilled."""
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens: expected a positive number, got {max_tokens!r}")
        tokens = self._tokenizer.encode(prompt).ids
        if not 1 <= len(tokens) <= LENGTH_MAX - max_tokens:
            raise ValueError(
                f"text_input: expected 1 to {LENGTH_MAX} tokens together with the {max_tokens} of max_tokens, "
                f"got {len(tokens)}"
            )
        return Text(row, tokens, max_tokens, () if ignore_eos else self._ends)

    def step(self, texts):
        """Extend each text by one token."""
        if not texts:
            return
        for text, token in zip(texts, self._network.next_tokens([text.part for text in texts]), strict=True):
            text.add(token, self._tokenizer)
