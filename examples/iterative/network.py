"""A Llama in plain PyTorch that extends any number of texts by one token each, and caches their keys and values."""

from typing import NamedTuple

import torch
from torch.nn import functional


class Shape(NamedTuple):
    layers: int
    size: int
    heads: int
    key_heads: int
    inner: int
    words: int
    turn_base: float
    epsilon: float


class Part(NamedTuple):
    """What of a text is read now: its prompt, or the token that was made last."""

    row: int
    start: int
    """Number of tokens of the text that are already read."""
    tokens: list[int]


class Network:
    """The weights, and in each row the keys and values of the text that it belongs to.

    Args:
        shape: Sizes of the network.
        weights: FP32, with the names of GGUF files.
        rows: Texts at a time.
        length: Most tokens of a text.
    """

    def __init__(self, shape, weights, rows, length):
        self.shape, self.weights = shape, weights
        head = shape.size // shape.heads
        self.keys, self.values = torch.zeros(2, shape.layers, rows, shape.key_heads, length, head)
        speeds = shape.turn_base ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(length), speeds)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    @torch.inference_mode()
    def next_tokens(self, parts):
        """Return the most probable next token of each text. Linear layers run once for the tokens of all texts."""
        ends = torch.tensor([len(part.tokens) for part in parts]).cumsum(0)
        places = torch.cat([torch.arange(part.start, part.start + len(part.tokens)) for part in parts])
        turns = self.turns[places].unsqueeze(1)
        embedding = self.weights["token_embd.weight"]
        x = embedding[torch.tensor([token for part in parts for token in part.tokens])]
        for layer in range(self.shape.layers):
            seen = self._attention(layer, self._normed(x, f"blk.{layer}.attn_norm"), turns, parts)
            x = x + self._linear(seen, f"blk.{layer}.attn_output")
            y = self._normed(x, f"blk.{layer}.ffn_norm")
            gate = functional.silu(self._linear(y, f"blk.{layer}.ffn_gate"))
            x = x + self._linear(gate * self._linear(y, f"blk.{layer}.ffn_up"), f"blk.{layer}.ffn_down")
        return functional.linear(self._normed(x[ends - 1], "output_norm"), embedding).argmax(-1).tolist()

    def _attention(self, layer, x, turns, parts):
        query, key, value = (
            self._linear(x, f"blk.{layer}.attn_{name}").unflatten(-1, (heads, -1))
            for name, heads in (("q", self.shape.heads), ("k", self.shape.key_heads), ("v", self.shape.key_heads))
        )
        query, key = turned(query, turns), turned(key, turns)
        seen, at = [], 0
        for row, start, tokens in parts:
            here, end = slice(at, at + len(tokens)), start + len(tokens)
            at = here.stop
            keys, values = self.keys[layer, row, :, :end], self.values[layer, row, :, :end]
            keys[:, start:], values[:, start:] = key[here].transpose(0, 1), value[here].transpose(0, 1)
            found = functional.scaled_dot_product_attention(
                *(query[here].transpose(0, 1)[None], keys[None], values[None]),
                is_causal=start == 0,  # later reads are one token, which sees all
                enable_gqa=True,
            )
            seen.append(found[0].transpose(0, 1).flatten(1))
        return torch.cat(seen)

    def _linear(self, x, name):
        return functional.linear(x, self.weights[f"{name}.weight"])

    def _normed(self, x, name):
        return functional.rms_norm(x, (self.shape.size,), self.weights[f"{name}.weight"], self.shape.epsilon)


def turned(heads, turns):
    """Return heads [tokens, heads, size], with each pair of numbers turned by the angle of the token's place."""
    return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * turns).flatten(-2)
