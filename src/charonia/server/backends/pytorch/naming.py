"""Maps inputs of a configuration to arguments of a model, and its results to outputs. Pure.

A model is called with positional and keyword arguments, any of which may be a list, a tuple or a dictionary of
tensors. A `Template` has their structure, with a `Slot` for each input. There are three naming conventions, and the
first one that all names follow applies:

1. the model's own names: of arguments, of keys of the only dictionary, of keys or fields of results;
2. positions: `ARGS[0]`, `ARGS[2][key]`, `KWARGS[key]`, `RESULT`, `RESULT[key]`, `RESULT[0]`, or `<name>__<number>`;
3. none: the order of the configuration is the order of the model.

Source of the conventions: the documentation of Triton's PyTorch backend.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from charonia.core.errors import internal, invalid

Path = tuple[str | int, ...]
"""Where a tensor is in nested containers: keys and indexes from the outside in."""

MISSING = object()
"""Value of an optional input that a request leaves out."""

_PLACE = re.compile(r"^(ARGS|KWARGS|RESULT)((?:\[[^\[\]\s\"]+\])*)$")
_NUMBERED = re.compile(r"^.*__(0|[1-9][0-9]*)$")


class ParameterKind(Enum):
    """Kind of value that an argument takes."""

    TENSOR = "a tensor"
    STRINGS = "a list of strings"
    DICTIONARY = "a dictionary of tensors"
    NUMBER = "a number"
    OTHER = "something that no input can be"


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a model's `forward`.

    Attributes:
        kind: What it takes.
        is_required: Whether it has no default.
        is_keyword_only: Whether it can be given by name only.
    """

    name: str
    kind: ParameterKind = ParameterKind.TENSOR
    is_required: bool = True
    is_keyword_only: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of an input: its number."""

    index: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A place for a tensor in the arguments that a program was exported with.

    Attributes:
        path: Where: ("ARGS", 0), ("ARGS", 2, "key"), ("KWARGS", "key").
        name: The model's own name for it, "" for none.
        is_constant: Whether its value is part of the program, so that it takes no input.
    """

    path: Path
    name: str = ""
    is_constant: bool = False

    @property
    def place(self) -> str:
        return str(self.path[0]) + "".join(f"[{key}]" for key in self.path[1:])


@dataclass(frozen=True, slots=True)
class Template:
    """Arguments with slots in them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def positional(self) -> set[int]:
        """Indices of the inputs that are passed by position, which cannot be left out."""
        return {part.index for part in self.args if isinstance(part, Slot)}

    def fill(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with the inputs' values; keys whose value is `MISSING` are left out."""
        args = [_filled(part, values) for part in self.args]
        return args, _filled(self.kwargs, values) if self.kwargs else {}


def _filled(part: Any, values: Sequence[Any]) -> Any:
    if type(part) is Slot:
        return values[part.index]
    if isinstance(part, Mapping):
        filled = {key: _filled(value, values) for key, value in part.items()}
        return {key: value for key, value in filled.items() if value is not MISSING}
    if isinstance(part, (list, tuple)):
        return type(part)([_filled(value, values) for value in part])
    return part


def place_of(name: str) -> Path | None:
    """Return the path that a name like `ARGS[2][key]` denotes, None for other names."""
    match = _PLACE.match(name)
    if match is None:
        return None
    keys = re.findall(r"\[([^\[\]]+)\]", match[2])
    return (match[1], *(int(key) if key.isascii() and key.isdigit() else key.strip("'") for key in keys))


def number_of(name: str) -> int | None:
    """Return the number at the end of a name like `INPUT__3`, None for other names."""
    match = _NUMBERED.match(name)
    return int(match[1]) if match else None


