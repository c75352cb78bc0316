"""Forms and files as bodies of `generate`."""

import json
from contextlib import suppress
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.wire.form_bodies import FIELDS_MAX, URL_ENCODED, form_document

JSON_CONTENT = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}
CONFIG = ModelConfig(
    "m",
    input=(
        ModelInput("image", DataType.BYTES, dims=(1,)),
        ModelInput("scale", DataType.FP32, dims=(-1,), optional=True),
        ModelInput("options", DataType.BYTES, dims=(1,), optional=True),
    ),
    parameters={JSON_SCHEMA: json.dumps({"inputs": {"options": JSON_CONTENT}, "outputs": {}})},
)
URL = "http://server/v2/models/m/generate"


def document(**sent: Any) -> Any:
    """Return the object that a request of this library stands for."""
    made = requests.Request("POST", URL, **sent).prepare()
    body = made.body if isinstance(made.body, bytes) else str(made.body or "").encode()
    kind = str(made.headers.get("Content-Type", "")).encode()
    return form_document(CONFIG, kind, made.path_url.encode(), body)


def refusal(kind: bytes, body: bytes, url: bytes = b"/") -> str:
    with pytest.raises(ServingError) as caught:
        form_document(CONFIG, kind, url, body)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_a_form_with_a_file_has_the_members_of_json() -> None:
    files = {"image": ("a.png", b"\x89PNG\r\n\r\n--\xff", "image/png")}

    assert document(files=files, data={"scale": "[0.5, 1]", "options": '{"a": 1}', "user": "ada", "seed": "7"}) == {
        "image": b"\x89PNG\r\n\r\n--\xff",
        "scale": [0.5, 1],
        "options": {"a": 1},
        "user": "ada",
        "seed": 7,
    }


def test_a_form_without_files_is_url_encoded() -> None:
    assert document(data={"image": "a&b=ä", "scale": "2"}) == {"image": "a&b=ä", "scale": 2}
    assert document(data=[("image", "a"), ("image", "b")]) == {"image": ["a", "b"]}
    assert document(data={"image": "a"}, params={"scale": "2"}) == {"image": "a", "scale": 2}


def test_any_other_body_is_the_only_required_input() -> None:
    headers = {"Content-Type": "image/png"}

    assert document(data=b"\x89PNG", headers=headers, params={"scale": "2", "user": "ada"}) == {
        "image": b"\x89PNG",
        "scale": 2,
        "user": "ada",
    }


@pytest.mark.parametrize(
    "kind", ["", "application/json", "application/x-www-form-urlencoded", "text/plain", "a/b+json"]
)
def test_json_is_json_whatever_a_client_calls_it(kind: str) -> None:
    assert form_document(CONFIG, kind.encode(), b"/?scale=1", b' {"image": "a"}') is None


@pytest.mark.parametrize("body", [b"", b"hello", b'"hello"'])
def test_what_is_no_form_either_is_broken_json(body: bytes) -> None:
    assert form_document(CONFIG, URL_ENCODED.encode(), b"/", body) is None


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        (b"multipart/form-data", b"", "its type names no boundary"),
        (b"multipart/form-data; boundary=x", b"--x\r\n\r\n", "it does not end with its boundary"),
        (b"multipart/form-data; boundary=x", b"", "it does not end with its boundary"),
        (b"multipart/form-data; boundary=x", b"--x\r\n\r\na\r\n--x--", "a part of it has no name"),
        (b"multipart/form-data; boundary=x", b"--x\r\nno header\r\n--x--", "a part of it has no name"),
        (b"multipart/form-data; boundary=x", b"--x" * 3 + b"\r\n--x" * (FIELDS_MAX + 2), "more than 1000 parts"),
        (b"application/x-www-form-urlencoded", b"image=%ff", "cannot be read"),
        (b"application/x-www-form-urlencoded", b"&".join([b"a=1"] * (FIELDS_MAX + 1)), "Max number of fields"),
        (
            b"application/x-www-form-urlencoded",
            b"scale=wide",
            "'scale': expected JSON, such as 1 or [1, 2], got 'wide'",
        ),
    ],
)
def test_what_cannot_be_read_says_why(kind: bytes, body: bytes, problem: str) -> None:
    assert problem in refusal(kind, body)


@given(st.binary(max_size=300), st.sampled_from([b"multipart/form-data; boundary=x", URL_ENCODED.encode()]))
def test_nothing_but_a_refusal_comes_of_any_bytes(body: bytes, kind: bytes) -> None:
    with suppress(ServingError):
        form_document(CONFIG, kind, body, b"--x" + body + b"\r\n--x--")
