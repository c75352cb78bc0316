"""The parameters of a backend's models, declared once.

A declaration defines parsing, error messages and the row in the documentation. Warnings about unknown parameters
suggest the closest known name. Pure.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem, check_problems, short

Options = TypeVar("Options")

_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

INVERTED = {word: not value for word, value in _WORDS.items()}
"""Kind of a boolean parameter whose value is the opposite of its text."""

Kind = type[Any] | Mapping[str, Any] | Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter.

    Attributes:
        help: Meaning, for the documentation; "" if another page has it.
        kind: `bool`, `INVERTED`, `int`, `float`, `str`, or a choice: an enum, or a mapping from text to value.
            Otherwise a function that raises ValueError with the expected value.
        default: Value if the parameter is absent.
        shown: The default as the documentation shows it, if it differs from its text.
        also: Second name; the first name takes precedence.
        is_setting_only: Whether only `--backend-config` can set it.
    """

    name: str
    help: str = ""
    kind: Kind = str
    default: Any = None
    shown: str = ""
    ge: float | None = None
    also: str = ""
    is_setting_only: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.also) if self.also else (self.name,)

    def read(self, text: str) -> Any:
        """Parse a text. Raises ValueError: The text is invalid; the message is the expected value."""
        if self.kind is str:
            return text
        if self.kind is bool or isinstance(self.kind, Mapping):
            return self._choice(_WORDS if self.kind is bool else self.kind, text)
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return self._choice({str(member.value): member for member in self.kind}, text)
        if self.kind in (int, float):
            return self._number(text)
        read: Callable[[str], Any] = self.kind
        return read(text.strip())

    def row(self) -> str:
        """Return the row of the documentation."""
        default = str(self.default).lower() if isinstance(self.default, bool) else self.default
        shown = self.shown or (f"`{default}`" if default not in (None, "") else "")
        names = ", ".join(f"`{name}`" for name in self.names)
        return f"| {names} | {f'{shown} ' if shown else ''}| {self.help} |"

    def _choice(self, choices: Mapping[str, Any], text: str) -> Any:
        found = {name.lower(): value for name, value in choices.items()}
        if text.strip().lower() not in found:
            is_boolean = self.kind is bool or self.kind is INVERTED
            raise ValueError("true or false" if is_boolean else f"one of {', '.join(choices)}")
        return found[text.strip().lower()]

    def _number(self, text: str) -> Any:
        try:
            value = int(text) if self.kind is int else float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (self.ge is not None and value < self.ge) or not text.isascii():
            kind = "a whole number" if self.kind is int else "a number"
            raise ValueError(kind if self.ge is None else f"{kind} of at least {self.ge}")
        return value


_PARAMETER = "parameter"


def parameter(name: str, help: str = "", kind: Kind = str, default: Any = None, *more: Any, **others: Any) -> Any:
    """Return a field of a class of options that is the value of a parameter; the arguments are those of `Param`."""
    declared = Param(name, help, kind, default, *more, **others)
    return field(default=default, metadata={_PARAMETER: declared})


def declared_by(options: Any) -> Iterator[Param]:
    """Yield the parameters whose values are fields of a class of options."""
    return (each.metadata[_PARAMETER] for each in fields(options) if _PARAMETER in each.metadata)


class Values:
    """The values of a model's parameters, and their problems.

    Attributes:
        entries: Path and text of each parameter that is set.
    """

    def __init__(self, parameters: Iterable[Param], entries: Mapping[str, tuple[str, str]]) -> None:
        self.entries = entries
        self.problems: list[Problem] = []
        self._found = {each.name: self._read(each) for each in parameters}

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def fail(self, name: str, message: str) -> None:
        self.problems.append(Problem(self.entries[name][0] if name in self else f"parameters['{name}']", message))

    def into(self, options: type[Options], **others: Any) -> Options:
        """Return options: the values of the parameters that their fields are, and others."""
        declared: Any = options
        own = {f.name: self[f.metadata[_PARAMETER].name] for f in fields(declared) if _PARAMETER in f.metadata}
        return options(**{**own, **others})

    def _read(self, parameter: Param) -> Any:
        name = next((name for name in parameter.names if name in self.entries), None)
        if name is None:
            return parameter.default
        try:
            return parameter.read(self.entries[name][1])
        except ValueError as error:
            self.fail(name, f"expected {error}, got '{short(self.entries[name][1])}'")
            return parameter.default


class Params:
    """The parameters of a backend.

    Args:
        settings: Names that `--backend-config` can set for all models, None for all names.
        others: Names that other code reads.
    """

    def __init__(
        self,
        backend: str,
        *parameters: Param,
        settings: Collection[str] | None = (),
        others: Collection[str] = (),
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._others = tuple(others)
        self.declared = parameters

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a model may set."""
        own = (name for each in self.declared if not each.is_setting_only for name in each.names)
        return (*own, *self._others)

    def values(
        self,
        config: ModelConfig,
        settings: Mapping[str, str] | None = None,
        overriding: Mapping[str, tuple[str, str]] | None = None,
    ) -> Values:
        """Return the values of a model. Its own parameters override the settings.

        Args:
            settings: Settings of the backend (`--backend-config`); undeclared settings are ignored.
            overriding: Path and text of values from another source, which override both.
        """
        entries: dict[str, tuple[str, str]] = {}
        for each in self.declared:
            for name in each.names:
                is_setting = each.is_setting_only or self._settings is None or name in self._settings
                if not each.is_setting_only and name in config.parameters:
                    entries[name] = (f"parameters['{name}']", config.parameters[name])
                elif is_setting and settings is not None and name in settings:
                    entries[name] = (f"--backend-config {self._backend},{name}", settings[name])
        return Values(self.declared, {**entries, **(overriding or {})})

    def checked(self, config: ModelConfig) -> Values:
        """Return the values of a model. Raises ServingError for their problems."""
        values = self.values(config)
        check_problems(config.name, values.problems)
        return values

    def unknown(self, config: ModelConfig, others: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """Yield each unknown parameter of a model, and the closest known name, "" for none."""
        for key in sorted(config.parameters.keys() - SERVER_PARAMETERS - {*self.names, *others}):
            yield key, self.closest(key, others)

    def closest(self, key: str, others: Collection[str] = ()) -> str:
        """Return the closest known name, "" for none."""
        names = {name.lower(): name for name in (*self.names, *others)}
        return next((names[each] for each in difflib.get_close_matches(key.lower(), names, n=1)), "")

    def remarks(self, config: ModelConfig, others: Collection[str] = ()) -> Iterator[str]:
        for key, near in self.unknown(config, others):
            hint = f"; did you mean '{near}'?" if near else ""
            yield f"model '{config.name}': the {self._backend} backend has no parameter '{key}', it has no effect{hint}"
