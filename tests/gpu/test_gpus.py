"""A real GPU: ONNX Runtime, PyTorch, shared memory, tensors between processes, memory pools, metrics and vLLM.

`make test-gpu`, in at most 8 minutes, on a machine with NVIDIA's driver and `pip install 'charonia[gpu]'`. Each part is
skipped where what it needs is not installed, and all of them without a GPU.
"""

import asyncio
import base64
import gc
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import onnxruntime
import pytest
import torch
import tritonclient.http as httpclient
from tests.support import models, torch_models
from tests.support.process import ServeProcess, eventually

import charonia
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Backend, BackendSettings, ModelFiles, Outputs, Placement
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend
from charonia.server.backends.pytorch.backend import PyTorchBackend, PyTorchModel
from charonia.server.backends.pytorch.instance import PyTorchInstance
from charonia.server.channel.cuda_ipc import export
from charonia.server.metrics.devices import PinnedMemory
from charonia.testing import backend_suite
from charonia.testing.backend_suite import BackendCase, BackendSuite

pytestmark = [
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no GPU of NVIDIA"),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
needs_onnx = pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu"
)
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

FP32 = DataType.FP32
GPU = Placement("lane_0", InstanceKind.KIND_GPU, 0)
GROUP = (InstanceGroup("m_0", InstanceKind.KIND_GPU, count=1, gpus=(0,)),)
TOLERANCE = 1e-3
"""GPUs may compute with TF32."""

PERCEPTRON = ModelConfig(
    name="m",
    backend="pytorch",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(16,)),),
    output=(ModelOutput("y", FP32, (4,)),),
    instance_group=GROUP,
)
MLP = ModelConfig(
    name="m",
    backend="onnxruntime",
    max_batch_size=8,
    input=(ModelInput("input", FP32, dims=(128,)),),
    output=(ModelOutput("output", FP32, (10,)),),
    instance_group=GROUP,
)


def sample(server: ServeProcess, name: str) -> float:
    """Return the value of the first series of a metric."""
    return float(next(line for line in server.metrics_page().splitlines() if line.startswith(name)).split()[-1])


# Backends


class _OnGpu(BackendSuite):
    """The conformance suite of backends, with instances on the GPU."""

    make: Callable[[], Backend]
    config: ModelConfig

    @pytest.fixture(autouse=True)
    def _placed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_suite, "PLACEMENT", GPU)
        monkeypatch.setattr(backend_suite, "TOLERANCE", TOLERANCE)

    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        self.write(tmp_path / "m")
        name, size = self.config.input[0].name, self.config.input[0].dims[0]

        def request(seed: int, count: int) -> InferRequest:
            array = np.random.default_rng(seed).random((count, size), np.float32)
            return InferRequest("m", {name: Tensor(name, FP32, array)})

        return BackendCase(type(self).make, files_of(tmp_path / "m"), self.config, request)

    def write(self, folder: Path) -> None:
        raise NotImplementedError


@needs_onnx
class TestOnnxRuntime(_OnGpu):
    make, config = OnnxRuntimeBackend, MLP

    def write(self, folder: Path) -> None:
        models.write_model(folder.parent, folder.name, models.mlp())


@needs_cuda
class TestTorchScript(_OnGpu):
    make, config = PyTorchBackend, PERCEPTRON

    def write(self, folder: Path) -> None:
        torch_models.save_scripted(torch_models.Perceptron(), folder)


@needs_cuda
class TestExportedProgram(_OnGpu):
    make, config = PyTorchBackend, PERCEPTRON

    def write(self, folder: Path) -> None:
        torch_models.exported_perceptron(folder)


@needs_onnx
def test_onnx_runtime_answers_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    for name, kind in (("cpu", "KIND_CPU"), ("gpu", "KIND_GPU")):
        config = f'backend: "onnxruntime"\nmax_batch_size: 8\ninstance_group {{ kind: {kind} }}\n'
        models.write_model(tmp_path, name, models.resnet18(64), config=config)
    x = np.random.default_rng(1).random((4, 3, 64, 64), np.float32)

    with charonia.Server(tmp_path) as server:
        expected, found = (server.infer(model, {"input": x})["output"] for model in ("cpu", "gpu"))

    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=1e-2, atol=1e-2)


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, 1, folder / "1")


