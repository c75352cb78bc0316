"""What people do wrong in their first hours, and the sentence that tells them.

Each row is a mistake and a part of the first line that is said about it. The sentence names what was expected or what
to do, so that no mistake takes two tries.
"""

import http.client
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, add_sub, identity, write_model

import charonia
from charonia.cli.main import main
from charonia.client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.server.backends.python.worker import triton_python_backend_utils as pb_utils
from charonia.server.backends.python.worker.errors import describe
from charonia.server.backends.python.worker.imports import ModelImports

IN_A_THREAD = 'parameters { key: "EXECUTION_MODE" value { string_value: "thread" } }'
TENSORS = (
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }'
)
ROW = [0.5] * 16
FORM = "application/x-www-form-urlencoded"

BODY = (
    'a body for this model: {"inputs":[{"name":"INPUT0","shape":[1,16],"datatype":"FP32","data":['
    + ",".join(["0.5"] * 16)
    + "]},"
)


class Mistake(NamedTuple):
    """A mistake: what was done, in words; how; and the sentence that answers it."""

    what: str
    how: Any
    sentence: str


def tensor(name: object = "INPUT0", **changed: object) -> dict[str, object]:
    """Return an input of `add_sub`, with some members changed."""
    return {"name": name, "shape": [1, 16], "datatype": "FP32", "data": ROW} | changed


def inputs(**changed: object) -> dict[str, object]:
    """Return a body for `add_sub`, with some members of its first input changed."""
    return {"inputs": [tensor() | changed, tensor("INPUT1")]}


ADD_SUB = "/v2/models/add_sub"

