"""The gRPC services of a replica, for Ray's gRPC proxy: `grpc_servicer_functions` in its options."""

from typing import Any

import grpc

from charonia.server.grpc.methods import Method, method_table

METHODS: dict[str, Method] = {method.name: method for method in method_table().values()}
"""All methods by name. Ray's proxy calls the replica's method of that name."""


def add_grpc_services(servicer: object, server: Any) -> None:
    """Add the inference, health and reflection services to Ray's gRPC proxy.

    Messages have no deserializer: the proxy passes them on as bytes.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for path, method in method_table().items():
        _, service, name = path.decode().split("/")
        handler = grpc.unary_unary_rpc_method_handler if method.run else grpc.stream_stream_rpc_method_handler
        # Ray's proxy replaces this function by its own.
        by_service.setdefault(service, {})[name] = handler(servicer)
    for service, handlers in by_service.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
