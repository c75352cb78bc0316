"""The JSON of a configuration: what the configuration calls answer, and what loading a model may send.

Field names are those of config.pbtxt, every scalar and list is printed even where it is the default, 64-bit integers
are numbers, enumerations are names, and messages and the members of a "one of" stand only where they are set. Keys of
maps are strings, as JSON has no others.

Source: Triton's model configuration protocol extension.

Whether the members of a JSON object are of the kinds that a message's fields have.

Protobuf's parser for Python looks at fewer than its others: it takes `""` and `[]` for a message without fields, reads
a text where a message belongs character by character, takes `true` for 1, and one of two spellings of a name. And of
some numbers that do not fit it does not know the path.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NoReturn

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from charonia.config.convert import MESSAGE, FieldPlan, from_message, plan
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import MAX_TEXT_CHARS
from charonia.config.problems import field_hint, printable, short, value_hint
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.schema.pool import message_class, pool

_KINDS: dict[int, tuple[tuple[type, ...], str]] = {
    FieldDescriptor.CPPTYPE_MESSAGE: ((dict,), "a JSON object"),
    FieldDescriptor.CPPTYPE_STRING: ((str,), "a string"),
    FieldDescriptor.CPPTYPE_BOOL: ((bool,), "true or false"),
    FieldDescriptor.CPPTYPE_ENUM: ((str, int, float), "a name or number"),
}
_NUMBER = ((int, float, str), "a number")
_BITS = {
    FieldDescriptor.CPPTYPE_ENUM: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_UINT64: range(2**64),
}
"""What integers fit in a field."""


def wrong_kinds(members: Mapping[str, object], message: Descriptor, path: str = "") -> Iterator[ServingError]:
    """Yield an error for each member of a wrong kind, with its path. Names that are no field's are passed over."""
    seen: dict[str, str] = {}
    for name, value in members.items():
        field = message.fields_by_name.get(name) or message.fields_by_camelcase_name.get(name)
        if field is None:
            continue
        where = f"{path}{name}"
        if seen.setdefault(field.name, name) != name:
            yield invalid(printable(f"{where}: {path}{seen[field.name]} is given too, and both are the same field"))
        if value is not None:
            yield from _wrong_member(value, field, where)


def _wrong_member(value: object, field: FieldDescriptor, path: str) -> Iterator[ServingError]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if not isinstance(value, dict):
            yield _misfit(path, "a JSON object", value)
            return
        for key, item in value.items():
            yield from _wrong_element(key, field.message_type.fields_by_name["key"], f"{path}[{key}]")
            yield from _wrong_element(item, field.message_type.fields_by_name["value"], f"{path}[{key}]")
    elif isinstance(field.default_value, list):  # what says "repeated" in every version of protobuf
        if not isinstance(value, list):
            yield _misfit(path, "a list", value)
            return
        for index, item in enumerate(value):
            yield from _wrong_element(item, field, f"{path}[{index}]")
    else:
        yield from _wrong_element(value, field, path)


def _wrong_element(value: object, field: FieldDescriptor, path: str) -> Iterator[ServingError]:
    types, expected = _KINDS.get(field.cpp_type, _NUMBER)
    message = field.message_type
    if value is None:
        yield invalid(printable(f"{path}: null is not allowed in a list or map"))
    elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        yield _misfit(path, expected, value, field_hint("", message) if message is not None and message.fields else "")
    elif message is not None and isinstance(value, dict):
        yield from wrong_kinds(value, message, path + ".")
    elif field.cpp_type in _BITS:
        yield from _wrong_integer(value, field, path)


def _wrong_integer(value: object, field: FieldDescriptor, path: str) -> Iterator[ServingError]:
    number = value
    if isinstance(value, str) and field.cpp_type != FieldDescriptor.CPPTYPE_ENUM:
        try:
            number = int(value)
        except ValueError:
            yield invalid(printable(f"{path}: expected an integer, got {short(value)!r}"))
            return
    # Python's parser tells neither which element of a list does not fit nor which member of a "one of" it is in.
    if isinstance(number, (int, float)) and number == number // 1 and int(number) not in _BITS[field.cpp_type]:
        yield invalid(printable(f"{path}: Value out of range: {short(str(number))}"))


