"""Answers of language models that do not speak OpenAI's API themselves.

Each answer to a request is an inference request: `n` answers are `n` of them. The pieces of text that a model sends
are joined, cut at stop strings, and sent on. Bytes at the end of a piece that are not yet a character wait for the next
one.
"""

import codecs
import logging
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import numpy as np

from charonia.config.model import ModelConfig
from charonia.config.parameters import INPUT_TOKENS, OUTPUT_TOKENS, TEXT_INPUT, repeats_text
from charonia.core.errors import ServingError, internal, unsupported
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Ticket
from charonia.core.statistics import COMPLETION_TOKENS, PROMPT_TOKENS, TokenUsage
from charonia.core.tensor import Tensor
from charonia.server.http.exchange import Exchange
from charonia.server.openai.events import EventStream, text_of
from charonia.server.openai.model_files import ModelText
from charonia.wire.json_text import dump
from charonia.wire.openai_answer import AnswerHead, StopCutter
from charonia.wire.openai_request import IMAGE_INPUT, Prompt, TextRequest
from charonia.wire.v2_generate import decode_generate

_log = logging.getLogger(__name__)

_ASKED_FOR = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
"""Inputs that are set where the model has them."""

_FINISH_REASON = "finish_reason"


def prompts_of(asked: TextRequest, text: ModelText) -> list[str]:
    """Return the prompts of a request as text.

    Raises:
        ServingError: The chat template refuses the messages, or tokens cannot be made text.
    """
    if asked.is_chat:
        return [text.render(asked.messages)]
    return [_as_text(prompt, text) for prompt in asked.prompts]


def _as_text(prompt: Prompt, text: ModelText) -> str:
    if isinstance(prompt, str):
        return prompt
    if text.tokenizer is None:
        raise unsupported(f"prompt: model '{text.config.name}' takes text, and has no tokenizer.json to decode tokens")
    return text.tokenizer.decode(list(prompt), skip_special_tokens=False)


def model_request(config: ModelConfig, asked: TextRequest, prompt: str, index: int, bytes_max: int) -> InferRequest:
    """Return the inference request of one answer.

    Args:
        config: Configuration of the model.
        asked: The client's request.
        index: Which of the answers to it.
        bytes_max: Largest tensor in bytes.

    Raises:
        ServingError: INVALID_ARG when an input of the model does not take a value.
    """
    names = {given.name for given in config.input}
    members: dict[str, object] = {TEXT_INPUT: prompt, **asked.inputs_of(index)}
    members |= dict.fromkeys(names.intersection(_ASKED_FOR), True)
    if "stream" in names and config.is_decoupled:
        members["stream"] = asked.is_streamed
    if asked.images:
        members[IMAGE_INPUT] = list(asked.images)
    return decode_generate(config, "", dump(members), bytes_max).request


