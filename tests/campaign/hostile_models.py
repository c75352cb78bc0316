"""Models that go for what is not theirs: one or more of each backend that runs code, or could be made to.

Each takes X, FP32 [1] or a path, and answers with Y. `ATTEMPTS` is a Python program that tries all that a process can.
"""

import io
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.onnx_writer import GraphWriter

from charonia.core.dtypes import DataType

KERAS_WRITES = "/tmp/charonia-hostile-keras-model"
"""File that the code in the Keras model would create."""

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Prey:
    """What hostile models go for.

    Attributes:
        secret: A file with a secret, such as owner.key.
        written: A file that there is not, next to it.
        abstract: Name of an abstract socket of another process.
        path_socket: A UNIX socket of the platform's user.
        tensorflow: Folder of `make_tensorflow`, "" to make its models.
    """

    secret: str
    size: int
    written: str
    pid: int = 0
    folders: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    reserved: int = 0
    abstract: str = ""
    path_socket: str = ""
    variable: str = ""
    tensorflow: str = ""


@dataclass(frozen=True, slots=True)
class HostileModel:
    """A hostile model.

    Attributes:
        module: Module that makes it, or serves it; "" for none.
        served: Whether it can be served here: others are for the check only.
        path: What X is: "secret" or "written" of the prey, "" for a number.
    """

    name: str
    module: str
    make: Callable[[Prey], Files]
    served: bool = True
    path: str = ""


ATTEMPTS = """
import ctypes, json, os, socket, sys

prey = json.loads(sys.argv[1]) if len(sys.argv) > 1 else PREY
done = []


def attempt(name, act):
    try:
        if act() is not False:
            done.append(name)
    except Exception:
        pass


def write(path):
    with open(path, "ab") as file:
        file.write(b"x")


def connect(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(200)
        sock.connect(address)


def bind(port):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))


def attach():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, prey["pid"], 0, 0):  # PTRACE_ATTACH
        return False
    os.waitpid(prey["pid"], 0x40000000)
    libc.ptrace(17, prey["pid"], 0, 0)


attempt("read the secret", lambda: open(prey["secret"], "rb").read())
attempt("empty the secret", lambda: os.truncate(prey["secret"], prey["size"]))
attempt("link the secret", lambda: (os.link(prey["secret"], "stolen"), os.unlink("stolen")))
attempt("change the mode of the secret", lambda: os.chmod(prey["secret"], 0o600))
attempt("write", lambda: write(prey["written"]))
for folder in prey["folders"]:
    attempt("list " + folder, lambda: os.listdir(folder))
if prey["variable"]:
    attempt("variable", lambda: prey["variable"] in os.environ)
if prey["pid"]:
    attempt("environ", lambda: prey["variable"].encode() in open("/proc/%d/environ" % prey["pid"], "rb").read())
    attempt("memory", lambda: open("/proc/%d/mem" % prey["pid"], "rb").close())
    attempt("root", lambda: os.listdir("/proc/%d/root" % prey["pid"]))
    attempt("signal", lambda: os.kill(prey["pid"], 0))
    attempt("attach", attach)
for port in prey["ports"]:
    attempt("connect to a port", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
if prey["reserved"]:
    attempt("listen on a port", lambda: bind(prey["reserved"]))
if prey["abstract"]:
    attempt("connect to an abstract socket", lambda: connect(socket.AF_UNIX, "\\0" + prey["abstract"]))
if prey["path_socket"]:
    attempt("connect to a socket", lambda: connect(socket.AF_UNIX, prey["path_socket"]))
"""
"""Leaves the names of the attempts that have succeeded in `done`. It gets a `Prey` as JSON, or as PREY."""

PRINTED = ATTEMPTS + "print(json.dumps(done))\n"

TENSORS = """
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_STRING dims: 1 }
"""