REQUESTS = [
    Mistake("no body", (f"{ADD_SUB}/infer", b""), BODY),
    Mistake("JSON that is cut off", (f"{ADD_SUB}/infer", b'{"inputs": ['), "unexpected end of data: line 1 column 13"),
    Mistake("a list for the body", (f"{ADD_SUB}/infer", []), f"expected an object, got an array (hint: {BODY}"),
    Mistake("`input` for `inputs`", (f"{ADD_SUB}/infer", {"input": [tensor()]}), BODY),
    Mistake("`instances`, as for other servers", (f"{ADD_SUB}/infer", {"instances": [ROW]}), BODY),
    Mistake("names as keys, at infer", (f"{ADD_SUB}/infer", {"INPUT0": ROW, "INPUT1": ROW}), BODY),
    Mistake(
        "inputs as an object",
        (f"{ADD_SUB}/infer", {"inputs": {"INPUT0": ROW}}),
        "'inputs' for model 'add_sub': expected an array, got an object",
    ),
    Mistake("`dtype` for `datatype`", (f"{ADD_SUB}/infer", inputs(datatype=None, dtype="FP32")), BODY),
    Mistake(
        "numpy's name of a datatype", (f"{ADD_SUB}/infer", inputs(datatype="float32")), "none of BOOL, UINT8, UINT16"
    ),
    Mistake(
        "another datatype",
        (f"{ADD_SUB}/infer", inputs(datatype="FP64")),
        "input 'INPUT0' data-type is 'FP64', but model 'add_sub' expects 'FP32'",
    ),
    Mistake("no shape", (f"{ADD_SUB}/infer", inputs(shape=None)), "'shape' must be an array of integers, got nothing"),
    Mistake(
        "no batch dimension",
        (f"{ADD_SUB}/infer", inputs(shape=[16])),
        "Expected [-1,16], got [16] (hint: the first dimension is the batch: [1,16] is one row)",
    ),
    Mistake(
        "-1 as a dimension", (f"{ADD_SUB}/infer", inputs(shape=[-1, 16])), "must be a non-negative integer, got -1"
    ),
    Mistake(
        "a shape that does not fit the data",
        (f"{ADD_SUB}/infer", inputs(shape=[1, 15])),
        "input 'INPUT0' of shape [1, 15] has 15 elements, got 16",
    ),
    Mistake(
        "text for numbers",
        (f"{ADD_SUB}/infer", inputs(data=[*ROW[1:], "a"])),
        "data' of input 'INPUT0': expected a number (FP32), got \"a\" at index 15",
    ),
    Mistake("no data", (f"{ADD_SUB}/infer", inputs(data=None)), "Input 'INPUT0' sets 0 of them."),
    Mistake(
        "one input of two",
        (f"{ADD_SUB}/infer", {"inputs": [tensor()]}),
        "missing required input(s) ['INPUT1']",
    ),
    Mistake(
        "a misspelt input",
        (f"{ADD_SUB}/infer", inputs(name="INPUT_0")),
        "unexpected inference input 'INPUT_0' for model 'add_sub' (hint: its inputs are ['INPUT0', 'INPUT1'])",
    ),
    Mistake(
        "a misspelt output",
        (f"{ADD_SUB}/infer", inputs() | {"outputs": [{"name": "OUTPUT"}]}),
        "unexpected inference output 'OUTPUT' for model 'add_sub' (hint: its outputs are ['OUTPUT0', 'OUTPUT1'])",
    ),
    Mistake(
        "outputs as names", (f"{ADD_SUB}/infer", inputs() | {"outputs": ["OUTPUT0"]}), "expected objects, got a string"
    ),
    Mistake(
        "a batch above the limit",
        (f"{ADD_SUB}/infer", {"inputs": [tensor(n, shape=[8, 16], data=ROW * 8) for n in ("INPUT0", "INPUT1")]}),
        "got 8 (hint: max_batch_size in the configuration sets the limit, --max-batch-size that of files",
    ),
    Mistake(
        "a file upload",
        (f"{ADD_SUB}/infer", b"--x\r\n\xff\xd8", "multipart/form-data; boundary=x"),
        "expected the inputs as JSON, got a body of type 'multipart/form-data' (hint: a body for this model",
    ),
    Mistake("a form", (f"{ADD_SUB}/infer", b"INPUT0=1&INPUT1=2", FORM), f"got a body of type '{FORM}'"),
    Mistake(
        "JSON that is cut off, as curl -d sends it",
        (f"{ADD_SUB}/infer", b' {"inputs": [', FORM),
        "unexpected end of data: line 1 column 14",
    ),
    Mistake(
        "a picture as the body", (f"{ADD_SUB}/infer", b"\x89PNG\r\n", "image/png"), "got a body of type 'image/png'"
    ),
    Mistake(
        "a body for a model with a large input",
        ("/v2/models/large/infer", {"x": 1}),
        '"data": ELEMENTS}]}; the inputs of this model are INPUT0 FP32 [-1, 3, 224, 224]',
    ),
    Mistake(
        "a misspelt model, with a body that is wrong, too",
        ("/v2/models/addsub/infer", b"{"),
        "unknown model: 'addsub' is not found (hint: did you mean 'add_sub'?)",
    ),
    Mistake(
        "a model of another server",
        ("/v2/models/resnet50/infer", b"{"),
        "unknown model: 'resnet50' is not found (hint: models that are ready: add_sub, bytes, large, misnamed)",
    ),
    Mistake(
        "a picture with its channels last",
        ("/v2/models/large/infer", {"inputs": [tensor(shape=[1, 224, 224, 3], data=[0] * 3 * 224 * 224)]}),
        "got [1,224,224,3] (hint: the model takes channels first: transpose the array to [1,3,224,224])",
    ),
    Mistake(
        "a feature that is missing",
        (f"{ADD_SUB}/infer", {"inputs": [tensor(n, shape=[1, 15], data=ROW[:15]) for n in ("INPUT0", "INPUT1")]}),
        "Expected [-1,16], got [1,15] (hint: dimension 1 is 16, not 15)",
    ),
    Mistake(
        "a dimension too many",
        (f"{ADD_SUB}/infer", {"inputs": [tensor(n, shape=[1, 1, 16]) for n in ("INPUT0", "INPUT1")]}),
        "got [1,1,16] (hint: it has 2 dimensions, the first for the batch)",
    ),
    Mistake(
        "a text for an array",
        (f"{ADD_SUB}/infer", inputs(data="hello")),
        "'data' of input 'INPUT0': expected a number (FP32), got \"hello\"",
    ),
    Mistake(
        "a text for an array, at generate",
        (f"{ADD_SUB}/generate", {"INPUT0": "hello", "INPUT1": ROW}),
        "'data' of input 'INPUT0': expected a number (FP32), got \"hello\"",
    ),
    Mistake(
        "a version that is not there",
        (f"{ADD_SUB}/versions/3/infer", inputs()),
        "'add_sub' version 3 is not found (hint: versions that are ready: 1)",
    ),
    Mistake(
        "a word for a version",
        ("/v2/models/add_sub/versions/latest/infer", inputs()),
        "model 'add_sub': expected a number for the version, got 'latest' (hint: versions that are ready: 1)",
    ),
    Mistake(
        "the path of another server",
        ("/v1/models/add_sub:predict", {"instances": [ROW]}),
        "there is nothing to POST to at /v1/models/add_sub:predict (hint: POST /v2/models/add_sub/infer takes tensors",
    ),
    Mistake("GET for POST", (f"{ADD_SUB}/infer", None), "method GET is not allowed here (hint: allowed: POST)"),
    Mistake(
        "a misspelt input at generate",
        (f"{ADD_SUB}/generate", {"INPUT_0": ROW, "INPUT1": ROW}),
        "model 'add_sub' has no input 'INPUT_0', and the request lacks INPUT0 "
        "(hint: its inputs are INPUT0, INPUT1; did you mean 'INPUT0'?)",
    ),
    Mistake(
        "the body of infer at generate",
        (f"{ADD_SUB}/generate", inputs()),
        "model 'add_sub' has no input 'inputs', and the request lacks INPUT0, INPUT1 (hint: its inputs",
    ),
    Mistake(
        "too few elements at generate",
        (f"{ADD_SUB}/generate", {"INPUT0": [1, 2], "INPUT1": ROW}),
        "input 'INPUT0' to tensor with proper shape: its shape is [-1, 16], got 2 elements",
    ),
    Mistake(
        "an output that the configuration names otherwise",
        ("/v2/models/misnamed/generate", {"INPUT0": ROW}),
        "the model returned RESULT; RESULT is dropped, as the configuration has only OUTPUT0",
    ),
]

