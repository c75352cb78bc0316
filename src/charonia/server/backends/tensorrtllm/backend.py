"""The `tensorrtllm` backend: serves repositories of Triton's TensorRT-LLM backend over the LLM API.

Source of the options: the repository `llmapi` among the examples of Triton's TensorRT-LLM backend.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.server.backends.api import BackendSettings, ModelFiles
from charonia.server.backends.language.backend import LanguageBackend, arguments_of, gpu_lists, version_text

ARGUMENTS_FILE = "model.yaml"
"""File of a version: arguments of `tensorrt_llm.LLM` by name, and `triton_config`."""

TRITON = "triton_config"
"""Member of the file with settings of Triton."""

GPU_DEVICE_IDS = "gpu_device_ids"
"""Model parameter: the GPUs of each instance, `0,1;2,3`."""

PROCESSORS = "logits_post_processors"
"""Member of the file that is not supported."""

_SAMPLING = {
    "best_of": DataType.INT32,
    "temperature": DataType.FP32,
    "top_k": DataType.INT32,
    "top_p": DataType.FP32,
    "frequency_penalty": DataType.FP32,
    "presence_penalty": DataType.FP32,
    "max_tokens": DataType.INT32,
    "stop": DataType.BYTES,
    "seed": DataType.UINT64,
    "exclude_input_from_output": DataType.BOOL,
    "return_perf_metrics": DataType.BOOL,
}

INPUTS = (
    ModelInput("streaming", DataType.BOOL, dims=(1,), optional=True),
    *(
        ModelInput(f"sampling_param_{name}", datatype, dims=(-1 if name == "stop" else 1,), optional=True)
        for name, datatype in _SAMPLING.items()
    ),
    ModelInput("return_stop_reason", DataType.BOOL, dims=(1,), optional=True),
    ModelInput("stop", DataType.BOOL, dims=(1,), optional=True),
)
"""Inputs besides those of all language models."""

OUTPUTS = (
    ModelOutput("stop_reason", DataType.BYTES, dims=(-1,)),
    ModelOutput("kv_cache_reused_block", DataType.INT32, dims=(-1,)),
    ModelOutput("kv_cache_missed_block", DataType.INT32, dims=(-1,)),
    ModelOutput("kv_cache_alloc_new_blocks", DataType.INT32, dims=(-1,)),
    ModelOutput("kv_cache_alloc_total_blocks", DataType.INT32, dims=(-1,)),
    ModelOutput("kv_cache_hit_rate", DataType.FP32, dims=(-1,)),
    ModelOutput("arrival_time_ns", DataType.INT64, dims=(1,)),
    ModelOutput("first_scheduled_time_ns", DataType.INT64, dims=(1,)),
    ModelOutput("first_token_time_ns", DataType.INT64, dims=(1,)),
    ModelOutput("last_token_time_ns", DataType.INT64, dims=(1,)),
    ModelOutput("acceptance_rate", DataType.FP32, dims=(1,)),
    ModelOutput("total_accepted_draft_tokens", DataType.INT32, dims=(1,)),
    ModelOutput("total_draft_tokens", DataType.INT32, dims=(1,)),
)
"""Outputs besides those of all language models."""


def engine_options(config: ModelConfig, found: object) -> dict[str, object]:
    """Return what the worker needs to know.

    Args:
        config: The configuration; its parameters take precedence over the file.

    Raises:
        ServingError: INVALID_ARG for a file or a parameter that is wrong.
    """
    if not isinstance(found, dict):
        raise _invalid(config, f"expected names and values, got {found!r:.50}")
    arguments: dict[str, Any] = found | arguments_of(config, (GPU_DEVICE_IDS,))
    triton = arguments.pop(TRITON, None) or {}
    if not isinstance(triton, dict) or triton.get("max_batch_size", 0) != 0:
        raise _invalid(config, f"{TRITON}.max_batch_size: expected 0: the engine batches by itself, got {triton}")
    if arguments.get(PROCESSORS):
        raise _invalid(config, f"{PROCESSORS}: processors of logits are not supported")
    if not isinstance(arguments.get("model"), str):
        raise _invalid(config, f"expected `model`, the name or folder of a model, got {arguments.get('model')!r}")
    return {"arguments": arguments, "gpus": _gpus(config)}


def _gpus(config: ModelConfig) -> list[str]:
    """Return the GPUs of each instance, separated by commas; [] where there is nothing to choose."""
    lists = gpu_lists(config, GPU_DEVICE_IDS, "commas, and by semicolons between instances")
    groups = [group for group in config.instance_group if group.kind is not InstanceKind.KIND_GPU]
    count = sum(group.count for group in groups)
    if len(groups) > 1:
        raise invalid(f"model '{config.name}': instance_group: expected one group, got {len(groups)}")
    if (count > 1 or lists) and len(lists) != count:
        raise invalid(
            f"model '{config.name}': parameter {GPU_DEVICE_IDS}: expected GPUs for each of {count} instances, "
            f"got {len(lists)}",
            hint='for example "0,1;2,3" for two instances',
        )
    return [",".join(each) for each in lists]


def _invalid(config: ModelConfig, problem: str) -> ServingError:
    return invalid(f"model '{config.name}': {ARGUMENTS_FILE}: {problem}")


class TensorRtLlmBackend(LanguageBackend):
    """The `tensorrtllm` backend."""

    name = "tensorrtllm"
    engine = Path(__file__).parent / "worker" / "engine.py"
    kind = InstanceKind.KIND_MODEL
    more_inputs = INPUTS
    more_outputs = OUTPUTS

    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        return engine_options(config, await asyncio.to_thread(_document, files, config))


def _document(files: ModelFiles, config: ModelConfig) -> object:
    text = version_text(
        files,
        config,
        ARGUMENTS_FILE,
        "it holds arguments of tensorrt_llm.LLM, such as `model: name or folder`; an engine built for the C++ "
        "backend is named there with `backend: tensorrt`",
    )
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _invalid(config, f"cannot be read: {error}") from None
