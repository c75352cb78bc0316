"""The models of the checker, and questions to them whose right answers are known."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.models import COUNT, COUNT_PBTXT, PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.sequence_models import SUM_BY_ID, sequence_pbtxt

from charonia.core.dtypes import DataType

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, tuple[DataType, Array]]

ECHOED = (
    *(DataType.BOOL, DataType.UINT8, DataType.UINT64, DataType.INT8, DataType.INT64),
    *(DataType.FP16, DataType.FP32, DataType.FP64, DataType.BYTES),
)

_HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"

ADD = (
    _HEAD
    + '''
class TritonPythonModel:
    """SUM = A + B, DIFFERENCE = A - B."""

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B"))
            tensors = [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
'''
)
BLS = (
    _HEAD
    + '''
class TritonPythonModel:
    """Calls "add", and returns its SUM as TOTAL."""

    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in ("A", "B")]
            call = pb_utils.InferenceRequest(model_name="add", requested_output_names=["SUM"], inputs=inputs)
            answer = call.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                total = pb_utils.get_output_tensor_by_name(answer, "SUM").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)]))
        return responses
'''
)
UPPER = (
    _HEAD
    + '''
class TritonPythonModel:
    """text_output is text_input in capitals."""

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            upper = np.array([each.decode().upper().encode() for each in text.reshape(-1)], object).reshape(text.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", upper)]))
        return responses
'''
)
NUMBERED = (
    _HEAD
    + '''
class TritonPythonModel:
    """Answers with a number that is in its file."""

    def execute(self, requests):
        number = pb_utils.Tensor("NUMBER", np.array([[{number}]], np.int32))
        return [pb_utils.InferenceResponse([number]) for _ in requests]
'''
)


def _pbtxt(inputs: str, outputs: str, datatype: str, dims: str, more: str) -> str:
    tensors = [("input", name) for name in inputs.split()] + [("output", name) for name in outputs.split()]
    lines = [f'{kind} {{ name: "{name}" data_type: {datatype} dims: [ {dims} ] }}' for kind, name in tensors]
    return "\n".join([*lines, more])


_ADD_PBTXT = _pbtxt(
    "A B", "SUM DIFFERENCE", "TYPE_INT32", "-1", 'backend: "python"\nmax_batch_size: 8\ndynamic_batching { }'
)
_STEP = 'model_name: "add" model_version: -1'
CHAIN_PBTXT = _pbtxt("A B", "TWICE_A TWICE_B", "TYPE_INT32", "-1", 'platform: "ensemble"\nmax_batch_size: 8\n') + (
    f'ensemble_scheduling {{ step {{ {_STEP} input_map {{ key: "A" value: "A" }} input_map {{ key: "B" value: "B" }}'
    ' output_map { key: "SUM" value: "s" } output_map { key: "DIFFERENCE" value: "d" } }'
    f' step {{ {_STEP} input_map {{ key: "A" value: "s" }} input_map {{ key: "B" value: "d" }}'
    ' output_map { key: "SUM" value: "TWICE_A" } output_map { key: "DIFFERENCE" value: "TWICE_B" } } }'
)
NUMBERED_PBTXT = _pbtxt("ANY", "NUMBER", "TYPE_INT32", "1", 'backend: "python"\nmax_batch_size: 8\n')


CHANGING = ("changing_1", "changing_2", "changing_3")
"""Models whose files change: while an engine that follows repeats the load of one, the others are loaded again."""


def write_numbered(repository: Path, name: str, number: int, version: int = 1) -> None:
    write_model(repository, name, NUMBERED.replace("{number}", str(number)), config=NUMBERED_PBTXT, version=version)


def write_repository(repository: Path) -> None:
    for datatype in ECHOED:
        write_model(
            repository, f"echo_{datatype.name.lower()}", b"", config=identity_pbtxt("identity", datatype, (-1,))
        )
    write_model(repository, "worker", PYTHON_IDENTITY, config=identity_pbtxt("python", DataType.FP32, (-1,)))
    write_model(repository, "add", ADD, config=_ADD_PBTXT)
    write_model(repository, "chain", b"", config=CHAIN_PBTXT)
    (repository / "chain" / "1").mkdir(exist_ok=True)
    bls = _pbtxt("A B", "TOTAL", "TYPE_INT32", "-1", 'backend: "python"\nmax_batch_size: 8\n')
    write_model(repository, "bls", BLS, config=bls)
    upper = _pbtxt("text_input", "text_output", "TYPE_STRING", "1", 'backend: "python"\n')
    write_model(repository, "upper", UPPER, config=upper)
    write_model(repository, "count", COUNT, config=COUNT_PBTXT)
    sums = sequence_pbtxt("max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 256 }")
    write_model(repository, "sums", SUM_BY_ID, config=sums)
    for name in CHANGING:
        write_numbered(repository, name, 1)
    for version in (1, 2):
        write_numbered(repository, "split", version, version)
    config = repository / "split" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all { } }\n")


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known."""

    model: str
    inputs: Tensors
    answer: Tensors
    parameters: Mapping[str, int | bool] = field(default_factory=dict)


