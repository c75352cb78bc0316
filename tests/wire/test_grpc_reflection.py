from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from charonia.wire.grpc_reflection import answer
from charonia.wire.grpc_status import RpcError, Status


def ask(**question: Any) -> Any:
    request = reflection_pb2.ServerReflectionRequest(host="h", **question)
    response = reflection_pb2.ServerReflectionResponse.FromString(answer(request.SerializeToString()))
    assert response.original_request == request
    assert response.valid_host == "h"
    return response


def file_names(response: Any) -> list[str]:
    files = response.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(data).name for data in files]


def test_the_services_are_listed() -> None:
    services = [service.name for service in ask(list_services="*").list_services_response.service]

    assert sorted(services) == [
        "charonia.Traffic",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "inference.GRPCInferenceService",
        "xds.service.orca.v3.OpenRcaService",
    ]


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ({"file_by_filename": "health.proto"}, ["health.proto"]),
        ({"file_containing_symbol": "inference.GRPCInferenceService"}, ["grpc_service.proto", "model_config.proto"]),
        ({"file_containing_symbol": "inference.ModelInferRequest"}, ["grpc_service.proto", "model_config.proto"]),
        ({"file_containing_symbol": "grpc.health.v1.Health.Check"}, ["health.proto"]),
    ],
)
def test_a_file_comes_with_those_it_imports(question: dict[str, str], names: list[str]) -> None:
    assert file_names(ask(**question)) == names


def test_a_message_without_extensions_has_no_extension_numbers() -> None:
    response = ask(all_extension_numbers_of_type="inference.ModelConfig").all_extension_numbers_response

    assert (response.base_type_name, list(response.extension_number)) == ("inference.ModelConfig", [])


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "no.proto"},
        {"file_containing_symbol": "no.Symbol"},
        {"file_containing_symbol": "grpc.health.v1.Health.NoMethod"},
        {"file_containing_symbol": ""},
        {"all_extension_numbers_of_type": "no.Message"},
        {"file_containing_extension": reflection_pb2.ExtensionRequest(containing_type="inference.ModelConfig")},
    ],
)
def test_what_is_not_there_is_not_found(question: dict[str, Any]) -> None:
    assert ask(**question).error_response.error_code == Status.NOT_FOUND


def test_a_request_that_asks_nothing_is_told_so() -> None:
    assert ask().error_response.error_code == Status.INVALID_ARGUMENT


def test_bytes_that_are_no_message_end_the_call() -> None:
    with pytest.raises(RpcError) as caught:
        answer(b"\xff")

    assert caught.value.status is Status.INTERNAL
