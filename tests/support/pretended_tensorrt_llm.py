"""A stand-in for TensorRT-LLM: what the backend uses of its LLM API, with the published signatures.

It answers with words of the prompt, one token each; a token's id is its place.

"""

import asyncio
import dataclasses
import datetime as dt
import types
from typing import Any

TOKEN_S = 0.002
"""Time for a token."""


class CppExecutorError(RuntimeError):
    pass


@dataclasses.dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")


@dataclasses.dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: Any = None


class RequestOutput:
    """As the one of the LLM API: awaited or iterated over; each step changes it and returns it."""

    def __init__(self, llm: "LLM", words: list[str], params: SamplingParams) -> None:
        self.request_id = len(llm.requests)
        self.prompt_token_ids = list(range(len(words)))
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        self.finished = False
        self.is_aborted = False
        self._llm = llm
        self._words = words
        self._params = params

    def abort(self) -> None:
        if self._llm.is_dead:
            raise AttributeError("'NoneType' object has no attribute 'abort_request'")
        self.is_aborted = True
        self._llm.aborted.append(self.request_id)

    async def aresult(self) -> "RequestOutput":
        async for _ in self:
            pass
        return self

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(TOKEN_S)
        if self._llm.is_dead:
            raise CppExecutorError("the executor is gone")
        count = self._params.max_tokens or 4
        for output in self.outputs:
            number = len(output.token_ids)
            output.token_ids.append(number)
            output.text += f" {self._words[number % len(self._words)]}"
            output.cumulative_logprob = -0.5 * (number + 1)
            if self._params.logprobs:
                output.logprobs.append({number: Logprob(-0.5, 1)})
            self.finished = number + 1 >= count or self.is_aborted
            if self.finished:
                output.finish_reason = "cancelled" if self.is_aborted else "length"
                output.request_perf_metrics = METRICS if self._params.return_perf_metrics else None
        return self


METRICS = types.SimpleNamespace(
    kv_cache_metrics=types.SimpleNamespace(
        num_reused_blocks=1,
        num_missed_blocks=2,
        num_new_allocated_blocks=3,
        num_total_allocated_blocks=4,
        kv_cache_hit_rate=0.25,
    ),
    timing_metrics=types.SimpleNamespace(
        **{
            name: dt.timedelta(seconds=second)
            for second, name in enumerate(
                ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"), 1
            )
        }
    ),
    speculative_decoding=types.SimpleNamespace(
        acceptance_rate=0.5, total_accepted_draft_tokens=6, total_draft_tokens=12
    ),
)


class Tokenizer:
    """As `TransformersTokenizer`: a word is a token."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], *args: Any, **kwargs: Any) -> str:
        assert kwargs["tokenize"] is False
        if any(message["role"] == "nobody" for message in conversation):
            raise RuntimeError("there is no such role")
        return " ".join(message["content"] for message in conversation)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        assert kwargs == {"add_special_tokens": False}
        self.words = text.split()
        return list(range(len(self.words)))


class LLM:
    """The engine.

    Attributes:
        requests: Prompt and sampling parameters of each request so far.
    """

    latest: "LLM"

    def __init__(self, model: str, tokenizer: Any = None, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        unknown = kwargs.keys() - {"backend", "pipeline_parallel_size", "max_num_tokens", "gpus_per_node"}
        if unknown:
            raise ValueError(f"LlmArgs: extra inputs are not permitted: {sorted(unknown)}")
        self.model = model
        self.arguments = kwargs
        self.tokenizer = Tokenizer()
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.aborted: list[int] = []
        self.is_dead = False
        self.is_shut_down = False
        LLM.latest = self

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        if sampling_params is None:
            sampling_params = SamplingParams()
        words = inputs.split() if isinstance(inputs, str) else self.tokenizer.words
        self.requests.append((inputs, sampling_params))
        if inputs == "die":
            self.is_dead = True
        return RequestOutput(self, words, sampling_params)

    def _check_health(self) -> bool:
        return not self.is_dead

    def shutdown(self) -> None:
        self.is_shut_down = True


def update_llm_args_with_extra_dict(llm_args: dict[str, Any], llm_args_dict: dict[str, Any]) -> dict[str, Any]:
    return llm_args | llm_args_dict


def modules() -> dict[str, types.ModuleType]:
    members: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "tensorrt_llm.llmapi": {"GuidedDecodingParams": GuidedDecodingParams},
        "tensorrt_llm.llmapi.llm_utils": {"update_llm_args_with_extra_dict": update_llm_args_with_extra_dict},
    }
    made = {}
    for name, content in members.items():
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        made[name].__dict__.update(content)
    return made
