"""Finds a model's file, and loads it for a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import torch

from charonia.config.complete import SignatureTensor
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.backends.api import ModelFiles
from charonia.server.backends.pytorch import aoti, eager, exported, torchscript
from charonia.server.backends.pytorch.archive import FileKind, file_kind, has_program
from charonia.server.backends.pytorch.options import EAGER_RUNTIME, RunPlan
from charonia.server.backends.pytorch.program import Leaves, Program
from charonia.server.backends.pytorch.signature import Found, of_exported, of_torchscript, try_outputs

FILES = ("model.pt", "model.pt2")
"""File names tried where the configuration has none."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model.

    Attributes:
        folder: The version's folder.
        path: The model's file; for an eager module its weights, None if it initializes its own.
        kind: Kind of the file, None for an eager module.
    """

    folder: Path
    path: Path | None
    kind: FileKind | None

    def open(self, device: torch.device | None, plan: RunPlan, runners: int = 1) -> Program:
        """Load the model.

        Args:
            device: Device to run on, None where the model decides.
            plan: Options of its run.
            runners: Number of calls that may run concurrently.

        Raises:
            ServingError: With the reason.
        """
        if self.kind is None or self.path is None:
            return eager.load(self.folder, self.path, device, plan)
        if self.kind is FileKind.TORCHSCRIPT:
            return torchscript.load(self.path, device, plan)
        if self.kind is FileKind.EXPORTED:
            return exported.load(self.path, device, plan)
        return aoti.load(self.path, device, plan, runners)

    def inspect(self, config: ModelConfig, plan: RunPlan) -> Found:
        """Return the signature of the model, inferred on the CPU without conversions.

        Raises:
            ServingError: The model cannot be read.
        """
        plan = replace(plan, precision=None, is_channels_last=False, compile_options=None, shares_weights=False)
        signature = self.signature(plan)
        if signature is not None:
            return signature
        given = _configured_inputs(config)
        if self.kind is None and not given:
            return Found(None, ("inputs: could not be inferred, as a module in Python does not say what it takes",))
        program = self.open(None if self.kind is FileKind.AOT_INDUCTOR else torch.device("cpu"), plan)
        if isinstance(program.interface, Leaves):
            places = ", ".join(leaf.place for leaf in program.interface.leaves)
            return Found(None, (f"inputs: datatypes and dims could not be inferred; the package takes {places}",))
        if given or self.path is None:
            return try_outputs(program, given)
        return of_torchscript(self.path, program)

    def signature(self, plan: RunPlan, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Found | None:
        """Return the signature that was exported with the model, None where there is none.

        Args:
            plan: How the model runs.
            inputs: Names of its inputs in the configuration, none for its own.
            outputs: Likewise of its outputs.

        Raises:
            ServingError: The model cannot be read, or the names do not fit.
        """
        is_exported = self.kind is FileKind.EXPORTED
        if self.path is None or not (is_exported or (self.kind is FileKind.AOT_INDUCTOR and has_program(self.path))):
            return None
        program = exported.read(self.path, unpickles=plan.unpickles)
        return of_exported(program, exported.interface_of(program), inputs, outputs)


def find_source(files: ModelFiles, config: ModelConfig) -> Source:
    """Return the files of a model.

    Raises:
        ServingError: INVALID_ARG when the file is missing, or is not a model.
    """
    folder = files.version_dir
    name = config.default_model_filename
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise invalid(f"default_model_filename: must stay within the version's folder, got '{name}'")
    if config.runtime == EAGER_RUNTIME:
        return Source(folder, _weights(files, config), None)
    candidates = [folder / name] if name else [folder / file for file in FILES]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise _no_file(files, config, candidates[0])
    kind = file_kind(path)
    if kind is FileKind.CHECKPOINT:
        raise invalid(
            f"{path.name} is {kind.value}, which does not hold the model's code",
            hint=f"give its class in {EAGER_RUNTIME}, with runtime: '{EAGER_RUNTIME}', or use torch.export.save",
        )
    return Source(folder, path, kind)


def _weights(files: ModelFiles, config: ModelConfig) -> Path | None:
    named = config.default_model_filename
    # Default names of other kinds of models are ignored.
    if named and named not in (*FILES, EAGER_RUNTIME):
        if not (files.version_dir / named).is_file():
            raise _no_file(files, config, files.version_dir / named)
        return files.version_dir / named
    return next((p for file in eager.WEIGHTS if (p := files.version_dir / file).is_file()), None)


def _no_file(files: ModelFiles, config: ModelConfig, wanted: Path) -> Exception:
    found = sorted(p.name for p in files.version_dir.glob("*")) if files.version_dir.is_dir() else []
    hint = f"the folder holds {', '.join(found[:10]) or 'nothing'}; `default_model_filename` names another file"
    if EAGER_RUNTIME in found:
        hint = f"runtime: '{EAGER_RUNTIME}' serves the module that {EAGER_RUNTIME} defines"
    return invalid(
        f"model '{config.name}' version {files.version} has no file {wanted.relative_to(files.model_dir)}", hint=hint
    )


def _configured_inputs(config: ModelConfig) -> list[SignatureTensor]:
    """Return the configured inputs as the model gets them, [] where one has no datatype."""
    lead = (-1,) if config.max_batch_size > 0 else ()
    tensors = []
    for tensor in config.input:
        if tensor.data_type is None:
            return []
        dims = tensor.reshape.shape if tensor.reshape is not None else tensor.dims
        tensors.append(SignatureTensor(tensor.name, tensor.data_type, (*lead, *dims), tensor.optional))
    return tensors