def texts(rng: random.Random, count: int) -> Array:
    """Return random texts, with characters of one to four bytes, as an array of bytes."""
    pieces = 'aZ09 "\\/{}[]\n\tß€\U0001f600\u200b'
    found = np.empty(count, object)
    found[:] = ["".join(rng.choices(pieces, k=rng.randrange(12))).encode() for _ in range(count)]
    return found


def values(rng: random.Random, datatype: DataType, count: int) -> Array:
    """Return random values of a datatype; finite ones, for JSON has no others."""
    dtype = datatype.numpy
    if datatype is DataType.BYTES:
        return texts(rng, count)
    if datatype is DataType.BOOL:
        return np.array([rng.random() < 0.5 for _ in range(count)], dtype)
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        lowest = -(2 ** (bits - 1)) if dtype.kind == "i" else 0
        return np.array([lowest + rng.getrandbits(bits) for _ in range(count)], dtype)
    return np.array([rng.choice((0.0, -0.0, 1.5, rng.uniform(-6e4, 6e4))) for _ in range(count)]).astype(dtype)


def _echo(rng: random.Random) -> Question:
    datatype = rng.choice(ECHOED)
    rows, columns = rng.choice(((1, 1), (1, 4), (3, 2), (8, 16), (1, 0), (2, 300)))
    array = values(rng, datatype, rows * columns).reshape(rows, columns)
    model = "worker" if datatype is DataType.FP32 and rng.random() < 0.5 else f"echo_{datatype.name.lower()}"
    return Question(model, {"INPUT0": (datatype, array)}, {"OUTPUT0": (datatype, array)})


def _pair(rng: random.Random) -> tuple[Array, Array]:
    shape = rng.choice(((1, 1), (2, 4), (8, 8)))
    a, b = (np.array([rng.randrange(-(10**6), 10**6) for _ in range(shape[0] * shape[1])], np.int32) for _ in "ab")
    return a.reshape(shape), b.reshape(shape)


def _add(rng: random.Random) -> Question:
    a, b = _pair(rng)
    answers = {
        "add": {"SUM": a + b, "DIFFERENCE": a - b},
        "chain": {"TWICE_A": 2 * a, "TWICE_B": 2 * b},
        "bls": {"TOTAL": a + b},
    }
    model = rng.choice(list(answers))
    integers = DataType.INT32
    answer = {name: (integers, array) for name, array in answers[model].items()}
    return Question(model, {"A": (integers, a), "B": (integers, b)}, answer)


def _upper(rng: random.Random) -> Question:
    text = texts(rng, 1)
    answer = np.array([text[0].decode().upper().encode()], object)
    return Question("upper", {"text_input": (DataType.BYTES, text)}, {"text_output": (DataType.BYTES, answer)})


KINDS: Sequence[Callable[[random.Random], Question]] = (_echo, _echo, _echo, _echo, _add, _upper)


def question(rng: random.Random) -> Question:
    """Return a random question without a state."""
    return rng.choice(KINDS)(rng)


def part_of_sequence(key: int, value: int, total: int, *, starts: bool, ends: bool) -> Question:
    """Return a request of a sequence."""
    number = DataType.INT32
    answer = np.array([[total + key * ends]], np.int32)
    parameters = {"sequence_id": key, "sequence_start": starts, "sequence_end": ends}
    return Question(
        "sums", {"INPUT": (number, np.array([[value]], np.int32))}, {"OUTPUT": (number, answer)}, parameters
    )
