"""Configuration records to and from the protocol's messages.

The records of `charonia.config.model` have the messages' field names, so both directions are one walk over the fields
of the schema. What differs: a field whose name Python reserves has a trailing underscore (`global_`), a DataType is
None for TYPE_INVALID, and a `ModelParameter` is its `string_value`.
"""

import keyword
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.schema.pool import message_class

MESSAGE = "inference.ModelConfig"
"""Full name of the configuration's message."""

_PARAMETER = "inference.ModelParameter"
_BY_NUMBER = {datatype.number: datatype for datatype in DataType}


def from_message(message: Message) -> ModelConfig:
    """Return the record of an `inference.ModelConfig` message.

    Raises:
        ServingError: INVALID_ARG for a number that its enumeration does not have, with the path of the field.
    """
    return cast(ModelConfig, _to_record(message, ModelConfig, ""))


def to_message(config: ModelConfig) -> Message:
    """Return the `inference.ModelConfig` message of a record.

    Raises:
        ServingError: INVALID_ARG for a value that the message cannot hold, with the path of the field.
    """
    message = message_class(MESSAGE)()
    _fill(message, config, "")
    return message


@dataclass(frozen=True, slots=True)
class FieldPlan:
    """How one field of a message is kept in its record.

    Attributes:
        name: Field name in the message.
        attribute: Field name in the record.
        is_map: Whether it is a map.
        is_repeated: Whether it is a list; a map is not one.
        has_presence: Whether "not set" differs from the default.
        leaf: Record class, DataType, other Enum class or scalar type of one element.
        message: Message type of one element, None for a scalar.
        is_parameter: Whether one element is a `ModelParameter`, kept as a str.
        is_single: Whether one element is a 32-bit float.
    """

    name: str
    attribute: str
    is_map: bool
    is_repeated: bool
    has_presence: bool
    leaf: Any
    message: Descriptor | None
    is_parameter: bool
    is_single: bool


@cache
def plan(descriptor: Descriptor, record_type: type) -> tuple[FieldPlan, ...]:
    """Return how the fields of a message are kept in `record_type`, in the order in which the schema declares them."""
    hints = get_type_hints(record_type)
    return tuple(_plan_field(field, hints) for field in descriptor.fields)


def _plan_field(field: FieldDescriptor, hints: Mapping[str, Any]) -> FieldPlan:
    attribute = field.name + "_" if keyword.iskeyword(field.name) else field.name
    hint = hints[attribute]
    origin = get_origin(hint)
    is_map = origin is Mapping
    element = cast(Descriptor, field.message_type).fields_by_name["value"] if is_map else field
    kind = element.message_type
    return FieldPlan(
        name=field.name,
        attribute=attribute,
        is_map=is_map,
        is_repeated=origin is tuple,
        has_presence=field.has_presence,
        # The element of `Mapping[K, T]`, of `tuple[T, ...]` and of `T | None`, else T itself.
        leaf=get_args(hint)[1] if is_map else get_args(hint)[0] if get_args(hint) else hint,
        message=kind,
        is_parameter=kind is not None and kind.full_name == _PARAMETER,
        is_single=element.type == FieldDescriptor.TYPE_FLOAT,
    )


def _to_record(message: Message, record_type: Any, path: str) -> object:
    values: dict[str, object] = {}
    for field in plan(message.DESCRIPTOR, record_type):
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        where = f"{path}{field.name}"
        if field.is_map:
            values[field.attribute] = {
                key: _record_value(value[key], field, f"{where}[{key}]") for key in sorted(value)
            }
        elif field.is_repeated:
            values[field.attribute] = tuple(
                _record_value(item, field, f"{where}[{index}]") for index, item in enumerate(value)
            )
        else:
            values[field.attribute] = _record_value(value, field, where)
    return record_type(**values)


def _record_value(value: Any, field: FieldPlan, path: str) -> object:
    if field.is_parameter:
        return value.string_value
    if field.message is not None:
        return _to_record(value, field.leaf, path + ".")
    if field.leaf is DataType:
        if value == 0:
            return None
        return _enum_value(_BY_NUMBER.__getitem__, value, field, path)
    if issubclass(field.leaf, Enum):
        return _enum_value(field.leaf, value, field, path)
    if field.is_single and math.isfinite(value):
        # The shortest decimal that means the same 32 bits: 0.1 in the file stays 0.1.
        return float(str(np.float32(value)))
    return value


def _enum_value(lookup: Callable[[int], object], number: int, field: FieldPlan, path: str) -> object:
    try:
        return lookup(number)
    except (KeyError, ValueError):
        raise invalid(f"{path}: {number} is not a number of {field.leaf.__name__}") from None


def _fill(message: Message, record: Any, path: str) -> None:
    record_type: Any = type(record)
    for field in plan(message.DESCRIPTOR, record_type):
        value = getattr(record, field.attribute)
        where = f"{path}{field.name}"
        if value is None:
            continue
        if field.is_map:
            _fill_map(getattr(message, field.name), value, field, where)
        elif field.message is not None and field.is_repeated:
            repeated = getattr(message, field.name)
            for index, item in enumerate(value):
                _fill(repeated.add(), item, f"{where}[{index}].")
        elif field.message is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill(child, value, where + ".")
        else:
            _set(message, field, value, where)


def _fill_map(entries: Any, value: Mapping[Any, Any], field: FieldPlan, path: str) -> None:
    for key, item in value.items():
        where = f"{path}[{key}]"
        try:
            if field.is_parameter:
                entries[key].string_value = item
            elif field.message is not None:
                _fill(entries[key], item, where + ".")
            else:
                entries[key] = item
        except (TypeError, ValueError) as error:
            raise _misfit(where, item, error) from None


def _set(message: Message, field: FieldPlan, value: Any, path: str) -> None:
    try:
        if field.is_repeated:
            getattr(message, field.name).extend(value)
        elif isinstance(value, DataType):
            setattr(message, field.name, value.number)
        elif isinstance(value, Enum):
            setattr(message, field.name, value.value)
        else:
            setattr(message, field.name, value)
    except (TypeError, ValueError) as error:
        raise _misfit(path, value, error) from None


def _misfit(path: str, value: object, error: Exception) -> Exception:
    return invalid(f"{path}: {value!r} does not fit this field: {error}")