def ones(size: int) -> InferRequest:
    return InferRequest("m", {"x": Tensor("x", FP32, np.ones((size, 16), np.float32))})


async def loaded(
    folder: Path, config: ModelConfig, count: int = 1, pinned: PinnedMemory | None = None
) -> tuple[PyTorchModel, list[PyTorchInstance]]:
    model = await PyTorchBackend().load(files_of(folder), config, BackendSettings(pinned=pinned))
    return model, [await model.create_instance(GPU) for _ in range(count)]


def result_of(instance: PyTorchInstance, request: InferRequest) -> Array:
    [result] = instance.execute([request]).results
    assert isinstance(result, Outputs)
    return result.tensors[0].array


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")
    return tmp_path / "m"


@needs_cuda
@pytest.mark.parametrize(("shares", "copies"), [("false", 2), ("true", 1)])
def test_weights_are_on_the_gpu_as_often_as_the_configuration_says(perceptron: Path, shares: str, copies: int) -> None:
    config = replace(PERCEPTRON, parameters={"ENABLE_WEIGHT_SHARING": shares})
    with torch.inference_mode():
        expected = torch_models.Perceptron()(torch.ones(3, 16)).numpy()

    model, instances = asyncio.run(loaded(perceptron, config, 2))

    assert [usage.type for usage in model.memory()] == ["GPU"] * copies
    for instance in instances:
        np.testing.assert_allclose(result_of(instance, ones(3)).astype(np.float64), expected, atol=TOLERANCE)


@needs_cuda
def test_a_batch_without_memory_fails_and_the_next_one_is_answered(tmp_path: Path) -> None:
    (torch_models.folder_of(tmp_path / "m") / "model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.zeros(int(x.sum()), 1 << 30, device=x.device).sum(1, keepdim=True) + x\n"
    )
    inputs, outputs = (ModelInput("x", FP32, dims=(1, 1)),), (ModelOutput("y", FP32, (-1, 1)),)
    config = ModelConfig(name="m", runtime="model.py", input=inputs, output=outputs)
    _, [instance] = asyncio.run(loaded(tmp_path / "m", config))

    def ask(size: float) -> InferRequest:
        return InferRequest("m", {"x": Tensor("x", FP32, np.full((1, 1), size, np.float32))})

    with pytest.raises(ServingError, match="out of memory") as caught:
        instance.execute([ask(1 << 20)])

    assert caught.value.code is Code.UNAVAILABLE
    assert result_of(instance, ask(1)).shape == (1, 1)


# Memory pools


@needs_cuda
def test_answers_are_in_pinned_memory_until_they_are_gone_and_it_is_used_again(perceptron: Path) -> None:
    account = PinnedMemory()
    _, [instance] = asyncio.run(loaded(perceptron, PERCEPTRON, pinned=account))

    for _ in range(100):
        found = result_of(instance, ones(8))
        assert 0 < account.used_bytes <= 1 << 20
    del found
    gc.collect()

    assert account.used_bytes == 0


@needs_cuda
def test_a_limit_of_pinned_memory_is_kept_under_load(perceptron: Path) -> None:
    account = PinnedMemory(8192)
    _, [instance] = asyncio.run(loaded(perceptron, PERCEPTRON, pinned=account))

    held = [result_of(instance, ones(8)) for _ in range(20)]

    assert account.used_bytes <= 8192
    assert all(array.tolist() == held[0].tolist() for array in held)


# Shared memory


