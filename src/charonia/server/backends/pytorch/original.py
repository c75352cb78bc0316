"""PyTorch models as ONNX, by torch.onnx: exported programs, and TorchScript, for which it has an older exporter."""

import logging
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.model import ModelConfig, ModelInput
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.tensor import Array
from charonia.server.backends.conversion import ReadOptions, failed, random_samples, rename, versioned
from charonia.server.backends.pytorch.archive import FileKind, file_kind
from charonia.server.backends.pytorch.naming import ResultNames
from charonia.server.backends.pytorch.program import TORCH, RunPlan, plain_text
from charonia.server.backends.pytorch.source import Source, interface_of, load_module, read_exported

EXAMPLE_ROWS = 2
"""Batch of the example that TorchScript is exported with; a batch of one would be taken for a constant."""

_OPERATORS = (
    re.compile(r"Exporting the operator '([\w:.]+)'"),
    re.compile(r"No (?:ONNX function|decompositions) .*?OpOverload\(op='([\w:.]+)'"),
    re.compile(r"OpOverload\(op='([\w:.]+)'"),
)
_INPUT_HINT = "say its inputs: --input NAME:TYPE:DIMS, such as --input x:FP32:-1,3,224,224"


class PyTorchOriginal:
    """A PyTorch model that brings its code."""

    scale = 1.0
    texts: Mapping[str, Sequence[str]] = {}

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        kind = file_kind(path)
        if kind not in (FileKind.TORCHSCRIPT, FileKind.EXPORTED):
            way_out = "load the weights into its class, and write it with torch.export.save"
            if kind is FileKind.AOT_INDUCTOR:
                way_out = "convert the exported program that it was compiled from"
            raise unsupported(f"{path.name} is {kind.value}, which cannot be converted", hint=way_out)
        self._is_exported = kind is FileKind.EXPORTED
        self._plan = RunPlan(unpickles=options.trust)
        self._signature = self._found(Source(path.parent, path, kind), options)
        self._results = ResultNames([tensor.name for tensor in self._signature.outputs])
        if self._is_exported:
            self._program = read_exported(path, unpickles=options.trust)
            self._template = interface_of(self._program).template
            self._module = self._program.module()
        else:
            self._program = self._module = load_module(path, torch.device("cpu"))
        self.title = f"{kind.value} of {versioned('torch')}".replace("an exported", "Exported")
        self.converter = f"torch.onnx of {versioned('torch')}"
        self.warnings: list[str] = []

    def to_onnx(self, path: Path, opset: int) -> None:
        loggers = {name: logging.getLogger(name).level for name in ("torch.onnx", "torch.onnx._internal")}
        for name in loggers:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self._is_exported:
                    self._export(path, opset)
                else:
                    self._export_script(path, opset)
        except ServingError:
            raise
        except Exception as error:  # the exporter's errors have no common base class
            raise _refused(self.converter, self._path, error) from error
        finally:
            for name, level in loggers.items():
                logging.getLogger(name).setLevel(level)

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        tensors = [_tensor(feed[tensor.name], tensor) for tensor in self._signature.inputs]
        with torch.no_grad():
            if self._is_exported:
                args, kwargs = self._template.fill(tensors)
                result = self._module(*args, **kwargs)
            else:
                result = self._module(*tensors)
        values = self._results.select(result)
        names = [tensor.name for tensor in self._signature.outputs]
        return {name: value.numpy(force=True) for name, value in zip(names, values, strict=True)}

    def close(self) -> None: ...

    def _found(self, source: Source, options: ReadOptions) -> Signature:
        given = tuple(ModelInput(t.name, t.datatype, dims=t.shape) for t in options.inputs)
        found = source.inspect(ModelConfig(name=source.folder.name, input=given), self._plan)
        if found.signature is None:
            raise invalid("; ".join(found.notes) or "the inputs could not be inferred", hint=_INPUT_HINT)
        return found.signature

    def _export(self, path: Path, opset: int) -> None:
        program = torch.onnx.export(self._program, dynamo=True, opset_version=opset or None, verbose=False)
        if program is None:
            raise failed(self.converter, "it returned nothing")
        program.save(str(path), external_data=None)
        self._name(path)

    def _export_script(self, path: Path, opset: int) -> None:
        inputs, outputs = self._signature.inputs, self._signature.outputs
        feed = random_samples(inputs, EXAMPLE_ROWS, {}, self.scale)
        torch.onnx.export(
            self._module,
            tuple(_tensor(feed[tensor.name], tensor) for tensor in inputs),
            str(path),
            dynamo=False,
            opset_version=opset or None,
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs],
            dynamic_axes={tensor.name: _free(tensor) for tensor in (*inputs, *outputs)},
        )

    def _name(self, path: Path) -> None:
        """Give the tensors of a file the names of the signature: exporters keep the order."""
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        names = {}
        for values, tensors in (
            (model.graph.input, self._signature.inputs),
            (model.graph.output, self._signature.outputs),
        ):
            if len(values) != len(tensors):
                raise failed(self.converter, f"expected {len(tensors)} tensors, got {len(values)}")
            names.update({value.name: tensor.name for value, tensor in zip(values, tensors, strict=True)})
        rename(model, names)
        onnx.save(model, str(path))


def _tensor(array: Array, tensor: SignatureTensor) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(TORCH[tensor.datatype])


def _free(tensor: SignatureTensor) -> dict[int, str]:
    """Return a name for each variable dimension, that of the batch for the first one."""
    return {
        axis: "batch" if axis == 0 else f"{tensor.name}_{axis}" for axis, dim in enumerate(tensor.shape) if dim == -1
    }


def _refused(converter: str, path: Path, error: Exception) -> ServingError:
    text = f"{error} {error.__cause__ or ''}"
    for pattern in _OPERATORS:
        operators = sorted(set(pattern.findall(text)))
        if operators:
            return unsupported(
                f"{converter} has no conversion for {', '.join(operators)}",
                hint=f"serve the model itself: charonia serve {shlex.quote(str(path))}",
            )
    return failed(converter, plain_text(error))
