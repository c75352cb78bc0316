"""Snapshot of the Python API: a change here is a change for users and shows up in review."""

import inspect

import charonia
import charonia.client

PUBLIC = [
    "BadRequest",
    "Code",
    "Request",
    "Response",
    "Server",
    "ServerOptions",
    "ServingError",
    "Shape",
    "__version__",
    "call",
    "call_async",
    "method",
    "model",
    "serve",
]
CLIENT = [
    "AsyncClient",
    "Balancing",
    "Client",
    "ClientError",
    "EndpointStatus",
    "Failure",
    "InferResult",
    "SequencePart",
    "SharedMemoryRegion",
    "TlsOptions",
    "WireOptions",
]
CLIENT_METHODS = [
    "close",
    "endpoints",
    "infer",
    "load_model",
    "model_config",
    "model_metadata",
    "model_ready",
    "register_shared_memory",
    "repository_index",
    "server_live",
    "server_metadata",
    "server_ready",
    "shared_memory_regions",
    "statistics",
    "stream_infer",
    "trace_settings",
    "unload_model",
    "unregister_shared_memory",
    "update_trace_settings",
]


def test_the_public_names_are_these() -> None:
    assert sorted(getattr(charonia, "__all__", [])) == PUBLIC


def test_the_public_names_of_the_client_are_these() -> None:
    assert sorted(charonia.client.__all__) == CLIENT


def test_both_clients_have_these_methods_with_the_same_parameters() -> None:
    methods = [
        {name: inspect.signature(member).parameters for name, member in vars(client).items() if name[0] != "_"}
        for client in (charonia.client.Client, charonia.client.AsyncClient)
    ]

    assert sorted(methods[0]) == CLIENT_METHODS
    assert methods[0] == methods[1]


def test_every_public_name_of_the_client_is_documented() -> None:
    undocumented = [name for name in CLIENT if not getattr(charonia.client, name).__doc__]

    assert undocumented == []


def test_every_public_name_exists_and_is_documented() -> None:
    undocumented = [name for name in PUBLIC if name != "__version__" and not getattr(charonia, name).__doc__]

    assert undocumented == []
