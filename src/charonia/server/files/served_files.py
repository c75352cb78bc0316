"""What the paths are that a command line gives to be served. Light to import."""

import os
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from charonia.archives import open_zip, read_entry
from charonia.config.backends import HUGGING_FACE, PYTHON, Form, served
from charonia.config.forms import (
    CHECKPOINT,
    advice,
    form_of,
    generates_text,
    is_model_folder,
    pickled_module,
    suffixes,
)
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.pbtxt import render
from charonia.core.errors import ServingError, invalid, not_found, unsupported
from charonia.server.options import ModelOptions

ENTRIES_MAX = 10_000
"""Entries of a folder that are read to recognise it."""

START_BYTES = 64
"""Bytes of a file that are read to recognise it."""

CONFIG = "config.pbtxt"

CONFIG_BYTES_MAX = 1024 * 1024
"""Largest `config.json` that is read."""

PICKLE_BYTES_MAX = 4 * 1024 * 1024
"""Largest pickle of a checkpoint that is searched for a module; its tensors are in other files."""

GZIP = b"\x1f\x8b"


class UnsupportedFiles(ServingError):  # noqa: N818 # an error like any other, with lines to paste
    """What was given is recognised, and no backend serves it.

    Attributes:
        lines: Lines for a shell that lead to something that is served.
    """

    def __init__(self, error: ServingError, lines: str) -> None:
        super().__init__(error.code, error.message, hint=error.hint)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What was given to be served, in the order in which it was given.

    Attributes:
        repositories: Repositories, as they were given.
        models: Folders of single models.
        loose: Folders with the files of one model and its configuration, without a version.
        files: Files, with the form of each.
        names: Names of models that were given with them, `NAME=PATH`.
    """

    repositories: tuple[str, ...]
    models: tuple[Path, ...]
    files: tuple[tuple[Path, Form], ...]
    loose: tuple[Path, ...] = ()
    names: Mapping[Path, str] = field(default_factory=dict)

    @property
    def needs_repository(self) -> bool:
        return bool(self.models or self.files or self.loose)

    @property
    def model_count(self) -> int:
        return len(self.models) + len(self.files) + len(self.loose)


def sort(paths: Sequence[str], *, is_named: bool = False) -> ServedFiles:
    """Return what each path is. Blocks on the disk.

    Args:
        paths: Paths of this machine, with a name as `NAME=PATH`, and URIs of stores, which are repositories.
        is_named: Whether a model has a name of its own, so that a folder may hold its files without a version.

    Raises:
        UnsupportedFiles: Something is recognised and cannot be served.
        ServingError: A file is missing, or has no known form.
    """
    repositories, models, files = list[str](), list[Path](), list[tuple[Path, Form]]()
    loose, names = list[Path](), dict[Path, str]()
    for each in dict.fromkeys(paths):
        name, source = split_name(each)
        path = Path(source).expanduser()
        if name and names.setdefault(path.absolute(), name) != name:
            raise invalid(f"'{source}' has two names, '{names[path.absolute()]}' and '{name}'")
        if path.is_symlink() and not path.exists():
            raise not_found(f"'{source}' is a link to '{path.readlink()}', and nothing is there")
        entries = _entries(path)
        form = form_of(path.name, entries, _start(path))
        if form in served() and (pickle := _checkpoint(path)) is not None:
            form = pickled_module(found) if (found := _class_of(pickle)) else CHECKPOINT
        if form is not None and not form.filename:
            if not (find_spec(HUGGING_FACE.backend) and generates_text(_model_config(path, form))):
                raise _unserveable(path, form)
            form = HUGGING_FACE
        if entries is not None and form is not None:
            files.append((path.absolute(), form))
        elif entries is not None and (inside := _files_in(path, entries, is_named=bool(name or is_named))):
            if CONFIG in entries:
                loose.append(path.absolute())
            else:
                files += inside
            if name:
                names[inside[0][0]] = name
        elif (name or is_named) and entries is not None and CONFIG in entries and is_model_folder(entries):
            models.append(path.absolute())
        elif "://" in source or (entries is not None and not _is_model(path, entries)):
            repositories.append(source)
        elif entries is not None:
            models.append(path.absolute())
        elif path.is_file() and form is not None:
            files.append((path.absolute(), form))
        elif path.is_file() and _start(path).startswith(GZIP):
            raise invalid(f"'{source}' is compressed with gzip", hint=f"gunzip {source}")
        elif path.is_file():
            raise invalid(
                f"'{source}': unsupported file type, expected a folder of models or a file that ends with {suffixes()}"
            )
        elif form is not None:
            raise not_found(f"there is no file '{source}'", hint=_similar_files_hint(path))
        else:
            repositories.append(source)  # that it is missing is reported with the other repositories
        if name and source in repositories:
            raise invalid(f"'{each}': a name is for one model, and '{source}' is a repository")
    return ServedFiles(tuple(repositories), tuple(models), tuple(files), tuple(loose), names)


def split_name(text: str) -> tuple[str, str]:
    """Return the name and the path of `NAME=PATH`; "" and the text where it is only a path. Blocks on the disk."""
    name, separator, path = text.partition("=")
    is_name = separator and path and name and "/" not in name and not Path(text).exists()
    return (name, path) if is_name else ("", text)


def classify(models: ModelOptions) -> ServedFiles:
    """Classify what is given to a server. Blocks on the disk.

    Raises:
        ServingError: Something cannot be served, or an option needs a file and there is none.
    """
    files = sort(models.repositories, is_named=bool(models.files.model_name))
    if models.files.explicit and not files.files:
        raise invalid(
            f"{', '.join(models.files.explicit)}: expected a file to serve, got repositories only",
            hint="the configurations of models in a repository say it: max_batch_size, instance_group { count: 2 }",
        )
    return files


def _checkpoint(path: Path) -> bytes | None:
    """Return the pickle of an archive of PyTorch with objects and without code, None for any other file."""
    try:
        with open_zip(path) as archive:
            names = {entry.rpartition("/")[2]: entry for entry in archive.namelist()}
            if "data.pkl" not in names or "constants.pkl" in names:
                return None
            is_small = archive.getinfo(names["data.pkl"]).file_size <= PICKLE_BYTES_MAX
            return read_entry(archive, names["data.pkl"], PICKLE_BYTES_MAX) if is_small else b""
    except (OSError, zipfile.BadZipFile):
        return None  # the load of the model reports it


def _class_of(pickle: bytes) -> str:
    """Return the class of a module in a pickle, "" for none, such as a state dict. Reads it without running it."""
    classes, texts = list[str](), set[str]()
    try:
        for code, argument, _ in pickletools.genops(pickle):
            if code.name == "GLOBAL":
                classes.append(str(argument).replace(" ", "."))
            elif code.name == "BINUNICODE":
                texts.add(str(argument))
    except ValueError:
        return ""
    own = [each for each in classes if not each.startswith(("collections.", "torch._utils.", "torch.storage."))]
    return own[0] if own and {"_parameters", "_modules"} <= texts else ""


def _unserveable(path: Path, form: Form) -> UnsupportedFiles:
    text = _model_config(path, form)
    error = unsupported(f"'{path}' is {form.title}, which cannot be served directly")
    if generates_text(text):
        error = unsupported(error.message, hint="vLLM serves it as it is: pip install 'charonia[vllm]'")
    return UnsupportedFiles(error, advice(form, str(path), text))


def _model_config(path: Path, form: Form) -> str:
    config = path / "config.json"
    is_read = form.members and config.is_file() and config.stat().st_size <= CONFIG_BYTES_MAX
    return config.read_text(encoding="utf-8", errors="replace") if is_read else ""


def _entries(path: Path) -> list[str] | None:
    """Return the names in a folder, None if it is none."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in islice(entries, ENTRIES_MAX)]
    except OSError:
        return None


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(START_BYTES)
    except OSError:
        return b""


