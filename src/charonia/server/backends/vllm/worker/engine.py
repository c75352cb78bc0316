"""An engine of vLLM: its arguments, vLLM's `AsyncLLM`, and vLLM's own OpenAI application over it.

A streamed answer with one choice of plain text takes a path of its own (`streams.py`). Everything else of OpenAI's API
goes through vLLM's application (`application.py`), requests that follow Triton's contract through `generation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ...language.worker.members import closest_hint
from .application import Application, failure_of
from .generation import answer_generation
from .metrics import MetricsRelay, later_statistics
from .streams import PlainStreams, is_plain

if TYPE_CHECKING:
    from typing import Any

_BIND, _THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"

_OTHER_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

METRICS_S = 5.0
"""Time between two looks at vLLM's metrics, each of which takes milliseconds; none while there is nothing to do."""

SHUTDOWN_S = 3.0
"""Time that vLLM's processes have to end before they are killed: less than the worker has (`STOP_S_MAX`)."""

_ARGUMENT_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_APPLICATIONS = ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server")
_STATES = ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server")
"""Modules of vLLM that may have a function, those of newer versions first."""


class Engine:
    """An engine, as `language/worker/model.py` runs it.

    Args:
        setup: Its model. The options are `arguments` of the engine, `of_parameters` (names of those that were given as
            parameters of the model), `variables` of the environment, `loras` (path by name), `gpus` ("" for any) and
            `metrics`.
    """

    def __init__(self, setup: Any) -> None:
        self._setup = setup
        self._options: dict[str, Any] = setup.options
        self._engine: Any = None
        self._application: Application | None = None
        self._streams: PlainStreams | None = None
        self._tasks: frozenset[str] = frozenset()
        self._relaying: asyncio.Task[None] | None = None
        self._open = 0
        self._has_worked = asyncio.Event()

    async def start(self) -> None:
        self._set_environment()
        namespace, arguments = self._arguments()
        from vllm.v1.engine.async_llm import AsyncLLM

        has_metrics = bool(self._options["metrics"]) and not arguments.disable_log_stats
        statistics = later_statistics() if has_metrics else None
        if statistics is not None or not has_metrics:
            arguments.disable_log_stats = True  # what vLLM would print of them as well
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[statistics] if statistics else None)
        for name in (field.name for field in dataclasses.fields(arguments)):
            setattr(namespace, name, getattr(arguments, name))
        tasks = await self._engine.get_supported_tasks()
        self._tasks = frozenset(tasks)
        app = _of_first(_APPLICATIONS, "build_app")(namespace, tasks, self._engine.model_config)
        await _of_first(_STATES, "init_app_state")(self._engine, app.state, namespace, tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # vLLM sets it when the engine has died
        self._application = Application(app)
        self._streams = PlainStreams(self._engine, app.state)
        self._app_state = app.state
        with contextlib.suppress(ImportError, AttributeError):  # vLLM asks for some of its variables at each token
            importlib.import_module("vllm.envs").enable_envs_cache()
        if has_metrics:
            labels = {"model": self._setup.model_name, "version": os.path.basename(self._setup.version_dir)}
            relay = MetricsRelay(self._setup.pb_utils.MetricFamily, labels)
            self._relaying = asyncio.create_task(self._relay(relay, getattr(statistics, "latest", None)))

    async def answer(self, request: Any) -> None:
        self._open += 1
        self._has_worked.set()
        try:
            if request.route:
                await self._answer_openai(request)
            else:
                await answer_generation(self._engine, request, self._tasks, self._lora(request))
        except Exception as error:
            if isinstance(error, self._setup.invalid):
                raise
            raise self._setup.error(*failure_of(error)) from error
        finally:
            self._open -= 1
            self._has_worked.set()

    def problem(self) -> str:
        return "vLLM's engine process has ended; its output says why" if self._engine.errored else ""

    async def stop(self) -> None:
        if self._relaying is not None:
            self._relaying.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)

    async def _answer_openai(self, request: Any) -> None:
        if self._application is None or self._streams is None:
            raise RuntimeError("the engine has not started")
        body = request.body
        name = self._setup.model_name
        adapter = request.parameters.get("lora_name", "")
        client_name = str(body.get("model", name))
        wanted = f"{name}:{adapter}" if adapter else name
        if client_name != wanted:
            body["model"] = wanted
        if is_plain(request.route, body) and await self._streams.answer(request, body, client_name):
            return
        text = request.text if client_name == wanted else json.dumps(body)
        await self._application.answer(request, text.encode(), self._setup.error)

    async def _relay(self, relay: MetricsRelay, statistics: Any) -> None:
        """Report vLLM's metrics: at first, while it works, and once after it has."""
        while True:
            try:
                while statistics is not None and statistics.count():
                    await asyncio.sleep(0)  # answers go first
                relay.report()
            except Exception as error:  # what vLLM's families look like is up to its release
                self._setup.pb_utils.Logger.log_error(f"vLLM's metrics are not shown any more: {error!r}")
                return
            if not self._open:
                self._has_worked.clear()
            await self._has_worked.wait()
            await asyncio.sleep(METRICS_S)

    def _lora(self, request: Any) -> Any:
        """Return the adapter that a request asks for, None for none."""
        name = request.sampling.pop("lora_name", None) or request.parameters.get("lora_name")
        if not name:
            return None
        loras = self._options["loras"]
        if not loras:
            raise self._setup.invalid("lora_name: the model has no LoRA adapters (hint: enable_lora in model.json)")
        if name not in loras:
            raise self._setup.invalid(f"lora_name: expected one of {', '.join(loras)}, got '{name}'")
        return self._app_state.openai_serving_models.lora_requests[f"{self._setup.model_name}:{name}"]

    def _set_environment(self) -> None:
        """Set vLLM's variables, unless the model or the server's environment does; those of the GPUs in any case."""
        os.environ.update(self._options["variables"])
        os.environ.pop("VLLM_API_KEY", None)  # keys are checked by the server
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        }
        for name in _OTHER_THREADS:  # MKL's number would replace that of the OpenMP threads that vLLM pins
            os.environ.pop(name, None)
        if _BIND not in os.environ:
            os.environ.update(engine_cores(cores, self._setup.threads))
        for key, value in variables.items():
            os.environ.setdefault(key, value)
        groups = self._setup.config.get("instance_group") or [{}]
        gpus = self._options["gpus"]
        if groups[0].get("kind") == "KIND_GPU":
            gpus = str(self._setup.device_id)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus

    def _arguments(self) -> tuple[Any, Any]:
        """Return the arguments of vLLM's server and of the engine."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = dict(self._options["arguments"])
        namespace = _of_first(_ARGUMENT_PARSERS, "make_arg_parser")(FlexibleArgumentParser()).parse_args([])
        of_engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        known = of_engine | vars(namespace).keys()
        for name in sorted(arguments.keys() - known):
            hint = closest_hint(name, known)
            if name not in self._options["of_parameters"]:
                raise ValueError(f"model.json: vLLM has no argument '{name}'{hint}")
            del arguments[name]
            self._setup.pb_utils.Logger.log_warn(
                f"parameter '{name}': vLLM has no such argument, it has no effect{hint}"
            )
        for name, value in arguments.items():
            setattr(namespace, name, value)
        arguments["served_model_name"] = [self._setup.model_name]
        if isinstance(arguments.get("model"), str) and os.path.isdir(
            os.path.join(self._setup.version_dir, arguments["model"])
        ):
            arguments["model"] = os.path.join(self._setup.version_dir, arguments["model"])
        loras = self._options["loras"]
        if loras:
            cls = importlib.import_module("vllm.entrypoints.openai.models.protocol").LoRAModulePath
            namespace.lora_modules = [
                cls(f"{self._setup.model_name}:{name}", os.path.join(self._setup.version_dir, path))
                if os.path.isdir(os.path.join(self._setup.version_dir, path))
                else cls(f"{self._setup.model_name}:{name}", path)
                for name, path in loras.items()
            ]
        return namespace, AsyncEngineArgs(**{name: arguments[name] for name in arguments if name in of_engine})


def engine_cores(cores: list[int], threads: int) -> dict[str, str]:
    """Return variables that say which cores vLLM's CPU engine computes on: its share, without one for the serving.

    Args:
        cores: Cores of this process.
        threads: Cores of them that are the model's share.
    """
    count = max(1, min(threads, len(cores) - 1))
    if cores and len(cores) <= threads:  # they are nobody else's, and the processes that compute set their own number
        return {_BIND: ",".join(str(core) for core in cores[:count]), _THREADS: "1"}
    return {_BIND: "nobind", _THREADS: str(count)}


def _of_first(modules: tuple[str, ...], name: str) -> Any:
    """Return the function of the first module that has it."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"this version of vLLM has no {name} in {' or '.join(modules)}")