def _misfit(path: str, expected: str, value: object, hint: str = "") -> ServingError:
    return invalid(printable(f"{path}: expected {expected}, got {type(value).__name__}"), hint=hint)


_WRAPPER = re.compile(r"Failed to parse (\S+) field: ")
_AT_PATH = re.compile(r'^(?P<problem>.*) at (?P<path>"?ModelConfig\S*)$', re.DOTALL)
_NO_VALUE = re.compile(r"Invalid enum value (?P<name>.*) for enum type (?P<type>[\w.]+)", re.DOTALL)
_NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)" at "(?P<path>[^"]*)"')


def to_json(config: ModelConfig) -> dict[str, object]:
    """Return the configuration as plain objects, ready for any JSON writer."""
    return _members(config, pool().FindMessageTypeByName(MESSAGE))


def from_json(text: str) -> ModelConfig:
    """Return the configuration that a JSON text says.

    What `to_json` makes is accepted, and so are camelCase names, 64-bit integers in strings and null for "not set".

    Raises:
        ServingError: INVALID_ARG with the path of the member that is wrong.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise invalid(f"the model configuration has {len(text)} characters; at most {MAX_TEXT_CHARS} are read")
    try:
        members = json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_float=_decimal, parse_constant=_no_number
        )
        # JSON can escape half a surrogate pair, which no string of a message can hold.
        json.dumps(members, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the model configuration is not JSON: {printable(short(str(error)))}") from None
    if not isinstance(members, dict):
        raise invalid(f"the model configuration must be a JSON object, got {type(members).__name__}")
    wrong = next(wrong_kinds(members, pool().FindMessageTypeByName(MESSAGE)), None)
    if wrong is not None:
        raise wrong
    message = message_class(MESSAGE)()
    try:
        json_format.ParseDict(members, message, descriptor_pool=pool())
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        # The parser lets some errors of Python through for members of a wrong type.
        raise _explain(error) from None
    return from_message(message)


def _members(record: Any, descriptor: Descriptor) -> dict[str, object]:
    members: dict[str, object] = {}
    record_type: Any = type(record)
    for field in plan(descriptor, record_type):
        value = getattr(record, field.attribute)
        if value is None and field.has_presence:
            continue
        if field.is_map:
            members[field.name] = {str(key): _element(item, field) for key, item in value.items()}
        elif field.is_repeated:
            members[field.name] = [_element(item, field) for item in value]
        else:
            members[field.name] = _element(value, field)
    return members


def _element(value: Any, field: FieldPlan) -> object:
    if field.is_parameter:
        return {"string_value": value}
    if field.message is not None:
        return _members(value, field.message)
    if field.leaf is DataType:
        return "TYPE_INVALID" if value is None else value.config
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such numbers; these are protobuf's names for them.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"member '{twice}' is given twice in one object")
    return members


def _integer(text: str) -> int:
    _decimal(text)
    return int(text)


def _decimal(text: str) -> float:
    # The parser takes numbers beyond 64 bits to where they are converted, and knows no position there.
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"a number is too large: {short(text)}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f'{name} is no number of JSON; "{name}" in quotes is one here')


def _explain(error: Exception) -> ServingError:
    problem = str(error)
    if found := _NO_FIELD.search(problem):
        owner = pool().FindMessageTypeByName(found["type"])
        path = _below_root(found["path"])
        sentence = f"{path}: {owner.name} has no field '{short(found['name'])}'"
        return invalid(printable(sentence), hint=field_hint(found["name"], owner))
    # The parser wraps an error once for every field on the way down, and most but not all carry the path as well.
    path = ".".join(_WRAPPER.findall(problem))
    problem = _WRAPPER.sub("", problem).rstrip(".")
    if found := _AT_PATH.match(problem):
        path, problem = _below_root(found["path"]), found["problem"]
    hint = ""
    if found := _NO_VALUE.search(problem):
        hint = value_hint(found["name"], pool().FindEnumTypeByName(found["type"]))
    return invalid(printable(f"{path or 'model configuration'}: {short(problem)}"), hint=hint)


def _below_root(path: str) -> str:
    return path.strip('"').removeprefix("ModelConfig").removeprefix(".") or "model configuration"