@needs_cuda
def test_a_client_passes_tensors_in_memory_of_the_gpu(tmp_path: Path) -> None:
    count = 4 * 1024 * 1024  # so large that PyTorch allocates it alone: the region is the whole allocation
    models.write_model(tmp_path, "echo", models.identity(FP32, ("n",), batches=False))
    given, answered = torch.arange(count, dtype=torch.float32, device="cuda"), torch.zeros(count, device="cuda")
    tensor, asked = httpclient.InferInput("INPUT0", [count], "FP32"), httpclient.InferRequestedOutput("OUTPUT0")

    with ServeProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        for name, memory in (("given", given), ("answered", answered)):
            exported = export(memory, "FP32")
            assert exported is not None
            assert exported.address.offset == 0
            client.register_cuda_shared_memory(name, base64.b64encode(exported.address.handle), 0, 4 * count)
        tensor.set_shared_memory("given", 4 * count)
        asked.set_shared_memory("answered", 4 * count)
        client.infer("echo", [tensor], outputs=[asked])
        client.unregister_cuda_shared_memory()

    assert torch.equal(given, answered)


# Tensors between processes

VALUES = np.arange(32, dtype=np.float32).reshape(2, 16)

CONFIG = """
backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {outputs} ] }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
"""

NETWORK = """
backend: "pytorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { kind: KIND_GPU count: 1 }
"""

HEAD = """
import os, signal, time
import torch
import triton_python_backend_utils as pb_utils

def answer(tensor):
    return pb_utils.InferenceResponse([tensor])

def ask(model, tensor):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["y"], inputs=[tensor],
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU),
    ).exec()

def call(model, tensor):
    response = ask(model, tensor)
    assert not response.has_error(), response.error().message()
    tensor = response.output_tensors()[0]
    assert not tensor.is_cpu()
    return torch.from_dlpack(tensor)

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(r, "x")) for r in requests]

    def one(self, given):
"""

MAKER = """
        return answer(pb_utils.Tensor.from_dlpack("y", torch.from_numpy(given.as_numpy().copy()).cuda() * 2))
"""

ADDER = """
        assert not given.is_cpu()
        return answer(pb_utils.Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(torch.from_dlpack(given) + 1)))
"""

ECHO = """
        return answer(pb_utils.Tensor.from_dlpack("y", given))
"""

FRONT = """
        mine = torch.from_numpy(given.as_numpy().copy()).cuda()
        for number in range(100):
            there = call("adder", pb_utils.Tensor.from_dlpack("x", mine + number))
            assert torch.equal(there, mine + number + 1)
        back = call("echo", pb_utils.Tensor.from_dlpack("x", mine))
        assert back.data_ptr() == mine.data_ptr()
        return answer(pb_utils.Tensor.from_dlpack("y", call("network", pb_utils.Tensor.from_dlpack("x", there))))
"""

PID = """
        return answer(pb_utils.Tensor.from_dlpack("y", torch.full((2, 16), float(os.getpid()), device="cuda")))
"""

KILLER = """
        theirs = ask("pid", given).output_tensors()[0]
        number = int(torch.from_dlpack(theirs)[0, 0].item())
        later = ask("pid", given).output_tensors()[0]
        os.kill(number, signal.SIGKILL)
        while os.path.exists(f"/proc/{number}"):
            time.sleep(0.01)
        return pb_utils.InferenceResponse(error=ask("adder", pb_utils.Tensor.from_dlpack("x", later)).error())
"""


def write(repository: Path, name: str, body: str, outputs: int = 16) -> None:
    models.write_model(repository, name, HEAD + body, config=CONFIG.format(outputs=outputs))


@needs_cuda
def test_what_a_worker_leaves_on_the_gpu_reaches_a_client(tmp_path: Path) -> None:
    write(tmp_path, "maker", MAKER)

    with charonia.Server(tmp_path) as server:
        for _ in range(3):
            assert server.infer("maker", {"x": VALUES})["y"].tolist() == (VALUES * 2).tolist()


@needs_cuda
def test_workers_and_a_pytorch_model_exchange_tensors_on_the_gpu(tmp_path: Path) -> None:
    for name, body, outputs in (("adder", ADDER, 16), ("echo", ECHO, 16), ("front", FRONT, 4)):
        write(tmp_path, name, body, outputs)
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "network")
    (tmp_path / "network" / "config.pbtxt").write_text(NETWORK)
    with torch.inference_mode():
        expected = torch_models.Perceptron()(torch.from_numpy(VALUES + 100)).numpy()

    with charonia.Server(tmp_path) as server:
        result = server.infer("front", {"x": VALUES})["y"]

    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=TOLERANCE, atol=1e-2)


