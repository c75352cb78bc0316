"""Embeddings of models that do not speak OpenAI's API themselves.

A model with an input `text_input` and one FP32 output gets the texts. A sentence encoder, with inputs `input_ids`,
`attention_mask` and maybe `token_type_ids`, gets their tokens by the `tokenizer.json` in its folder; where it returns a
vector for each token, these are pooled, and vectors are scaled to length 1.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from charonia.config.model import ModelConfig
from charonia.config.parameters import (
    EMBEDDING_NORMALIZE,
    EMBEDDING_OUTPUT,
    EMBEDDING_POOLING,
    TEXT_INPUT,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import internal, invalid
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import InferResponse, Reply, Ticket
from charonia.core.statistics import TokenUsage
from charonia.core.tensor import Array, Tensor
from charonia.server.facade import SingleResponse
from charonia.server.openai.model_files import TOKENS_MAX, ModelText
from charonia.wire.openai_answer import (
    EmbeddingsRequest,
    Floats,
    Text,
    normalized,
    padded_tokens,
    pooled,
    shortened,
)
from charonia.wire.openai_models import (
    ATTENTION_MASK,
    INPUT_IDS,
    TOKEN_TYPES,
    float_outputs,
    is_sentence_encoder,
)

TEXTS_AT_ONCE = 32
"""Most texts of an inference request."""

POOLINGS = ("mean", "cls")

Infer = Callable[[InferRequest, Reply], Ticket]

_NOT_ONE = internal("the model sent no embedding, or more than one response")


class Embedder:
    """Asks a model for embeddings.

    Args:
        config: Its configuration.
        text: Its tokenizer.
        infer: Passes a request on.
    """

    def __init__(self, config: ModelConfig, text: ModelText, infer: Infer) -> None:
        self._config = config
        self._text = text
        self._infer = infer
        self._tickets: list[Ticket] = []
        self._output = config.parameters.get(EMBEDDING_OUTPUT) or float_outputs(config)[0]

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    async def embed(self, asked: EmbeddingsRequest) -> tuple[Floats, TokenUsage | None]:
        """Return a vector a text, and the tokens of all, None where they are not known.

        Raises:
            ServingError: The request does not fit the model, or the model fails.
        """
        embed = self._of_tokens if is_sentence_encoder(self._config) else self._of_texts
        vectors, usage = await embed(asked.texts)
        return shortened(vectors, asked.dimensions), usage

    async def _of_texts(self, texts: Sequence[Text]) -> tuple[Floats, TokenUsage | None]:
        strings = [self._text.text_of("input", text, keeps_special=False) for text in texts]
        parts = []
        for some in _parts(strings, self._at_once(TEXT_INPUT)):
            elements = np.array([text.encode() for text in some], object)
            shape = (len(some), 1) if self._is_batched else (len(some),)
            parts.append({TEXT_INPUT: Tensor(TEXT_INPUT, DataType.BYTES, elements.reshape(shape))})
        vectors = [_rows(output) for output in await self._run(parts)]
        counts = [self._text.count(text) for text in strings]
        known = [count for count in counts if count is not None]
        return np.concatenate(vectors), TokenUsage(sum(known)) if len(known) == len(counts) else None

    async def _of_tokens(self, texts: Sequence[Text]) -> tuple[Floats, TokenUsage]:
        parameters = self._config.parameters
        pooling = parameters.get(EMBEDDING_POOLING, POOLINGS[0])
        if pooling not in POOLINGS:
            raise internal(f"model '{self._config.name}': {EMBEDDING_POOLING}: expected mean or cls, got '{pooling}'")
        rows = await asyncio.to_thread(self._tokens, texts)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # so that little is padded
        parts, masks = [], []
        for some in _parts(order, self._at_once(INPUT_IDS)):
            ids, mask = padded_tokens([rows[number] for number in some])
            masks.append(mask)
            values = {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPES: np.zeros_like(ids)}
            types = {each.name: each.data_type for each in self._config.input}
            parts.append({name: _integers(name, types[name], value) for name, value in values.items() if name in types})
        outputs = await self._run(parts)
        found = np.concatenate([pooled(output, mask, pooling) for output, mask in zip(outputs, masks, strict=True)])
        vectors = np.empty_like(found)
        vectors[order] = found
        if parameters.get(EMBEDDING_NORMALIZE, "true") != "false":
            vectors = normalized(vectors)
        return vectors, TokenUsage(sum(map(len, rows)))

    def _tokens(self, texts: Sequence[Text]) -> list[Sequence[int]]:
        tokenizer = self._text.tokenizer
        if tokenizer is None:
            raise invalid(
                f"model '{self._config.name}' takes tokens", hint="put its tokenizer.json into the model's folder"
            )
        most = int((tokenizer.truncation or {}).get("max_length", TOKENS_MAX))
        strings = [text for text in texts if isinstance(text, str)]
        found = iter(tokenizer.encode_batch_fast(strings) if strings else ())
        rows: list[Sequence[int]] = []
        for text in texts:
            if isinstance(text, str):
                rows.append(next(found).ids)
            elif min(text) < 0 or max(text) >= tokenizer.get_vocab_size():
                raise invalid(f"input: expected tokens from 0 to {tokenizer.get_vocab_size() - 1}")
            elif len(text) > most:
                raise invalid(f"input: expected at most {most} tokens, got {len(text)}")
            else:
                rows.append(text)
        return rows

    @property
    def _is_batched(self) -> bool:
        return self._config.max_batch_size > 0

    def _at_once(self, name: str) -> int:
        if self._is_batched:
            return min(TEXTS_AT_ONCE, self._config.max_batch_size)
        dims = next(given.dims for given in self._config.input if given.name == name)
        return TEXTS_AT_ONCE if dims[:1] == (-1,) and (name == INPUT_IDS or len(dims) == 1) else 1

    async def _run(self, parts: Sequence[dict[str, Tensor]]) -> list[Floats]:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[InferResponse]] = []
        for inputs in parts:
            request = InferRequest(self._config.name, inputs, outputs=(RequestedOutput(self._output),))
            answer: asyncio.Future[InferResponse] = loop.create_future()
            answers.append(answer)
            self._tickets.append(self._infer(request, partial(SingleResponse(_NOT_ONE).settle, answer)))
        try:
            responses = await asyncio.gather(*answers)
        except BaseException:
            self.cancel()
            raise
        return [np.asarray(response.outputs[0].array, np.float32) for response in responses]


def _rows(output: Array) -> Floats:
    """Return the vectors of texts, each of which has all numbers of a row."""
    array = np.asarray(output, np.float32)
    return array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)


def _integers(name: str, datatype: DataType | None, values: Array) -> Tensor:
    datatype = datatype or DataType.INT64
    return Tensor(name, datatype, values.astype(datatype.numpy, copy=False))


def _parts(values: Sequence[Text] | Sequence[int], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
