"""Settings that clients change: documents and messages, and what is refused in them."""

import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from charonia.core.errors import Code, ServingError
from charonia.core.trace import TraceLevel
from charonia.schema.pool import message_class
from charonia.wire import log_settings, trace_settings
from charonia.wire.log_settings import LogFormat, LogOptions

SETTINGS = {"trace_level": ["TIMESTAMPS"], "trace_rate": ["5"]}


def trace_request(model: str = "", **settings: list[str]) -> Any:
    request: Any = message_class("inference.TraceSettingRequest")(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
        request.settings[name].SetInParent()
    return request


def log_request(**settings: tuple[str, Any]) -> Any:
    request: Any = message_class("inference.LogSettingsRequest")()
    for name, (field, value) in settings.items():
        setattr(request.settings[name], field, value)
    return request


def test_a_document_and_a_message_ask_for_the_same_change() -> None:
    document = json.dumps({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "3", "trace_count": None})
    message = trace_request("m", trace_level=["TIMESTAMPS", "TENSORS"], trace_rate=["3"], trace_count=[])

    change = {"level": TraceLevel.TIMESTAMPS | TraceLevel.TENSORS, "rate": 3, "count": None}
    assert trace_settings.decode_json(document.encode()) == change
    assert trace_settings.decode_message(message) == change


def test_a_number_may_be_one_and_nothing_asks_for_nothing() -> None:
    assert trace_settings.decode_json(b'{"trace_rate": 3}') == {"rate": 3}
    assert trace_settings.decode_json(b"") == trace_settings.decode_json(b"{}") == {}


@pytest.mark.parametrize(
    "body", ['{"trace_level": "OFF"}', '{"trace_level": [1]}', '{"trace_rate": [1]}', '{"trace_rate": true}', "[]"]
)
def test_a_setting_of_the_wrong_kind_is_refused(body: str) -> None:
    with pytest.raises(ServingError) as caught:
        trace_settings.decode_json(body.encode())
    assert caught.value.code is Code.INVALID_ARG


def test_settings_are_shown_in_the_form_of_each_protocol() -> None:
    assert trace_settings.describe(SETTINGS) == {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    message: Any = ParseDict(
        trace_settings.describe_message(SETTINGS), message_class("inference.TraceSettingResponse")()
    )
    assert {name: list(each.value) for name, each in message.settings.items()} == SETTINGS


def test_log_settings_change_what_is_given_and_leave_the_rest() -> None:
    before = LogOptions(file="log", warning=False, verbose=1)
    document = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601", "log_error": None, "log_file": None}
    message = log_request(
        log_info=("bool_param", False), log_verbose_level=("uint32_param", 2), log_format=("string_param", "ISO8601")
    )

    expected = LogOptions(file="log", warning=False, info=False, verbose=2, format=LogFormat.ISO8601)
    assert log_settings.decode_json(json.dumps(document).encode(), before) == expected
    assert log_settings.decode_message(message, before) == expected
    assert log_settings.decode_json(b"", before) == before


def test_all_log_settings_are_shown() -> None:
    shown = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": False,
        "log_verbose_level": 3,
        "log_format": "default",
    }
    options = LogOptions(error=False, verbose=3)

    assert log_settings.describe(options) == shown
    message: Any = ParseDict(log_settings.describe_message(options), message_class("inference.LogSettingsResponse")())
    values = {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in message.settings.items()}
    assert values == shown


@pytest.mark.parametrize(
    ("document", "code", "part"),
    [
        ({"log_file": "x"}, Code.UNSUPPORTED, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, Code.INVALID_ARG, "expect boolean for 'log_info', got a number"),
        ({"log_verbose_level": "1"}, Code.INVALID_ARG, "expect int32 for 'log_verbose_level', got a string"),
        ({"log_verbose_level": True}, Code.INVALID_ARG, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, Code.INVALID_ARG, "expected 0 to"),
        ({"log_format": "x"}, Code.INVALID_ARG, "invalid argument for log_format, got: x"),
        ({"log_format": 1}, Code.INVALID_ARG, "expect string for 'log_format'"),
        ({"log_color": True}, Code.INVALID_ARG, "no log setting 'log_color'"),
    ],
)
def test_what_is_no_log_setting_is_refused(document: dict[str, object], code: Code, part: str) -> None:
    with pytest.raises(ServingError) as caught:
        log_settings.decode_json(json.dumps(document).encode(), LogOptions())
    assert caught.value.code is code
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (log_request(log_info=("string_param", "on")), "expect boolean for 'log_info', got a string"),
        (log_request(log_verbose_level=("bool_param", True)), "expect int32 for 'log_verbose_level', got a boolean"),
        (log_request(log_format=("uint32_param", 1)), "expect string for 'log_format', got an unsigned number"),
        (log_request(log_file=("string_param", "x")), "log file location"),
    ],
)
def test_a_message_with_another_kind_is_refused(message: Any, part: str) -> None:
    with pytest.raises(ServingError, match=part):
        log_settings.decode_message(message, LogOptions())


def test_a_setting_without_a_value_is_refused() -> None:
    request: Any = message_class("inference.LogSettingsRequest")()
    request.settings["log_info"].SetInParent()

    with pytest.raises(ServingError, match="expect boolean for 'log_info', got nothing"):
        log_settings.decode_message(request, LogOptions())
