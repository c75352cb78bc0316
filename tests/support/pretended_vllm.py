"""A stand-in for vLLM 0.32: what the backend uses of it, with the published signatures.

It answers with words of the prompt.

A folder `vllm` whose `__init__.py` is `INIT` stands for the package in a worker.
"""

import argparse
import asyncio
import dataclasses
import enum
import json
import sys
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

INIT = "from tests.support.pretended_vllm import install\ninstall()\n"


TOKEN_S = 0.002
"""Time for a token."""


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class QueueOverflowError(Exception):
    pass


class EngineDeadError(Exception):
    pass


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams:
    def __init__(self, json: Any = None, choice: list[str] | None = None) -> None:
        self.json = json
        self.choice = choice


class SamplingParams(msgspec.Struct, dict=True):
    n: int = 1
    temperature: float = 1.0
    stop: str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: Any = None
    _all_stop_token_ids: Any = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise VLLMValidationError(
                f"temperature must be non-negative, got {self.temperature}.", parameter="temperature"
            )


class PoolingParams:
    def __init__(self, *, task: str, dimensions: int | None = None) -> None:
        self.task = task
        self.dimensions = dimensions


@dataclasses.dataclass
class AsyncEngineArgs:
    model: str = ""
    served_model_name: Any = None
    max_model_len: int = 64
    max_num_seqs: int = 256
    enable_lora: bool = False
    disable_log_stats: bool = False
    tensor_parallel_size: int = 1
    stream_interval: int = 1


@dataclasses.dataclass
class LoRAModulePath:
    name: str
    path: str


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 2


class Queue:
    """As `RequestOutputCollector`: whoever holds it may replace `put`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output: Any = None

    def put(self, output: Any) -> None:
        self.output = output

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        if isinstance(output, Exception):
            raise output
        return output


class RequestState:
    """What the output processor knows of a request with one choice; `make_request_output` may be replaced."""

    def __init__(self, request_id: str, prompt_ids: list[int], stream_interval: int) -> None:
        self.prompt_len = len(prompt_ids)
        self.num_cached_tokens = 2
        self.stream_interval = stream_interval
        self.detokenizer = self
        self.logprobs: Any = None
        self.total: float | None = None
        self.text = ""
        self._request_id = request_id
        self._prompt_ids = prompt_ids

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text, self.text = self.text, ""
        return text

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: int | str | None,
        kv_transfer_params: Any = None,
        ec_transfer_params: Any = None,
        error: Any = None,
    ) -> RequestOutput | None:
        text, reason = self.get_next_output_text(bool(finish_reason), True), finish_reason
        choice = CompletionOutput(0, text, new_token_ids, self.total, self.logprobs, reason and str(reason))
        return RequestOutput(self._request_id, self._prompt_ids, [choice], bool(reason))


class PrometheusStatLogger:
    """As vLLM's logger of statistics."""

    def __init__(self, vllm_config: Any = None, engine_indexes: list[int] | None = None) -> None:
        self.recorded: list[Any] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.recorded.append(iteration_stats)


