"""Confined processes reach nothing of the platform, and keep what they need. Each attempt succeeds where it is not."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from tests.campaign.hostile_models import PRINTED, Prey
from tests.support.process import wait_until_ended

from charonia.core.errors import Code, ServingError
from charonia.platform.artifacts.archives import unpack
from charonia.platform.isolation import isolation as module
from charonia.platform.isolation.isolation import Isolation, Layers, PrivateFolders, SandboxAccess, collect, layers

pytestmark = [
    pytest.mark.cold_start,
    pytest.mark.skipif(layers().landlock < 6, reason="the kernel lacks Landlock 6"),
]

SECRET = "the key of the owner"
EVERYTHING = {
    *("read the secret", "empty the secret", "link the secret", "change the mode of the secret", "write"),
    *("list /data", "list /data/artifacts", "list ", "variable", "environ", "root", "signal"),
    *("connect to a port", "listen on a port", "connect to an abstract socket", "connect to a socket"),
}
"""What every user may do to its own processes and files; where debugging is restricted, not "memory" and "attach"."""

VARIABLE = "CHARONIA_DATABASE_OF_TESTS"


@pytest.fixture
def prey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prey]:
    """A platform's folder, process, ports and sockets."""
    data = tmp_path / "data"
    (data / "artifacts").mkdir(parents=True)
    (data / "owner.key").write_text(SECRET)
    (data / "owner.key").chmod(0o600)
    monkeypatch.setenv(VARIABLE, "secret")
    with ExitStack() as stack:
        sleeper = stack.enter_context(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        stack.callback(sleeper.kill)
        port, abstract, beside = socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in "ab")
        name = f"charonia-test-{secrets.token_hex(8)}"
        abstract.bind(f"\0{name}")
        short = Path(f"/tmp/{name}")  # the path of a socket must be short
        beside.bind(str(short))
        stack.callback(short.unlink)
        for each in (port, abstract, beside):
            stack.enter_context(each)
            each.listen()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            reserved = free.getsockname()[1]
        yield Prey(
            secret=str(data / "owner.key"),
            size=len(SECRET),
            written=str(tmp_path / "written"),
            pid=sleeper.pid,
            folders=(str(data), str(data / "artifacts"), str(tmp_path)),
            ports=(port.getsockname()[1],),
            reserved=reserved,
            abstract=name,
            path_socket=str(short),
            variable=VARIABLE,
        )


def isolated(prey: Prey) -> Isolation:
    reserved = (prey.reserved, prey.reserved)
    return Isolation(Path(prey.secret).parent, reserved=reserved, refused=prey.ports)


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_nothing_of_the_platform_is_in_reach(prey: Prey) -> None:
    arguments = [sys.executable, "-P", "-c", PRINTED, json.dumps(asdict(prey))]
    isolation = isolated(prey)

    free = json.loads(run(arguments, cwd=Path(prey.secret).parent))
    Path(prey.written).unlink()
    Path(prey.secret).write_text(SECRET)
    with isolation.room(1) as room:
        found = run(isolation.command(arguments, room, SandboxAccess(project=1)), env=isolation.environment(room))

    assert {name.replace(str(Path(prey.secret).parents[1]), "") for name in free} >= EVERYTHING
    assert json.loads(found) == []
    assert Path(prey.secret).read_text() == SECRET
    assert not Path(prey.written).exists()


