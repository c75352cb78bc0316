"""An engine of TensorRT-LLM: its `LLM`, asked as Triton's backend and OpenAI's API are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from typing import TYPE_CHECKING

from ...language.worker.text_stream import CHAT, TextStream, document
from .generation import NewText, TritonAnswer, choice_of, read_body, read_sampling, sampling_params, usage_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_INVALID = {"RequestError", "ValueError", "TypeError"}
"""Names of exceptions that are about the request."""

_FATAL = "CppExecutorError"
"""Name of the exception after which the engine answers nothing."""

_NOT_SUPPORTED = ("lora_id", "lora_name", "lora_path", "lora_ckpt_source", "image_url")


class Engine:
    """An engine, as `language/worker/model.py` runs it.

    Args:
        setup: Its model. The options are `arguments` of the `LLM`, and `gpus` of each instance.
    """

    def __init__(self, setup: Any) -> None:
        self._setup = setup
        self._llm: Any = None
        self._fault = ""
        self._running: dict[str, list[Any]] = {}

    async def start(self) -> None:
        self._choose_gpus()
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

        given = dict(self._setup.options["arguments"])
        folder = os.path.join(self._setup.version_dir, given["model"])
        if os.path.isdir(folder):
            given["model"] = folder
        arguments = update_llm_args_with_extra_dict({}, given)
        self._llm = await asyncio.to_thread(lambda: LLM(**arguments))

    async def answer(self, request: Any) -> None:
        try:
            if request.route:
                await self._answer_openai(request)
            else:
                await self._generate(request)
        except Exception as error:
            if isinstance(error, self._setup.invalid):
                raise
            names = {each.__name__ for each in type(error).__mro__}
            codes = self._setup.pb_utils.TritonError
            if _FATAL in names:
                self._fault = str(error) or _FATAL
                raise self._setup.error(f"the engine of the model has failed: {error}", codes.UNAVAILABLE) from error
            if names & _INVALID:
                raise self._setup.invalid(str(error)) from error
            raise self._setup.error(f"{type(error).__name__}: {error}", codes.INTERNAL) from error

    def problem(self) -> str:
        """Return why the engine has died, "" while it lives."""
        is_healthy = getattr(self._llm, "_check_health", None)  # what trtllm-serve asks; older versions lack it
        if not self._fault and is_healthy is not None and not is_healthy():
            return "TensorRT-LLM's executor has ended; its output says why"
        return self._fault

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    async def _generate(self, request: Any) -> None:
        sampling = dict(request.sampling)
        for name in _NOT_SUPPORTED:
            if sampling.pop(name, None) is not None:
                raise ValueError(f"{name}: the tensorrtllm backend does not support it")
        if request.images:
            raise ValueError("image: the tensorrtllm backend does not support it")
        if isinstance(sampling.get("stop"), bool) and sampling.pop("stop"):
            self._cancel(request.id)
        members = read_sampling(sampling)
        if "logprobs" in request.returns or "cumulative_logprob" in request.returns:
            members.setdefault("logprobs", 1)
        params = sampling_params(members, stream=request.stream)
        await self._run(request.id, request.text, params, request.stream, TritonAnswer(request).take)

    async def _answer_openai(self, request: Any) -> None:
        body = request.body
        asked = read_body(request.route, body, self._llm.tokenizer)
        params = sampling_params(asked.sampling, stream=asked.stream)
        request_id = f"{'chatcmpl' if request.route == CHAT else 'cmpl'}-{uuid.uuid4().hex}"
        model = str(body.get("model", self._setup.model_name))
        if asked.stream:
            take = StreamAnswer(TextStream(request, request_id, model, body)).take
        else:

            def take(output: Any) -> None:
                usage = usage_of(output)
                choices = [choice_of(request.route, choice) for choice in output.outputs]
                text = document(request.route, request_id, model, choices, usage)
                request.send({"text_output": text}, usage, final=True)

        await self._run("", asked.prompt, params, asked.stream, take)

    async def _run(
        self, request_id: str, prompt: str | list[int], params: Any, stream: bool, take: Callable[[Any], None]
    ) -> None:
        """Run a request to its end; if this is cancelled, or `take` fails, the engine works on it no longer."""
        result = self._llm.generate_async(prompt, params, streaming=stream)
        running = self._running.setdefault(request_id, [])
        running.append(result)
        try:
            if stream:
                async for output in result:
                    take(output)
            else:
                take(await result.aresult())
        except BaseException:
            if not result.finished:
                with contextlib.suppress(Exception):  # of an engine that is gone
                    result.abort()
            raise
        finally:
            running.remove(result)
            if not running:
                self._running.pop(request_id, None)

    def _cancel(self, request_id: str) -> None:
        """Abort the requests of an id; as in Triton, the request that asks for it ends with an error."""
        if not request_id:
            raise ValueError("stop: expected the id of the request to cancel as this request's id")
        for result in self._running.get(request_id, ()):
            result.abort()
        code = self._setup.pb_utils.TritonError.CANCELLED
        raise self._setup.error(f"the requests with the id '{request_id}' are cancelled", code)

    def _choose_gpus(self) -> None:
        """Show the engine its GPUs only, before anything of CUDA is loaded."""
        gpus = self._setup.options["gpus"]
        kinds = {group.get("kind") for group in self._setup.config.get("instance_group") or ()}
        if kinds == {"KIND_GPU"}:
            chosen = str(self._setup.device_id)
        elif gpus:
            chosen = gpus[self._setup.number]
        else:
            return
        # The second is handed on to the processes that TensorRT-LLM starts through MPI.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = chosen
        if len(gpus) > 1:
            self._setup.options["arguments"].setdefault("gpus_per_node", len(chosen.split(",")))


class StreamAnswer:
    """Turns the outputs of one request into chunks."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._new = NewText()

    def take(self, output: Any) -> None:
        """Take an output of the engine, whose choice holds all text so far."""
        choice = output.outputs[0]
        text, tokens = self._new.of(choice)
        if not output.finished:
            self._stream.take(text, tokens)
            return
        usage = usage_of(output)
        reason = choice.finish_reason or "stop"
        self._stream.end(text, tokens, reason, choice.stop_reason, usage["prompt_tokens"], usage["cached_tokens"])
