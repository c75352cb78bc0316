"""Options of vLLM models: files of a version, parameters, and what a configuration is completed with."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.backends import version_of

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.server.backends.api import BackendSettings
from charonia.server.backends.vllm.backend import POOLING_ROUTES, ROUTES, VllmBackend, engine_options
from charonia.wire.openai_models import model_ids

MODEL = '{"model": "m"}'


def options(arguments: str = MODEL, loras: str | None = None, **parameters: str) -> dict[str, Any]:
    return engine_options(ModelConfig(name="lm", parameters=parameters), arguments, loras)


def test_arguments_pass_as_they_are() -> None:
    found = options('{"model": "m", "gpu_memory_utilization": 0.5, "disable_log_requests": true}')
    assert found["arguments"] == {"model": "m", "gpu_memory_utilization": 0.5, "disable_log_requests": True}
    assert (found["loras"], found["gpus"], found["metrics"]) == ({}, "", True)


def test_parameters_take_precedence_over_the_file() -> None:
    found = options(
        '{"model": "m", "max_num_seqs": 4, "seed": 1}',
        max_num_seqs="16",
        enable_chunked_prefill="True",
        gpu_memory_utilization="0.5",
        dtype="bfloat16",
        compilation_config='{"level": 0}',
        openai_routes="completions",
        VLLM_CPU_KVCACHE_SPACE="2",
        REPORT_CUSTOM_METRICS="true",
    )
    given = {"max_num_seqs": 16, "enable_chunked_prefill": True, "gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
    given["compilation_config"] = {"level": 0}
    assert found["arguments"] == {"model": "m", "seed": 1, **given}
    assert found["of_parameters"] == sorted(given)
    assert found["variables"] == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert options('{"model": "m"}', '{"sql": "s"}', enable_lora="true")["loras"] == {"sql": "s"}
    assert options("{}", model="m")["arguments"] == {"model": "m"}


def test_adapters_are_read_where_they_are_enabled() -> None:
    found = options('{"model": "m", "enable_lora": "true"}', '{"sql": "/loras/sql"}')
    assert found["loras"] == {"sql": "/loras/sql"}
    assert found["arguments"]["enable_lora"] is True
    assert options('{"model": "m", "enable_lora": "false"}', '{"sql": "/loras/sql"}')["loras"] == {}


def test_metrics_can_be_left_out() -> None:
    assert options(REPORT_CUSTOM_METRICS="false")["metrics"] is False
    assert options(REPORT_CUSTOM_METRICS="True", ENABLE_VLLM_HEALTH_CHECK="true")["metrics"] is True


def test_gpus_are_numbers() -> None:
    assert options(GPU_DEVICE_IDS="0, 2")["gpus"] == "0,2"
    assert options('{"model": "m", "tensor_parallel_size": 2}', GPU_DEVICE_IDS="1,0")["gpus"] == "1,0"


@pytest.mark.parametrize(
    ("arguments", "loras", "parameters", "message"),
    [
        ("{", None, {}, "model.json is no JSON: "),
        ("[]", None, {}, "model.json: expected a JSON object, got '[]'"),
        ("{}", None, {}, "model.json: expected `model`, the name or folder of a model, got None"),
        ('{"model": "m", "enable_lora": true}', None, {}, "model.json enables LoRA, but the version has no multi_lora"),
        ('{"model": "m", "enable_lora": true}', "x", {}, "multi_lora.json is no JSON: "),
        (MODEL, None, {"REPORT_CUSTOM_METRICS": "2"}, "['REPORT_CUSTOM_METRICS']: expected true or false, got '2'"),
        (MODEL, None, {"ENABLE_VLLM_HEALTH_CHECK": ""}, "['ENABLE_VLLM_HEALTH_CHECK']: expected true or false, got ''"),
        (MODEL, None, {"GPU_DEVICE_IDS": "0,-1"}, "GPU_DEVICE_IDS: expected numbers of GPUs, each once"),
        (MODEL, None, {"GPU_DEVICE_IDS": "0,0"}, "GPU_DEVICE_IDS: expected numbers of GPUs, each once"),
        (MODEL, None, {"tensor_parallel_size": "two"}, "expected whole numbers, got ['two', 1]"),
        ('{"model": "m", "tensor_parallel_size": 2}', None, {"GPU_DEVICE_IDS": "0"}, "GPU_DEVICE_IDS: expected 2 GPUs"),
    ],
)
def test_what_is_wrong_is_named(arguments: str, loras: str | None, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ServingError) as caught:
        options(arguments, loras, **parameters)
    assert caught.value.code is Code.INVALID_ARG
    assert message in caught.value.message


def completed(folder: Path, files: dict[str, bytes], **parameters: str) -> ModelConfig:
    config = ModelConfig(name="lm", parameters=parameters)
    return asyncio.run(VllmBackend().complete(version_of(folder, **files), config, BackendSettings())).config


def test_a_configuration_is_completed_as_tritons(tmp_path: Path) -> None:
    config = completed(tmp_path, {"model_json": MODEL.encode()})
    assert [each.name for each in config.input] == [
        "text_input",
        "stream",
        "sampling_parameters",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "image",
        "embedding_request",
    ]
    assert [each.name for each in config.input if not each.optional] == ["text_input"]
    assert config.is_decoupled
    assert [(group.kind, group.count) for group in config.instance_group] == [(InstanceKind.KIND_MODEL, 1)]
    assert config.parameters["openai_routes"] == ",".join(ROUTES)


def test_a_model_that_pools_has_the_route_of_embeddings(tmp_path: Path) -> None:
    by_file = completed(tmp_path, {"model_json": b'{"model": "m", "runner": "pooling"}'})
    by_parameter = completed(tmp_path, {"model_json": MODEL.encode()}, runner="pooling")
    for found in (by_file, by_parameter):
        assert found.parameters["openai_routes"] == ",".join(POOLING_ROUTES)


def test_adapters_are_names_for_clients_of_openai(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "multi_lora.json").write_text('{"sql": "/loras/sql", "doll": "doll"}')
    files = {"model_json": MODEL.encode()}
    assert "lora_adapters" not in completed(tmp_path, files).parameters
    config = completed(tmp_path, files, enable_lora="true")
    assert model_ids(config) == ["lm", "lm:sql", "lm:doll"]


def test_a_version_without_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"version 1 has no file model\.json"):
        completed(tmp_path, {})
