"""The JSON form of a configuration, in responses of configuration calls and in load requests.

Fields have the names of config.pbtxt. Every scalar and list is written even at its default, 64-bit integers are
numbers, enumerations are names, and messages and members of a "one of" are written only if set. Keys of maps are
strings, because JSON has no others.

Input is checked against the fields of the message before Protobuf's Python parser reads it, because that parser is less
strict than Protobuf's others: it accepts `""` and `[]` as a message without fields, reads a string in place of a
message character by character, accepts `true` as 1, and accepts both spellings of a field name. For some numbers that
are out of range, it cannot name the field.

Two things that JSON does not have pass, as they do in Protobuf's parser in C++: a comma after the last member or
element, and a single value in place of a list.

Source: Triton's model configuration protocol extension.
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
"""The range of integers of a field."""


def wrong_kinds(members: Mapping[str, object], message: Descriptor, path: str = "") -> Iterator[ServingError]:
    """Yield an error for each member of a wrong type, with its path. Unknown names are skipped."""
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
    elif isinstance(field.default_value, list):  # the test for "repeated" that works in every version of protobuf
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
    # Python's parser reports neither the element of a list that does not fit nor the member of a "one of".
    if isinstance(number, (int, float)) and number == number // 1 and int(number) not in _BITS[field.cpp_type]:
        yield invalid(printable(f"{path}: Value out of range: {short(str(number))}"))


def _misfit(path: str, expected: str, value: object, hint: str = "") -> ServingError:
    return invalid(printable(f"{path}: expected {expected}, got {type(value).__name__}"), hint=hint)


def _single_as_list(members: dict[str, Any], message: Descriptor) -> None:
    """Put every single value where a list is expected into one."""
    for name, value in members.items():
        field = message.fields_by_name.get(name) or message.fields_by_camelcase_name.get(name)
        if field is None or value is None:
            continue
        element: Descriptor | None = field.message_type
        inner: list[Any]
        if element is not None and element.GetOptions().map_entry:
            element = element.fields_by_name["value"].message_type
            inner = list(value.values()) if isinstance(value, dict) else []
        elif isinstance(field.default_value, list) and not isinstance(value, list):
            inner = members[name] = [value]
        else:
            inner = value if isinstance(value, list) else [value]
        for item in inner:
            if element is not None and isinstance(item, dict):
                _single_as_list(item, element)


_LENIENT = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*+"?)|'(?P<single>(?:[^'\\]|\\.)*+)'|(?<![\w$.])(?P<name>[A-Za-z_$][\w$]*+)(?=\s*:)"""
    r"|,(?=\s*[}\]])",
    re.DOTALL,
)
"""A string, which stays; one in single quotes; an unquoted name; a comma before the end of an object or list."""

_QUOTE = re.compile(r'\\.|"', re.DOTALL)
"""An escape or a double quote in a string in single quotes."""

_WRAPPER = re.compile(r"Failed to parse (\S+) field: ")
_AT_PATH = re.compile(r'^(?P<problem>.*) at (?P<path>"?ModelConfig\S*)$', re.DOTALL)
_NO_VALUE = re.compile(r"Invalid enum value (?P<name>.*) for enum type (?P<type>[\w.]+)", re.DOTALL)
_NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)" at "(?P<path>[^"]*)"')


def to_json(config: ModelConfig) -> dict[str, object]:
    """Return the configuration as plain objects, ready for any JSON writer."""
    return _members(config, pool().FindMessageTypeByName(MESSAGE))


def from_json(text: str) -> ModelConfig:
    """Parse a configuration from JSON.

    The output of `to_json` is accepted, and so are camelCase names, 64-bit integers in strings, null for "not set",
    names without quotes, strings in single quotes, a comma before a closing bracket, and a single value where a list is
    meant.

    Raises:
        ServingError: INVALID_ARG with the path of the invalid member.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise invalid(f"the model configuration has {len(text)} characters; at most {MAX_TEXT_CHARS} are read")
    try:
        members = json.loads(
            _LENIENT.sub(_strict, text),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=_no_number,
        )
        # JSON can escape half a surrogate pair, which a message's strings cannot hold.
        json.dumps(members, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the model configuration is not JSON: {printable(short(str(error)))}") from None
    if not isinstance(members, dict):
        raise invalid(f"the model configuration must be a JSON object, got {type(members).__name__}")
    _single_as_list(members, pool().FindMessageTypeByName(MESSAGE))
    wrong = next(wrong_kinds(members, pool().FindMessageTypeByName(MESSAGE)), None)
    if wrong is not None:
        raise wrong
    message = message_class(MESSAGE)()
    try:
        json_format.ParseDict(members, message, descriptor_pool=pool())
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        # For members of a wrong type, the parser lets some Python exceptions through.
        raise _explain(error) from None
    return from_message(message)


def _strict(found: re.Match[str]) -> str:
    """Return what strict JSON has in place of a match of `_LENIENT`."""
    if found["string"] is not None:
        return found["string"]
    if found["single"] is not None:
        escapes = {'"': r"\"", r"\'": "'"}
        return f'"{_QUOTE.sub(lambda each: escapes.get(each[0], each[0]), found["single"])}"'
    return f'"{found["name"]}"' if found["name"] is not None else ""


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
        # JSON lacks these numbers; the names are protobuf's.
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
    # The parser rejects numbers beyond 64 bits only at conversion, where it knows no position.
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"a number is too large: {short(text)}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f'{name} is not a JSON number; write "{name}" in quotes')


def _explain(error: Exception) -> ServingError:
    problem = str(error)
    if found := _NO_FIELD.search(problem):
        owner = pool().FindMessageTypeByName(found["type"])
        path = _below_root(found["path"])
        sentence = f"{path}: {owner.name} has no field '{short(found['name'])}'"
        return invalid(printable(sentence), hint=field_hint(found["name"], owner))
    # The parser wraps an error once for every enclosing field, and most but not all of them include the path.
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