def python(prey: Prey) -> Files:
    """Return a Python model that answers with the attempts that have succeeded."""
    code = f"PREY = {asdict(prey)!r}\n{ATTEMPTS}" + (
        "import numpy as np\nimport triton_python_backend_utils as utils\n\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        text = np.array([json.dumps(done).encode()], object)\n"
        "        return [utils.InferenceResponse([utils.Tensor('Y', text)]) for _ in requests]\n"
    )
    return {"config.pbtxt": b'backend: "python"' + TENSORS.encode(), "1/model.py": code.encode()}


def _torchscript(line: str) -> Files:
    import torch

    class Hostile(torch.jit.ScriptModule):  # each has a class of its own
        pass

    module = Hostile()
    module.define(f"def forward(self, X):\n    {line}\n    return Y\n")
    content = io.BytesIO()
    torch.jit.save(module, content)
    config = """backend: "pytorch"
    input { name: "X" data_type: TYPE_FP32 dims: 1 }
    output { name: "Y" data_type: TYPE_FP32 dims: -1 }
    """
    return {"config.pbtxt": config.encode(), "1/model.pt": content.getvalue()}


def torchscript_reads(prey: Prey) -> Files:
    """Return TorchScript that answers with the secret."""
    return _torchscript(f"Y = torch.from_file({prey.secret!r}, False, {prey.size}, dtype=0).to(6)")


def torchscript_writes(prey: Prey) -> Files:
    return _torchscript(f"Y = torch.from_file({prey.written!r}, True, 4, dtype=0).to(6) + X.sum()")


_TENSORFLOW = f"""
import os
import sys
import keras
import tensorflow as tf

folder = sys.argv[1]


def read(X):
    return {{"Y": tf.map_fn(tf.io.read_file, X)}}


def write(X):
    with tf.control_dependencies([tf.io.write_file(X[0], "x")]):
        return {{"Y": tf.identity(X)}}


for call in (read, write):
    module = tf.Module()
    module.call = tf.function(call, input_signature=[tf.TensorSpec([1], tf.string, name="X")])
    tf.saved_model.save(module, f"{{folder}}/{{call.__name__}}", signatures=module.call)
code = lambda x: (open({KERAS_WRITES!r}, "w").close(), x)[1]
keras.Sequential([keras.Input((1,), name="X"), keras.layers.Lambda(code, name="Y")]).save(f"{{folder}}/lambda.keras")
os.remove({KERAS_WRITES!r})  # Keras calls it once
"""


def make_tensorflow(folder: Path) -> None:
    """Make the models of TensorFlow, in a process that imports it."""
    done = subprocess.run([sys.executable, "-c", _TENSORFLOW, str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def _of_tensorflow(prey: Prey, name: str, place: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as empty:
        if not prey.tensorflow:
            make_tensorflow(Path(empty))
        root = Path(prey.tensorflow or empty) / name
        paths = [root, *sorted(root.rglob("*"))]
        return {
            f"1/{place}{path.relative_to(root) if path != root else ''}": path.read_bytes()
            for path in paths
            if path.is_file()
        }


def _saved_model(prey: Prey, name: str) -> Files:
    config = """platform: "tensorflow_savedmodel"
    input { name: "X" data_type: TYPE_STRING dims: 1 }
    output { name: "Y" data_type: TYPE_STRING dims: 1 }
    """
    return {**_of_tensorflow(prey, name, "model.savedmodel/"), "config.pbtxt": config.encode()}


def saved_model_reads(prey: Prey) -> Files:
    """Return a SavedModel that answers with the content of the file that X names."""
    return _saved_model(prey, "read")


def saved_model_writes(prey: Prey) -> Files:
    return _saved_model(prey, "write")


def keras_lambda(prey: Prey) -> Files:
    """Return a Keras model with Python code in it, which creates `KERAS_WRITES`."""
    return _of_tensorflow(prey, "lambda.keras", "model.keras")


class _Reduced:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, (self.code,)


def pickled(prey: Prey) -> Files:
    config = b'backend: "sklearn" parameters { key: "TRUSTED" value { string_value: "true" } }'
    return {"config.pbtxt": config, "1/model.pkl": pickle.dumps(_Reduced(f"open({prey.written!r}, 'w').close()"))}


def onnx_outside(prey: Prey) -> Files:
    """Return an ONNX model whose weights are the secret."""
    from onnx import TensorProto, helper

    weights = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[prey.size], data_location=TensorProto.EXTERNAL)
    place = "../" * 20 + prey.secret.lstrip("/")
    for key, value in (("location", place), ("offset", "0"), ("length", str(prey.size))):
        weights.external_data.add(key=key, value=value)
    ends = [("X", TensorProto.FLOAT, [1]), ("Y", TensorProto.UINT8, [prey.size])]
    tensors = [helper.make_tensor_value_info(*end) for end in ends]
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["Y"])], "g", tensors[:1], tensors[1:], [weights])
    return {"1/model.onnx": helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()}


