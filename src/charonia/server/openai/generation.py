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
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Ticket
from charonia.core.statistics import COMPLETION_TOKENS, PROMPT_TOKENS, TokenUsage
from charonia.core.tensor import Tensor
from charonia.server.http.exchange import Exchange
from charonia.server.openai.events import EventStream, text_of
from charonia.server.openai.guided import REPAIRS_MAX, Guide
from charonia.server.openai.model_files import TOKEN_BYTES, ModelText
from charonia.wire.json_text import Object, dump
from charonia.wire.openai_answer import AnswerHead, StopCutter, usage_object
from charonia.wire.openai_request import IMAGE_INPUT, TextRequest
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
    return [text.text_of("prompt", prompt, keeps_special=True) for prompt in asked.prompts]


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
    names = {tensor.name for tensor in config.input}
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
        guide: What answers have to fit, None for nothing; they are sent when they do.
    """

    def __init__(
        self,
        exchange: Exchange,
        asked: TextRequest,
        text: ModelText,
        stream: EventStream | None,
        counted: Callable[[TokenUsage], None],
        guide: Guide | None = None,
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self.text = text
        self.is_cumulative = repeats_text(text.config)
        self.stream = stream
        self.guide = guide
        self._counted = counted
        self._is_estimated = False
        self._spent = TokenUsage(0)  # on answers that did not fit
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
        self._request_of, self._infer = request_of, infer
        for answer, request in zip(self._answers, requests, strict=True):
            self._ask(answer, request)

    def _ask(self, answer: "TextChoice", request: InferRequest) -> None:
        if self.exchange.is_open:
            ticket = self._infer(request, answer)
            if answer.is_over:
                ticket.cancel()
            else:
                answer.ticket = ticket

    def again(self, answer: "TextChoice", problem: str) -> None:
        """Ask for another answer in place of one that does not fit.

        Raises:
            ServingError: It was the last try.
        """
        assert self.guide is not None
        tries = answer.tries + 1
        if tries > REPAIRS_MAX:
            raise internal(f"model '{self.text.config.name}' gave no valid answer in {tries} tries: {problem}")
        usage = self._usage_of(answer)
        self._spent = TokenUsage(self._spent.prompt + usage.prompt, self._spent.completion + usage.completion)
        prompt = self.text.render([*self.asked.messages, *self.guide.again(answer.whole, problem)])
        index = answer.index % self.asked.count
        self._answers[answer.index] = fresh = TextChoice(self, answer.index, prompt, tries)
        self._ask(fresh, self._request_of(prompt, index))

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
        prompt, completion, _ = self._spent
        for number, answer in enumerate(self._answers):
            of_answer = self._usage_of(answer)
            prompt += of_answer.prompt if number % asked.count == 0 else 0
            completion += of_answer.completion
        usage = TokenUsage(prompt, completion)
        if not self._is_estimated:
            exchange.usage = usage
        shown = usage_object(usage, is_estimated=self._is_estimated)
        if self.stream is None:
            answers = [(answer.whole, answer.calls, answer.finish_reason) for answer in self._answers]
            exchange.respond(200, [self.head.document(answers, shown)])
            return
        if asked.includes_usage:
            self.stream.send(self.head.usage(shown))
        self.stream.end()

    def _usage_of(self, answer: "TextChoice") -> TokenUsage:
        """Return the tokens of an answer, as reported by the model, else counted by the tokenizer, else estimated."""
        prompt_tokens = answer.prompt_tokens if answer.prompt_tokens is not None else self.text.count(answer.prompt)
        made = answer.completion_tokens if answer.completion_tokens is not None else self.text.count(answer.whole)
        if prompt_tokens is None or made is None:
            self._is_estimated = True
            prompt_tokens = _estimate(answer.prompt) if prompt_tokens is None else prompt_tokens
            return TokenUsage(prompt_tokens, _estimate(answer.whole) if made is None else made)
        if answer.prompt_tokens is None:
            self._counted(TokenUsage(prompt_tokens, made))
        return TokenUsage(prompt_tokens, made)


def _estimate(text: str) -> int:
    return -(-len(text.encode()) // TOKEN_BYTES)


class TextChoice:
    """One answer.

    Attributes:
        index: Its place among the answers.
        tries: Answers before it that did not fit.
        calls: Calls of functions in it.
        ticket: The inference request, None before it is known.
        is_over: Whether it is complete.
        finish_reason: Why it ended.
        prompt_tokens: Tokens of the prompt, as reported by the model; None if not reported.
        completion_tokens: Tokens of the answer, likewise.
    """

    def __init__(self, generation: Generation, index: int, prompt: str, tries: int = 0) -> None:
        self.index = index
        self.tries = tries
        self.prompt = prompt
        self.calls: list[Object] = []
        self.ticket: Ticket | None = None
        self.is_over = False
        self.finish_reason = "stop"
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._generation = generation
        self._limit = generation.asked.max_tokens
        self._made = 0  # tokens of the text so far
        self._is_full = False
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
            self._add(self._within(self._decoder.decode(self._new(text_of(outcome)))))
        if final and not self._cutter.is_cut:
            self._add(self._decoder.decode(b"", final=True))
        if (final or self._is_full) and not self._cutter.is_cut:
            self._send(self._cutter.rest())
        if final or self._cutter.is_cut or self._is_full:
            self._end()

    def _within(self, piece: str) -> str:
        """Return what of a piece of text is within the limit of tokens.

        Tokens are those that the model reports, else its tokenizer's. Without both, each response of a model that
        streams counts as one token, and text of others is estimated if the model has no way to learn of the limit.
        """
        if not self._limit or not piece:
            return piece
        generation = self._generation
        text, reported = generation.text, self.completion_tokens
        count = text.count(piece)
        if reported is not None:
            made = reported
        elif count is not None:
            made = self._made + count
            if made > self._limit:  # pieces of their own may have more tokens than as a part of the text
                made = text.count(self.whole + piece) or 0
        elif text.config.is_decoupled and not generation.is_cumulative:
            made = self._made + 1
        else:
            made = 0 if generation.asked.passes_limit else _estimate(self.whole + piece)
        if made <= self._limit:
            self._made = made
            return piece
        left, self._made = self._limit - self._made, self._limit
        self._is_full = True
        if reported is not None:
            self.completion_tokens = self._limit
        return text.first(piece, left) if left > 0 else ""

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
        if generation.stream is not None and generation.guide is None and generation.asked.is_chat:
            generation.stream.send(generation.head.first(self.index))
        if generation.asked.echoes:
            self._send(self.prompt)

    def _send(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        generation = self._generation
        if generation.stream is not None and generation.guide is None:
            generation.stream.send(generation.head.piece(self.index, text))

    def _end(self) -> None:
        generation = self._generation
        if self._cutter.is_cut:
            self.finish_reason = "stop"
        elif self._limit and max(self.completion_tokens or 0, self._made) >= self._limit:
            self.finish_reason = "length"
        self.cancel()
        if generation.guide is not None and self.finish_reason != "length":
            try:
                content, self.calls = generation.guide.check(self.whole)
            except ValueError as problem:
                generation.again(self, str(problem))
                return
            self._pieces = [content]
        self._close()
        generation.ended()

    def _close(self) -> None:
        generation = self._generation
        for call in self.calls:
            self.finish_reason = "tool_calls"
            call["id"] = f"call_{uuid4().hex}"
        stream, head = generation.stream, generation.head
        if stream is None:
            return
        if generation.guide is not None:
            stream.send(head.first(self.index))
            if self.whole:
                stream.send(head.piece(self.index, self.whole))
            if self.calls:
                stream.send(head.calls(self.index, self.calls))
        stream.send(head.last(self.index, self.finish_reason))

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
