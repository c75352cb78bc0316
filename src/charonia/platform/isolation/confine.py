"""Confines this process, then runs a command in its place: `python -I -S confine.py RULES COMMAND...`.

RULES is the text of `rules.Rules`. If the system refuses a layer that RULES requires, the process exits with status 126
and the command does not run. Linux only. Every command waits for this program, so it imports little: `json`, `pathlib`,
`socket` and `typing` would take longer than all the rest.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

CANNOT_CONFINE = 126

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_ABI_VERSION = 1
_BENEATH, _PORT = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_RIGHTS = 16
_BIND, _CONNECT = 1, 2
_PORTS_ABI, _SCOPES_ABI = 4, 6
_SCOPES = 3  # abstract sockets and signals stay within the domain

_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _DROP_BOUND = 1, 38, 24
_KILL = 9
_CAPABILITIES = 64
_NEW_USER, _NEW_MOUNTS, _NEW_NETWORK = 0x10000000, 0x00020000, 0x40000000
_BIND_MOUNT, _RECURSIVE, _PRIVATE, _REMOUNT, _READ_ONLY = 4096, 16384, 1 << 18, 32, 1
_NO_SUID, _NO_DEVICES = 2, 4
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}  # of statvfs, and of mount

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """Return which version of Landlock the kernel has, 0 for none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ABI_VERSION)))


def hide(
    folders: Sequence[str],
    read: Iterable[str],
    write: Iterable[str],
    *,
    in_user_namespace: bool,
    has_network: bool = True,
) -> None:
    """Replace folders by empty ones that contain only these files and folders.

    Without a network, the process has no working network device, and no abstract socket of other processes.

    Raises:
        OSError: The system refuses.
    """
    user, group = os.getuid(), os.getgid()
    own = _NEW_MOUNTS | _NEW_USER * in_user_namespace | _NEW_NETWORK * (not has_network)
    _check(_libc.unshare(own), "unshare")
    if in_user_namespace:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    hidden = _outermost(os.path.realpath(folder) for folder in folders if os.path.isdir(folder))
    left = {path: os.open(path, os.O_PATH) for path in _existing([*read, *write]) if _is_below(path, hidden)}
    for folder in hidden:
        _mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=1m")
    writable = set(write)
    for path, descriptor in left.items():
        place = f"/proc/self/fd/{descriptor}"
        if os.path.isdir(place):
            os.makedirs(path, exist_ok=True)
        elif not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        _mount(place, path, None, _BIND_MOUNT | _RECURSIVE)
        if path not in writable:
            flags = os.statvfs(path).f_flag
            kept = sum(mount for seen, mount in _KEPT_FLAGS.items() if flags & seen)
            _mount(None, path, None, _BIND_MOUNT | _REMOUNT | _READ_ONLY | kept)
        os.close(descriptor)


def restrict(
    abi: int,
    read: Iterable[str],
    write: Iterable[str],
    bind: Sequence[Sequence[int]],
    connect: Sequence[int],
    *,
    has_network: bool = True,
) -> None:
    """Restrict this process and its children to these files, and keep them from these ports.

    Args:
        read: Files and folders to read and execute. Missing ones are skipped.
        write: Files and folders that it may also change.
        bind: First and last port of each range that nothing listens on.
        connect: Ports that nothing connects to.
        has_network: Whether any other port may be used.

    Raises:
        OSError: The system refuses.
    """
    handled = (1 << _RIGHTS_BY_ABI.get(abi, _RIGHTS)) - 1
    net = _BIND | _CONNECT if abi >= _PORTS_ABI and (bind or connect or not has_network) else 0
    attributes = struct.pack("QQQ", handled, net, _SCOPES if abi >= _SCOPES_ABI else 0)
    rules = _check(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    for paths, rights in ((read, _READ), (write, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))):
        for path in paths:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
                allowed = rights & handled if os.path.isdir(path) else rights & handled & _OF_FILES
                rule = struct.pack("=Qi", allowed, beneath)
                _check(_libc.syscall(_ADD_RULE, rules, _BENEATH, rule, 0), f"landlock: {path}")
                os.close(beneath)
            except (FileNotFoundError, PermissionError):
                pass
    if net and has_network:
        refused = {port for first, last in bind for port in range(first, last + 1)}
        port_rule = ctypes.create_string_buffer(16)
        for port in range(2**16):
            allowed = (0 if port in refused else _BIND) | (0 if port in connect else _CONNECT)
            if allowed:
                struct.pack_into("QQ", port_rule, 0, allowed, port)
                _libc.syscall(_ADD_RULE, rules, _PORT, port_rule, 0)
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _check(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock")
    os.close(rules)


def drop_rights(user: int) -> None:
    """Become another user, or, for 0, the same one without capabilities. For processes of root."""
    for capability in range(_CAPABILITIES):
        _libc.prctl(_DROP_BOUND, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def main(arguments: Sequence[str]) -> int:
    """Confine this process and run the command. Returns only if that fails."""
    command = arguments[1:]
    try:
        confine(arguments[0])
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"the process cannot be confined: {error}", file=sys.stderr)
    return CANNOT_CONFINE


def confine(text: str) -> None:
    """Confine this process. Raises OSError if the system refuses a layer.

    Args:
        text: The rules, as `Rules.text` has them.
    """
    rules: dict[str, Any] = marshal.loads(bytes.fromhex(text))  # noqa: S302 # from the process that starts this one
    read, write = rules["read"], rules["write"]
    if rules["beside"]:  # afterwards, sockets of other processes are out of reach
        import socket

        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            asking.connect(f"\0{rules['beside']}")
            os.set_inheritable(asking.fileno(), True)
            os.environ["CHARONIA_BESIDE_SOCKET"] = str(asking.detach())
        except OSError:  # the command reports it itself
            pass
    if rules["namespace"]:
        is_user = rules["namespace"] == "user"
        hide(rules["hidden"], read, write, in_user_namespace=is_user, has_network=rules["network"])
    os.chdir(rules["folder"])
    if rules["landlock"]:
        ports = rules["bind"], rules["connect"]
        restrict(rules["landlock"], read, write, *ports, has_network=rules["network"])
    if os.getuid() == 0:
        drop_rights(rules["user"])
    if rules["parent"]:  # a change of users resets it
        _check(_libc.prctl(_DEATH_SIGNAL, _KILL, 0, 0, 0), "prctl")
        if os.getppid() != rules["parent"]:
            raise OSError("the platform has ended")


def _existing(paths: Iterable[str]) -> list[str]:
    """Return the paths that exist, folders before their content."""
    return sorted({os.path.normpath(path) for path in paths if os.path.exists(path)})


def _outermost(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in _existing(paths):
        if not _is_below(path, found):
            found.append(path)
    return found


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
