"""Checks whether this machine has what the models of a repository need. No model is loaded."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.server.backends.registry import check_of, install_hint, installed_backends
from charonia.server.doctor.machine import COMPILERS, Check, Section, bytes_text
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.configure import ConfigureOptions, configure
from charonia.server.lifecycle.repository.scan import ModelFolder, scan
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.gpus import visible_gpus

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
ENVIRONMENT = "EXECUTION_ENV_PATH"


async def examine(
    repositories: Sequence[str], settings: Mapping[str, Mapping[str, str]] | None = None
) -> list[Section]:
    """Return the checks of every model of the repositories.

    Args:
        settings: Settings of `--backend-config`.

    Raises:
        ServingError: A repository cannot be read.
    """
    found = await asyncio.to_thread(scan, repositories, fingerprints=False)
    backends = Backends(installed_backends(None), settings or {})
    needs: list[tuple[ModelConfig, int]] = []
    findings = []
    try:
        for folder in found.models.values():
            finding = await _model(folder, backends, needs)
            findings.append(finding)
    finally:
        await backends.aclose()
    notes = [
        Check(name, "ignored", f"several repositories have it: {', '.join(at)}") for name, at in found.ambiguous.items()
    ]
    notes += [Check("note", note) for note in found.notes]
    return [
        Section("Models", tuple(findings) or (Check("none", "no folder of a model"),)),
        Section("All models together", (*totals(needs), *notes)),
    ]


async def _model(folder: ModelFolder, backends: Backends, needs: list[tuple[ModelConfig, int]]) -> Check:
    options = ConfigureOptions(auto_complete=False, gpu_count=visible_gpus())
    try:
        configured = await configure(folder, backends, options)
    except ServingError as error:
        return Check(folder.name, "cannot be served as it is", error.message, error.hint)
    config = configured.config
    size = await asyncio.to_thread(_bytes, folder.path, configured.versions)
    needs.append((config, size))
    problem, hint = problem_of(config)
    return Check(folder.name, _describe(config, size), problem, hint)


def problem_of(config: ModelConfig) -> tuple[str, str]:
    """Return what this machine lacks for a model, and a hint; empty where it lacks nothing."""
    if config.parameters.get(COMPILE) and not any(shutil.which(name) for name in COMPILERS):
        return "torch.compile needs a C++ compiler, and there is none", "install g++"
    record = record_of(config.backend)
    if record.without_gpu and not visible_gpus():
        return f"backend {record.name} runs on an NVIDIA GPU only, and there is none", record.without_gpu
    if record.check and (refusal := check_of(record)(config)) != ("", ""):
        return refusal
    for package in record.packages:
        if not package.optional and ENVIRONMENT not in config.parameters and find_spec(package.module) is None:
            return f"the model needs the package {package.module}, which is not installed", install_hint(package)
    cores = usable_cores()
    count = sum(group.count for group in config.instance_group if group.kind is not InstanceKind.KIND_GPU)
    if count > cores and record.computes:
        return (
            f"{count} instances compute on {cores} core{'s' if cores > 1 else ''}: they wait for one another",
            f"instance_group {{ count: {cores} }}; `charonia tune` finds the best number",
        )
    return "", ""


def totals(needs: Sequence[tuple[ModelConfig, int]]) -> list[Check]:
    """Return the checks of the total that all models need.

    Args:
        needs: Configuration and bytes of the files of each.
    """
    cpu = sum(size * copies_of(config, on_gpu=False) for config, size in needs)
    gpu = sum(size * copies_of(config, on_gpu=True) for config, size in needs)
    free = psutil.virtual_memory().available
    is_short = cpu > free
    found = [
        Check(
            "memory for weights",
            f"about {bytes_text(cpu)} of {bytes_text(free)} that is free",
            "there is not enough memory for all models at a time" if is_short else "",
            "load some of them (--model-control-mode=explicit), or have fewer instances" if is_short else "",
        )
    ]
    if gpu:
        found.append(Check("memory of GPUs for weights", f"about {bytes_text(gpu)}"))
    return found


def copies_of(config: ModelConfig, *, on_gpu: bool) -> int:
    """Return the number of copies of a model's weights in the memory of the CPU, or of GPUs."""
    groups = [g for g in config.instance_group if (g.kind is InstanceKind.KIND_GPU) is on_gpu]
    shares = config.parameters.get("ENABLE_WEIGHT_SHARING", "").lower() in ("true", "1", "yes", "on")
    if shares or (record_of(config.backend).shares_weights and not on_gpu):
        return len({gpu for g in groups for gpu in (g.gpus or (0,))}) if on_gpu else min(1, len(groups))
    return sum(g.count * max(1, len(g.gpus)) for g in groups)


def _describe(config: ModelConfig, size: int) -> str:
    if config.platform == ENSEMBLE:
        steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
        return f"ensemble of {', '.join(step.model_name for step in steps)}"
    groups = [
        f"{group.count * max(1, len(group.gpus))} x {group.kind.name.removeprefix('KIND_')}"
        for group in config.instance_group
    ]
    return f"{config.backend}, {', '.join(groups)}, files {bytes_text(size)}"


def _bytes(folder: Path, versions: Sequence[int]) -> int:
    return sum(
        os.path.getsize(os.path.join(root, name))
        for version in versions
        for root, _, names in os.walk(folder / str(version))
        for name in names
        if os.path.isfile(os.path.join(root, name))
    )
