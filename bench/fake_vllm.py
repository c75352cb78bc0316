"""vLLM's `AsyncLLM` without an engine: every open request gets a word at a steady pace.

What stands before the engine, vLLM's own front end or Charonia's, is then all there is to measure. `install` is for a
process that imports vLLM later; `python -m bench.fake_vllm ARGUMENTS` is vLLM's OpenAI server with these arguments.
"""

import asyncio
import importlib.abc
import importlib.util
import os
import runpy
import sys
import types
from typing import Any

PACE = "CHARONIA_BENCH_TOKENS_PER_S"
"""Environment variable: words a second for each request."""

_MODULE = "vllm.v1.engine.async_llm"


class FakeCore:
    """As vLLM's client of the engine's process: there is none, and nothing comes from it."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.resources = types.SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the model's tasks."""
        return ("generate",)

    async def get_output_async(self) -> Any:
        """Never return."""
        await asyncio.Event().wait()

    async def abort_requests_async(self, request_ids: Any) -> None:
        """Do nothing."""

    async def reset_mm_cache_async(self) -> None:
        """Do nothing."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""


class Pace:
    """Hands a word to each open request, again and again."""

    def __init__(self) -> None:
        self._open: dict[str, list[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._interval_s = 1 / float(os.environ.get(PACE, "100"))

    def add(self, request_id: str, queue: Any, count: int, prompt_ids: list[int]) -> None:
        """Give a request so many words."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._open[request_id] = [queue, count, prompt_ids]

    def drop(self, request_id: str) -> None:
        """Give a request no more."""
        self._open.pop(request_id, None)

    async def _run(self) -> None:
        from vllm.outputs import CompletionOutput, RequestOutput

        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for request_id, state in list(self._open.items()):
                queue, left, prompt_ids = state
                state[1] = left - 1
                is_last = left == 1
                choice = CompletionOutput(0, " word", (7,), None, None, finish_reason="length" if is_last else None)
                queue.put(RequestOutput(request_id, None, prompt_ids, None, [choice], is_last, num_cached_tokens=0))
                if is_last:
                    del self._open[request_id]
            due = max(due + self._interval_s, loop.time() - self._interval_s)  # lost time is not made up for
            await asyncio.sleep(max(0.0, due - loop.time()))


def install() -> None:
    """Have vLLM, once it is imported, do without an engine."""
    sys.meta_path.insert(0, _Finder())


def replace(module: Any) -> None:
    """Replace what reaches the engine in vLLM's module."""
    cls, pace = module.AsyncLLM, Pace()
    module.EngineCoreClient = types.SimpleNamespace(make_async_mp_client=lambda **_: FakeCore())

    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, **_: Any) -> Any:
        queue = module.RequestOutputCollector(params.output_kind, request_id)
        pace.add(request_id, queue, params.max_tokens, list(prompt.get("prompt_token_ids") or ()))
        return queue

    async def abort(self: Any, request_id: Any, internal: bool = False) -> None:
        for each in (request_id,) if isinstance(request_id, str) else request_id:
            pace.drop(each)

    cls.add_request, cls.abort = add_request, abort


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def run(module: Any) -> None:
            execute(module)
            replace(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    install()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