UNCLOSED = f"max_batch_size: 4\ndynamic_batching {{\n  max_queue_delay_microseconds: 100\n\n{TENSORS}\n"
NESTED = "max_batch_size: 4\noptimization {\n  graph {\n    level: 1\n}\n"
STEP = 'step { model_name: "add_sub" input_map { key: "INPUT0" value: "A" } output_map { key: "OUTPUT0" value: "C" } }'

CONFIGURATIONS = [
    Mistake("a brace without an end", UNCLOSED, "the brace in line 2, 'dynamic_batching {', is not closed"),
    Mistake("an inner brace without an end", NESTED, "the brace in line 3, 'graph {', is not closed"),
    Mistake(
        "a misspelt field", "max_batchsize: 4", "has no field 'max_batchsize' (hint: did you mean 'max_batch_size'?)"
    ),
    Mistake("a text without quotes", "backend: onnxruntime", 'texts stand in quotes: "onnxruntime"'),
    Mistake("a word in quotes", 'instance_group { kind: "KIND_CPU" }', "write KIND_CPU without quotes"),
    Mistake("a datatype as requests have it", "input { data_type: FP32 }", "(hint: did you mean TYPE_FP32?)"),
    Mistake("a dimension of any size as ?", "input { dims: ? }", "a dimension of any size is -1"),
    Mistake("JSON", '{"max_batch_size": 4}', "this is JSON; config.pbtxt holds fields without braces around them"),
    Mistake("another name than the folder's", 'name: "other"', "leave `name` out of the configuration"),
    Mistake(
        "a misspelt input",
        f"max_batch_size: 4 {TENSORS.replace('INPUT0', 'INPUT')}",
        "input[0].name: unexpected inference input 'INPUT', allowed inputs are: INPUT0",
    ),
    Mistake(
        "another datatype than the model's",
        TENSORS.replace("TYPE_FP32", "TYPE_INT32", 1) + "max_batch_size: 4",
        "configuration expects datatype TYPE_INT32 for input 'INPUT0', model provides TYPE_FP32",
    ),
    Mistake(
        "another size than the model's",
        TENSORS.replace("dims: 16", "dims: 8", 1) + "max_batch_size: 4",
        "the model expects shape [-1, 16] but the model configuration specifies shape [-1, 8], where the first",
    ),
    Mistake(
        "the batch among the dimensions",
        TENSORS.replace("dims: 16", "dims: [-1, 16]") + "max_batch_size: 4",
        "the model expects 2 dimensions (shape [-1, 16]) but the model configuration specifies 3 dimensions",
    ),
    Mistake(
        "a preferred size above the limit",
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
        "dynamic batching preferred size must be <= max batch size",
    ),
    Mistake(
        "an ensemble without inputs and outputs",
        f'platform: "ensemble" ensemble_scheduling {{ {STEP} }}',
        "2 problems in the model configuration\n  input: must specify 'input' for ensemble",
    ),
    Mistake(
        "the platform of another format",
        'platform: "tensorrt_plan"',
        'the version\'s folder holds model.onnx: leave out platform and backend, or write backend: "onnxruntime"',
    ),
    Mistake("a misspelt backend", 'backend: "onnx"', 'or write backend: "onnxruntime"'),
    Mistake("an unknown platform", 'platform: "onnx"', "known are tensorflow_savedmodel"),
    Mistake(
        "a GPU where there is none",
        "instance_group { kind: KIND_GPU }",
        "KIND_GPU but no GPUs are available; KIND_CPU or no kind runs it here, `charonia doctor` looks for GPUs",
    ),
    Mistake(
        "an accelerator for GPUs where there is none",
        'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
        "gpu_execution_accelerator tensorrt has no effect: no instance of the model runs on a GPU",
    ),
]
"""Each is the configuration of an ONNX model with INPUT0 and OUTPUT0, FP32 of 16 elements, that batches."""

