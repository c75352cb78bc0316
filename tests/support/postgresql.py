"""A real PostgreSQL server for tests, in a folder of its own."""

import contextlib
import glob
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

START_S_MAX = 200.0


def find_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, None if it is not installed."""
    found = shutil.which("initdb")
    folders = [Path(path) for path in sorted(glob.glob("/usr/lib/postgresql/*/bin"))]
    folders += [Path(found).resolve().parent] if found else []
    return folders[0] if folders else None


@contextlib.contextmanager
def postgresql(programs: Path) -> Iterator[str]:
    """Run a server and yield the address of its database; it refuses to run as root, so it runs as `postgres` then."""
    user: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="charonia-postgresql-"))
    if os.getuid() == 0:
        owner = pwd.getpwnam("postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    data = folder / "data"
    initdb: list[str | Path] = [
        programs / "initdb",
        "-D",
        data,
        "-U",
        "postgres",
        "-A",
        "trust",
        "--no-sync",
        "-E",
        "UTF8",
        "--locale",
        "C",
    ]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=folder, **user)
    port = free_port()
    options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
    command: list[str | Path] = [
        programs / "postgres",
        "-D",
        data,
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=folder, **user)
    try:
        deadline = time.monotonic() + START_S_MAX
        ready: list[str | Path] = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        while subprocess.run(ready, check=False).returncode:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()
        process.wait(START_S_MAX)
        shutil.rmtree(folder, ignore_errors=True)
