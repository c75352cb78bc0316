from dataclasses import replace

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import Accelerator, ExecutionAccelerators, Graph, ModelConfig, Optimization
from charonia.core.errors import Code, ServingError
from charonia.server.backends.api import Placement
from charonia.server.backends.onnxruntime.options import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    SessionPlan,
    choose_providers,
    for_openvino,
    ineffective_parameters,
    read_plan,
)

CONFIG = ModelConfig(name="m", backend="onnxruntime")
ON_CPU = Placement("m_0", InstanceKind.KIND_CPU)
ON_GPU = Placement("m_0", InstanceKind.KIND_GPU, device_id=2)
ALL = (TENSORRT, CUDA, OPENVINO, CPU)


def plan(**parameters: str) -> SessionPlan:
    made, problems = read_plan(replace(CONFIG, parameters=parameters), {})
    assert problems == []
    return made


def accelerated(*, gpu: tuple[Accelerator, ...] = (), cpu: tuple[Accelerator, ...] = ()) -> ModelConfig:
    return replace(CONFIG, optimization=Optimization(execution_accelerators=ExecutionAccelerators(gpu, cpu)))


def test_nothing_configured_leaves_threads_to_the_budget() -> None:
    assert plan() == SessionPlan()


def test_parameters_win_over_settings() -> None:
    config = replace(CONFIG, parameters={"intra_op_thread_count": "3"})
    settings = {"intra_op_thread_count": "5", "inter_op_thread_count": "2", "default-max-batch-size": "9"}

    made, problems = read_plan(config, settings)

    assert problems == []
    assert (made.intra_op_threads, made.inter_op_threads) == (3, 2)


def test_every_parameter_has_its_place() -> None:
    parameters = {
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "true",
        "memory.enable_memory_arena_shrinkage": "cpu:0;gpu:0",
        "session.dynamic_block_base": "4",
        "optimization.enable_gelu_approximation": "1",
        "gpu_mem_limit": "1024",
        "arena_extend_strategy": "0",
        "cudnn_conv_algo_search": "1",
        "do_copy_in_default_stream": "true",
    }
    assert plan(**parameters) == SessionPlan(
        is_parallel=True,
        has_arena=False,
        has_pattern=True,
        run_entries=(("memory.enable_memory_arena_shrinkage", "cpu:0;gpu:0"),),
        entries=(("optimization.enable_gelu_approximation", "1"), ("session.dynamic_block_base", "4")),
        gpu_options=(
            ("arena_extend_strategy", "kNextPowerOfTwo"),
            ("cudnn_conv_algo_search", "HEURISTIC"),
            ("do_copy_in_default_stream", "1"),
            ("gpu_mem_limit", "1024"),
        ),
    )
    assert list(ineffective_parameters(replace(CONFIG, parameters=parameters))) == []


@pytest.mark.parametrize(
    ("level", "name"), [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED")]
)
def test_the_level_of_the_graph_has_ort_s_name(level: int, name: str) -> None:
    made, problems = read_plan(replace(CONFIG, optimization=Optimization(graph=Graph(level))), {})

    assert (made.graph_level, problems) == (name, [])


def test_all_that_is_wrong_is_said_at_once() -> None:
    parameters = {"intra_op_thread_count": "many", "execution_mode": "2", "enable_mem_arena": "maybe"}
    config = replace(CONFIG, parameters=parameters, optimization=Optimization(graph=Graph(5)))

    _, problems = read_plan(config, {"inter_op_thread_count": "-1", "enable-global-threadpool": "x"})

    assert {problem.path for problem in problems} == {
        "parameters['intra_op_thread_count']",
        "parameters['execution_mode']",
        "parameters['enable_mem_arena']",
        "optimization.graph.level",
        "--backend-config onnxruntime,inter_op_thread_count",
        "--backend-config onnxruntime,enable-global-threadpool",
    }


def test_an_unknown_parameter_is_named() -> None:
    config = replace(CONFIG, parameters={"enable_mem_arenas": "1", "zzz": "1"})

    sentences = list(ineffective_parameters(config))

    assert "did you mean 'enable_mem_arena'?" in sentences[0]
    assert sentences[1].endswith("it has no effect")


def test_an_instance_on_the_cpu_has_the_cpu_alone() -> None:
    gpu_only = accelerated(gpu=(Accelerator("tensorrt"),))

    assert choose_providers(CONFIG, SessionPlan(), ON_CPU, [CPU]) == [(CPU, {})]
    assert choose_providers(gpu_only, SessionPlan(), ON_CPU, [CPU]) == [(CPU, {})]


def test_an_instance_on_a_gpu_has_cuda_on_its_device() -> None:
    [cuda, cpu] = choose_providers(CONFIG, plan(gpu_mem_limit="99"), ON_GPU, ALL)

    assert cuda == (CUDA, {"device_id": "2", "arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": "99"})
    assert cpu == (CPU, {})


def test_tensorrt_goes_before_cuda_with_its_parameters_translated() -> None:
    parameters = {"precision_mode": "FP16", "max_workspace_size_bytes": "1024", "trt_engine_cache_enable": "true"}
    config = accelerated(gpu=(Accelerator("tensorrt", parameters),))

    providers = choose_providers(config, SessionPlan(), ON_GPU, ALL)

    assert [name for name, _ in providers] == [TENSORRT, CUDA, CPU]
    assert providers[0][1] == {
        "device_id": "2",
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1024",
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": "~/.cache/charonia/tensorrt/m",
    }


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"trt_engine_cache_enable": "True"}, "~/.cache/charonia/tensorrt/m"),
        ({"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/engines"}, "/engines"),
        ({"trt_engine_cache_enable": "0"}, None),
    ],
)
def test_engines_are_kept_in_a_folder_of_the_model(parameters: dict[str, str], path: str | None) -> None:
    config = accelerated(gpu=(Accelerator("tensorrt", parameters),))

    assert choose_providers(config, SessionPlan(), ON_GPU, ALL)[0][1].get("trt_engine_cache_path") == path


