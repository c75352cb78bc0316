"""JSON schemas of tensors, and of the bodies that carry them. Pure.

A tensor's elements have a separate schema by datatype, which bodies of `infer` refer to. The server reads flat and
nested arrays of `infer` alike, so their number is not part of a schema.
"""

import re
from collections.abc import Sequence
from typing import Any

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.wire.plain_values import BASE64, CONTENT, PlainValues, Schema, plain_values
from charonia.wire.v2_generate import BARE

Json = dict[str, object]

NO_JSON_FORM = (DataType.FP16, DataType.BF16)
"""Datatypes that JSON does not carry: such tensors are sent in binary form."""

COMPONENTS = "#/components/schemas/"

_FORMATS = {DataType.INT32: "int32", DataType.INT64: "int64", DataType.FP32: "float", DataType.FP64: "double"}


def element(datatype: DataType) -> Json:
    """Return the schema of one element."""
    kind = datatype.numpy.kind
    if datatype is DataType.BYTES:
        return {"type": "string"}
    if kind == "b":
        return {"type": "boolean"}
    found: Json = {"type": "number" if kind == "f" else "integer"}
    if datatype in _FORMATS:
        found["format"] = _FORMATS[datatype]
    if kind in "iu":
        bits = 8 * datatype.byte_size
        low, high = (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        found |= {"minimum": low, "maximum": high}
    return found


def elements(datatype: DataType) -> Json:
    """Return the schema of a tensor's elements, flat or nested.

    It does not refer to itself for the arrays within: generators of clients make no types of such schemas.
    """
    return {
        "type": "array",
        "description": f"{datatype.wire} elements in row-major order, flat or nested",
        "items": {"anyOf": [element(datatype), {"type": "array", "items": {}}]},
    }


def shape_of(config: ModelConfig, tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Return the shape of requests and responses: with the batch dimension, and -1 for variable dimensions."""
    return (-1, *tensor.dims) if config.max_batch_size > 0 else tensor.dims


def signature_text(config: ModelConfig, tensor: ModelInput | ModelOutput) -> str:
    """Return datatype and shape, e.g. `FP32 [batch, 4]`."""
    dims = ["n" if dim == -1 else str(dim) for dim in tensor.dims]
    shape = ", ".join(["batch", *dims] if config.max_batch_size > 0 else dims)
    return f"{_wire(tensor)} [{shape}]"


def infer_request(config: ModelConfig) -> Json:
    """Return the schema of the body of `infer`."""
    inputs = [given for given in config.input if given.data_type is not None]
    entries = [_entry(config, given) for given in inputs]
    required = sum(not given.optional for given in inputs)
    array: Json = {"type": "array", "minItems": required, "maxItems": len(inputs), "items": {"oneOf": entries}}
    if not entries:
        array.pop("items")
    outputs = {
        "type": "array",
        "description": "The outputs to return, all by default",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"enum": [output.name for output in config.output]},
                "parameters": {"$ref": COMPONENTS + "OutputParameters"},
            },
        },
    }
    properties = {
        "id": {"type": ["string", "null"], "description": "Returned with the response"},
        "inputs": array,
        "outputs": outputs,
        "parameters": {"$ref": COMPONENTS + "RequestParameters"},
    }
    return {"type": "object", "required": ["inputs"], "properties": properties}


def infer_response(config: ModelConfig) -> Json:
    """Return the schema of a response of `infer` with all outputs in JSON."""
    entries = [_entry(config, output) for output in config.output if output.data_type not in NO_JSON_FORM]
    array: Json = {"type": "array", "items": {"anyOf": [*entries, {"$ref": COMPONENTS + "Tensor"}]}}
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {**_RESPONSE, "outputs": array},
    }


def generate_request(config: ModelConfig) -> Json:
    """Return the schema of the body of `generate`: a member for each input, request parameters for the rest."""
    schemas = plain_values(config) or PlainValues()
    properties: Json = {"id": {"type": ["string", "null"]}}
    inputs = [given for given in config.input if given.data_type is not None]
    for given in inputs:
        schema = schemas.inputs.get(given.name)
        member = _given(config, given) if schema is None else _plain(config, given, schema)
        properties[given.name] = {"anyOf": [member, {"type": "null"}]} if given.optional else member
    return {
        "type": "object",
        "required": [given.name for given in inputs if not given.optional],
        "properties": properties,
        "additionalProperties": True,  # request parameters; a type would hold for the inputs as well in other languages
    }


def generate_response(config: ModelConfig) -> Json:
    """Return the schema of a response of `generate`."""
    return {
        "type": "object",
        "required": ["model_name", "model_version"],
        "properties": {**_RESPONSE, **_outputs(config)},
    }


def bare_response(config: ModelConfig) -> Json:
    """Return the schema of a response at the model's own path: the outputs, or the value of a single one."""
    members = _outputs(config)
    if members.keys() == {BARE}:
        only = members[BARE]
        assert isinstance(only, dict)
        return only
    return {"type": "object", "properties": members}


def _outputs(config: ModelConfig) -> Json:
    schemas = plain_values(config)
    members: Json = {}
    for output in config.output:
        if schemas is not None:
            members[output.name] = _plain(config, output, schemas.outputs.get(output.name, {}), has_nan=True)
        elif output.data_type not in NO_JSON_FORM:
            members[output.name] = _member(config, output)
    return members


def named_schemas(config: ModelConfig) -> Json:
    """Return the schemas that those of a function's values refer to, by their names in the document."""
    schemas = plain_values(config) or PlainValues()
    found: Json = {}
    for schema in (*schemas.inputs.values(), *schemas.outputs.values()):
        for name, named in schema.get(CONTENT, schema).get("$defs", {}).items():
            own = {key: value for key, value in named.items() if key != "title"}  # generators would take it for a name
            found[_named(config, name)] = _in_document(config, own)
    return found


def _plain(config: ModelConfig, tensor: ModelInput | ModelOutput, schema: Schema, *, has_nan: bool = False) -> Json:
    """Return the schema of a value of a function: one, or a list of them for a model with a batch dimension."""
    if CONTENT in schema:
        value = {key: each for key, each in schema[CONTENT].items() if key != "$defs"}
    elif schema.get("format") == "binary":
        base64 = {"type": "object", "required": [BASE64], "properties": {BASE64: {"type": "string"}}}
        value = {"anyOf": [{"type": "string"}, base64]}
    else:
        value = _nullable(dict(schema)) if has_nan else dict(schema)
    found = _in_document(config, value)
    assert isinstance(found, dict)
    if config.max_batch_size > 0:
        found = {"anyOf": [found, {"type": "array", "items": found}]}
    return {"description": signature_text(config, tensor), **found}


def _nullable(schema: Json) -> Json:
    """Return the schema of numbers that may be NaN, which JSON has as null."""
    items = schema.get("items")
    if isinstance(items, dict):
        return {**schema, "items": _nullable(items)}
    return {**schema, "type": ["number", "null"]} if schema.get("type") == "number" else schema


def _named(config: ModelConfig, name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{config.name}.{name}")


def _in_document(config: ModelConfig, part: Any) -> Any:
    """Return a part of a schema with references into the document."""
    if isinstance(part, list):
        return [_in_document(config, each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: COMPONENTS + _named(config, value.rpartition("/")[2])
        if key == "$ref" and isinstance(value, str)
        else _in_document(config, value)
        for key, value in part.items()
    }


_RESPONSE = {"id": {"type": "string"}, "model_name": {"type": "string"}, "model_version": {"type": "string"}}


def _wire(tensor: ModelInput | ModelOutput) -> str:
    return tensor.data_type.wire if tensor.data_type is not None else ""


def _member(config: ModelConfig, tensor: ModelInput | ModelOutput) -> Json:
    datatype = tensor.data_type or DataType.FP32
    return {
        "description": signature_text(config, tensor),
        "anyOf": [element(datatype), {"$ref": COMPONENTS + datatype.wire}],
    }


def _given(config: ModelConfig, tensor: ModelInput) -> Json:
    """Return the schema of an input: an array, flat or nested, and a plain value where one element will do."""
    plain = element(tensor.data_type or DataType.FP32)
    forms = [plain] if all(dim in (-1, 1) for dim in tensor.dims) else []
    forms.append({"type": "array", "items": plain})
    shapes = {tensor.dims, shape_of(config, tensor)}
    forms += [_nested(plain, shape) for shape in sorted(shapes, key=len) if len(shape) > 1]
    return {"description": signature_text(config, tensor), "anyOf": forms}


def _nested(schema: Json, dims: Sequence[int]) -> Json:
    for dim in reversed(dims):
        schema = {"type": "array", "items": schema, **({"minItems": dim, "maxItems": dim} if dim >= 0 else {})}
    return schema


def _entry(config: ModelConfig, tensor: ModelInput | ModelOutput) -> Json:
    properties: Json = {
        "name": {"const": tensor.name},
        "datatype": {"const": _wire(tensor)},
        "shape": _shape(shape_of(config, tensor), config.max_batch_size),
    }
    if tensor.data_type not in NO_JSON_FORM:
        properties["data"] = {"$ref": COMPONENTS + _wire(tensor)}
    return {
        "title": tensor.name,
        "description": signature_text(config, tensor),
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": properties | {"parameters": {"$ref": COMPONENTS + "InputParameters"}},
    }


def _shape(shape: Sequence[int], batch_max: int) -> Json:
    size: Json = {"type": "integer", "minimum": 0}
    dims = [size if dim == -1 else {"const": dim} for dim in shape]
    if batch_max > 0:
        dims[0] = {"type": "integer", "minimum": 1, "maximum": batch_max}
    found: Json = {"type": "array", "items": size, "minItems": len(shape), "maxItems": len(shape)}
    return found | ({"prefixItems": dims} if dims else {})


def shared_schemas(datatypes: Sequence[DataType]) -> Json:
    """Return the schemas that others refer to.

    Args:
        datatypes: Datatypes of all inputs and outputs.
    """
    return {datatype.wire: elements(datatype) for datatype in datatypes} | _SHARED


_UNSIGNED = {"type": "integer", "minimum": 0}

_SHARED: Json = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "The problem, and what to do"}},
    },
    "Tensor": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": _UNSIGNED},
            "datatype": {"enum": [datatype.wire for datatype in DataType]},
            "data": {"type": "array", "items": {}},
            "parameters": {"type": "object"},
        },
    },
    "RequestParameters": {
        "type": "object",
        "description": "Parameters of the server; the model receives the others",
        "properties": {
            "sequence_id": {"type": ["integer", "string"]},
            "sequence_start": {"type": "boolean"},
            "sequence_end": {"type": "boolean"},
            "priority": _UNSIGNED,
            "timeout": {**_UNSIGNED, "description": "Longest time in the queue, in microseconds"},
            "binary_data_output": {"type": "boolean", "description": "Whether outputs are binary by default"},
        },
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    "InputParameters": {
        "type": "object",
        "properties": {
            "binary_data_size": {**_UNSIGNED, "description": "Size of the input's bytes, which follow the JSON"},
            "shared_memory_region": {"type": "string"},
            "shared_memory_offset": _UNSIGNED,
            "shared_memory_byte_size": _UNSIGNED,
        },
    },
    "OutputParameters": {
        "type": "object",
        "properties": {
            "binary_data": {"type": "boolean", "description": "Whether this output's bytes follow the JSON"},
            "classification": {**_UNSIGNED, "description": "Return this number of top classes instead of the tensor"},
            "shared_memory_region": {"type": "string"},
            "shared_memory_offset": _UNSIGNED,
            "shared_memory_byte_size": _UNSIGNED,
        },
    },
}