def _identity() -> bytes:
    graph = GraphWriter()
    graph.input("X", DataType.FP32, [1])
    graph.node("Identity", ["X"], "Y")
    graph.output("Y", DataType.FP32, [1])
    return graph.model()


def onnx_library(prey: Prey) -> Files:
    config = b'backend: "onnxruntime" model_operations { op_library_filename: "1/operators" }'
    return {"config.pbtxt": config, "1/model.onnx": _identity(), "1/operators": b"\x7fELF"}


def onnx_strategy(prey: Prey) -> Files:
    code = f"open({prey.written!r}, 'w').close()\n"
    config = b"""backend: "onnxruntime" dynamic_batching {}
    parameters { key: "BATCHING_STRATEGY" value { string_value: "strategy.txt" } }"""
    return {"config.pbtxt": config, "1/model.onnx": _identity(), "strategy.txt": code.encode()}


def openvino_cache(prey: Prey) -> Files:
    """Return a model for OpenVINO that writes its cache elsewhere."""
    config = f'backend: "openvino" parameters {{ key: "CACHE_DIR" value {{ string_value: "{prey.written}" }} }}'
    return {"config.pbtxt": config.encode(), "1/model.onnx": _identity()}


def openvino_library(prey: Prey) -> Files:
    """Return a model for OpenVINO with a library of operators."""
    config = (
        f'backend: "openvino" parameters {{ key: "CPU_EXTENSION_PATH" value {{ string_value: "{prey.written}" }} }}'
    )
    return {"config.pbtxt": config.encode(), "1/model.onnx": _identity()}


def tensorrt_plan(prey: Prey) -> Files:
    """Return a TensorRT plan, which holds machine code."""
    return {"1/model.plan": b"ptrt"}


def agent(prey: Prey) -> Files:
    config = b'backend: "onnxruntime" model_repository_agents { agents { name: "own" } }'
    return {"config.pbtxt": config, "1/model.onnx": _identity()}


def llama_projector(prey: Prey) -> Files:
    """Return a GGUF model whose parameters, in a file, name another file."""
    return {"1/model.gguf": b"GGUF", "1/model.json": json.dumps({"mmproj": "../../../../x.gguf"}).encode()}


HOSTILE = (
    HostileModel("python", "", python),
    HostileModel("torchscript that reads", "torch", torchscript_reads),
    HostileModel("torchscript that writes", "torch", torchscript_writes),
    HostileModel("saved model that reads", "tensorflow", saved_model_reads, path="secret"),
    HostileModel("saved model that writes", "tensorflow", saved_model_writes, path="written"),
    HostileModel("keras lambda", "keras", keras_lambda),
    HostileModel("pickle", "sklearn", pickled),
    HostileModel("onnx with weights outside", "onnx", onnx_outside),
    HostileModel("onnx with a library", "", onnx_library),
    HostileModel("onnx with a batching strategy", "", onnx_strategy),
    HostileModel("openvino with a cache", "openvino", openvino_cache),
    HostileModel("openvino with a library", "openvino", openvino_library),
    HostileModel("tensorrt plan", "", tensorrt_plan, served=False),
    HostileModel("repository agent", "", agent, served=False),
    HostileModel("llama.cpp with a projector outside", "", llama_projector, served=False),
)
"""All of them."""
