"""llama.cpp as the engine of a language model.

llama.cpp's own server does the work: it batches, keeps the prompts' state, applies chat templates and follows grammars.
It runs in this process and listens on a Unix socket that only this user may open. A connection that is closed ends the
work on its request.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import xllamacpp

from ...language.worker.members import MemberError
from ...language.worker.text_stream import TextStream, document, usage_of
from .exchange import OK, SeveralChoices, ask, choices_count, streamed_request
from .openai_members import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    AnswerForm,
    Capabilities,
    completion_of,
    llama_request,
)

if TYPE_CHECKING:
    from charonia.server.backends.language.worker.model import EngineSetup, LanguageRequest

LOG_FLUSH_S = 0.3
"""Time for llama.cpp's log, which a thread writes, to say why a model cannot be loaded."""

THREADS_MORE = 4
"""Connections that are served besides those of requests in slots."""

SLOTS = 4
"""Default of `n_parallel`; the slots then share the context."""

BATCH_TOKENS = 512
"""Default of `n_batch`, llama.cpp's `n_ubatch`: between batches it looks after other requests, and those cancelled."""

_TOKENS = (TOKENIZE, DETOKENIZE)

# Endpoint pickers of clusters read these names.
_LOAD = (
    ("vllm:num_requests_running", "Requests in slots"),
    ("vllm:num_requests_waiting", "Requests that wait for a slot"),
    ("vllm:kv_cache_usage_perc", "Share of the slots, which divide the cache, that are in use"),
)
_DATA = b"data: "
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error":'
_FAILED = b"event: error\ndata: "
_NOTHING = b"data: null"
_FIELD = re.compile(r"^Field '(\w+)': ")
_LEAKED = re.compile(r"\[json\.exception\.[^]]*\] |Unable to generate parser.*parser generation failed: ")
_OVERFLOW = re.compile(r"input \((\d+) tokens\) is too large to process.*batch size: (\d+)")

# Status 500 of llama.cpp for requests that no repetition makes better.
_UNFIT = re.compile(r"[Ff]ailed to parse|input is not supported|template|[Jj]inja")

