"""Finds the model among uploaded files: which file belongs where in the model's folder. Pure.

It recognises, with or without folders around it:

- the folder of a model in a repository: config.pbtxt and folders of versions, of which one is taken
- the content of a version: files under the names that backends look for, such as model.onnx
- one file of a known form, such as resnet.onnx, with the files next to it
- a SavedModel
- a folder of Hugging Face with a network that continues text
- a model written by MLflow, if one of its flavours is served

`repository_models` divides a repository of several models.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from charonia.config.backends import HUGGING_FACE, Form, formats, records, served
from charonia.config.forms import RECOGNISED, advice, form_of, generates_text, suffixes
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.platform.artifacts.manifest import FILES_MAX, check_together, is_content

CONFIG = "config.pbtxt"
MLMODEL = "MLmodel"
REQUIREMENTS = "requirements.txt"

NETWORK = "config.json"
_NETWORK = "model"
_NETWORKS = [form for form in RECOGNISED if NETWORK in form.members]
"""Forms of folders of Hugging Face, and the folder of a version that one becomes."""

NAMES_IN_MESSAGE_MAX = 10

MODELS_MAX = 100
"""Most models of a repository that are added together."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A model's folder, arranged from uploaded files.

    Attributes:
        files: Path of the uploaded file, by path in the model's folder.
        made: Content of additional files, by path in the model's folder.
    """

    files: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    made: Mapping[str, bytes] = field(default_factory=dict)


def model_root(paths: Sequence[str]) -> str:
    """Return the folder, with "/" at its end, that contains all content; "" for none.

    The folder of a version does not count: files around it would be missed.
    """
    kept = [path for path in paths if is_content(path)]
    root = ""
    while kept:
        first = kept[0].removeprefix(root).split("/")
        if len(first) == 1 or _is_version(first[0]) or not all(p.startswith(f"{root}{first[0]}/") for p in kept):
            break
        root += f"{first[0]}/"
    return root


def repository_models(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each model of a repository, by the model's name; {} if they are not a repository."""
    kept = [path for path in paths if is_content(path)]
    root = model_root(kept)
    inner = {path.removeprefix(root): path for path in kept}
    tops = {path.split("/")[0] for path in inner}
    own_names = {CONFIG, MLMODEL} | {entry.filename for entry in formats()}
    if own_names & tops or any(map(_is_version, tops)) or form_of(root.rstrip("/") or "model", sorted(tops)):
        return {}
    found: dict[str, list[str]] = {}
    for path, source in inner.items():
        found.setdefault(path.split("/")[0], []).append(source)
    models = {name: files for name, files in found.items() if _is_model_folder(f"{root}{name}/", files)}
    if len(models) > MODELS_MAX:
        raise invalid(f"repository: expected at most {MODELS_MAX} models, got {len(models)}")
    return models


def _is_model_folder(folder: str, files: Sequence[str]) -> bool:
    inner = [path.removeprefix(folder).split("/") for path in files]
    return any(path[0] == CONFIG or (len(path) > 1 and _is_version(path[0])) for path in inner)


def arrange(
    paths: Sequence[str],
    start: Callable[[str], bytes],
    *,
    take: int = 0,
    flavours: Mapping[str, Any] | None = None,
    network: str = "",
) -> Arrangement:
    """Find the model.

    Args:
        start: Returns the first bytes of a file.
        take: Which of several versions to take, 0 for the highest.
        flavours: The flavours of the MLmodel in `model_root`, None if there is none.
        network: Text of the config.json in `model_root`, "" if there is none.
    """
    made: dict[str, bytes] = {}
    kept = [path for path in paths if is_content(path)]
    check_together(kept)
    root = model_root(kept)
    inner = {path.removeprefix(root): path for path in kept}
    tops = sorted({path.split("/")[0] for path in inner})
    if not inner:
        raise invalid("expected a model, got no files", hint="hidden files do not count")
    if flavours is not None:
        files = _of_mlflow(inner, flavours, start)
    elif CONFIG in inner or any(_is_version(top) for top in tops):
        files = _of_folder(inner, take)
    elif HUGGING_FACE.filename not in inner and form_of("model", tops) in _NETWORKS and generates_text(network):
        files = {f"1/{_NETWORK}/{path}": source for path, source in inner.items()}
        made = {f"1/{HUGGING_FACE.filename}": json.dumps({"model": _NETWORK}).encode()}
    else:
        files = _version_content(root.rstrip("/").rpartition("/")[2], inner, start)
    if len(files) > FILES_MAX:
        raise invalid(f"expected at most {FILES_MAX} files, got {len(files)}")
    used = set(files.values())
    return Arrangement(files, tuple(path for path in paths if path not in used), made)