def _numbers(names: Sequence[str], count: int) -> list[int] | None:
    """Return the number of each name if all have one below `count`, no two the same."""
    numbers = [number for name in names if (number := number_of(name)) is not None and number < count]
    return numbers if len(numbers) == len(names) == len(set(numbers)) else None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments of a model of which only the names are known.

    Attributes:
        takes_any: Whether the model also takes arguments of any name (`**kwargs`).
    """

    parameters: tuple[Parameter, ...]
    takes_any: bool = False

    def bind(self, names: Sequence[str]) -> Template:
        """Return how to call the model with inputs of these names.

        Raises:
            ServingError: INVALID_ARG when an argument gets no input or an input has no argument.
        """
        required = [parameter for parameter in self.parameters if parameter.is_required]
        slots = {name: Slot(index) for index, name in enumerate(names)}
        known = {parameter.name for parameter in self.parameters}
        paths = [place_of(name) for name in names]
        if all(paths):
            return _of_paths([path for path in paths if path], self.parameters)
        dictionary = (required or self.parameters[:1])[:1]
        is_lone = bool(dictionary) and dictionary[0].kind is ParameterKind.DICTIONARY and len(required) <= 1
        if is_lone and not known.issuperset(names):
            return (
                Template((slots,)) if not dictionary[0].is_keyword_only else Template((), {dictionary[0].name: slots})
            )
        if known.issuperset(names) or (self.takes_any and _numbers(names, 1 << 16) is None):
            return _checked(Template((), slots), self.parameters, set(names))
        numbers = _numbers(names, len(self.parameters))
        if numbers is None and all(number_of(name) is not None for name in names):
            raise invalid(f"inputs {_listed(names)} do not fit: {_describe(self.parameters)}")
        if len(names) > len(self.parameters):
            raise invalid(f"{len(names)} inputs are configured: {_describe(self.parameters)}")
        bound = [self.parameters[number] for number in (numbers if numbers is not None else range(len(names)))]
        named = {parameter.name: Slot(index) for index, parameter in enumerate(bound)}
        return _checked(Template((), named), self.parameters, set(named))

    def kinds(self, template: Template) -> dict[int, ParameterKind]:
        """Return the kind of each input's argument, without inputs inside containers."""
        kinds = {parameter.name: parameter.kind for parameter in self.parameters}
        given = [(part, parameter.kind) for part, parameter in zip(template.args, self.parameters, strict=False)]
        given += [(part, kinds.get(name, ParameterKind.TENSOR)) for name, part in template.kwargs.items()]
        return {part.index: kind for part, kind in given if isinstance(part, Slot)}