FILES = [
    Mistake("a package that is not there", "import not_there", "'model.py' cannot be imported: ModuleNotFoundError"),
    Mistake("the same: what to do", "import not_there", "add the line 'not_there' to requirements.txt"),
    Mistake(
        "the same, for a service file", "import not_there", "or to the dependencies at the start of a service file"
    ),
    Mistake("a package with another name", "raise ModuleNotFoundError(name='cv2')", "'opencv-python-headless'"),
    Mistake(
        "a syntax error", "x = (", "'model.py' cannot be imported: SyntaxError: '(' was never closed (model.py, line 1)"
    ),
    Mistake("an exception in the file", "1 / 0", "'model.py' cannot be imported: ZeroDivisionError: division by zero"),
    Mistake(
        "no class", "class Model: pass", "no class TritonPythonModel, and no function or class with @charonia.model"
    ),
]
"""Each is the text of a model.py."""

COMMANDS = [
    Mistake("a misspelt command", ["serv"], "unknown command 'serv' (hint: did you mean serve?)"),
    Mistake("an option before the command", ["--port", "80"], "options follow the command: charonia serve --port"),
    Mistake("no path", ["serve"], "--model-repository must be specified, e.g. `charonia serve models`"),
    Mistake("an underscore", ["serve", "--metrics_port", "80", "m"], "(hint: did you mean --metrics-port?)"),
    Mistake("TensorFlow Serving's path", ["serve", "--model_base_path=/m"], "(hint: charonia serve PATH, the folder"),
    Mistake("TensorFlow Serving's port", ["serve", "--rest_api_port=80", "m"], "(hint: --http-port)"),
    Mistake("vLLM's model", ["serve", "--model", "m"], "(hint: charonia serve PATH, the folder or file itself)"),
    Mistake("a device", ["serve", "--device", "cuda", "m"], "instance_group in a model's config.pbtxt says where"),
    Mistake("Uvicorn's log level", ["serve", "--log-level", "debug", "m"], "(hint: --log-verbose=1 logs more)"),
    Mistake("a port in words", ["serve", "--http-port", "abc", "m"], "expected an integer from 0 to 65535, got 'abc'"),
    Mistake(
        "a misspelt mode",
        ["serve", "--model-control-mode=explict", "m"],
        "expected none or poll or explicit or auto, got 'explict'",
    ),
    Mistake("a model to load, in another mode", ["serve", "--load-model", "m", "r"], "'--model-control-mode=explicit'"),
    Mistake("a key without scopes", ["key", "ci"], "expected SCOPES, got none"),
    Mistake("perf without a model", ["perf"], "expected the name of a model, got none (hint: charonia perf -m NAME"),
    Mistake(
        "a range that ends before it begins", ["perf", "-m", "m", "--concurrency-range", "4:1"], "at least 4, got 1"
    ),
    Mistake("a file that is not there", ["serve", "/not/there.onnx"], "there is no file '/not/there.onnx'"),
    Mistake("a folder that is not there", ["config", "/not/there"], "model folder '/not/there': no such folder"),
    Mistake(
        "the same, with doctor", ["doctor", "/not/there.onnx"], "charonia doctor: there is no file '/not/there.onnx'"
    ),
    Mistake("no server", ["infer", "m", "-u", "localhost:1"], "Connection refused (hint: -u names the address of a"),
    Mistake("a value without a name", ["infer", "m", "-i", "x"], "--input: expected NAME=VALUE, got 'x'"),
    Mistake("two kinds of code", ["infer", "m", "--curl", "--python"], "--curl, --python: expected one of them"),
    Mistake("another scheme", ["explain", "m", "-u", "ftp://a"], "expected HOST:PORT, or a URL of http or https"),
    Mistake(
        "perf of a model's name", ["perf", "resnet"], "no file or folder 'resnet' (hint: a model of a running server is"
    ),
    Mistake("perf of a file elsewhere", ["perf", "m.onnx", "-u", "a:1"], "--url: expected none, as 'm.onnx' is served"),
    Mistake("an empty batch", ["perf", "-m", "m", "-b", "0"], "--batch-size: expected an integer from 1 to 2147483647"),
    Mistake("another protocol", ["perf", "-m", "m", "-i", "rest"], "--protocol: expected http or grpc, got 'rest'"),
    Mistake("a stream over HTTP", ["perf", "-m", "m", "--streaming"], "--streaming: expected -i grpc with it, got -i"),
    Mistake("tune of a file elsewhere", ["tune", "m.onnx"], "charonia tune: there is no file or folder 'm.onnx'"),
    Mistake("explain of a file elsewhere", ["explain", "m.onnx", "-u", "a:1"], "no charonia server answers at"),
    Mistake("a misspelt subcommand", ["tune", "profil"], "unknown subcommand 'profil' (hint: did you mean profile?)"),
    Mistake(
        "tune without models", ["tune", "--profile-models", "m"], "--model-repository: expected a folder, got none"
    ),
    Mistake(
        "nothing to apply yet",
        ["tune", "apply", "-e", "/not/there"],
        "charonia-tune.json' does not exist (hint: charonia tune profile writes it; -e names the folder that it is in)",
    ),
    Mistake("a name with a slash", ["serve", "m.onnx", "--name=a/b"], "--name: expected a name without '/'"),
    Mistake("options of files for a repository", ["serve", "m", "--workers=2"], "--workers: expected a file to serve"),
    Mistake("a negative batch", ["serve", "m.onnx", "--max-batch-size=-1"], "expected an integer from 0 to 2147483647"),
    Mistake("a port that is too large", ["serve", "m", "--http-port", "70000"], "from 0 to 65535, got '70000'"),
    Mistake("a process that is not there", ["upgrade", "99999999"], "process 99999999 does not exist"),
    Mistake("conversion of nothing", ["convert", "/not/there.pt"], "there is no file or folder '/not/there.pt'"),
    Mistake("no action", ["traffic", "m"], "expected one of status, set, canary, pause, resume, promote, abort, reset"),
]

