import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default

from charonia.schema.pool import file_set, message_class, pool

ROOT = Path(__file__).resolve().parents[2]


def compile_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_schema", ROOT / "tools" / "compile_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields(message: Any) -> dict[str, object]:
    """Every field of a message and of the messages inside it: number, type, cardinality, oneof."""
    found: dict[str, object] = {}
    for field in message.fields:
        typed = field.message_type or field.enum_type
        kind = field.type if typed is None else typed.full_name
        group = field.containing_oneof.name if field.containing_oneof else None
        found[f"{message.full_name}.{field.name}"] = (field.number, kind, field.is_repeated, group)
    for enum in message.enum_types:
        found[enum.full_name] = {value.name: value.number for value in enum.values}
    for nested in message.nested_types:
        found |= fields(nested)
    return found


def test_the_compiled_schema_is_up_to_date() -> None:
    tool = compile_tool()

    compiled = tool.compile_schema()

    assert tool.OUTPUT.read_bytes() == compiled, "run: python tools/compile_schema.py"


def test_a_message_class_reads_and_writes_the_wire_format() -> None:
    config = message_class("inference.ModelConfig")

    message = config(name="m", max_batch_size=4, parameters={"a": {"string_value": "b"}})

    assert config.FromString(message.SerializeToString()) == message


def test_a_message_class_is_made_once() -> None:
    assert message_class("inference.ModelConfig") is message_class("inference.ModelConfig")


def test_an_unknown_message_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        message_class("inference.NoSuchMessage")


def test_the_schema_stays_out_of_the_default_pool() -> None:
    assert message_class("inference.ModelConfig").DESCRIPTOR.file.pool is not Default()


def test_files_stand_after_those_they_import() -> None:
    seen: set[str] = set()
    for file in file_set().file:
        assert seen >= set(file.dependency)
        seen.add(file.name)


def test_the_model_configuration_has_the_numbers_of_the_stock_client() -> None:
    from tritonclient.grpc import model_config_pb2 as client

    for name, descriptor in client.DESCRIPTOR.message_types_by_name.items():
        ours = fields(message_class(f"inference.{name}").DESCRIPTOR)
        assert ours == fields(descriptor)
    datatypes = pool().FindEnumTypeByName("inference.DataType").values_by_name
    theirs = client.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: value.number for name, value in datatypes.items()} == {n: v.number for n, v in theirs.items()}
