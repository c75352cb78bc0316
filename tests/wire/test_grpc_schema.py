"""Our schema against the stock client's: same fields, numbers and methods."""

from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from charonia.schema.pool import pool

Field = tuple[int, int, int, str]


def fields(messages: Any, prefix: str = "") -> dict[str, Field]:
    found: dict[str, Field] = {}
    for message in messages:
        name = f"{prefix}{message.name}."
        for field in message.field:
            type_name = field.type_name.replace("v1alpha", "v1")
            found[name + field.name] = (field.number, field.type, field.label, type_name)
        found.update(fields(message.nested_type, name))
    return found


def described(file: Any) -> descriptor_pb2.FileDescriptorProto:
    description = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(description)
    return description


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ("grpc_service.proto", service_pb2),
        ("health.proto", health_pb2),
        ("reflection.proto", reflection_pb2),
    ],
    ids=["service", "health", "reflection"],
)
def test_messages_and_methods_are_those_of_the_protocol(ours: str, stock: Any) -> None:
    mine, theirs = described(pool().FindFileByName(ours)), described(stock.DESCRIPTOR)

    my_fields, their_fields = fields(mine.message_type), fields(theirs.message_type)
    # The protocols grow: what we have must be theirs, and all of what their inference messages have must be ours.
    assert {name: their_fields.get(name) for name in my_fields} == my_fields
    assert {name for name in their_fields if name.startswith("ModelInfer")} <= set(my_fields)
    methods = {m.name: (m.client_streaming, m.server_streaming) for m in mine.service[0].method}
    their_methods = {m.name: (m.client_streaming, m.server_streaming) for m in theirs.service[0].method}
    assert {name: their_methods.get(name) for name in methods} == methods
