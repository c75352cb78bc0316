"""Runs processes of projects so that the platform's own files, other projects and their servers are out of reach.

`confine.py` confines each process with everything that the kernel offers: Landlock; a mount namespace, in which folders
of users are empty; and, where the platform runs as root, a user for each project. See `docs/threat_model.md`.
"""

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from charonia.core.errors import invalid, unsupported
from charonia.die_with_parent import with_parent_death_signal
from charonia.platform.isolation import confine
from charonia.platform.isolation.rules import (
    DEVICES,
    FILE_VARIABLES,
    HIDDEN,
    NVIDIA_DEVICES,
    REQUIRED_ABI,
    SYSTEM,
    Rules,
    bind_ranges,
    environment,
    missing,
)

_log = logging.getLogger(__name__)

MODES = ("required", "available", "off")

FIRST_USER = 1_900_000_000
"""User id of the first project; by convention, no system uses this range."""

TEMPORARY_PREFIX = "charonia-run-"
"""Prefix of the temporary folders of rooms; a hash of the data folder follows."""

PROBE_S_MAX = 30.0

COLLECTED_BYTES_MAX = 64 * 2**20
"""Largest file that is copied from a confined process."""

_BASE = ".base"
_LAUNCHER = Path(confine.__file__)


@dataclass(frozen=True, slots=True)
class PrivateFolders:
    """Private folders of a process.

    Attributes:
        home: Its home and working folder, with its caches.
        temporary: Its temporary folder; its path is short, since paths of sockets are limited.
    """

    home: Path
    temporary: Path


