"""vLLM's `AsyncLLM` without an engine's process: every open request gets a token at a steady pace.

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

TOKEN = 2000
"""Each token, a part of a word."""

_MODULE = "vllm.v1.engine.async_llm"


class FakeCore:
    """As vLLM's client of the engine's process: hands a token to each open request at a steady pace."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.resources = types.SimpleNamespace(engine_dead=False)
        self._open: dict[str, int] = {}
        self._is_open = asyncio.Event()
        self._interval_s = 1 / float(os.environ.get(PACE, "100"))
        self._due = 0.0

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the model's tasks."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Open a request."""
        self._open[request.request_id] = request.sampling_params.max_tokens
        self._is_open.set()

    async def get_output_async(self) -> Any:
        """Return a token of each open request, when the next is due."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        await self._is_open.wait()
        now = asyncio.get_running_loop().time()
        self._due = max(self._due + self._interval_s, now)  # lost time is not made up for
        await asyncio.sleep(self._due - now)
        outputs = []
        for request_id, left in list(self._open.items()):
            self._open[request_id] = left - 1
            outputs.append(
                EngineCoreOutput(request_id, [TOKEN], finish_reason=FinishReason.LENGTH if left == 1 else None)
            )
            if left == 1:
                del self._open[request_id]
        if not self._open:
            self._is_open.clear()
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, request_ids: Any) -> None:
        """Close requests."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""


def install() -> None:
    """Have vLLM, once it is imported, do without an engine."""
    sys.meta_path.insert(0, _Finder())


def replace(module: Any) -> None:
    """Replace what reaches the engine in vLLM's module."""
    module.EngineCoreClient = types.SimpleNamespace(make_async_mp_client=lambda **_: FakeCore())


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
