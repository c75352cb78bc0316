"""Trace settings, their changes at run time, and their requests and responses as JSON and as gRPC messages.

A setting of a model overrides that of the server, which overrides the command line. A change to None resets a single
field.

Source: Triton's trace extension, for names, ranges and precedence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from charonia.core.errors import invalid, unsupported
from charonia.core.trace import TraceLevel
from charonia.wire.json_text import kind_of, parse_object

UINT32_MAX = 2**32 - 1
INT32_MAX = 2**31 - 1

UNLIMITED = -1
"""An unlimited number of traces."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which requests are traced, and which events.

    Attributes:
        level: Recorded events; OFF for no trace at all.
        rate: One of this number of requests is traced.
        count: Total number of traces, `UNLIMITED` for no limit.
        log_frequency: Number of traces in each file, 0 for all in one file.
    """

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = UNLIMITED
    log_frequency: int = 0


Change = Mapping[str, int | None]
"""New value by field of `TraceSettings`; None resets the field."""

_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_RANGES = {"trace_rate": (0, UINT32_MAX), "trace_count": (UNLIMITED, INT32_MAX), "log_frequency": (0, UINT32_MAX)}


def read_change(texts: Mapping[str, Sequence[str] | None]) -> Change:
    """Return the change that a client requests.

    Args:
        texts: Values by name in the protocol; None or no value clears the setting.

    Raises:
        ServingError: UNSUPPORTED for the file, INVALID_ARG for an unknown setting or an invalid value.
    """
    if "trace_file" in texts:
        raise unsupported(
            "trace file location can not be updated through network protocol",
            hint="it is set by --trace-config triton,file=PATH",
        )
    change: dict[str, int | None] = {}
    for name, values in texts.items():
        if name not in _FIELDS:
            raise invalid(f"there is no trace setting '{name}'", hint=f"expected one of {', '.join(_FIELDS)}")
        if not values:
            change[_FIELDS[name]] = None
        elif name == "trace_level":
            change["level"] = read_level(values)
        elif len(values) > 1:
            raise invalid(f"expect only 1 value for '{name}', got {len(values)}")
        else:
            change[_FIELDS[name]] = _number(name, values[0])
    return change


def read_level(names: Sequence[str]) -> TraceLevel:
    """Return the sum of these levels.

    Raises:
        ServingError: INVALID_ARG for an unknown one, or for OFF together with others.
    """
    level = TraceLevel.OFF
    for name in names:
        if name not in TraceLevel.__members__:
            raise invalid(f"there is no trace level '{name}'", hint=f"expected {', '.join(TraceLevel.__members__)}")
        level |= TraceLevel[name]
    if "OFF" in names and len(names) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified", hint="leave out OFF, or the others")
    return level


def level_names(level: TraceLevel) -> list[str]:
    return [each.name or "" for each in TraceLevel if each and each in level] or ["OFF"]


class SettingsTable:
    """The settings of the server and of its models.

    Args:
        default: Settings of the command line.
    """

    def __init__(self, default: TraceSettings) -> None:
        self._default = default
        self._server: dict[str, int] = {}
        self._models: dict[str, dict[str, int]] = {}

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def of_server(self) -> TraceSettings:
        return _with(self._default, self._server)

    def of_model(self, model: str) -> TraceSettings:
        return _with(self.of_server(), self._models.get(model, {}))

    def change(self, model: str, change: Change) -> None:
        own = dict(self._models.get(model, {}) if model else self._server)
        for name, value in change.items():
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value
        if not model:
            self._server = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)

    def copy(self) -> "SettingsTable":
        """Return a table with the same settings, to try a change on."""
        other = SettingsTable(self._default)
        other._server = dict(self._server)
        other._models = {model: dict(own) for model, own in self._models.items()}
        return other


def _with(settings: TraceSettings, own: Mapping[str, int]) -> TraceSettings:
    values: dict[str, int] = {**own}
    if "level" in values:
        values["level"] = TraceLevel(values["level"])
    return replace(settings, **values)  # type: ignore[arg-type]


def _number(name: str, text: str) -> int:
    lowest, highest = _RANGES[name]
    try:
        number = int(text)
    except ValueError:
        raise invalid(f"Unable to parse '{name}', got: {text}", hint="expected a whole number") from None
    if name == "trace_count" and number < lowest:
        raise invalid(f"Unable to parse 'trace_count'. Expecting value >= {lowest}, got: {text}")
    if not lowest <= number <= highest:
        raise invalid(f"Unable to parse '{name}', value is out of range [ {lowest}, {highest} ], got: {text}")
    return number


TraceTexts = Mapping[str, Sequence[str]]
"""Settings by name, each a list of texts."""


def decode_json(body: bytes | memoryview) -> Change:
    """Return the change that a body requests.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED, as `charonia.wire.trace_settings.read_change`.
    """
    texts: dict[str, Sequence[str] | None] = {}
    for name, value in (parse_object(body) if len(body) else {}).items():
        if value is None:
            texts[name] = None
        elif name == "trace_level":
            if type(value) is not list or any(type(level) is not str for level in value):
                raise invalid(f"'trace_level': expected a list of strings, got {kind_of(value)}")
            texts[name] = value
        elif type(value) in (str, int):
            texts[name] = [str(value)]
        else:
            raise invalid(f"'{name}': expected a string, got {kind_of(value)}")
    return read_change(texts)


def describe(settings: TraceTexts) -> dict[str, object]:
    """Return settings as a JSON document."""
    return {name: list(texts) if name == "trace_level" else texts[0] for name, texts in settings.items()}


def decode_message(request: Any) -> Change:
    """Return the change that a `TraceSettingRequest` requests. Raises as `decode_json`."""
    return read_change({name: list(setting.value) for name, setting in request.settings.items()})


def describe_message(settings: TraceTexts) -> dict[str, object]:
    """Return settings as the members of a `TraceSettingResponse`."""
    return {"settings": {name: {"value": list(texts)} for name, texts in settings.items()}}
