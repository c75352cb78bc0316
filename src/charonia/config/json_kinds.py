"""Whether the members of a JSON object are of the kinds that a message's fields have.

Protobuf's parser for Python looks at fewer than its others: it takes `""` and `[]` for a message without fields, reads
a text where a message belongs character by character, takes `true` for 1, and one of two spellings of a name. And of
some numbers that do not fit it does not know the path.
"""

from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from charonia.config.wording import field_hint, printable, short
from charonia.core.errors import ServingError, invalid

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
