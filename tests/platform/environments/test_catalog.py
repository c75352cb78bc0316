"""Environments: added, built by uv, tested by import, shared, removed."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import select, update
from tests.support.process import waited_for

from charonia import compiled
from charonia.core.errors import Code, ServingError
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import PlatformLease
from charonia.platform.database.tables import DeploymentRow, EnvironmentRow, GrantRow, ProjectRow, RevisionRow, TaskRow
from charonia.platform.environments import builder, catalog
from charonia.platform.environments.catalog import EnvironmentRequest
from charonia.platform.environments.requirements import read_requirements
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.people import keys
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.tasks.runner import TaskRunner

UV = """\
#!{python} -IS
import json, sys, pathlib
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments[0] == "venv":
    interpreter = pathlib.Path(arguments[-1], "bin", "python")
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/bin/sh\\nexec {python} \\"$@\\"\\n")
    interpreter.chmod(0o755)
elif arguments[1] == "install":
    required = pathlib.Path(arguments[arguments.index("-r") + 1]).read_text()
    pathlib.Path({log!r}).with_suffix(".required").write_text(required)
    if "absent" in required:
        sys.exit("no solution found: absent is not in the index")
elif arguments[1] == "list":
    print("iniconfig==2.0.0")
"""
"""What `uv` is replaced with: it notes its arguments, and its environments are the Python of the tests."""


ABSENT_INDEX = """\
elif arguments[1] == "install" and __import__("os").environ.get("UV_TORCH_BACKEND"):
    sys.exit("error: Failed to fetch: https://download.pytorch.org/whl/cpu/iniconfig/")
elif arguments[1] == "install":"""


class Environments:
    """A project with environments, and the task runner that builds them."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder / "environments"
        self.database = Database(f"sqlite:///{folder / 'platform.sqlite'}")
        self.database.migrate()
        self.deployed: list[object] = []
        isolation = Isolation(folder, mode=mode)
        handle = catalog.handler(self.database, self.folder, isolation, lambda *given: self.deployed.append(given))
        handlers = {catalog.KIND: handle}
        self.runner = TaskRunner(self.database, folder / "tasks", handlers, PlatformLease(self.database))
        self.runner.start()
        with self.database.transaction() as session:
            self.project = ProjectRow(name="p", created=now())
            session.add(self.project)
            session.flush()
            grant = Grant(ProjectRole.DEPLOYER, "p", may_run_code=True)
            self.ada = keys.principal(keys.create(session, Principal("root", ProjectRole.ADMIN), "ada", [grant])[0])

    def add(self, name: str, requirements: str = "", imports: tuple[str, ...] = (), python: str = "") -> int:
        with self.database.transaction() as session:
            row, _ = catalog.add(
                session,
                self.ada,
                "p",
                EnvironmentRequest(name=name, requirements=requirements, python=python, imports=[*imports]),
            )
        return row.id

    def when_built(self, name: str) -> EnvironmentRow:
        def look() -> tuple[EnvironmentRow, TaskRow | None]:
            with self.database.reading() as session:
                row = catalog.get(session, self.project, name)
                return row, catalog.newest_task(session, row)

        return waited_for(look, lambda found: found[1] is not None and found[1].state not in ("waiting", "running"))[0]

    def log(self, name: str) -> str:
        with self.database.reading() as session:
            task = catalog.newest_task(session, catalog.get(session, self.project, name))
        assert task is not None
        return (self.runner.folder(task.id) / "log").read_text()

    def python(self, name: str) -> Path:
        with self.database.reading() as session:
            row = catalog.get(session, self.project, name)
        return builder.python_of(builder.folder_of(self.folder, row.project_id, row.digest))


