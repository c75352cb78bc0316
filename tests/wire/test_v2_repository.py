from base64 import b64encode

import orjson
import pytest

from charonia.core.errors import ServingError
from charonia.wire.v2_control import decode_index, decode_load, decode_unload


@pytest.mark.parametrize(("body", "ready"), [(b"", False), (b"{}", False), (b'{"ready": true}', True)])
def test_an_index_request_may_ask_for_ready_models(body: bytes, ready: bool) -> None:
    assert decode_index(body) is ready


def test_a_load_request_may_bring_configuration_and_files() -> None:
    parameters = {"config": "{}", "file:1/model.onnx": b64encode(b"onnx").decode()}

    assert decode_load(orjson.dumps({"parameters": parameters})) == ("{}", {"1/model.onnx": b"onnx"})


def test_a_load_request_may_be_empty() -> None:
    assert decode_load(b"") == (None, {})


@pytest.mark.parametrize(("body", "dependents"), [(b"", False), (b'{"parameters": {"unload_dependents": true}}', True)])
def test_an_unload_request_may_include_dependents(body: bytes, dependents: bool) -> None:
    assert decode_unload(body) is dependents


def test_an_index_request_that_says_something_else_is_refused() -> None:
    with pytest.raises(ServingError, match="Invalid value for 'ready': expected a boolean, got a number"):
        decode_index(b'{"ready": 1}')


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ([], "'parameters' must be an object, got an array"),
        ({"config": 1}, "load parameter 'config': expected a string, got a number"),
        ({"file:a": "%"}, "load parameter 'file:a': the value is not base64"),
        ({"file:a": "é"}, "load parameter 'file:a': the value is not base64"),
        ({"other": "a"}, "unrecognized load parameter 'other'"),
    ],
)
def test_a_load_request_that_says_something_else_is_refused(parameters: object, fragment: str) -> None:
    with pytest.raises(ServingError, match=fragment):
        decode_load(orjson.dumps({"parameters": parameters}))


def test_an_unload_request_that_says_something_else_is_refused() -> None:
    with pytest.raises(ServingError, match="'unload_dependents': expected a boolean"):
        decode_unload(b'{"parameters": {"unload_dependents": "yes"}}')
