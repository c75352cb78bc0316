"""The form of a deployment, converted to a specification and back. Pure."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from charonia.core.errors import invalid
from charonia.platform.deployments.spec import LATEST
from charonia.wire.traffic import REPLACE

_WEIGHT = re.compile(r"\s*(\d+)\s*[=:]\s*([0-9.]+)\s*%?\s*")


NUMBERS = {
    "cpu_cores": "device.cpu_cores",
    "memory_mib": "device.memory_mib",
    "gpu_memory_mib": "device.gpu_memory_mib",
    "replicas_min": "replicas.min",
    "replicas_max": "replicas.max",
    "ready_within_s": "ready_within_s",
    "idle_unload_s": "idle_unload_s",
}
"""Fields with numbers, and where the specification has them."""

MODEL_NUMBERS = {
    "instances_min": "instances.min",
    "instances_max": "instances.max",
    "max_batch_size": "batching.max_batch_size",
    "max_queue_delay_us": "batching.max_queue_delay_microseconds",
}
"""The same for each model."""

_FIELDS = {place: field for field, place in (NUMBERS | MODEL_NUMBERS).items()} | {
    "instances": "instances_min",
    "traffic": "weights",
    "traffic.weights": "weights",
}

_PATH = re.compile(r"(?:models\[\d+\]\.|device\.)?[a-z_.]+|\d+\.[a-z_]+|models")

FormFields = Mapping[str, Sequence[str]]
"""A sent form: the values of each field, usually one."""


def text_of(sent: FormFields, name: str) -> str:
    """Return the value of a field, "" if it was not sent."""
    return (sent.get(name) or [""])[0].strip()


def document(sent: FormFields) -> dict[str, Any]:
    """Return the specification of a form, as plain values."""
    problems: list[str] = []
    models = [_model(sent, index, name, problems) for index, name in enumerate(sent.get("model", ()))]
    gpus = " ".join(sent.get("gpus", ())).replace(",", " ").split()
    variables, secrets = (_assigned(text_of(sent, key), key, problems) for key in ("variables", "secrets"))
    if problems:
        raise invalid("\n".join(problems))
    found = {
        "name": text_of(sent, "name"),
        "target": text_of(sent, "target") or "local",
        "environment": text_of(sent, "environment"),
        "models": models,
        "replicas": 1,
        "keys": bool(text_of(sent, "keys")),
        "strategy": text_of(sent, "strategy") or None,
        "variables": variables,
        "secrets": secrets,
        **_numbers(sent, "", NUMBERS),
    }
    if gpus:
        found.setdefault("device", {})["gpus"] = [int(each) if each.isdecimal() else each for each in gpus]
    return {key: value for key, value in found.items() if value not in (None, {})}


def _numbers(sent: FormFields, prefix: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Return the members of a specification that the fields with numbers have."""
    found: dict[str, Any] = {}
    for field, place in places.items():
        part, _, member = place.rpartition(".")
        if (value := number(sent, prefix + field)) is not None:
            (found.setdefault(part, {}) if part else found)[member] = value
    return found