NOT_ONNX = {"net.onnx": "<html>"}
NO_NAME = "import charonia\n\n@charonia.model\ndef f(x: int) -> int:\n    return y\n"
WHOLE = STEP.replace('"A"', '"INPUT0"').replace('"C"', '"OUTPUT0"')
IN_ENSEMBLES = {
    "models/add_sub/1/model.py": PYTHON_IDENTITY,
    "models/add_sub/config.pbtxt": f"{TENSORS} max_batch_sise: 4",
    **{f"models/{name}/1/.keep": "" for name in ("first", "second")},
    **{
        f"models/{name}/config.pbtxt": f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {WHOLE} }}'
        for name in ("first", "second")
    },
}

STARTS = [
    Mistake("a file that is not what its name says", ("net.onnx", NOT_ONNX), "cannot load net.onnx: "),
    Mistake("the page of a download", ("net.onnx", NOT_ONNX), "the file is an HTML page: the download needed a login"),
    Mistake(
        "a compressed file", ("net.onnx.gz", {"net.onnx.gz": "\x1f\x8b"}), "is compressed with gzip (hint: gunzip "
    ),
    Mistake("a misspelt suffix", ("net.onx", NOT_ONNX), "/net.onnx'?)"),
    Mistake("a syntax error in a service file", ("f.py", {"f.py": NO_NAME + "("}), "SyntaxError"),
    Mistake("an error in a service file", ("f.py", {"f.py": NO_NAME + "\nz = y\n"}), "name 'y' is not defined"),
    Mistake("an error in a model of two ensembles", ("models", IN_ENSEMBLES), "did you mean 'max_batch_size'?"),
    Mistake(
        "an exception of a Python model while it is loaded",
        (
            "models",
            {
                "models/m/1/model.py": PYTHON_IDENTITY.replace(
                    "def ", "def initialize(self, args):\n        1 / 0\n\n    def ", 1
                ),
                "models/m/config.pbtxt": f'backend: "python" {TENSORS}',
            },
        ),
        "division by zero",
    ),
]
"""Each is what is served, and the files there: the sentence is in the first line of the only error in the log."""