@needs_cuda
def test_a_worker_that_is_killed_takes_its_tensors_with_it_and_nothing_else(tmp_path: Path) -> None:
    for name, body in (("adder", ADDER), ("pid", PID), ("killer", KILLER), ("maker", MAKER)):
        write(tmp_path, name, body)

    with charonia.Server(tmp_path) as server:
        with pytest.raises(ServingError) as caught:
            server.infer("killer", {"x": VALUES})
        assert caught.value.code is Code.UNAVAILABLE
        assert server.infer("maker", {"x": VALUES})["y"].tolist() == (VALUES * 2).tolist()


# Metrics


def test_metrics_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    command = ["nvidia-smi", "--query-gpu=uuid,memory.total,power.limit", "--format=csv,noheader,nounits"]
    uuid, memory_mib, power = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(",")[:3]
    models.write_model(tmp_path, "echo", models.identity())

    with ServeProcess(tmp_path) as server:
        series = f'{{gpu_uuid="{uuid.strip()}"}}'
        assert sample(server, f"nv_gpu_memory_total_bytes{series}") == pytest.approx(
            float(memory_mib) * 2**20, rel=0.02
        )
        assert sample(server, f"nv_gpu_power_limit{series}") == pytest.approx(float(power.split()[0]), rel=0.02)
        assert 0 <= sample(server, f"nv_gpu_utilization{series}") <= 1


# vLLM

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tiny_llama(folder: Path) -> None:
    """Write a model without weights, which vLLM then draws at random, and with words for tokens."""
    words = {word: number for number, word in enumerate(["<s>", "</s>", *(f"w{n}" for n in range(254))])}
    folder.mkdir(parents=True)
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, document in (
        ("config", LLAMA),
        ("tokenizer", tokenizer),
        ("tokenizer_config", {**settings, "chat_template": TEMPLATE}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("vllm")
    tiny_llama(folder / "llama")
    arguments = {"model": str(folder / "llama"), "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 8}
    arguments |= {"gpu_memory_utilization": 0.2, "max_model_len": 512}
    models.write_model(
        folder / "repository", "lm", json.dumps(arguments).encode(), config='backend: "vllm"\n', file_name="model.json"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("tests.support.process._START_SECONDS_MAX", 240)
        with ServeProcess(folder / "repository") as server:
            yield server


def chat(server: ServeProcess, **members: Any) -> Any:
    """Return the response to a chat, to be closed."""
    body = {"model": "lm", "messages": [{"role": "user", "content": "w1 w2 w3"}], "stream": True, **members}
    return urlopen(Request(f"http://{server.http}/v1/chat/completions", json.dumps(body).encode()), timeout=200)


@needs_vllm
def test_vllm_streams_a_chat_and_reports_its_load(vllm_server: ServeProcess) -> None:
    wanted = {"max_tokens": 8, "ignore_eos": True, "stream_options": {"include_usage": True}}
    with chat(vllm_server, **wanted) as response:
        events = [line[6:].strip() for line in response if line.startswith(b"data: ")]

    assert events.pop() == b"[DONE]"
    usage = json.loads(events[-1])["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"] >= 3) == (8, True)
    assert eventually(lambda: 'vllm:kv_cache_usage_perc{model="lm"' in vllm_server.metrics_page())


@needs_vllm
def test_vllm_works_no_longer_for_a_client_that_has_left(vllm_server: ServeProcess) -> None:
    began = time.monotonic()
    with chat(vllm_server, max_tokens=480, ignore_eos=True) as response:
        response.readline()

    assert eventually(lambda: 'vllm:num_requests_running{model="lm",version="1"} 0' in vllm_server.metrics_page())
    assert time.monotonic() - began < 60
