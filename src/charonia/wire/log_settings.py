"""Requests and responses of the log settings, as JSON and as gRPC messages.

Source: Triton's logging extension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from charonia.core.errors import invalid, unsupported
from charonia.wire.json_text import kind_of, parse_object


class LogFormat(Enum):
    """Prefix of a log line."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


class AccessLogFormat(Enum):
    """Form of the access log."""

    NONE = "none"
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The server's own log and the access log.

    Attributes:
        verbose: 0 for none, 1 and up for more and more detail.
        info: Whether informational lines are written.
        warning: Whether warnings are written.
        error: Whether errors are written.
        format: Prefix of a line.
        file: Path to append to, "" for stderr.
        escape: Whether messages are quoted, so that no client's text can forge a line.
        access: Form of the access log, one line a request.
        access_file: Path of the access log, "" for stderr.
    """

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = LogFormat.DEFAULT
    file: str = ""
    escape: bool = True
    access: AccessLogFormat = AccessLogFormat.NONE
    access_file: str = ""


VERBOSE_MAX = 2**31 - 1

_FIELDS = {
    "log_info": "info",
    "log_warning": "warning",
    "log_error": "error",
    "log_verbose_level": "verbose",
    "log_format": "format",
}
_FORMATS = {each.value: each for each in LogFormat}
_KINDS = {"bool_param": "a boolean", "uint32_param": "an unsigned number", "string_param": "a string"}


def decode_json(body: bytes | memoryview, options: LogOptions) -> LogOptions:
    """Return the options changed by a body; null changes nothing.

    Raises:
        ServingError: UNSUPPORTED for the file, INVALID_ARG for an unknown setting or an invalid value.
    """
    document = parse_object(body) if len(body) else {}
    fields = {name: value for name, value in document.items() if value is not None}
    return _changed(options, fields, kind_of)


def describe(options: LogOptions) -> dict[str, object]:
    """Return all settings as a JSON document."""
    return {
        "log_file": options.file,
        "log_info": options.info,
        "log_warning": options.warning,
        "log_error": options.error,
        "log_verbose_level": options.verbose,
        "log_format": options.format.value,
    }


def decode_message(request: Any, options: LogOptions) -> LogOptions:
    """Return the options changed by a `LogSettingsRequest`. Raises as `decode_json`."""
    fields: dict[str, object] = {}
    kinds: dict[str, str] = {}
    for name, setting in request.settings.items():
        choice = setting.WhichOneof("parameter_choice")
        fields[name] = getattr(setting, choice) if choice else None
        kinds[name] = _KINDS.get(choice or "", "nothing")
    return _changed(options, fields, lambda name: kinds[str(name)], by_name=True)


def describe_message(options: LogOptions) -> dict[str, object]:
    """Return all settings as the members of a `LogSettingsResponse`."""
    fields: dict[type, str] = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {fields[type(value)]: value} for name, value in describe(options).items()}}


def _changed(
    options: LogOptions, fields: Mapping[str, object], kind: Callable[[object], str], *, by_name: bool = False
) -> LogOptions:
    if "log_file" in fields:
        raise unsupported("log file location can not be updated through network protocol", hint="--log-file sets it")
    changes: dict[str, bool | int | LogFormat] = {}
    for name, value in fields.items():
        got = kind(name if by_name else value)
        if name not in _FIELDS:
            raise invalid(f"there is no log setting '{name}'", hint=f"expected one of {', '.join(_FIELDS)}")
        changes[_FIELDS[name]] = _value(name, value, got)
    return replace(options, **changes)  # type: ignore[arg-type]


def _value(name: str, value: object, got: str) -> bool | int | LogFormat:
    if name == "log_format":
        if type(value) is not str:
            raise invalid(f"expect string for 'log_format', got {got}")
        if value not in _FORMATS:
            raise invalid(f"invalid argument for log_format, got: {value}", hint=f"expected {' or '.join(_FORMATS)}")
        return _FORMATS[value]
    if name == "log_verbose_level":
        if type(value) is not int:
            raise invalid(f"expect int32 for 'log_verbose_level', got {got}")
        if not 0 <= value <= VERBOSE_MAX:
            raise invalid(f"'log_verbose_level': expected 0 to {VERBOSE_MAX}, got {value}")
        return value
    if type(value) is not bool:
        raise invalid(f"expect boolean for '{name}', got {got}")
    return value
