"""Requests and responses about traffic between versions, as gRPC messages: JSON objects, the same as over HTTP."""

from collections.abc import Mapping

from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_messages import new, parsed, serialized
from charonia.wire.json_text import Object, dump, parse_object


def decode_traffic_request(data: Buffer) -> str:
    """Return the model of a ModelTrafficRequest.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    model: str = parsed("charonia.ModelTrafficRequest", data).model_name
    return model


def decode_traffic_change(data: Buffer) -> tuple[str, Object]:
    """Return the model and the change of a ModelTrafficChangeRequest.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
        ServingError: INVALID_ARG when the change is not a JSON object.
    """
    request = parsed("charonia.ModelTrafficChangeRequest", data)
    return request.model_name, parse_object(request.change.encode())


def encode_traffic(document: Mapping[str, object]) -> bytes:
    return serialized(new("charonia.ModelTrafficResponse", traffic=dump(document).decode()))
