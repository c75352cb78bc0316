"""The parameter `PADDING` of a model, which lets requests of different shapes share a batch. Pure.

Its value is a JSON object. Servers that do not know the parameter ignore it.

    parameters { key: "PADDING" value { string_value: '{
      "inputs": { "ids": { "value": 0, "buckets": [32, 64, 128], "mask": "attention_mask", "length": "ids_length" } },
      "outputs": { "hidden": { "input": "ids", "stride": 1, "dims": [0] } }
    }' } }

Every member of an input or output is optional, except `input` of an output. `buckets` beside `inputs` applies to all of
them. A mask or a length is an input that clients may omit (`optional: true`).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import PADDING
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType
from charonia.server.ragged.padding import Companion, CutOutput, PaddedInput, PaddingPlan

_PATH = f"parameters[{PADDING}]"
_BUCKETS_MAX = 1024

Add = Callable[[str, str], None]
"""Records a problem: its path within the parameter, and a message."""


def padding_plan(config: ModelConfig) -> PaddingPlan | None:
    """Return the plan of a validated configuration, None if it pads nothing."""
    return _Reader(config).plan if PADDING in config.parameters else None


def padding_problems(config: ModelConfig) -> list[Problem]:
    return _Reader(config).problems if PADDING in config.parameters else []


def as_padded(config: ModelConfig) -> ModelConfig:
    """Return the configuration for the model's backend, in which computed inputs are not optional."""
    plan = padding_plan(config)
    if plan is None:
        return config
    companions = plan.companions
    inputs = tuple(replace(tensor, optional=False) if tensor.name in companions else tensor for tensor in config.input)
    return replace(config, input=inputs)