class AsyncLLM:
    """The engine."""

    latest: "AsyncLLM"

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self.arguments = arguments
        self.model_config = types.SimpleNamespace(max_model_len=arguments.max_model_len)
        self.errored = False
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.is_shut_down = False
        self.shutdown_s: float | None = None
        self.output_processor = types.SimpleNamespace(request_states={})
        self.stat_loggers: list[Any] = []
        self._running: dict[str, tuple[Queue, asyncio.Task[None]]] = {}
        AsyncLLM.latest = self

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
    ) -> "AsyncLLM":
        made = cls(engine_args)
        made.stat_loggers = [factory(None, [0]) for factory in stat_loggers or ()]
        return made

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> Queue:
        if self.errored:
            raise EngineDeadError
        text = prompt["prompt"]
        words = text.split()
        if len(words) > self.arguments.max_model_len:
            raise VLLMValidationError(f"the prompt has {len(words)} tokens", parameter="prompt")
        self.requests.append((text, options))
        queue = Queue(f"{request_id}-internal")
        if params.output_kind is RequestOutputKind.DELTA and params.n == 1:
            state = RequestState(request_id, list(range(len(words))), self.arguments.stream_interval)
            self.output_processor.request_states[queue.request_id] = state
        task = asyncio.create_task(self._generate(request_id, words, params, queue))
        self._running[request_id] = queue, task
        if text == "die":
            asyncio.get_running_loop().call_soon(self.die)
        return queue

    async def abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running[1].cancel()
            self.aborted.append(request_id)

    def die(self) -> None:
        self.errored = True
        for queue, task in self._running.values():
            task.cancel()
            queue.put(EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        self.shutdown_s = timeout
        self.is_shut_down = True

    async def _generate(self, request_id: str, words: list[str], params: SamplingParams, queue: Queue) -> None:
        ids = list(range(len(words)))
        texts: list[str] = []
        count = params.max_tokens or 16
        state = self.output_processor.request_states.get(queue.request_id)
        for number in range(count):
            await asyncio.sleep(TOKEN_S)
            text = f" {words[number % len(words)]}" if words else " x"
            texts.append(text)
            is_last = number == count - 1
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                if not is_last:
                    continue
                text = "".join(texts)
            new = [number] if params.output_kind is RequestOutputKind.DELTA else list(range(count))
            logprobs = [{token: Logprob(-0.5, 1, text)} for token in new] if params.logprobs is not None else None
            total = -0.5 * (number + 1) if params.logprobs is not None else None
            if state is not None:
                state.text, state.logprobs, state.total = text, logprobs, total
                output = state.make_request_output(new, None, "length" if is_last else None, None)
                if output is not None:
                    queue.put(output)
                continue
            choices = [
                CompletionOutput(index, text, new, total, logprobs, "length" if is_last else None)
                for index in range(params.n)
            ]
            queue.put(RequestOutput(request_id, ids, choices, is_last))
        self._running.pop(request_id, None)
        self.output_processor.request_states.pop(queue.request_id, None)


class Request:
    """As the request classes of vLLM's server."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members

    @classmethod
    def model_validate(cls, members: dict[str, Any]) -> "Request":
        return cls(members)


class Serving:
    """As `OpenAIServingChat` and `OpenAIServingCompletion`."""

    def __init__(self, engine_client: Any, prefix: str) -> None:
        self.engine_client = engine_client
        self.prefix = prefix
        self.parser_cls = None

    async def create_chat_completion(self, request: Request, raw_request: Any = None) -> Any:
        prompt = "\n".join(message["content"] for message in request.members["messages"])
        return await self._create(request, prompt, self.chat_completion_stream_generator)

    async def create_completion(self, request: Request, raw_request: Any = None) -> Any:
        return await self._create(request, request.members["prompt"], self.completion_stream_generator)

    def chat_completion_stream_generator(self, request: Request, generator: Any, request_id: str) -> AsyncIterator[str]:
        raise NotImplementedError("the stand-in streams nothing itself")

    def completion_stream_generator(self, request: Request, generator: Any, request_id: str) -> AsyncIterator[str]:
        raise NotImplementedError("the stand-in streams nothing itself")

    async def _create(self, request: Request, prompt: str, stream: Callable[..., Any]) -> Any:
        members = request.members
        if len(prompt.split()) > self.engine_client.model_config.max_model_len:
            raise VLLMValidationError("the prompt is too long", parameter="prompt")
        if members.get("max_tokens", 1) < 1:
            raise VLLMValidationError("max_tokens must be at least 1", parameter="max_tokens")
        params = SamplingParams(max_tokens=members.get("max_tokens", 4), output_kind=RequestOutputKind.DELTA)
        request_id = f"{self.prefix}-{len(AsyncLLM.latest.requests)}"
        generator = self.engine_client.generate({"prompt": prompt}, params, request_id, lora_request=None, priority=0)
        return stream(request, generator, request_id)


class Application:
    """As vLLM's FastAPI application: what does not stream plain text is answered with what was asked."""

    def __init__(self) -> None:
        self.state = types.SimpleNamespace()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = json.loads((await receive())["body"])
        status, kind, parts = 200, b"application/json", [b""]
        if body.get("max_tokens", 1) < 1:
            status, error = 400, {"message": "is wrong", "type": "BadRequestError", "param": "max_tokens", "code": 400}
            parts = [json.dumps({"error": error}).encode()]
        elif len(body.get("prompt", "").split()) > self.state.engine.arguments.max_model_len:
            status, error = 400, {"message": "the prompt is too long", "param": "prompt", "code": 400}
            parts = [json.dumps({"error": error}).encode()]
        elif body.get("stream"):
            kind = b"text/event-stream; charset=utf-8"
            start = "event: response.created\n" if scope["path"].endswith("responses") else ""
            chunks = [f'{start}data: {{"n":{n}}}\n\n' for n in range(3)]
            text = "".join(chunks) + "data: [DONE]\n\n"
            parts = [text[:20].encode(), text[20:].encode()]
            usage = types.SimpleNamespace(model_dump=lambda: {"prompt_tokens": 3, "completion_tokens": 2})
            scope["state"]["request_metadata"] = types.SimpleNamespace(final_usage_info=usage)
        else:
            usages = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
            parts = [json.dumps({"asked": body, "usage": usages}).encode()]
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def build_app(args: argparse.Namespace, supported_tasks: Any = None, model_config: Any = None) -> Application:
    return Application()


async def init_app_state(engine_client: Any, state: Any, args: argparse.Namespace, supported_tasks: Any = None) -> None:
    state.engine = engine_client
    state.args = args
    state.openai_serving_chat = Serving(engine_client, "chatcmpl")
    state.openai_serving_completion = Serving(engine_client, "cmpl")
    adapters = {module.name: module for module in args.lora_modules or ()}
    state.openai_serving_models = types.SimpleNamespace(lora_requests=adapters)


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for name in ("model", "served-model-name", "lora-modules", "chat-template", "tool-call-parser"):
        parser.add_argument(f"--{name}")
    return parser


_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"SamplingParams": SamplingParams, "PoolingParams": PoolingParams},
    "vllm.sampling_params": {
        "RequestOutputKind": RequestOutputKind,
        "StructuredOutputsParams": StructuredOutputsParams,
    },
    "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "vllm.v1.metrics.loggers": {"PrometheusStatLogger": PrometheusStatLogger},
    "vllm.entrypoints.launchers.cli_args": {"make_arg_parser": make_arg_parser},
    "vllm.entrypoints.launchers.app": {"build_app": build_app},
    "vllm.entrypoints.launchers.api_server.app_state": {"init_app_state": init_app_state},
    "vllm.entrypoints.openai.models.protocol": {"LoRAModulePath": LoRAModulePath},
}


def modules() -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {}
    for name, members in _MODULES.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in made:
                made[path] = types.ModuleType(path)
                made[path].__path__ = []
        made[name].__dict__.update(members)
    return made


def install() -> None:
    """Take the place of vLLM in this process."""
    existing = sys.modules.get("vllm")
    made = modules()
    if existing is not None:  # the package whose import this is
        existing.__dict__.update(_MODULES["vllm"])
        made["vllm"] = existing
    sys.modules.update(made)
