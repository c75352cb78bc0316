"""The report of `charonia doctor` as text and JSON, and the checks of this machine.

They are about interpreter, cores, memory, limits, ports, GPUs, frameworks and packages.
"""

import importlib
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from charonia import compiled
from charonia.config.backends import Package, records
from charonia.install_hint import extra_hint
from charonia.server.backends.registry import install_hint
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.gpus import Nvml, visible_gpus
from charonia.server.machine.memory import usable_memory
from charonia.server.options import GrpcOptions, HttpOptions, MetricsOptions
from charonia.version import __version__


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        problem: Its problem, "" for none.
    """

    name: str
    value: str
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A group of checks."""

    title: str
    findings: tuple[Check, ...]


def problem_count(sections: list[Section]) -> int:
    return sum(bool(finding.problem) for section in sections for finding in section.findings)


def to_text(sections: list[Section]) -> str:
    """Return the report as text for a terminal."""
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title] if lines else [section.title]
        width = max((len(finding.name) for finding in section.findings), default=0)
        for finding in section.findings:
            mark = "!" if finding.problem else " "
            lines.append(f"{mark} {finding.name:<{width}}  {finding.value}".rstrip())
            lines += [f"  {'':<{width}}  {text}" for text in finding.problem.splitlines()]
            lines += [f"  {'':<{width}}  hint: {finding.hint}"] if finding.hint else []
    return "\n".join(lines)


def to_json(sections: list[Section]) -> dict[str, object]:
    """Return the report as JSON: a list of findings by section, those without a problem without that field."""
    return {
        section.title: [
            {key: value for key in ("name", "value", "problem", "hint") if (value := getattr(finding, key))}
            for finding in section.findings
        ]
        for section in sections
    }


def bytes_text(size: float) -> str:
    """Return a number of bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


DISTRIBUTION_PREFIX = "/usr"
"""Prefix of the interpreters of distributions, which build them with profile-guided optimisation."""

OPEN_FILES_MIN = 4096
"""Connections soon use up a lower limit of open files."""

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_MIN = 64 * 1024 * 1024

TOOLS = (
    Package("skl2onnx", "skl2onnx", "convert", purpose="charonia convert"),
    Package("nvidia-ml-py", "pynvml", "gpu", purpose="metrics of GPUs"),
    Package("tritonclient", "tritonclient", "demo", purpose="the demo"),
)
"""Packages that no backend needs."""

COMPILERS = ("g++", "clang++", "c++")

_OPTION = "--enable-optimizations"


def is_optimised(prefix: str = sys.base_prefix, arguments: str | None = None) -> bool:
    """Whether the interpreter was probably built with profile-guided optimisation.

    Args:
        arguments: Arguments of `configure` in its build; None for those of this interpreter.

    Source: Python's "Using Python on Unix platforms", performance options of `configure`.
    """
    if arguments is None:
        arguments = sysconfig.get_config_var("CONFIG_ARGS")
    return not arguments or _OPTION in arguments or prefix == DISTRIBUTION_PREFIX


def check_machine() -> list[Section]:
    """Return the checks of this machine. Takes seconds where PyTorch is installed."""
    return [
        Section("Machine", tuple(_machine())),
        Section("GPUs", tuple(gpus(Nvml.find(), visible_gpus()))),
        Section("Frameworks", tuple(_frameworks())),
        Section("Packages", tuple(packages())),
    ]


def _machine() -> Iterator[Check]:
    yield Check(
        "charonia", f"{__version__}, {compiled.form}", compiled.problem, compiled.HINT if compiled.problem else ""
    )
    yield python_finding(is_optimised())
    cores, usable = os.cpu_count() or 1, usable_cores()
    limit = "" if usable == cores else f", of which this process may use {usable}"
    yield Check("cores", f"{cores}{limit}")
    memory, most = psutil.virtual_memory(), usable_memory()
    limit = "" if most >= memory.total else f", limited to {bytes_text(most)}"
    yield Check("memory", f"{bytes_text(memory.total)}{limit}, {bytes_text(memory.available)} free")
    yield _open_files()
    yield from _shared_memory()
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), "")
    yield Check("C++ compiler", compiler or "none: needed for torch.compile only")
    for port in (HttpOptions().port, GrpcOptions().port, MetricsOptions().port):
        yield port_finding(port)


def python_finding(is_optimised: bool) -> Check:
    """Return version and build of the interpreter."""
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if is_optimised:
        return Check("python", value)
    return Check(
        "python", f"{value}, built without optimisation: small requests take a tenth more CPU time",
        hint="take another build; for pyenv: PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto' pyenv install",
    )  # fmt: skip


def _open_files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES_MIN:
        return Check("open files", "no limit" if hard == resource.RLIM_INFINITY else str(hard))
    return Check("open files", str(hard), "each connection takes one", "raise the limit: ulimit -n, or LimitNOFILE=")


def _shared_memory() -> Iterator[Check]:
    if os.path.isdir(SHARED_MEMORY):
        usage = shutil.disk_usage(SHARED_MEMORY)
        value = f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}"
        is_small = usage.free < SHARED_MEMORY_MIN
        problem = "clients that put tensors there need more; the server itself uses none of it" if is_small else ""
        yield Check("shared memory", value, problem, "docker run --shm-size" if is_small else "")


def port_finding(port: int) -> Check:
    """Return whether a port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Check(f"port {port}", "in use")
    return Check(f"port {port}", "free")