def _of_paths(paths: Sequence[Path], parameters: Sequence[Parameter]) -> Template:
    """Return the call that names like ARGS[0] and KWARGS[key] describe."""
    arguments: dict[str, Any] = {}
    for index, path in enumerate(paths):
        root, *keys = path
        first = keys[0] if keys else ""
        if root == "KWARGS" and keys:
            at = str(first)
        elif root == "ARGS" and isinstance(first, int) and first < len(parameters):
            at = parameters[first].name
        else:
            raise invalid(f"input '{Leaf(path).place}' is no argument: {_describe(parameters)}")
        if len(keys) == 1:
            arguments[at] = Slot(index)
        else:
            inner = arguments.setdefault(at, {})
            for key in keys[1:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = Slot(index)
    return _checked(Template((), arguments), parameters, set(arguments))


def _checked(template: Template, parameters: Sequence[Parameter], names: set[str]) -> Template:
    """Return the template with leading arguments by position, which is faster than by name."""
    missing = [p.name for p in parameters if p.is_required and p.name not in names]
    if missing:
        raise invalid(f"no input is given for argument {_listed(missing)} of the model: {_describe(parameters)}")
    for parameter in parameters:
        if parameter.name in names and parameter.kind is ParameterKind.OTHER:
            raise invalid(f"argument '{parameter.name}' of the model takes {parameter.kind.value}")
    kwargs = dict(template.kwargs)
    args = []
    for parameter in parameters:
        if parameter.name not in kwargs or parameter.is_keyword_only or not parameter.is_required:
            break
        args.append(kwargs.pop(parameter.name))
    return Template(tuple(args), kwargs)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Arguments whose structure was fixed when the model was exported.

    Attributes:
        template: The arguments, with slots that count the leaves.
        leaves: What is known of each leaf.
    """

    template: Template
    leaves: tuple[Leaf, ...]

    def bind(self, names: Sequence[str]) -> Template:
        """Return how to call the model.

        Raises:
            ServingError: INVALID_ARG when a leaf gets no input or an input has no leaf.
        """
        slots: list[Any] = [None] * len(self.leaves)
        for number, index in enumerate(self.choose(names)):
            slots[index] = Slot(number)
        args, kwargs = self.template.fill(slots)
        return Template(tuple(args), kwargs)

    def kinds(self, template: Template) -> dict[int, ParameterKind]:
        return {}

    def choose(self, names: Sequence[str]) -> list[int]:
        """Return which leaf each input is. Raises like `bind`."""
        open_leaves = [index for index, leaf in enumerate(self.leaves) if not leaf.is_constant]
        by_name = {self.leaves[index].name: index for index in open_leaves if self.leaves[index].name}
        by_name |= {self.leaves[index].place: index for index in open_leaves}
        written = [Leaf(path).place if (path := place_of(name)) else name for name in names]
        if by_name.keys() >= set(written):
            chosen = [by_name[name] for name in written]
        else:
            numbers = _numbers(names, len(open_leaves))
            if numbers is None and (len(names) != len(open_leaves) or any(place_of(name) for name in names)):
                raise invalid(f"inputs {_listed(names)} do not fit: the model takes {self._listed()}")
            chosen = [open_leaves[number] for number in (numbers if numbers is not None else range(len(names)))]
        missing = [self.leaves[index].name or self.leaves[index].place for index in open_leaves if index not in chosen]
        if missing:
            raise invalid(f"no input is given for {_listed(missing)} of the model: it takes {self._listed()}")
        return chosen

    def _listed(self) -> str:
        return ", ".join(
            f"'{leaf.name}' ({leaf.place})" if leaf.name else leaf.place for leaf in self.leaves if not leaf.is_constant
        )


class ResultNames:
    """Finds the outputs of a configuration in what a model returns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._known: dict[tuple[Path, ...], list[int]] = {}

    def select(self, result: object) -> list[Any]:
        """Return the value of each output."""
        paths: list[Path] = []
        values: list[Any] = []
        _flatten(result, (), paths, values)
        key = tuple(paths)
        chosen = self._known.get(key)
        if chosen is None:
            chosen = self._known[key] = bind_results(self._names, paths)
        return [values[index] for index in chosen]


def result_paths(result: object) -> list[Path]:
    """Return where each part of a result lies."""
    paths: list[Path] = []
    _flatten(result, (), paths, [])
    return paths


def _flatten(part: object, path: Path, paths: list[Path], values: list[Any]) -> None:
    if isinstance(part, Mapping):
        for key, value in part.items():
            _flatten(value, (*path, str(key)), paths, values)
    elif isinstance(part, (list, tuple)) and not (part and all(isinstance(element, str) for element in part)):
        fields = getattr(part, "_fields", None)
        for key, value in zip(fields, part, strict=True) if fields else enumerate(part):
            _flatten(value, (*path, key), paths, values)
    else:
        paths.append(path)
        values.append(part)


def bind_results(names: Sequence[str], paths: Sequence[Path]) -> list[int]:
    """Return which part of a result each output is. Raises ServingError: INTERNAL when the result has no such part."""
    outer = {path[0]: index for index, path in enumerate(paths) if len(path) == 1 and isinstance(path[0], str)}
    if all(name in outer for name in names):
        return [outer[name] for name in names]
    places: dict[Path, int] = {("RESULT", *path): index for index, path in enumerate(paths)}
    chosen = []
    has_unplaced = False
    for position, name in enumerate(names):
        path, number = place_of(name), number_of(name)
        if path is None and number is None:  # its place in the configuration
            has_unplaced, number = True, position
        index = number if path is None and number is not None and number < len(paths) else places.get(path or ())
        if index is None or (has_unplaced and index in chosen):
            found = ", ".join(Leaf(("RESULT", *path)).place for path in paths) or "nothing"
            raise internal(
                f"outputs {_listed(names)} do not fit: the model returned {found}",
                hint="name outputs after the keys of what the model returns, <name>__<number>, or in its order",
            )
        chosen.append(index)
    return chosen


def output_names(paths: Sequence[Path]) -> list[str]:
    """Return names for the parts of a result: its keys or fields where it has them, else by number."""
    if paths and all(len(path) == 1 and isinstance(path[0], str) for path in paths):
        return [str(path[0]) for path in paths]
    return [f"OUTPUT__{index}" for index in range(len(paths))]


def _describe(parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return "the model takes no arguments"
    return "the model takes " + ", ".join(
        f"'{p.name}' ({p.kind.value}{'' if p.is_required else ', optional'})" for p in parameters
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