_ENUMS = {
    "cache_type_k": ("ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("ggml_type", "GGML_TYPE_"),
    "flash_attn_type": ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "load_mode": ("llama_load_mode", "LLAMA_LOAD_MODE_"),
    "pooling_type": ("llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    "reasoning_format": ("common_reasoning_format", "COMMON_REASONING_FORMAT_"),
    "rope_scaling_type": ("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    "split_mode": ("llama_split_mode", "LLAMA_SPLIT_MODE_"),
}


def idle_threads(share: int, topology: str = "/sys/devices/system/cpu") -> int:
    """Return the threads that llama.cpp computes with: it slows down many times when one of them waits for a core.

    The least of the share, the physical cores, and the cores that other programs leave; one of all cores is left over.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    siblings = set()
    for core in cores:
        try:
            with open(f"{topology}/cpu{core}/topology/thread_siblings_list") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(core))
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = round((os.cpu_count() or 1) - busy)
    return max(1, min(share, len(siblings) - (share >= len(siblings)), free))


class Engine:
    """llama.cpp with one model."""

    def __init__(self, setup: "EngineSetup") -> None:
        self._setup = setup
        self._path = os.path.join(setup.folder, f"{os.getpid()}.sock")
        self._parameters: dict[str, Any] = setup.options["parameters"]
        self._embeds = bool(self._parameters.get("embedding"))
        self._slots_count = self._parameters.get("n_parallel", SLOTS)
        self._slots = asyncio.Semaphore(self._slots_count)
        self._server: Any = None
        self._capabilities = Capabilities()
        self._context = 0
        self._problem = ""
        self._requests = 0
        self._load: list[Any] = []

    async def start(self) -> None:
        self._families = [
            self._setup.pb_utils.MetricFamily(name, words, self._setup.pb_utils.MetricFamily.GAUGE)
            for name, words in _LOAD
        ]
        labels = {"model": self._setup.model_name, "version": os.path.basename(self._setup.version_dir)}
        self._load = [family.Metric(labels) for family in self._families]
        self._count(0)
        params = self._common_params()
        try:
            self._server = await asyncio.to_thread(xllamacpp.Server, params)
        except RuntimeError as error:
            await asyncio.sleep(LOG_FLUSH_S)
            self._setup.die(f"llama.cpp cannot load '{os.path.basename(params.model.path)}': {error}")
        _, properties = await ask(self._path, "/props", b"")
        found = json.loads(properties)
        self._context = found["default_generation_settings"]["n_ctx"]
        modalities = found.get("modalities", {})
        takes_tools = found["chat_template_caps"]["supports_tools"]
        self._capabilities = Capabilities(takes_tools, modalities.get("vision", False), modalities.get("audio", False))

    def problem(self) -> str:
        """Return why llama.cpp answers no longer, "" while it does."""
        return self._problem

    async def stop(self) -> None:
        self._server = None

    def _count(self, more: int) -> None:
        """Count requests, and report the load."""
        self._requests += more
        running = min(self._requests, self._slots_count)
        for metric, value in zip(
            self._load, (running, self._requests - running, running / self._slots_count), strict=True
        ):
            metric.set(value)

    async def answer(self, request: "LanguageRequest") -> None:
        if request.route in _TOKENS:
            await self._answer(request)
            return
        self._count(1)
        try:
            async with self._slots:
                await self._answer(request)
        finally:
            self._count(-1)

    async def _answer(self, request: "LanguageRequest") -> None:
        try:
            if request.route:
                await self._answer_openai(request)
            elif self._embeds:
                answer = json.loads(await self._post("/v1/embeddings", {"input": request.text}))
                usage = usage_of(answer["usage"]["prompt_tokens"])
                request.send({"text_output": json.dumps(answer["data"][0]["embedding"])}, usage, final=True)
            elif request.stream:
                await self._stream(request)
            else:
                await self._generate(request)
        except (ConnectionError, FileNotFoundError) as error:
            self._problem = f"llama.cpp's server does not answer: {error}"
            raise

    # Triton's contract

    async def _generate(self, request: "LanguageRequest") -> None:
        body = self._completion(request)
        answer = json.loads(await self._post("/completion", body))
        text = answer["content"] if request.excludes_input else request.text + answer["content"]
        logprobs = _Logprobs(answer.get("completion_probabilities", ()))
        outputs = {
            "text_output": text,
            "finish_reason": _finish_reason(answer),
            "cumulative_logprob": logprobs.total,
            "logprobs": logprobs.text(),
            "num_input_tokens": answer["tokens_evaluated"],
            "num_output_tokens": answer["tokens_predicted"],
        }
        self._send(request, outputs, answer)

    async def _stream(self, request: "LanguageRequest") -> None:
        tokens = 0
        total = 0.0

        def take(event: bytes) -> None:
            nonlocal tokens, total
            piece = self._event(event)
            logprobs = _Logprobs(piece.get("completion_probabilities", ()))
            total += logprobs.total
            outputs = {"text_output": piece["content"], "cumulative_logprob": total, "logprobs": logprobs.text()}
            outputs["num_output_tokens"] = piece["tokens_predicted"] - tokens
            tokens = piece["tokens_predicted"]
            if piece["stop"]:
                outputs["finish_reason"] = _finish_reason(piece)
                outputs["num_input_tokens"] = piece["tokens_evaluated"]
                self._send(request, outputs, piece)
            else:
                request.send(_wanted(request, outputs))

        await self._post("/completion", {**self._completion(request), "stream": True}, take)

    def _completion(self, request: "LanguageRequest") -> dict[str, Any]:
        try:
            body = completion_of(request.sampling)
        except ValueError as error:
            raise self._setup.invalid(str(error)) from None
        if "cumulative_logprob" in request.returns or "logprobs" in request.returns:
            body["n_probs"] = max(body.get("n_probs", 0), 1)
        return {**body, "prompt": request.text}

    def _send(self, request: "LanguageRequest", outputs: dict[str, Any], answer: dict[str, Any]) -> None:
        request.send(_wanted(request, outputs), _usage_of_timings(answer), final=True)

    # OpenAI's

    async def _answer_openai(self, request: "LanguageRequest") -> None:
        body = request.body
        address = next(_addresses(body), None)
        if address is not None:
            raise self._setup.invalid(f"image_url: must begin with 'data:', got {address[:100]!r}")
        try:
            asked = llama_request(request.route, body, self._capabilities)
        except MemberError as error:
            raise self._setup.invalid(str(error)) from None
        if request.route in _TOKENS:
            await self._answer_tokens(request, asked)
            return
        if "input_prefix" in asked:
            await self._infill(request, body, asked)
            return
        form = AnswerForm(request.route, self._setup.model_name, body)
        if request.route in (CHAT, COMPLETIONS) and choices_count(asked) > 1:
            await self._answer_several(request, asked, form)
            return
        answer = _OpenAIAnswer(request, self._event, form)
        route = f"/v1/{request.route}"
        if asked.get("stream"):
            await self._post(route, asked, answer.take)
            answer.finish()
        else:
            found = await self._post(route, asked)
            request.send({"text_output": form.of(found)}, _usage(json.loads(found)), final=True)

    async def _infill(self, request: "LanguageRequest", body: dict[str, Any], asked: dict[str, Any]) -> None:
        answer_id, model = f"cmpl-{uuid4().hex}", str(body.get("model", self._setup.model_name))
        if not asked.get("stream"):
            answer = json.loads(await self._post("/infill", asked))
            usage = _usage_of_timings(answer)
            choice = {"index": 0, "text": answer["content"], "logprobs": None, "finish_reason": _finish_reason(answer)}
            text = document(COMPLETIONS, answer_id, model, [choice], usage)
            request.send({"text_output": text}, usage, final=True)
            return
        stream = TextStream(request, answer_id, model, body)

        def take(event: bytes) -> None:
            piece = self._event(event)
            if piece["stop"]:
                usage = _usage_of_timings(piece)
                made = usage["completion_tokens"] - stream.count
                prompt, cached = usage["prompt_tokens"], usage["cached_tokens"]
                stream.end(piece["content"], made, _finish_reason(piece), None, prompt, cached)
            else:
                stream.take(piece["content"], 1)

        await self._post("/infill", asked, take)

    async def _answer_tokens(self, request: "LanguageRequest", body: dict[str, Any]) -> None:
        answer = json.loads(await self._post(f"/{request.route}", body))
        if request.route == DETOKENIZE:
            answer["prompt"] = answer["content"]
        else:
            if body["with_pieces"]:
                answer["token_strs"] = [token["piece"] for token in answer["tokens"]]
                answer["tokens"] = [token["id"] for token in answer["tokens"]]
            answer |= {"count": len(answer["tokens"]), "max_model_len": self._context}
        request.send({"text_output": json.dumps(answer)}, final=True)

    async def _answer_several(self, request: "LanguageRequest", body: dict[str, Any], form: AnswerForm) -> None:
        choices = SeveralChoices(body)

        def take(event: bytes) -> None:
            if event in (_DONE, _NOTHING):
                return
            chunk = choices.take(form.completed(self._event(event)))
            if body.get("stream"):
                request.send({"text_output": json.dumps(chunk)})

        await self._post(f"/v1/{request.route}", streamed_request(body), take)
        outputs: dict[str, Any] = {}
        if not body.get("stream"):
            outputs = {"text_output": json.dumps(choices.document())}
        elif (body.get("stream_options") or {}).get("include_usage"):
            outputs = {"text_output": json.dumps(choices.usage_chunk())}
        request.send(outputs, choices.usage, final=True)

    # Inside

    async def _post(self, route: str, body: Any, on_event: Any = None) -> bytes:
        """Return the body of an answer. Raises for one with an error."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, received = await ask(self._path, route, content, on_event)
        if status != OK:
            raise self._failure(received)
        return received

    def _event(self, event: bytes) -> dict[str, Any]:
        """Return the JSON object of an event. Raises for one with an error."""
        document: dict[str, Any] = json.loads(event[len(_DATA) :])
        if "error" in document:
            raise self._failure(event[len(_DATA) :])
        return document

    def _failure(self, content: bytes) -> Exception:
        """Return the exception for an error of llama.cpp's server."""
        try:
            error = json.loads(content)["error"]
            code, message = int(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            error, code, message = {}, 500, content.decode(errors="replace")[:1000]
        message = _LEAKED.sub("", _FIELD.sub(r"\1: ", message))
        message = f"suffix: {message}" if "nfill is not supported" in message else message
        codes = self._setup.pb_utils.TritonError
        overflow = _OVERFLOW.match(message)
        sizes = overflow.groups() if overflow else (error.get("n_prompt_tokens"), error.get("n_ctx"))
        if sizes[0] is not None:
            limit = f"the model's maximum context length is {sizes[1]} tokens, the request has {sizes[0]}"
            return self._setup.error(f"{limit} (hint: shorten it, or raise n_ctx)", codes.INVALID_ARG)
        by_status = {400: codes.INVALID_ARG, 404: codes.NOT_FOUND, 501: codes.INVALID_ARG, 503: codes.UNAVAILABLE}
        unfit = codes.INVALID_ARG if _UNFIT.search(message) else codes.INTERNAL
        return self._setup.error(message, by_status.get(code, unfit))

    def _common_params(self) -> Any:
        params = xllamacpp.CommonParams()
        parameters = dict(self._parameters)
        threads = parameters.pop("n_threads", 0) or idle_threads(self._setup.threads)
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = parameters.pop("n_threads_batch", threads)
        params.cpuparams.poll = params.cpuparams_batch.poll = 0  # waiting threads sleep: neighbours have the cores
        params.model.path = self._setup.options["path"]
        params.model_alias = {self._setup.model_name}
        params.hostnames = [self._path]
        params.n_parallel = -1  # four slots that share the context
        params.n_batch = BATCH_TOKENS
        params.verbosity = 1  # errors
        params.n_threads_http = self._slots_count + THREADS_MORE
        params.endpoint_slots = False
        if "mmproj" in parameters:
            params.mmproj.path = parameters.pop("mmproj")
        for name, value in parameters.items():
            if name in _ENUMS:
                enum, prefix = _ENUMS[name]
                value = getattr(getattr(xllamacpp, enum), prefix + value.upper())
            setattr(params, name, value)
        return params


class _OpenAIAnswer:
    """Hands on an answer in OpenAI's form, and finds its usage."""

    def __init__(self, request: "LanguageRequest", read: Any, form: AnswerForm) -> None:
        self._request = request
        self._read = read
        self._form = form
        self._held: list[bytes] = []
        self._counted: dict[str, Any] = {}

    def take(self, event: bytes) -> None:
        """Hand on an event; those that have counts are held until it is known whether they are the last."""
        if event in (_DONE, _NOTHING):
            return
        if event.startswith((_ERROR, _FAILED)):
            self._read(event[event.index(_DATA) :])
        self._flush()
        if b'"timings":{' in event or b'"usage":{' in event:
            self._counted = _with_earlier(self._counted, json.loads(event[event.index(_DATA) + len(_DATA) :]))
            self._held.append(event)
        else:
            self._send(event)

    def finish(self) -> None:
        """Send the last event with the usage."""
        last = self._held.pop() if self._held else None
        outputs = {} if last is None else {"text_output": self._form.of(last.removeprefix(_DATA))}
        self._request.send(outputs, _usage(self._counted), final=True)

    def _flush(self) -> None:
        for event in self._held:
            self._send(event)
        self._held.clear()

    def _send(self, event: bytes) -> None:
        self._request.send({"text_output": self._form.of(event.removeprefix(_DATA))})


class _Logprobs:
    """Log probabilities of tokens, in the form of vLLM's."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = list(tokens)
        self.total = float(sum(token["logprob"] for token in self._tokens))

    def text(self) -> str:
        """Return JSON: for each token an object of the likeliest ones, and itself, by id."""
        found = []
        for token in self._tokens:
            of_token = {}
            for rank, each in enumerate(token.get("top_logprobs", ()), 1):
                of_token[str(each["id"])] = self._entry(each, rank)
            of_token.setdefault(str(token["id"]), self._entry(token, None))
            found.append(of_token)
        return json.dumps(found)

    @staticmethod
    def _entry(token: dict[str, Any], rank: int | None) -> dict[str, Any]:
        return {"logprob": token["logprob"], "rank": rank, "decoded_token": token["token"]}


def _wanted(request: "LanguageRequest", outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if name == "text_output" or name in request.returns}


def _finish_reason(answer: dict[str, Any]) -> str:
    return "length" if answer["stop_type"] == "limit" else "stop"


def _usage(document: dict[str, Any]) -> dict[str, int]:
    """Return the usage, from what llama.cpp says in OpenAI's form, else from its timings."""
    usage = document.get("usage")
    if not usage:
        return _usage_of_timings(document)
    details = usage.get("prompt_tokens_details") or {}
    cached = usage.get("cache_read_input_tokens", details.get("cached_tokens", 0))
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return usage_of(prompt, usage.get("completion_tokens", usage.get("output_tokens", 0)), cached)


def _with_earlier(counted: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return an event with counts; the first and the last event of a message have a part of them each."""
    first = document.get("message", document).get("usage") if "type" in document else None
    return document if first is None else {"usage": {**counted.get("usage", {}), **first}}


def _usage_of_timings(document: dict[str, Any]) -> dict[str, int]:
    timings = document.get("timings", {})
    cached = timings.get("cache_n", 0)
    return usage_of(timings.get("prompt_n", 0) + cached, timings.get("predicted_n", 0), cached)


def _addresses(value: Any) -> Iterator[str]:
    """Yield each URL in a request that is not data: llama.cpp would fetch it."""
    if isinstance(value, dict):
        for key, member in value.items():
            url = member.get("url") if isinstance(member, dict) else member
            if key in ("image_url", "video_url", "audio_url", "source") and isinstance(url, str):
                if not url.startswith("data:"):
                    yield url
            else:
                yield from _addresses(member)
    elif isinstance(value, list):
        for member in value:
            yield from _addresses(member)