ARRAY = np.zeros((1, 16), np.float32)
BOTH = {"INPUT0": ARRAY, "INPUT1": ARRAY}

CALLS: list[Mistake] = [
    Mistake("an array without a name", lambda c: c.infer("add_sub", ARRAY), "got ndarray (hint: write {'NAME': value}"),
    Mistake("a list of arrays", lambda c: c.infer("add_sub", [ARRAY] * 2), "expected values by input name, got list"),
    Mistake(
        "a misspelt input",
        lambda c: c.infer("add_sub", {"INPUT": ROW}),
        "model 'add_sub' has no input 'INPUT': it has INPUT0, INPUT1",
    ),
    Mistake(
        "an array of numpy's default dtype",
        lambda c: c.infer("add_sub", BOTH | {"INPUT0": np.zeros((1, 16))}),
        "data-type is 'FP64', but model 'add_sub' expects 'FP32'",
    ),
    Mistake(
        "text in a list of numbers",
        lambda c: c.infer("add_sub", BOTH | {"INPUT0": [[*ROW[1:], "a"]]}),
        "input 'INPUT0': expected a number (FP32), got \"a\" at index 15",
    ),
    Mistake(
        "a number that its datatype cannot hold",
        lambda c: c.infer("bytes", {"INPUT0": [[1, 300]]}),
        "input 'INPUT0': expected an integer from -128 to 127 (INT8), got 300 at index 1",
    ),
    Mistake(
        "a model to load that is not there",
        lambda c: c.load_model("nowhere"),
        "failed to load 'nowhere', failed to poll from model repository",
    ),
    Mistake("one name for a list", lambda c: c.infer("add_sub", BOTH, outputs="OUTPUT0"), "(hint: write ['OUTPUT0'])"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models that work, and one for each mistake in a configuration."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "add_sub", add_sub(), config="max_batch_size: 4")
    write_model(folder, "bytes", identity(DataType.INT8, (2,)), config="max_batch_size: 4")
    write_model(folder, "large", identity(dims=(3, 224, 224)), config="max_batch_size: 4")
    misnamed = PYTHON_IDENTITY.replace('"OUTPUT0"', '"RESULT"')
    write_model(folder, "misnamed", misnamed, config=f'backend: "python" max_batch_size: 4 {TENSORS} {IN_A_THREAD}')
    write_model(folder, "bare", PYTHON_IDENTITY, config=IN_A_THREAD)
    for number, mistake in enumerate(CONFIGURATIONS):
        write_model(folder, f"mistake_{number}", identity(), config=mistake.how)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[charonia.Server]:
    working = ["add_sub", "bytes", "large", "misnamed"]
    with charonia.Server(repository, http=True, control_mode="explicit", load_models=working) as running:
        yield running


def answered(server: charonia.Server, path: str, body: object, content_type: str = "application/json") -> str:
    """Return the body of the answer to a request, which is a GET without a body."""
    connection = http.client.HTTPConnection(server.http_url)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, {"Content-Type": content_type})
        return str(json.loads(connection.getresponse().read()).get("error", ""))
    finally:
        connection.close()


def refused(action: Callable[[], object]) -> str:
    """Return the error that an action ends with, "" for none."""
    try:
        action()
    except ServingError as error:
        return str(error)
    return ""


def first_line(text: str) -> str:
    """Return the first line of an answer; where that counts several problems, with the first of them."""
    first, _, others = text.strip().partition("\n")
    return f"{first}\n{others.splitlines()[0]}" if first.endswith("problems in the model configuration") else first


def rows(mistakes: list[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=[mistake.what for mistake in mistakes])


@rows(REQUESTS)
def test_request(mistake: Mistake, server: charonia.Server, caplog: pytest.LogCaptureFixture) -> None:
    assert mistake.sentence in first_line(answered(server, *mistake.how) or caplog.text)


@rows(CONFIGURATIONS)
def test_configuration(mistake: Mistake, server: charonia.Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    refusal = refused(lambda: server.load(f"mistake_{CONFIGURATIONS.index(mistake)}"))
    assert mistake.sentence in first_line(refusal or caplog.text)


def test_a_python_model_that_nothing_describes(server: charonia.Server, caplog: pytest.LogCaptureFixture) -> None:
    server.load("bare")
    assert "model 'bare' has no inputs and no outputs: config.pbtxt, or auto_complete_config in model.py" in caplog.text


@rows(FILES)
def test_file(mistake: Mistake, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(mistake.how)
    with pytest.raises((ImportError, SyntaxError, ArithmeticError, AttributeError)) as caught:
        ModelImports(str(tmp_path), str(tmp_path), pb_utils, shares_process=True).load(str(path))
    assert mistake.sentence in first_line(describe(caught.value))


@pytest.mark.usefixtures("root_logger")
@rows(COMMANDS)
def test_command(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(mistake.how) != 0
    assert mistake.sentence in first_line(capsys.readouterr().err)


@rows(STARTS)
def test_start(mistake: Mistake, tmp_path: Path) -> None:
    path, files = mistake.how
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))

    done = run_command("serve", path, "--port=0", folder=tmp_path)

    assert done.returncode == 1
    assert done.stderr.count(mistake.sentence) == 1
    [line] = re.findall(r"^(?:E\d{4} |charonia serve: ).*", done.stderr, re.MULTILINE)
    assert mistake.sentence in line


def test_a_request_for_a_model_that_could_not_be_loaded_says_why(server: charonia.Server) -> None:
    mistake = CONFIGURATIONS[2]
    name = f"mistake_{CONFIGURATIONS.index(mistake)}"
    refused(lambda: server.load(name))

    answer = answered(server, f"/v2/models/{name}/infer", inputs())

    assert f"'{name}' has no available versions (hint: " in answer
    assert mistake.sentence in answer


@rows(CALLS)
def test_call(mistake: Mistake, server: charonia.Server) -> None:
    with Client(server.http_url) as client:
        assert mistake.sentence in refused(lambda: mistake.how(client))


def test_the_list_is_worth_its_name() -> None:
    every = [*REQUESTS, *CONFIGURATIONS, *FILES, *COMMANDS, *STARTS, *CALLS]
    assert len(every) >= 120
    assert len(set(map(str, every))) == len(every)
