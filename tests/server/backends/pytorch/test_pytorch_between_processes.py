"""Tensors of PyTorch between processes on a GPU; `test_gpu_between_processes.py` has the same with one pretended."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import torch_models

import charonia

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")

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
import torch
import triton_python_backend_utils as pb_utils

def answer(tensor):
    return pb_utils.InferenceResponse([tensor])

def call(model, tensor):
    response = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["y"], inputs=[tensor],
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU),
    ).exec()
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


def write(repository: Path, name: str, body: str, outputs: int = 16) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(outputs=outputs))
    (repository / name / "1" / "model.py").write_text(HEAD + body)


def test_what_a_worker_leaves_on_the_gpu_reaches_a_client(tmp_path: Path) -> None:
    write(tmp_path, "maker", MAKER)

    with charonia.Server(tmp_path) as server:
        for _ in range(3):
            assert server.infer("maker", {"x": VALUES})["y"].tolist() == (VALUES * 2).tolist()


def test_workers_and_a_pytorch_model_exchange_tensors_on_the_gpu(tmp_path: Path) -> None:
    write(tmp_path, "adder", ADDER)
    write(tmp_path, "echo", ECHO)
    write(tmp_path, "front", FRONT, outputs=4)
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "network")
    (tmp_path / "network" / "config.pbtxt").write_text(NETWORK)
    with torch.inference_mode():
        expected = torch_models.Perceptron()(torch.from_numpy(VALUES + 100)).numpy()

    with charonia.Server(tmp_path) as server:
        result = server.infer("front", {"x": VALUES})["y"]

    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=1e-3, atol=1e-2)
