"""Builds environments: a folder for each digest, created by uv, tested by importing its packages."""

import contextlib
import fcntl
import importlib.metadata
import json
import shutil
import sys
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia import compiled
from charonia.core.errors import invalid
from charonia.platform.environments.requirements import OWN, Requirements
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess, base_file, note_base
from charonia.platform.tasks.runner import TaskRun
from charonia.platform.values import OLDER_PYTHONS

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions of Python that servers support."""

NEEDED_BY_WORKERS = "numpy"

BUILD_S_MAX = 1800.0
REASON_LINES_MAX = 8
"""The last lines of a command that has failed, as part of the reason."""

IMPORT_S_MAX = 300.0

_PYTORCH_INDEX = "download.pytorch.org"
_INDEX_VARIABLES = frozenset(
    {"UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_CONFIG_FILE"}
)

_ORIGIN = "direct_url.json"
"""Metadata of a distribution that was not installed from an index."""

_TRIAL = Path(__file__).parent / "import_trial.py"


def pythons() -> tuple[str, ...]:
    """Return the versions to choose from, the platform's first."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (own, *(version for version in PYTHONS if version != own), *OLDER_PYTHONS)


def release() -> str:
    """Return the identity of this release: its version, and unless an index provides it, its form and its files."""
    installed = importlib.metadata.distribution(OWN)
    named = f"{OWN}=={installed.version}"
    return f"{named} {compiled.form} {installed.read_text('RECORD')}" if installed.read_text(_ORIGIN) else named


def own_requirement(extras: Sequence[str], folder: Path) -> str:
    """Return the requirement of this release: from the index it was installed from, otherwise a wheel in `folder`."""
    named = f"{OWN}[{','.join(extras)}]" if extras else OWN
    installed = importlib.metadata.distribution(OWN)
    if not installed.read_text(_ORIGIN):
        return f"{named}=={installed.version}"
    metadata = {name: installed.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    return f"{named} @ {pack(Path(compiled.__file__).parent, installed.version, metadata, folder).as_uri()}"


def pack(package: Path, version: str, metadata: Mapping[str, str], folder: Path) -> Path:
    """Write the running files as a wheel for any Python. Those that the compiled form does not fit ignore it."""
    skipped = {"__pycache__"} | ({"_compiled"} if compiled.problem else set())
    files = [path for path in sorted(package.rglob("*")) if path.is_file() and skipped.isdisjoint(path.parts)]
    content = {f"{OWN}/{path.relative_to(package).as_posix()}": path.read_bytes() for path in files}
    kind = "Wheel-Version: 1.0\nGenerator: charonia\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = f"{OWN}-{version}.dist-info"
    content |= {f"{info}/{name}": text.encode() for name, text in {**metadata, "WHEEL": kind}.items()}
    content[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*content, f"{info}/RECORD"]).encode()
    wheel = folder / f"{OWN}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return wheel


def folder_of(environments: Path, project_id: int, digest: str) -> Path:
    """Return the folder of an environment. Projects share none: packages of one could change it for the others."""
    return environments / str(project_id) / digest


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def is_built(folder: Path) -> bool:
    return _record(folder).exists() and python_of(folder).exists()


def remove(folder: Path) -> None:
    """Remove an environment and its records."""
    for path in (_record(folder), base_file(folder)):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def build(
    run: TaskRun, folder: Path, python: str, wanted: Requirements, imports: Sequence[str], isolation: Isolation
) -> Mapping[str, Any]:
    """Create an environment, unless it exists, and return its packages and its size.

    Packages run code when they are installed and imported, so that happens confined. The platform afterwards neither
    writes nor trusts anything that they can write: records of an environment are stored next to its folder.
    """
    with _alone(folder):
        if not is_built(folder):
            remove(folder)
            try:
                with isolation.room(run.project_id) as room:
                    _make(run, folder, python, wanted, imports, isolation, room)
            except BaseException:
                remove(folder)
                raise
        return dict(json.loads(_record(folder).read_text(encoding="utf-8")))