@pytest.fixture
def environments(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Environments]:
    # What uv is replaced with notes its arguments in a file, which is out of reach of what is isolated.
    made = Environments(tmp_path, "off" if "uv" in request.fixturenames else "available")
    yield made
    made.runner.close()
    made.database.close()


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace uv, and return where it notes its arguments."""
    program, log = tmp_path / "bin" / "uv", tmp_path / "uv.log"
    program.parent.mkdir()
    program.write_text(UV.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setattr(builder, "_uv", lambda: str(program))
    return log


def test_an_environment_is_built_from_packages_and_this_release(environments: Environments, uv: Path) -> None:
    environments.add("reader", "iniconfig\ncharonia[torch]")

    row = environments.when_built("reader")

    assert (row.state, row.reason, row.packages) == ("ready", "", [["iniconfig", "2.0.0"]])
    lines = uv.with_suffix(".required").read_text().splitlines()
    assert [line.partition(" @ ")[0] for line in lines] == ["iniconfig", "charonia[torch]"]
    assert environments.python("reader") == environments.folder / "1" / row.digest / "bin" / "python"
    assert "import iniconfig: " in environments.log("reader")


@pytest.mark.parametrize("origin", [None, '{"url": "file:///gone/charonia.whl"}'])
def test_this_release_comes_from_the_index_or_from_the_running_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    texts = {"direct_url.json": origin, "METADATA": "Name: charonia\n"}
    found = SimpleNamespace(version="1.2", read_text=texts.get)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)

    wheel = tmp_path / "charonia-1.2-py3-none-any.whl"
    expected = f"charonia[torch] @ {wheel.as_uri()}" if origin else "charonia[torch]==1.2"
    assert builder.own_requirement(["torch"], tmp_path) == expected
    assert wheel.exists() == bool(origin)


@pytest.mark.parametrize("problem", ["", "a source has changed"])
def test_the_wheel_of_the_running_files_has_the_compiled_form_unless_that_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(compiled, "problem", problem)
    for name in ("clock.py", "__pycache__/clock.pyc", "_compiled/cpython-311/charonia/clock.so"):
        path = tmp_path / "charonia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    with zipfile.ZipFile(builder.pack(tmp_path / "charonia", "1.2", {"METADATA": "m"}, tmp_path)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("charonia/")]
        record = wheel.read("charonia-1.2.dist-info/RECORD").decode()

    assert names == [*([] if problem else ["charonia/_compiled/cpython-311/charonia/clock.so"]), "charonia/clock.py"]
    assert record.splitlines() == [f"{name},," for name in wheel.namelist()]


@pytest.mark.parametrize(
    ("gpu", "variable", "line", "is_small"),
    [
        *(("", "", "torch", True), ("nvidia0", "", "torch", False), ("nvidiactl", "", "torch", True)),
        *(("", "UV_INDEX", "torch", False), ("", "", "--extra-index-url https://h.org", False)),
    ],
)
def test_pytorch_is_for_cpus_where_there_is_no_gpu_and_no_index_is_chosen(
    tmp_path: Path, gpu: str, variable: str, line: str, is_small: bool
) -> None:
    (tmp_path / (gpu or "null")).touch()

    found = builder.for_cpus({variable: "x"} if variable else {}, read_requirements(line), tmp_path)

    assert found == ({"UV_TORCH_BACKEND": "cpu"} if is_small and sys.platform == "linux" else {})


def test_without_the_index_of_pytorch_the_usual_one_is_used(
    environments: Environments, uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "for_cpus", lambda *_: {"UV_TORCH_BACKEND": "cpu"})
    program = uv.parent / "bin" / "uv"
    program.write_text(program.read_text().replace('elif arguments[1] == "install":', ABSENT_INDEX))
    environments.add("reader", "iniconfig")

    assert environments.when_built("reader").state == "ready"
    assert len([line for line in uv.read_text().splitlines() if '"install"' in line]) == 2


def test_the_python_of_the_platform_is_its_own_and_others_are_found_by_uv(environments: Environments, uv: Path) -> None:
    own, other = builder.pythons()[:2]
    environments.add("own", "iniconfig", python=own)
    environments.when_built("own")
    environments.add("other", "iniconfig", python=other)
    environments.when_built("other")

    calls = [json.loads(line) for line in uv.read_text().splitlines()]
    assert [call[2] for call in calls if call[0] == "venv"] == [sys.executable, other]


def test_equal_environments_share_a_folder_and_one_build(environments: Environments, uv: Path) -> None:
    environments.add("a", "iniconfig")
    environments.add("b", "iniconfig  # the same")

    assert environments.when_built("a").digest == environments.when_built("b").digest
    assert [json.loads(line)[0] for line in uv.read_text().splitlines()].count("venv") == 1


def test_a_second_environment_is_tested_with_its_own_imports(environments: Environments, uv: Path) -> None:
    environments.add("a", "iniconfig")
    assert environments.when_built("a").state == "ready"
    environments.add("b", "iniconfig", ("no_such_module",))

    assert environments.when_built("b").state == "failed"


@pytest.mark.parametrize(
    ("requirements", "imports", "reason", "logged"),
    [
        ("absent", (), "the packages cannot be installed:\nno solution found", "no solution found"),
        ("iniconfig", ("no_such_module",), "No module named 'no_such_module'", "No module named 'no_such_module'"),
    ],
)
def test_an_environment_that_does_not_build_has_the_reason_and_leaves_nothing(
    environments: Environments, uv: Path, requirements: str, imports: tuple[str, ...], reason: str, logged: str
) -> None:
    environments.add("reader", requirements, imports)

    row = environments.when_built("reader")

    assert row.state == "failed"
    assert reason in row.reason
    assert logged in environments.log("reader")
    assert [path for path in environments.folder.glob("*/*") if path.is_dir()] == []


def test_what_has_failed_is_built_again(environments: Environments, uv: Path) -> None:
    environments.add("reader", "absent")
    environments.when_built("reader")
    uv.with_name("bin").joinpath("uv").write_text(
        UV.replace("absent", "nothing").format(python=sys.executable, log=str(uv))
    )

    with environments.database.transaction() as session:
        catalog.rebuild(session, environments.ada, "p", "reader")

    assert environments.when_built("reader").reason.startswith("a package cannot be imported:")


@pytest.mark.parametrize(
    ("requirements", "role", "count"),
    [("iniconfig", "deployer", 1), ("absent", "deployer", 0), ("iniconfig", "viewer", 0)],
)
def test_a_deployment_that_waits_for_its_environment_follows_its_build_with_the_roles_of_then(
    environments: Environments, uv: Path, requirements: str, role: str, count: int
) -> None:
    spec = {"name": "reader", "environment": "torch"}
    with environments.database.transaction() as session:
        catalog.add(session, environments.ada, "p", EnvironmentRequest(name="torch", requirements=requirements), spec)
        session.execute(update(GrantRow).values(role=role, may_run_code=False))
    row = environments.when_built("torch")

    now_has = replace(environments.ada, may_run_code=frozenset())
    assert environments.deployed == [(now_has, "p", spec)] * count
    assert row.state == ("failed" if requirements == "absent" else "ready")
    assert ("'key ada' is no longer a deployer of project 'p'" in environments.log("torch")) == (role == "viewer")


def test_an_environment_that_a_deployment_uses_is_not_removed(environments: Environments, uv: Path) -> None:
    environments.add("reader", "iniconfig")
    environments.when_built("reader")
    with environments.database.transaction() as session:
        row = catalog.get(session, environments.project, "reader")
        deployment = DeploymentRow(
            project_id=environments.project.id, name="d", target="local", latest=1, wanted=1, state="ready", created=0.0
        )
        spec = {"name": "d", "environment": "reader"}
        deployment.revisions.append(RevisionRow(number=1, spec=spec, state="serving", created=0.0))
        session.add(deployment)

    with pytest.raises(ServingError) as raised, environments.database.transaction() as session:
        catalog.remove(session, environments.ada, "p", "reader")
    assert raised.value.code is Code.ALREADY_EXISTS

    with environments.database.transaction() as session:
        session.get_one(DeploymentRow, deployment.id).removed = True
        catalog.remove(session, environments.ada, "p", "reader")
    with environments.database.reading() as session:
        catalog.sweep(session, environments.folder)
    assert not (environments.folder / "1" / row.digest).exists()


def test_a_name_is_taken_once(environments: Environments, uv: Path) -> None:
    environments.add("reader")

    with pytest.raises(ServingError) as raised:
        environments.add("reader", "numpy")

    assert raised.value.code is Code.ALREADY_EXISTS
    with environments.database.reading() as session:
        assert len(session.scalars(select(TaskRow)).all()) == 1


def test_a_real_environment_runs_this_release(environments: Environments) -> None:
    environments.add("small", "iniconfig")

    row = environments.when_built("small")

    assert row.state == "ready", environments.log("small")
    assert row.size > 10_000_000
    assert f"charonia: {compiled.form} form" in environments.log("small")
    assert "iniconfig" in dict(row.packages)
    command = [str(environments.python("small")), "-Ic", "import charonia, iniconfig, sys; print(charonia.__file__)"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout.strip()
    assert Path(found).is_relative_to(environments.folder / "1" / row.digest)