@pytest.mark.parametrize("layer", ["", "user"])
def test_files_and_processes_are_out_of_reach_with_landlock_alone(
    prey: Prey, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    if layer and not layers().namespace:
        pytest.skip("no namespaces here")
    monkeypatch.setattr(module, "layers", lambda: Layers(layers().landlock, layer))
    isolation = isolated(prey)
    arguments = [sys.executable, "-P", "-c", PRINTED, json.dumps(asdict(prey))]

    with isolation.room() as room:
        found = run(isolation.command(arguments, room, SandboxAccess()), env=isolation.environment(room))

    known = ["change the mode of the secret", "connect to a socket"]
    assert json.loads(found) == ([] if layer else known), "docs/threat_model.md names these two"


def test_a_process_keeps_what_it_needs(tmp_path: Path) -> None:
    isolation = Isolation(tmp_path / "data", reserved=(1, 1))
    model = tmp_path / "data" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_text("weights")
    code = f"""
import multiprocessing, os, socket, ssl, subprocess, sys, tempfile, numpy, onnxruntime, charonia.cli.serve
assert open({str(model / "weights")!r}).read() == "weights"
for act in (lambda: open({str(model / "weights")!r}, "a"), lambda: os.chmod({str(model / "weights")!r}, 0o777)):
    try:
        act()
    except OSError:
        continue
    assert False
open("mine", "w").close()
assert os.getcwd() == os.environ["HOME"]
tempfile.TemporaryFile().write(b"x")
os.memfd_create("x")
multiprocessing.Lock()
with socket.socket() as listener, socket.socket() as client:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client.connect(listener.getsockname())
a, b = socket.socketpair()
inner = socket.socket(socket.AF_UNIX)
inner.bind("\\0charonia-test-inner-%d" % os.getpid())
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout == "1\\n"
assert ssl.create_default_context().get_ca_certs() is not None
socket.getaddrinfo("localhost", 80)
"""
    with isolation.room(1) as room:
        command = isolation.command([sys.executable, "-P", "-c", code], room, SandboxAccess(read=[model], project=1))
        run(command, env=isolation.environment(room))
        left = (room.home, room.temporary)

    assert not any(folder.exists() for folder in left)


def test_what_unpacks_reaches_its_archive_and_its_folder_only(prey: Prey, tmp_path: Path) -> None:
    class Exploited(Isolation):
        """Runs the attempts in place of the reader of archives, as a fault in it could."""

        def command(self, command: Sequence[str], room: PrivateFolders, reach: SandboxAccess) -> list[str]:
            archive, _, folder = command[-3:]
            script = 'cat "$1" > "$0/archive" && shift && exec "$@" > "$0/found"'
            attempts = [sys.executable, "-P", "-c", PRINTED, json.dumps(asdict(prey))]
            return super().command(["/bin/sh", "-c", script, folder, archive, *attempts], room, reach)

    archive, folder = tmp_path / "m.zip", tmp_path / "data" / "incoming"
    archive.write_text("content")
    folder.mkdir()
    unpack(archive, "m.zip", folder, Exploited(tmp_path / "data"), lambda: None)

    assert (folder / "archive").read_text() == "content"
    assert json.loads((folder / "found").read_text()) == []


HOLDS_A_ROOM = """
import sys
from pathlib import Path
from charonia.platform.isolation.isolation import Isolation
with Isolation(Path(sys.argv[1]), mode="off").room() as room:
    print(room.home, room.temporary, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_platform_has_left_is_removed(tmp_path: Path) -> None:
    folders = (tmp_path / "own", tmp_path / "other")
    left: list[tuple[Path, ...]] = []
    for folder in folders:
        command = [sys.executable, "-P", "-c", HOLDS_A_ROOM, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as platform:
            assert platform.stdout is not None
            left.append(tuple(map(Path, platform.stdout.readline().split())))
            platform.kill()
    isolation = Isolation(folders[0], mode="off")
    used = isolation.prepare_room(folders[0] / "deployments" / "home").temporary
    assert all(path.is_dir() for paths in left for path in paths)

    isolation.sweep({used})

    assert [[path.exists() for path in paths] for paths in left] == [[False, False], [True, True]]
    assert used.is_dir()
    for folder in folders:
        Isolation(folder, mode="off").sweep(())


def test_a_process_listens_on_its_own_ports(prey: Prey) -> None:
    isolation = isolated(prey)
    code = f"import socket; socket.socket().bind(('127.0.0.1', {prey.reserved}))"

    with isolation.room() as room:
        run(isolation.command([sys.executable, "-c", code], room, SandboxAccess(ports=[prey.reserved])))


@pytest.mark.parametrize("mode", ["required", "off"])
def test_a_process_that_ignores_sigterm_is_killed_with_the_platform(tmp_path: Path, mode: str) -> None:
    code = f"""
import os, subprocess, sys
from pathlib import Path
from charonia.platform.isolation.isolation import Isolation, SandboxAccess
isolation = Isolation(Path({str(tmp_path)!r}), mode={mode!r})
room = isolation.prepare_room(Path({str(tmp_path)!r}) / "home", 1)
ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
loop = f"import os, signal, time; {{ignores}}; print(os.getpid(), flush=True); time.sleep(600)"
command = isolation.command([sys.executable, "-c", loop], room, SandboxAccess(project=1))
process = subprocess.Popen(command, stdout=subprocess.PIPE)
print(process.stdout.readline().decode(), flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as platform:
        assert platform.stdout is not None
        child = psutil.Process(int(platform.stdout.readline()))
        platform.kill()
        wait_until_ended(child)


def test_a_link_that_a_process_leaves_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "link").symlink_to("secret")
    os.link(tmp_path / "secret", tmp_path / "hard")
    (tmp_path / "plain").write_text("report")
    os.mkfifo(tmp_path / "pipe")

    taken = [name for name in ("link", "hard", "pipe", "absent", "plain") if collect(tmp_path / name, tmp_path / "got")]

    assert taken == ["plain"]
    assert (tmp_path / "got").read_text() == "report"


def test_a_machine_that_cannot_isolate_is_refused_unless_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "layers", lambda: Layers(4))

    with pytest.raises(ServingError, match="cannot keep models from controlling other servers") as raised:
        Isolation(tmp_path).check()

    assert raised.value.code is Code.UNSUPPORTED
    assert "--isolation=available" in raised.value.hint
    assert "controlling other servers" in Isolation(tmp_path, mode="available").check()[0]
    assert Isolation(tmp_path, mode="off").check()[0].startswith("Isolation is off")
    assert Isolation(tmp_path, mode="off").command(["true"], None, SandboxAccess(ends_with_platform=False)) == ["true"]  # type: ignore[arg-type]


def test_data_must_not_lie_where_models_read(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"the data folder .* is inside"):
        Isolation(tmp_path / "models" / "data", readable=[tmp_path / "models"]).check()