def _is_model(path: Path, entries: Sequence[str]) -> bool:
    """Return whether a folder is one model: it has a version that holds a model's file."""
    if not is_model_folder(entries):
        return False
    own = {form.filename for form in served()}
    versions = [path / entry for entry in entries if entry.isdecimal()]
    return any(own & set(_entries(version) or ()) for version in versions)


def _files_in(path: Path, entries: Sequence[str], *, is_named: bool) -> list[tuple[Path, Form]]:
    """Return the models' files in a folder without versions, with one model if it is named; none for a repository."""
    inner = {entry: _entries(path / entry) for entry in entries if not entry.startswith(".")}
    if any(each is not None and (CONFIG in each or is_model_folder(each)) for each in inner.values()):
        return []  # a repository
    if is_model_folder(entries) or (CONFIG in entries and not is_named):
        return []
    forms = {entry: form_of(entry, each, _start(path / entry)) for entry, each in inner.items()}
    found = [(path.absolute() / entry, form) for entry, form in forms.items() if form is not None and form.filename]
    if not is_named or any(form.filename != "model.py" for _, form in found):
        found = [each for each in found if each[1].filename != "model.py"]
    if len(found) > 1 and is_named:
        names = ", ".join(sorted(each.name for each, _ in found))
        raise invalid(f"'{path}': expected the file of one model, got {names}")
    return sorted(found, key=lambda each: each[0].name)


def _similar_files_hint(path: Path) -> str:
    """Return a hint with files of the same kind in the folder of a missing one."""
    same = sorted(each.name for each in islice(path.parent.glob(f"*{path.suffix}"), ENTRIES_MAX) if each.exists())
    return f"'{path.parent}' has {', '.join(same[:10])}" if same else ""


INSTANCES = 8
"""Requests that are passed on at a time; each instance waits for the answer of one."""

_SCRIPT = "from charonia.client.predictor_model import TritonPythonModel\n"


def make_with_predictor(repositories: Sequence[str], predictor: str, host: str, folder: Path) -> None:
    """Write the repository. Blocks on the disk.

    Args:
        repositories: Folders of models.
        folder: The repository's folder, which is empty.

    Raises:
        ServingError: There is no such model, or what is given are no folders.
    """
    models = dict[str, Path]()
    for repository in map(Path, repositories):
        if not repository.is_dir():
            raise invalid(f"--predictor: expected a folder of models, got '{repository}'")
        models |= {each.name: each.absolute() for each in repository.iterdir() if not each.name.startswith(".")}
    if predictor not in models:
        raise invalid(f"--predictor: there is no model '{predictor}'", hint=f"there are {', '.join(sorted(models))}")
    for name, path in models.items():
        if name != predictor:
            (folder / name).symlink_to(path)
    version = folder / predictor / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_SCRIPT, encoding="utf-8")
    config = ModelConfig(
        name=predictor,
        backend=PYTHON,
        instance_group=(InstanceGroup(kind=InstanceKind.KIND_CPU, count=INSTANCES),),
        parameters={"PREDICTOR_HOST": host, "EXECUTION_MODE": "thread"},
    )
    (folder / predictor / "config.pbtxt").write_text(render(config), encoding="utf-8")