def gpus(nvml: Nvml | None, device_files: int, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield the checks of GPUs.

    Args:
        nvml: NVIDIA's library, None where it is missing or does not answer.
    """
    if nvml is None:
        if device_files == 0:
            yield Check("NVIDIA", "none: there are no device files of a driver")
        elif _installed("nvidia-ml-py"):
            yield Check("NVIDIA", f"{device_files}", "the driver does not answer", "do driver and libraries match?")
        else:
            yield Check(
                "NVIDIA", f"{device_files}", "nothing can be read: nvidia-ml-py is not installed",
                extra_hint("gpu"),
            )  # fmt: skip
    else:
        driver, cuda = nvml.driver()
        yield Check("driver", f"{driver}, runs CUDA up to {cuda}")
        for device in nvml.devices():
            capability = f", compute capability {device.capability}" if device.capability else ""
            memory = bytes_text(device.memory_bytes)
            yield Check(f"GPU {device.index}", f"{device.name}, {memory}{capability}, {device.uuid}")
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        yield Check("CUDA_VISIBLE_DEVICES", allowed or '""')


def _frameworks() -> Iterator[Check]:
    yield onnxruntime_finding(_module("onnxruntime"))
    yield from torch_findings(_module("torch"), visible_gpus())


def onnxruntime_finding(module: Any) -> Check:
    """Return version and providers of ONNX Runtime."""
    if isinstance(module, str):
        return Check("ONNX Runtime", "not usable", module)
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in module.get_available_providers())
    return Check("ONNX Runtime", f"{module.__version__}, providers {providers}")


def torch_findings(module: Any, gpu_count: int) -> Iterator[Check]:
    """Yield the build and the threads of PyTorch, and whether it can use the GPUs."""
    if isinstance(module, str):
        yield Check("PyTorch", f"none ({module}): needed for PyTorch models only")
        return
    cuda = module.version.cuda
    build = f"CUDA {cuda}" if cuda else f"ROCm {module.version.hip}" if module.version.hip else "CPU only"
    count = module.cuda.device_count() if module.cuda.is_available() else 0
    problem = hint = ""
    if gpu_count > 0 and count == 0:
        problem = "it cannot use the GPUs of this machine"
        hint = "install a CUDA build of PyTorch" if build == "CPU only" else "is the driver new enough for its CUDA?"
    yield Check("PyTorch", f"{module.__version__}, {build}, GPUs {count}", problem, hint)
    yield Check("PyTorch threads", f"{module.get_num_threads()} by itself; the server sets the share of each instance")


def _module(name: str) -> Any:
    """Return a module, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == name else f"{error}"
    except (ImportError, OSError) as error:  # a library that it needs is missing
        return str(error)


def packages() -> Iterator[Check]:
    """Yield the version of each optional package, or what it is for and how it is installed."""
    known = [package for record in records() for package in record.packages if package.purpose]
    for package in (*known, *TOOLS):
        found = _installed(package.name) or _installed(f"{package.name}-cpu")  # a build of the same library
        yield Check(package.name, found or f"none: for {package.purpose}, {install_hint(package)}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