class Generation:
    """The answers to one request.

    Args:
        asked: The client's request.
        text: Template and tokenizer of the model.
        stream: Sends the answers while they are generated; None to send them as one document.
        counted: Called with the tokens of each answer that the model did not report.
    """

    def __init__(
        self,
        exchange: Exchange,
        asked: TextRequest,
        text: ModelText,
        stream: EventStream | None,
        counted: Callable[[TokenUsage], None],
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self.text = text
        self.is_cumulative = repeats_text(text.config)
        self.stream = stream
        self._counted = counted
        prefix = "chatcmpl-" if asked.is_chat else "cmpl-"
        self.head = AnswerHead(asked.is_chat, prefix + uuid4().hex, int(time.time()), exchange.model)
        self._answers: list[TextChoice] = []
        exchange.ticket = self

    def start(
        self,
        prompts: Sequence[str],
        request_of: Callable[[str, int], InferRequest],
        infer: Callable[[InferRequest, "TextChoice"], Ticket],
    ) -> None:
        """Ask the model.

        Args:
            request_of: Returns the inference request of a prompt, and of the number of the answer to it.
            infer: Submits the request of an answer.

        Raises:
            ServingError: A request cannot be made; none was submitted.
        """
        count = self.asked.count
        each = [(prompt, index) for prompt in prompts for index in range(count)]
        requests = [request_of(prompt, index) for prompt, index in each]
        self._answers = [TextChoice(self, number, prompt) for number, (prompt, _) in enumerate(each)]
        for answer, request in zip(self._answers, requests, strict=True):
            if self.exchange.is_open:
                answer.ticket = infer(request, answer)
                if answer.is_over:
                    answer.cancel()

    def cancel(self) -> None:
        """Drop the answers that are not over."""
        self.exchange.is_over = True
        for answer in self._answers:
            answer.cancel()

    def fail(self, error: ServingError) -> None:
        """End the response with an error."""
        if self.exchange.is_open:
            if self.stream is not None:
                self.stream.fail(error)
            else:
                self.exchange.fail(error)
        self.cancel()

    def ended(self) -> None:
        """One of the answers is over."""
        if not all(answer.is_over for answer in self._answers):
            return
        exchange, asked = self.exchange, self.asked
        exchange.is_over = True
        usage = exchange.usage = self._usage()
        if self.stream is None:
            answers = [(answer.whole, answer.finish_reason) for answer in self._answers]
            exchange.respond(200, [self.head.document(answers, usage)])
            return
        if asked.includes_usage and usage is not None:
            self.stream.send(self.head.usage(usage))
        self.stream.end()

    def _usage(self) -> TokenUsage | None:
        """Return the tokens, as reported by the model, else counted by the tokenizer."""
        prompt = completion = 0
        for number, answer in enumerate(self._answers):
            given = answer.prompt_tokens if answer.prompt_tokens is not None else self.text.count(answer.prompt)
            made = answer.completion_tokens
            made = made if made is not None else self.text.count(answer.whole)
            if given is None or made is None:
                return None
            if answer.prompt_tokens is None:
                self._counted(TokenUsage(given, made))
            prompt += given if number % self.asked.count == 0 else 0
            completion += made
        return TokenUsage(prompt, completion)


class TextChoice:
    """One answer.

    Attributes:
        ticket: The inference request, None before it is known.
        is_over: Whether it is complete.
        finish_reason: Why it ended.
        prompt_tokens: Tokens of the prompt, as reported by the model; None if not reported.
        completion_tokens: Tokens of the answer, likewise.
    """

    def __init__(self, generation: Generation, index: int, prompt: str) -> None:
        self.prompt = prompt
        self.ticket: Ticket | None = None
        self.is_over = False
        self.finish_reason = "stop"
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._generation = generation
        self._index = index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cutter = StopCutter(generation.asked.stops)
        self._received = 0  # bytes of text, of a model that repeats them
        self._pieces: list[str] = []
        self._has_begun = False

    @property
    def whole(self) -> str:
        return "".join(self._pieces)

    def cancel(self) -> None:
        """Drop it, unless the model is done with it."""
        self.is_over = True
        if self.ticket is not None:
            ticket, self.ticket = self.ticket, None
            ticket.cancel()

    def reply(self, outcome: Outcome, final: bool) -> None:
        """Take an outcome of the model."""
        if self.is_over or not self._generation.exchange.is_open:
            return
        try:
            self._take(outcome, final)
        except ServingError as error:
            self._generation.fail(error)
        except Exception as fault:  # the model's output is malformed: only this request fails
            model = self._generation.exchange.model
            _log.exception("the response of model '%s' cannot be read", model)
            self._generation.fail(internal(f"the response of model '{model}' is broken: {type(fault).__name__}"))

    def _take(self, outcome: Outcome, final: bool) -> None:
        if isinstance(outcome, ServingError):
            raise outcome
        if final:
            self.ticket = None
        if outcome is not None:
            self._generation.exchange.outcome = outcome
            self._note(outcome)
            self._add(self._decoder.decode(self._new(text_of(outcome))))
        if final and not self._cutter.is_cut:
            self._add(self._decoder.decode(b"", final=True))
            self._send(self._cutter.rest())
        if final or self._cutter.is_cut:
            self._end()

    def _new(self, text: bytes) -> bytes:
        if not self._generation.is_cumulative:
            return text
        before, self._received = self._received, len(text)
        return text[before:]

    def _add(self, text: str) -> None:
        self._begin()
        if text:
            self._send(self._cutter.take(text))

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        generation = self._generation
        if generation.stream is not None and generation.asked.is_chat:
            generation.stream.send(generation.head.first(self._index))
        if generation.asked.echoes:
            self._send(self.prompt)

    def _send(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        generation = self._generation
        if generation.stream is not None:
            generation.stream.send(generation.head.piece(self._index, text))

    def _end(self) -> None:
        generation = self._generation
        limit = generation.asked.max_tokens
        if self._cutter.is_cut:
            self.finish_reason = "stop"
        elif limit and (self.completion_tokens or 0) >= limit:
            self.finish_reason = "length"
        self.cancel()
        if generation.stream is not None:
            generation.stream.send(generation.head.last(self._index, self.finish_reason))
        generation.ended()

    def _note(self, response: InferResponse) -> None:
        """Keep the other data of a response besides its text."""
        for tensor in response.outputs:
            if tensor.name == _FINISH_REASON:
                self.finish_reason = _reason(tensor) or self.finish_reason
            elif tensor.name == INPUT_TOKENS and tensor.array.size:
                self.prompt_tokens = int(np.asarray(tensor.array).reshape(-1)[0])
            elif tensor.name == OUTPUT_TOKENS and tensor.array.size:
                made = int(np.asarray(tensor.array).sum())
                before = 0 if self._generation.is_cumulative else self.completion_tokens or 0
                self.completion_tokens = before + made
        given, made_ = response.parameters.get(PROMPT_TOKENS), response.parameters.get(COMPLETION_TOKENS)
        if type(given) is int and type(made_) is int:
            self.prompt_tokens, self.completion_tokens = given, made_


def _reason(tensor: Tensor) -> str:
    """Return the model's reason for the end of its answer, "" where it continues."""
    elements: list[bytes] = tensor.array.ravel().tolist()
    reason = elements[0].decode(errors="replace") if elements else ""
    return "" if reason in ("None", "null") else reason
