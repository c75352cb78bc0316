"""Input data from JSON: `{"data": [...], "validation_data": [...]}`.

`data` is a list of steps, or a list of streams, which are lists of steps. A step is an object of inputs by name. An
input is a list (flat or nested), a single value, `{"b64": TEXT}`, or `{"content": ...}` with either of these as
content. The two objects accept a `"shape": [...]`, without the batch dimension.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import orjson

from charonia.core.errors import ServingError, invalid
from charonia.core.tensor import Array
from charonia.tools.perf.data.convert import from_base64, from_list
from charonia.tools.perf.data.spec import FILE_BYTES_MAX, InputStep, Item, ModelSpec, Stream, TensorSpec, names

MODEL_KEY = "model"
"""Key of a step that names a model and is ignored."""

_DOCUMENT_KEYS = frozenset({"data", "validation_data"})


def read_json(path: Path, spec: ModelSpec) -> list[Stream]:
    """Return the streams of a JSON file.

    Raises:
        ServingError: INVALID_ARG with file, step and tensor of the first problem.
    """
    where = path.name
    document = _parse(path)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise invalid(f"""{where}: expected an object with a list named "data", got none""")
    unknown = sorted(document.keys() - _DOCUMENT_KEYS)
    if unknown:
        raise invalid(f"{where}: expected data and validation_data only, got '{unknown[0]}'")
    streams = _streams(document["data"], where, "data", lambda step, place: _inputs(spec, step, place))
    if "validation_data" not in document:
        return [[InputStep(item, None, place) for place, item in stream] for stream in streams]
    expected = _streams(
        document["validation_data"], where, "validation_data", lambda step, place: _outputs(spec, step, place)
    )
    if [len(stream) for stream in streams] != [len(stream) for stream in expected]:
        raise invalid(
            f"{where}: expected validation_data with as many streams and steps as data, {_lengths(streams)}, "
            f"got {_lengths(expected)}"
        )
    return [
        [InputStep(item, outputs, place) for (place, item), (_, outputs) in zip(stream, wanted, strict=True)]
        for stream, wanted in zip(streams, expected, strict=True)
    ]


def _parse(path: Path) -> object:
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise invalid(f"{path}: expected at most {FILE_BYTES_MAX} bytes, got {size}")
        text = path.read_bytes()
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass  # NaN and Infinity are not JSON, and the other parser reports the position of a mistake
    try:
        document: object = json.loads(text)
    except UnicodeDecodeError as error:
        raise invalid(f"{path.name}: expected JSON in UTF-8, got: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise invalid(f"{path.name}: line {error.lineno}: expected JSON, got: {error.msg}") from None
    except ValueError:  # Python reads no longer ones
        raise invalid(f"{path.name}: expected JSON, got an integer of thousands of digits") from None
    except RecursionError:
        raise invalid(f"{path.name}: expected JSON, got lists that are nested too deeply") from None
    return document


def _streams(
    data: object, where: str, key: str, read: Callable[[Mapping[str, object], str], Item]
) -> list[list[tuple[str, Item]]]:
    """Return the items of each stream with their places in the file."""
    if not isinstance(data, list) or not data:
        raise invalid(f"{where}: {key}: expected a list of steps, got {'an empty one' if data == [] else 'none'}")
    kinds = {type(entry) for entry in data}
    if kinds not in ({dict}, {list}):
        raise invalid(f"{where}: {key}: expected objects (steps) only or lists (streams) only, got a mixture")
    streams = [data] if kinds == {dict} else data
    made = []
    for number, stream in enumerate(streams):
        place = where if kinds == {dict} else f"{where}: stream {number}"
        if not stream:
            raise invalid(f"{place}: expected at least one step, got none")
        made.append([_read(f"{place}: step {index}", step, read) for index, step in enumerate(stream)])
    return made


def _read(place: str, step: object, read: Callable[[Mapping[str, object], str], Item]) -> tuple[str, Item]:
    if not isinstance(step, dict):
        raise invalid(f"{place}: expected an object with a tensor by name, got something else")
    return place, read(step, place)


def _inputs(spec: ModelSpec, step: Mapping[str, object], place: str) -> Item:
    for name in step:
        if spec.input(name) is None and name != MODEL_KEY:
            raise invalid(f"{place}: expected inputs of model '{spec.name}', {names(spec.inputs)}, got '{name}'")
    missing = [tensor for tensor in spec.inputs if tensor.name not in step and not tensor.optional]
    if missing:
        raise invalid(f"{place}: expected input {names(missing)}, got none")
    return {
        tensor.name: _tensor(tensor, step[tensor.name], f"{place}: input '{tensor.name}'")
        for tensor in spec.inputs
        if tensor.name in step
    }


def _outputs(spec: ModelSpec, step: Mapping[str, object], place: str) -> Item:
    made = {}
    for name, value in step.items():
        tensor = spec.output(name)
        if tensor is None:
            raise invalid(f"{place}: expected outputs of model '{spec.name}', {names(spec.outputs)}, got '{name}'")
        made[name] = _tensor(tensor, value, f"{place}: output '{name}'")
    return made


def _tensor(spec: TensorSpec, value: object, place: str) -> Array:
    try:
        return _array(spec, value)
    except ServingError as error:
        _raise(place, error)


def _array(spec: TensorSpec, value: object) -> Array:
    if not isinstance(value, dict):
        return from_list(spec, value, None)
    if "content" in value and "b64" in value:
        raise invalid("expected content or b64, got both")
    content = value if "b64" in value else value.get("content")
    unknown = sorted(value.keys() - {"content", "b64", "shape"})
    if content is None or unknown:
        got = f"'{unknown[0]}'" if unknown else "no content"
        raise invalid(f'expected a list, {{"b64": ...}} or {{"content": ...}}, both with an optional shape, got {got}')
    shape = _shape(value["shape"]) if "shape" in value else None
    if not isinstance(content, dict):
        return from_list(spec, content, shape)
    if content is not value and content.keys() != {"b64"}:
        raise invalid(f"expected a list or b64 as content, got an object with {sorted(content)}")
    return from_base64(spec, content["b64"], shape)


def _shape(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    raise invalid(f"expected a shape of integers of at least 0, got {json.dumps(value)[:60]}")


def _lengths(streams: list[list[tuple[str, Item]]]) -> str:
    return f"{len(streams)} streams of {', '.join(str(len(stream)) for stream in streams)} steps"


def _raise(place: str, error: ServingError) -> NoReturn:
    raise invalid(f"{place}: {error.message}", hint=error.hint) from None