def _make(
    run: TaskRun,
    folder: Path,
    python: str,
    wanted: Requirements,
    imports: Sequence[str],
    isolation: Isolation,
    room: PrivateFolders,
) -> None:
    uv = _uv()
    run.progress(0.05, f"Python {python}")
    which = sys.executable if python == pythons()[0] else python  # uv looks only in PATH and where it installs them
    if run.run([uv, "venv", "--python", which, "--quiet", str(folder)], timeout_s=BUILD_S_MAX, folder=room.home):
        raise invalid(f"Python {python} was not found", hint="the log has the reason")
    note_base(folder, python_of(folder))
    isolation.chown_tree(folder, run.project_id)
    access = SandboxAccess(
        read=[Path(uv), Path(uv).resolve(), _TRIAL],
        write=[folder],
        python=python_of(folder),
        project=run.project_id,
    )
    inside: dict[str, Any] = {"environment": isolation.environment(room), "folder": room.home}

    def confined(*command: str) -> list[str]:
        return isolation.command(command, room, access)

    file = room.home / "requirements.txt"
    own = NEEDED_BY_WORKERS if python in OLDER_PYTHONS else own_requirement(wanted.extras, room.home)
    file.write_text("\n".join([*wanted.lines, own]) + "\n", encoding="utf-8")
    run.progress(0.1, "packages are installed")
    interpreter = str(python_of(folder))
    command = [uv, "pip", "install", "--refresh-package", OWN, "--python", interpreter, "-r", str(file)]
    command.append("--compile-bytecode")  # servers only read the environment
    said = deque[str](maxlen=REASON_LINES_MAX)
    small = for_cpus(inside["environment"], wanted, Path("/dev"))
    status = run.run(
        confined(*command),
        timeout_s=BUILD_S_MAX,
        on_line=said.append,
        **{**inside, "environment": inside["environment"] | small},
    )
    if status and small and any(_PYTORCH_INDEX in line for line in said):
        run.progress(0.1, f"{_PYTORCH_INDEX} cannot be reached: PyTorch from the usual index, for GPUs too")
        said.clear()
        status = run.run(confined(*command), timeout_s=BUILD_S_MAX, on_line=said.append, **inside)
    if status:
        raise invalid("\n".join(["the packages cannot be installed:", *said]), hint="the log has everything")
    run.progress(0.8, "importing the installed packages")
    trial = json.dumps(
        {"packages": wanted.names, "modules": [*imports, NEEDED_BY_WORKERS if python in OLDER_PYTHONS else OWN]}
    )
    said.clear()
    tried = confined(interpreter, "-I", str(_TRIAL), trial)
    if run.run(tried, timeout_s=IMPORT_S_MAX, on_line=said.append, **inside):
        raise invalid("\n".join(["a package cannot be imported:", *said]), hint="the log has everything")
    run.progress(0.95, "listing its packages")
    lines = list[str]()
    listing = confined(uv, "pip", "list", "--python", interpreter, "--format", "freeze")
    run.run(listing, timeout_s=60, on_line=lines.append, **inside)
    content = {
        "packages": [line.split("==", 1) for line in lines if "==" in line],
        "size": sum(path.lstat().st_size for path in folder.rglob("*")),
    }
    _record(folder).write_text(json.dumps(content), encoding="utf-8")


def for_cpus(variables: Mapping[str, str], wanted: Requirements, devices: Path) -> dict[str, str]:
    """Return the variable for a PyTorch without CUDA, for a machine without a GPU, unless indexes are chosen."""
    is_chosen = not _INDEX_VARIABLES.isdisjoint(variables) or any("index-url" in line for line in wanted.lines)
    has_gpu = any(devices.glob("nvidia[0-9]*"))
    return {} if is_chosen or has_gpu or sys.platform != "linux" else {"UV_TORCH_BACKEND": "cpu"}


def _record(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _uv() -> str:
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if found is None:
        raise invalid("environments are built by uv, which was not found", hint="pip install uv")
    return found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other thread builds the same environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