def _of_folder(inner: Mapping[str, str], take: int) -> dict[str, str]:
    numbers = sorted({int(path.split("/")[0]) for path in inner if _is_version(path.split("/")[0]) and "/" in path})
    if take and take not in numbers:
        found = ", ".join(str(number) for number in numbers[:NAMES_IN_MESSAGE_MAX]) or "none"
        raise invalid(f"version {take} does not exist", hint=f"there is {found}")
    number = take or (numbers[-1] if numbers else 1)
    files = {path: source for path, source in inner.items() if not _is_version(path.split("/")[0])}
    return files | {
        f"1/{path.partition('/')[2]}": source for path, source in inner.items() if path.startswith(f"{number}/")
    }


def _version_content(name: str, inner: Mapping[str, str], start: Callable[[str], bytes]) -> dict[str, str]:
    """Return the files of a model that does not have the layout of a repository."""
    entries = sorted({path.split("/")[0] for path in inner})
    if {entry.filename for entry in formats()} & set(entries):
        return {f"1/{path}": source for path, source in inner.items()}
    form = form_of(name or "model", entries)
    if form is not None:
        if not form.filename:
            raise _not_served(form, name or "the folder")
        return {f"1/{form.filename}/{path}": source for path, source in inner.items()}
    found = {entry: form_of(entry, None, start(inner[entry])) for entry in entries if entry in inner}
    models = {entry: form for entry, form in found.items() if form is not None and form in served()}
    if len(models) == 1:
        (main, form), *_ = models.items()
        return _beside(main, form, inner)
    if models:
        raise invalid(
            f"expected one model, got {_names(models)}",
            hint="upload one of them; if one belongs to another, name the main file as its backend expects: model.py",
        )
    recognised = [(entry, form) for entry, form in found.items() if form in RECOGNISED]
    if recognised and recognised[0][1] is not None:
        raise _not_served(recognised[0][1], recognised[0][0])
    folders = [entry for entry in entries if entry not in inner]
    if any(path.split("/")[1:2] and _is_version(path.split("/")[1]) for path in inner):
        raise invalid(f"expected one model, got a repository with {_names(folders)}", hint="add each by itself")
    raise invalid(
        f"{_names(entries)}: unsupported file type; expected the folder of a model, or a file that ends with one "
        f"of {suffixes()}"
    )


def _beside(main: str, form: Form, inner: Mapping[str, str]) -> dict[str, str]:
    """Return a file under the name that its backend expects, with its weights, and all others unchanged."""
    files = {f"1/{path}": source for path, source in inner.items() if path != main}
    weights = str(PurePosixPath(main).with_suffix(form.weights)) if form.weights else ""
    if weights in inner:
        del files[f"1/{weights}"]
        files[f"1/{PurePosixPath(form.filename).with_suffix(form.weights)}"] = inner[weights]
    return {**files, f"1/{form.filename}": inner[main]}


def _of_mlflow(inner: Mapping[str, str], flavours: Mapping[str, Any], start: Callable[[str], bytes]) -> dict[str, str]:
    for flavour, member in [each for record in records() for each in record.mlflow]:
        entry = flavours.get(flavour)
        place = str(entry.get(member, "")) if isinstance(entry, Mapping) else ""
        if not place:
            continue
        below = {path.removeprefix(f"{place}/"): at for path, at in inner.items() if path.startswith(f"{place}/")}
        if place in inner:
            form = form_of(place, None, start(inner[place]))
            if form is None or form not in served():
                continue
            own = {MLMODEL, REQUIREMENTS, "conda.yaml", "python_env.yaml", "input_example.json"}
            data = {path: at for path, at in inner.items() if "/" not in path and path not in own}
            files = _beside(place, form, data | {place: inner[place]})
        elif below:
            root = model_root(list(below))
            found = {path.removeprefix(root): at for path, at in below.items()}
            files = _version_content("", _without_records(found), start)
        else:
            continue
        return files | ({REQUIREMENTS: inner[REQUIREMENTS]} if REQUIREMENTS in inner else {})
    form = next(form for form in RECOGNISED if form.members == (MLMODEL,))
    raise unsupported(
        f"the model of MLflow has the flavours {_names(flavours)}, none of which can be served directly",
        hint=f"as a Python model: {advice(form, 'FOLDER')}",
    )


def _without_records(found: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a flavour without MLflow's notes: how pickles are read, Keras's module."""
    notes = {"keras_module.txt", "save_format.txt", "pickle_module_info.txt", "global_custom_objects.cloudpickle"}
    return {path: source for path, source in found.items() if path not in notes}


def _not_served(form: Form, name: str) -> ServingError:
    return unsupported(f"'{name}' is {form.title}, which cannot be served directly", hint=advice(form, name))


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and not name.startswith("0") and len(name) < 19


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMES_IN_MESSAGE_MAX} more" if len(listed) > NAMES_IN_MESSAGE_MAX else ""
    return ", ".join(f"'{name}'" for name in listed[:NAMES_IN_MESSAGE_MAX]) + more