def _number_fields(spec: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields with numbers of a specification; the opposite of `_numbers`."""
    parts = {field: place.rpartition(".") for field, place in places.items()}
    return {field: (spec.get(part, {}) if part else spec).get(member, "") for field, (part, _, member) in parts.items()}


def form_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the form's fields for a specification."""
    bounds = {"min": 1, "max": 1, **spec.get("replicas", {})}
    return {
        "name": spec.get("name", ""),
        "target": spec.get("target", "local"),
        "environment": spec.get("environment", ""),
        "models": [_fields(model) for model in spec.get("models", ())],
        "gpus": ", ".join(map(str, spec.get("device", {}).get("gpus", ()))),
        "strategy": spec.get("strategy", REPLACE),
        "variables": _lines(spec.get("variables", {})),
        "secrets": _lines(spec.get("secrets", {})),
        "keys": bool(spec.get("keys")),
        **_number_fields({**spec, "replicas": bounds}, NUMBERS),
        "ready_within_s": f"{spec.get('ready_within_s', 600):g}",
    }


def sent_of(form: Mapping[str, Any]) -> FormFields:
    """Return a form with these values as a browser sends it."""
    sent = {name: [str(value)] for name, value in form.items() if name not in ("models", "keys")}
    sent["keys"] = ["yes"] if form["keys"] else []
    sent["model"] = [model["name"] for model in form["models"]]
    for index, model in enumerate(form["models"]):
        sent |= {f"{index}.{name}": [str(value)] for name, value in model.items()}
        sent[f"{index}.version"] = [str(number) for number in model["chosen"]]
    return sent


def merged(
    base: Mapping[str, Any], theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a form with the changes of two editors, and by field what both have changed: there, `mine` wins."""
    conflicts: dict[str, str] = {}

    def fields(old: Mapping[str, Any], their: Mapping[str, Any], my: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found = {**my}
        for key in my.keys() & their.keys() - {"name", "models", "has_more"}:
            values = [sorted(each) if isinstance(each, list) else each for each in (old.get(key), their[key], my[key])]
            before, other, own = [value if isinstance(value, bool | list) else str(value or "") for value in values]
            if own == before:
                found[key] = their[key]
            elif other not in (before, own):
                name = "models" if key == "chosen" else f"{prefix}{key}"
                conflicts[name] = f"{my['name']}: " * (name == "models") + f"the other editor has entered '{other}'"
        return found

    old, their, my = ({each["name"]: each for each in form["models"]} for form in (base, theirs, mine))
    models: list[Mapping[str, Any]] = []
    for name in [*my, *(each for each in their if each not in my)]:
        if name in my and name in their:
            models.append(fields(old.get(name, {}), their[name], my[name], f"{len(models)}."))
        elif name not in old:  # one of the two has added it; what one has removed stays removed
            models.append(my.get(name) or their[name])
    return {**fields(base, theirs, mine, ""), "models": models}, conflicts


def field_of(path: str) -> str | None:
    """Return the form's field for a member of a specification: "0.instances_min"."""
    path = re.sub(r"(?<!^models)\[\d+\]$", "", path)  # a number in a list: the field has all of them
    if not _PATH.fullmatch(path):
        return None
    model = re.match(r"models\[(\d+)\]\.?", path)
    rest = path[model.end() :] if model else path.removeprefix("device.")
    return (f"{model[1]}." if model else "") + _FIELDS.get(rest, rest)


def by_field(message: str, find: Callable[[str], str | None] = field_of, *, other: str = "") -> dict[str, str]:
    """Return problems by field.

    Args:
        message: The problems, one per line. A problem of a field begins with the path of a value and a colon.
        find: Returns the field for a path, None for none.
        other: The field of the other problems, "" for the form.
    """
    found: dict[str, list[str]] = {}
    for line in message.splitlines():
        path, colon, _ = line.partition(": ")
        found.setdefault((find(path) if colon else None) or other, []).append(line)
    return {field: "\n".join(lines) for field, lines in found.items()}


def number(sent: FormFields, name: str) -> Any:
    """Return a number of the form, None for an empty field, the text itself if it is not a number."""
    return numeric(text) if (text := text_of(sent, name)) else None


def numeric(text: str) -> Any:
    """Return the number that a text is, else the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip()


def _model(sent: FormFields, index: int, name: str, problems: list[str]) -> dict[str, Any]:
    versions = [int(text) for text in sent.get(f"{index}.version", ()) if text.isdecimal()]
    config = _json(sent, f"{index}.config", problems)
    traffic = _json(sent, f"{index}.traffic", problems)
    weights = _weights(text_of(sent, f"{index}.weights"), f"{index}.weights", problems)
    if text_of(sent, "strategy") not in ("", REPLACE):  # it sets them
        weights = {}
    traffic = {key: value for key, value in traffic.items() if key != "weights"} | (
        {"weights": weights} if weights else {}
    )
    found = {**_numbers(sent, f"{index}.", MODEL_NUMBERS), "config": config, "traffic": traffic}
    return {"name": name, "versions": versions or LATEST, **{key: value for key, value in found.items() if value}}


def _fields(model: Mapping[str, Any]) -> dict[str, Any]:
    traffic, numbers = model.get("traffic", {}), _number_fields(model, MODEL_NUMBERS)
    rest = {key: value for key, value in traffic.items() if key != "weights"}
    weights = traffic.get("weights") or {}
    return {
        "name": model["name"],
        "chosen": numbers_of(model),
        **numbers,
        "weights": ", ".join(f"{version}={weight:g}" for version, weight in weights.items()),
        "traffic": json.dumps(rest) if rest else "",
        "config": json.dumps(model["config"], indent=2) if model.get("config") else "",
        "has_more": bool(traffic or set(numbers.values()) - {""} or model.get("config")),
    }


def numbers_of(model: Mapping[str, Any]) -> list[int]:
    """Return the versions of a model of a specification, none for the latest."""
    versions = model.get("versions", LATEST)
    return [] if versions == LATEST else list(versions)


def _assigned(text: str, field: str, problems: list[str]) -> dict[str, str]:
    """Return variables, of a line NAME=VALUE each."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        name, equals, value = line.partition("=")
        if not equals:
            problems.append(f"{field}: expected lines such as NAME=VALUE, got '{name.strip()}'")
        found[name.strip()] = value.strip()
    return found


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in values.items())


def _weights(text: str, field: str, problems: list[str]) -> dict[str, float]:
    found = {}
    for part in text.split(",") if text.strip() else ():
        match = _WEIGHT.fullmatch(part)
        if match is None:
            problems.append(f"{field}: expected a version and its weight such as 1=90, got '{part.strip()}'")
        else:
            found[match[1]] = float(match[2])
    return found


def _json(sent: FormFields, field: str, problems: list[str]) -> dict[str, Any]:
    text = text_of(sent, field)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        problems.append(f"{field}: expected JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{field}: expected a JSON object, got '{text[:60]}'")
        return {}
    return value