@dataclass(frozen=True, slots=True)
class SandboxAccess:
    """Files, ports and sockets that a process needs besides its interpreter and its room.

    Attributes:
        python: The interpreter, None for the platform's; the environments of the project are always in reach.
        ports: Ports of deployments that it listens on.
        beside: Abstract socket of another server that it needs at its start.
        project: Number of its project, None for a process that runs no code of a project: where projects have users,
            it keeps the platform's user, without capabilities.
        ends_with_platform: Whether the kernel kills it together with the platform.
    """

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    python: Path | None = None
    ports: Sequence[int] = ()
    beside: str = ""
    project: int | None = 0
    network: bool = True
    ends_with_platform: bool = True


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that confine processes on this machine.

    Attributes:
        landlock: Version of Landlock, 0 for none.
        namespace: As in `Rules`.
    """

    landlock: int = 0
    namespace: str = ""
    has_users: bool = False


class Isolation:
    """Confines processes.

    Args:
        data: The data folder of the platform, which no process sees.
        mode: One of `MODES`: whether the platform refuses to run processes that it cannot confine.
        readable: Additional files and folders that processes can read.
        hidden: Additional folders that look empty, except for the readable files in them.
        refused: Ports of the platform and its database.
    """

    def __init__(
        self,
        data: Path,
        *,
        mode: str = "required",
        readable: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        reserved: tuple[int, int] = (1, 0),
        refused: Sequence[int] = (),
    ) -> None:
        self._data = data.absolute()
        self._rooms = self._data / "rooms"
        # Two platforms of one machine share the folder of temporary files.
        self._prefix = f"{TEMPORARY_PREFIX}{hashlib.sha256(os.fsencode(self._data.resolve())).hexdigest()[:8]}-"
        self._mode = mode
        self._own: set[Path] = set()
        self._readable = tuple(path.absolute() for path in readable)
        self._hidden = (*HIDDEN, str(Path.home()), *(str(path.absolute()) for path in (data, *hidden)))
        self._reserved, self._refused = reserved, tuple(refused)
        self.layers = Layers() if mode == "off" else layers()

    def check(self) -> list[str]:
        """Return the gaps of the isolation, a sentence each."""
        if self._mode == "off":
            return ["Isolation is off: models can read and change all files of the platform's user."]
        for path in self._always_read():
            if self._data.resolve().is_relative_to(Path(path).resolve()) and path not in ("/proc", "/sys"):
                raise invalid(f"--data: the data folder '{self._data}' is inside '{path}', which models can read")
        found = missing(
            self.layers.landlock, self.layers.namespace, is_root=os.getuid() == 0, has_users=self.layers.has_users
        )
        if self._mode == "required" and self.layers.landlock < REQUIRED_ABI:
            raise unsupported(
                f"models cannot be isolated on this machine: {' '.join(found)}",
                hint="use a newer kernel, or accept less with --isolation=available",
            )
        return found

    @contextmanager
    def room(self, project: int | None = 0) -> Iterator[PrivateFolders]:
        """Yield a room that is removed at the end."""
        self._rooms.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._rooms, ignore_cleanup_errors=True) as home:
            room = self.prepare_room(Path(home), project)
            self._own |= {room.home, room.temporary}
            try:
                yield room
            finally:
                self._own -= {room.home, room.temporary}
                shutil.rmtree(room.temporary, ignore_errors=True)

    def sweep(self, used: Collection[Path]) -> None:
        """Remove rooms that a killed platform with this data folder has left behind.

        Args:
            used: Temporary folders of processes that outlive the platform.
        """
        temporary = Path(tempfile.gettempdir()).glob(f"{self._prefix}*")
        for path in {*temporary, *(self._rooms.iterdir() if self._rooms.is_dir() else ())} - self._own - set(used):
            shutil.rmtree(path, ignore_errors=True)

    def prepare_room(self, home: Path, project: int | None = 0) -> PrivateFolders:
        """Return a room with this home and a new temporary folder."""
        temporary = Path(tempfile.mkdtemp(prefix=self._prefix))
        (home / "cache").mkdir(parents=True, exist_ok=True)
        for path in (home, home / "cache", temporary):
            self.give(path, project)
        return PrivateFolders(home, temporary)

    def give(self, path: Path, project: int | None) -> None:
        """Give a file or folder to the user of a project."""
        if self.layers.has_users and project is not None:
            os.chown(path, _user(project), _user(project), follow_symlinks=False)

    def chown_tree(self, folder: Path, project: int) -> None:
        """Give a folder and its content to the user of a project."""
        for path in (folder, *folder.rglob("*")) if self.layers.has_users else ():
            self.give(path, project)

    def show(self, folder: Path) -> None:
        """Let the users of projects enter a folder that only its owner can enter."""
        if self.layers.has_users:
            folder.chmod(0o755)

    def environment(self, room: PrivateFolders, *, installs: bool = True) -> dict[str, str]:
        return environment(os.environ, str(room.home), str(room.temporary), installs=installs)

    def command(self, command: Sequence[str], room: PrivateFolders, access: SandboxAccess) -> list[str]:
        """Return a command that runs `command` confined, in the room as its working folder."""
        if self._mode == "off":
            return with_parent_death_signal(command) if access.ends_with_platform else list(command)
        read = [*self._always_read(), *map(str, access.read)]
        read += [str(access.python)] if access.python is not None else []
        read += self._environments(access.project) if access.project is not None else []
        write = [*_devices(), str(room.home), str(room.temporary), *map(str, access.write)]
        rules = Rules(
            read=tuple(dict.fromkeys(read)),
            write=tuple(dict.fromkeys(write)),
            hidden=self._hidden,
            folder=str(room.home),
            bind=bind_ranges(self._reserved, self._refused, access.ports),
            connect=self._refused,
            network=access.network,
            beside=access.beside,
            parent=os.getpid() if access.ends_with_platform else 0,
            user=_user(access.project) if self.layers.has_users and access.project is not None else 0,
            namespace=self.layers.namespace,
            landlock=self.layers.landlock,
        )
        return _launch(rules, command)

    def _environments(self, project: int) -> list[str]:
        """Return the files of the environments of a project: a server can be upgraded to any of them.

        Links in environments do not count: packages may have made them.
        """
        folder = self._data / "environments"
        of_project = folder / str(project)
        of_project.mkdir(parents=True, exist_ok=True)
        return [str(of_project), *(path.read_text(encoding="utf-8") for path in folder.glob(f"*/*{_BASE}"))]

    def _always_read(self) -> list[str]:
        named = [os.environ[name] for name in FILE_VARIABLES if os.environ.get(name)]
        libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
        return [*SYSTEM, *_own_paths(), *map(str, self._readable), *named, *libraries]


def collect(source: Path, target: Path) -> bool:
    """Copy a file of a confined process, unless it is a link, a pipe or too large.

    Returns:
        Whether it was copied.
    """
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_size > COLLECTED_BYTES_MAX:
            return False
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy)
    return True


@cache
def layers() -> Layers:
    """Return the layers of this machine. It tries each layer in a process; root gets users if it can hide folders."""
    if sys.platform != "linux":
        return Layers()
    landlock, is_root = confine.landlock_abi(), os.getuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # noqa: S103 # an empty folder for users to try
        for namespace in ("mount", "user") if is_root else ("user",):
            if _works(Layers(landlock, namespace, is_root and namespace == "mount"), folder):
                return Layers(landlock, namespace, is_root and namespace == "mount")
            if is_root and _works(Layers(landlock, namespace), folder):
                return Layers(landlock, namespace)
    return Layers(landlock)


def _works(tried: Layers, folder: str) -> bool:
    rules = Rules(
        read=(*SYSTEM, *_own_paths()),
        write=(*_devices(), folder),
        hidden=(*HIDDEN, str(Path.home())),
        folder=folder,
        user=FIRST_USER if tried.has_users else 0,
        namespace=tried.namespace,
        landlock=tried.landlock,
    )
    code = f"import ctypes, ssl, charonia; open('{folder}/{tried.namespace}{tried.has_users}', 'w')"
    command = _launch(rules, [sys.executable, "-P", "-c", code])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S_MAX, text=True)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        _log.info("isolation: %s is not available: %s", tried, done.stderr.strip())
    return done.returncode == 0


def _launch(rules: Rules, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_LAUNCHER), rules.text(), *command]


def _user(project: int) -> int:
    return FIRST_USER + project


@cache
def _own_paths() -> tuple[str, ...]:
    """Return the prefixes of the platform's interpreter and the folders of its packages."""
    started_in = (Path.cwd(), Path(sys.argv[0]).absolute().parent)
    packages = [path for path in sys.path if path and Path(path) not in started_in and Path(path).is_dir()]
    own = Path(__file__).parents[3]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    return tuple(dict.fromkeys([*prefixes, str(own), *packages, str(Path(sys.executable).resolve())]))


def _devices() -> list[str]:
    return [*DEVICES, *(str(path) for path in Path("/dev").glob(NVIDIA_DEVICES))]


def base_file(environment_folder: Path) -> Path:
    """Return the file with the location of an environment's interpreter: outside of the folder of its packages."""
    return environment_folder.with_suffix(_BASE)


def note_base(environment_folder: Path, python: Path) -> None:
    """Record the location of the interpreter that a new environment is based on, before packages are installed."""
    base_file(environment_folder).write_text(str(python.resolve().parents[1]), encoding="utf-8")
