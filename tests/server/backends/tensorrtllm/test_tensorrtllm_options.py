"""Options of TensorRT-LLM models: the file of a version, parameters, and what a configuration is completed with."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.server.backends.api import BackendSettings, ModelFiles
from charonia.server.backends.tensorrtllm.backend import TensorRtLlmBackend, engine_options

MODEL = """
model: TinyLlama/TinyLlama-1.1B-Chat-v1.0
backend: "pytorch"
tensor_parallel_size: 1
triton_config:
  max_batch_size: 0
  decoupled: False
"""


def options(text: str = MODEL, count: int = 1, **parameters: str) -> dict[str, Any]:
    groups = (InstanceGroup(kind=InstanceKind.KIND_CPU, count=count),)
    return engine_options(ModelConfig(name="lm", parameters=parameters, instance_group=groups), yaml.safe_load(text))


def test_arguments_are_those_of_the_file_without_tritons_and_parameters_take_precedence() -> None:
    own = {"model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "backend": "pytorch", "tensor_parallel_size": 1}
    assert options() == {"arguments": own, "gpus": []}
    found = options(max_num_tokens="512", tensor_parallel_size="2", kv_cache_config='{"enable_block_reuse": true}')
    more = {"tensor_parallel_size": 2, "max_num_tokens": 512, "kv_cache_config": {"enable_block_reuse": True}}
    assert found["arguments"] == {**own, **more}


def test_each_instance_has_its_gpus() -> None:
    assert options(count=2, gpu_device_ids="0, 1;2,3")["gpus"] == ["0,1", "2,3"]
    assert options(gpu_device_ids="1")["gpus"] == ["1"]


@pytest.mark.parametrize(
    ("text", "count", "parameters", "message"),
    [
        ("- a", 1, {}, "model.yaml: expected names and values, got ['a']"),
        ("{}", 1, {}, "model.yaml: expected `model`, the name or folder of a model, got None"),
        ("model: m\ntriton_config: {max_batch_size: 8}", 1, {}, "triton_config.max_batch_size: expected 0"),
        ("model: m\nlogits_post_processors: {a: b.c:D}", 1, {}, "processors of logits are not supported"),
        (MODEL, 1, {"gpu_device_ids": "0,0"}, "gpu_device_ids: expected numbers of GPUs, each once"),
        (MODEL, 1, {"gpu_device_ids": "0;1"}, "gpu_device_ids: expected GPUs for each of 1 instances, got 2"),
        (MODEL, 2, {}, "gpu_device_ids: expected GPUs for each of 2 instances, got 0"),
    ],
)
def test_what_is_wrong_is_named(text: str, count: int, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ServingError) as caught:
        options(text, count, **parameters)
    assert caught.value.code is Code.INVALID_ARG
    assert message in caught.value.message


def test_a_configuration_is_completed_and_a_missing_package_is_named(tmp_path: Path) -> None:
    files, backend = ModelFiles(tmp_path, 1, tmp_path / "1"), TensorRtLlmBackend()
    config = asyncio.run(backend.complete(files, ModelConfig(name="lm"), BackendSettings())).config
    names = {each.name for each in config.input}
    assert {"text_input", "stream", "streaming", "sampling_param_top_k", "stop", "return_stop_reason"} <= names
    assert {"text_output", "stop_reason", "kv_cache_hit_rate"} <= {each.name for each in config.output}
    assert config.is_decoupled
    assert config.parameters["openai_routes"] == "chat/completions,completions"
    with pytest.raises(ServingError, match="needs the package 'tensorrt_llm'") as caught:
        asyncio.run(backend.load(files, replace(config, backend="tensorrtllm"), BackendSettings()))
    assert "nvcr.io/nvidia/tensorrt-llm/release" in caught.value.hint
    assert caught.value.code is Code.UNSUPPORTED


def test_a_version_without_the_file_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    files, config = ModelFiles(tmp_path, 1, tmp_path / "1"), ModelConfig(name="lm")
    with pytest.raises(ServingError, match=r"version 1 has no file model\.yaml") as caught:
        asyncio.run(TensorRtLlmBackend().options(files, config, BackendSettings()))
    assert "backend: tensorrt" in caught.value.hint
    (tmp_path / "1" / "model.yaml").write_text("a: b: c")
    with pytest.raises(ServingError, match=r"model\.yaml: cannot be read: mapping values are not allowed"):
        asyncio.run(TensorRtLlmBackend().options(files, config, BackendSettings()))