def test_cuda_may_be_named_with_parameters_of_its_own() -> None:
    config = accelerated(gpu=(Accelerator("cuda", {"use_tf32": "0"}),))

    providers = choose_providers(config, SessionPlan(), ON_GPU, ALL)

    assert [name for name, _ in providers] == [CUDA, CPU]
    assert providers[0][1]["use_tf32"] == "0"


def test_openvino_is_for_the_cpu() -> None:
    config = accelerated(cpu=(Accelerator("openvino", {"num_of_threads": "2"}),))

    assert choose_providers(config, SessionPlan(), ON_CPU, ALL)[0] == (
        OPENVINO,
        {"device_type": "CPU", "num_of_threads": "2"},
    )
    with pytest.raises(ServingError, match="needs ONNX Runtime's OpenVINOExecutionProvider") as caught:
        choose_providers(config, SessionPlan(), ON_CPU, [CPU])
    assert caught.value.code is Code.UNSUPPORTED
    assert "install openvino" in caught.value.hint


def test_the_openvino_backend_runs_what_onnx_runtime_has_no_provider_for() -> None:
    given = {"num_of_threads": "2", "NUM_STREAMS": "1"}
    config = replace(
        accelerated(cpu=(Accelerator("openvino", given),)),
        parameters={"intra_op_thread_count": "3", "enable_mem_arena": "0", "front_end": "no"},
    )

    routed = for_openvino(config, [CPU])

    assert routed == replace(config, parameters={"front_end": "no", "INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "1"})
    assert for_openvino(config, ALL) is None
    assert for_openvino(CONFIG, [CPU]) is None
    with pytest.raises(ServingError, match="accelerator 'openvino' has no parameter 'speed'") as caught:
        for_openvino(accelerated(cpu=(Accelerator("openvino", {"speed": "1"}),)), [CPU])
    assert "num_of_threads" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "placement", "message"),
    [
        (accelerated(gpu=(Accelerator("tensorflow"),)), ON_GPU, "unknown gpu execution accelerator 'tensorflow'"),
        (accelerated(cpu=(Accelerator("tensorrt"),)), ON_CPU, "unknown cpu execution accelerator 'tensorrt'"),
        (accelerated(gpu=(Accelerator("tensorrt", {"precision_mode": "FP8"}),)), ON_GPU, "expected one of FP32, FP16"),
        (accelerated(gpu=(Accelerator("tensorrt", {"speed": "1"}),)), ON_GPU, "has no parameter 'speed'"),
        (accelerated(gpu=(Accelerator("tensorrt", {"trt_cuda_graph_enable": "1"}),)), ON_GPU, "at fixed addresses"),
    ],
)
def test_a_wrong_accelerator_is_refused(config: ModelConfig, placement: Placement, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        choose_providers(config, SessionPlan(), placement, ALL)