class _Reader:
    """Parses the parameter.

    Attributes:
        plan: The valid part of the plan.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.problems: list[Problem] = []
        self._inputs = {tensor.name: tensor for tensor in config.input}
        self._outputs = {output.name: output for output in config.output}
        for sentence in _model_problems(config):
            self._add("", sentence)
        document = self._document(config.parameters[PADDING])
        self._check_keys("", document, ("inputs", "outputs", "buckets"))
        buckets = self._buckets("buckets", document.get("buckets", []))
        inputs = self._objects("inputs", document)
        if not inputs:
            self._add("inputs", "must name at least one input")
        padded = [self._input(name, members, buckets) for name, members in inputs.items()]
        found = tuple(each for each in padded if each is not None)
        by_name = {each.name: each for each in found}
        companions = [each.name for padded in found for each in (padded.mask, padded.length) if each is not None]
        for name, count in Counter([*by_name, *companions]).items():
            if count > 1:
                self._add("inputs", f"input '{name}' is given {count} times: each is one of input, mask and length")
        cut = [self._output(name, members, by_name) for name, members in self._objects("outputs", document).items()]
        self.plan = PaddingPlan(found, tuple(each for each in cut if each is not None))

    def _add(self, where: str, message: str) -> None:
        self.problems.append(Problem(f"{_PATH}.{where}" if where else _PATH, message))

    def _document(self, text: str) -> Mapping[str, object]:
        try:
            document = json.loads(text)
        except ValueError as error:
            self._add("", f"expected a JSON object: {error}")
            return {}
        if not isinstance(document, dict):
            self._add("", f"expected a JSON object, got {text[:40]}")
            return {}
        return document

    def _check_keys(self, where: str, members: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in members:
            if key not in known:
                self._add(f"{where}.{key}".lstrip("."), f"unknown key, expected one of {', '.join(known)}")

    def _objects(self, key: str, document: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
        """Return a member that holds an object for each tensor."""
        value = document.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
            self._add(key, "expected an object with an object for each name")
            return {}
        return value

    def _buckets(self, where: str, value: object) -> tuple[int, ...]:
        if (
            not isinstance(value, list)
            or not all(type(size) is int and size > 0 for size in value)
            or not all(low < high for low, high in pairwise(value))
            or len(value) > _BUCKETS_MAX
        ):
            self._add(where, f"expected at most {_BUCKETS_MAX} ascending sizes of 1 or more, got {value}")
            return ()
        return tuple(value)

    def _input(self, name: str, members: Mapping[str, object], buckets: tuple[int, ...]) -> PaddedInput | None:
        where = f"inputs.{name}"
        self._check_keys(where, members, ("value", "buckets", "mask", "length"))
        given = self._inputs.get(name)
        if given is None or given.data_type is None:
            self._add(where, f"there is no input '{name}'")
            return None
        dims = tuple(index for index, dim in enumerate(given.dims) if dim == -1)
        if not dims:
            self._add(where, f"input '{name}' has no variable dimension: its dims are {list(given.dims)}")
        if given.allow_ragged_batch:
            self._add(where, f"input '{name}' has allow_ragged_batch: it needs no padding")
        if given.reshape is not None:
            self._add(where, f"input '{name}' has a reshape, which cannot be padded")
        if "buckets" in members:
            buckets = self._buckets(f"{where}.buckets", members["buckets"])
        mask = self._companion(f"{where}.mask", name, members.get("mask"), (-1,) * len(dims))
        length = self._companion(f"{where}.length", name, members.get("length"), (len(dims),))
        value = self._value(f"{where}.value", given.data_type, members.get("value"))
        return PaddedInput(name, dims, value, buckets, mask, length)

    def _value(self, where: str, datatype: DataType, value: object) -> float | bytes:
        if datatype is DataType.BYTES:
            if value is not None and not isinstance(value, str):
                self._add(where, f"expected a string for {datatype.config}, got {value!r}")
                return b""
            return (value or "").encode()
        if value is None:
            return 0
        kind = datatype.numpy.kind
        if not isinstance(value, int | float) or (isinstance(value, bool) is not (kind == "b")):
            self._add(where, f"expected a value of {datatype.config}, got {value!r}")
        elif datatype is DataType.BF16 and value != 0:
            self._add(where, "BF16 can be padded with 0 only")
        elif kind in "iu" and not (isinstance(value, int) and _fits(datatype, value)):
            self._add(where, f"{value} does not fit {datatype.config}")
        else:
            return value
        return 0

    def _companion(self, where: str, source: str, name: object, dims: tuple[int, ...]) -> Companion | None:
        if name is None:
            return None
        given = self._inputs.get(name) if isinstance(name, str) else None
        if given is None or given.data_type is None:
            self._add(where, f"there is no input '{name}'")
            return None
        for sentence in _companion_problems(given, source, dims):
            self._add(where, sentence)
        return Companion(given.name, given.data_type)

    def _output(self, name: str, members: Mapping[str, object], inputs: Mapping[str, PaddedInput]) -> CutOutput | None:
        where = f"outputs.{name}"
        self._check_keys(where, members, ("input", "stride", "dims"))
        output, source = self._outputs.get(name), members.get("input")
        padded = inputs.get(source) if isinstance(source, str) else None
        if output is None:
            self._add(where, f"there is no output '{name}'")
            return None
        if padded is None:
            self._add(f"{where}.input", f"expected the name of a padded input, got {source!r}")
            return None
        own = tuple(index for index, dim in enumerate(output.dims) if dim == -1)
        follows = members.get("dims", list(padded.dims[: len(own)]))
        stride = members.get("stride", 1)
        if not own:
            self._add(where, f"output '{name}' has no variable dimension: its dims are {list(output.dims)}")
        elif (
            not isinstance(follows, list) or len(follows) != len(own) or any(dim not in padded.dims for dim in follows)
        ):
            expected = f"a variable dimension of input '{padded.name}', {list(padded.dims)}, for each of {list(own)}"
            self._add(f"{where}.dims", f"expected {expected}, got {follows}")
        elif type(stride) is not int or stride < 1:
            self._add(f"{where}.stride", f"expected an integer of 1 or more, got {stride!r}")
        else:
            return CutOutput(name, padded.name, own, tuple(padded.dims.index(dim) for dim in follows), stride)
        return None


def _fits(datatype: DataType, value: int) -> bool:
    bits = 8 * datatype.byte_size
    return 0 <= value < 1 << bits if datatype.numpy.kind == "u" else -(1 << bits - 1) <= value < 1 << bits - 1


def _model_problems(config: ModelConfig) -> Iterator[str]:
    if config.max_batch_size < 1:
        yield "padding is for batches: max_batch_size must be 1 or more"
    if config.is_decoupled:
        yield "a decoupled model cannot be padded"
    for field in ("sequence_batching", "ensemble_scheduling"):
        if getattr(config, field) is not None:
            yield f"a model with {field} cannot be padded"


def _companion_problems(tensor: ModelInput, source: str, dims: tuple[int, ...]) -> Iterator[str]:
    if not tensor.optional:
        yield f"input '{tensor.name}' must be optional: it is computed if clients omit it"
    if tensor.dims != dims:
        yield f"input '{tensor.name}' must have dims {list(dims)}, as input '{source}' has, got {list(tensor.dims)}"
    if tensor.data_type in (DataType.BYTES, DataType.BF16):
        yield f"input '{tensor.name}' must be of numbers or booleans"
    if tensor.reshape is not None:
        yield f"input '{tensor.name}' has a reshape, which cannot be computed"
