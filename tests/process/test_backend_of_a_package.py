"""The backend on docs/backends.md, from a package: it has the rights of our own."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.platform_models import add_version
from tests.support.ports import free_ports
from tests.support.process import eventually
from tests.support.wheels import SITE_PACKAGES

import charonia
from charonia.config import backends
from charonia.config.model import ModelConfig
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import EnvironmentRow
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.models.code import code_in
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.targets.fit import MIB, LocalMachine
from charonia.platform.targets.local import LocalTarget

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
SOURCE = Path(charonia.__file__).parents[1]
BLOCK = re.compile(r"^```python\n# (scaling/\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
STARTED = re.compile(r"Started HTTPService at (127\.0\.0\.1:\d+)")
ADDRESSES = ("--http-address=127.0.0.1", "--http-port=0", "--allow-grpc=false", "--allow-metrics=false")
RAGGED = """
backend: "scaling" max_batch_size: 8
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 60000000 }
input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""

pytestmark = pytest.mark.cold_start


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    info = folder / "charonia_scaling-1.0.dist-info"
    files = {
        **dict(blocks),
        f"{info.name}/METADATA": "Metadata-Version: 2.1\nName: charonia-scaling\nVersion: 1.0\n",
        f"{info.name}/entry_points.txt": "[charonia.backends]\nscaling = scaling:RECORD\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def environment(folder: Path, site: Path) -> Path:
    """Make an environment with Charonia and the package, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{SOURCE}\n{SITE_PACKAGES}\n", encoding="utf-8")
    for each in site.iterdir():  # installed, not linked: servers of the platform only see their environment
        shutil.copytree(each, packages / each.name)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    return environment(tmp_path_factory.mktemp("environment") / "venv", site)


class Served:
    def __init__(self, python: Path, *arguments: str) -> None:
        self._command = [str(python), "-P", "-m", "charonia", "serve", *ADDRESSES, *arguments]

    def __enter__(self) -> str:
        """Start it, and return its address."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := STARTED.search(line):
                return found[1]
        raise AssertionError("".join(lines))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=200)


def ask(address: str, path: str, document: object = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}/{path}", body), timeout=200) as response:
        return json.load(response)


def scaled(address: str, model: str, values: list[float], *, rows: int = 0) -> list[float]:
    shape = [rows, len(values)] if rows else [len(values)]
    tensor = {"name": "IN", "datatype": "FP32", "shape": shape, "data": values}
    answer = ask(address, f"v2/models/{model}/infer", {"inputs": [tensor]})
    found: list[float] = answer["outputs"][0]["data"]
    return found


def test_it_is_served_from_a_file(python: Path, tmp_path: Path) -> None:
    (tmp_path / "twice.scale").write_text("2.0")
    with Served(python, str(tmp_path / "twice.scale")) as address:
        assert scaled(address, "twice", [1, 2, 3]) == [2, 4, 6]


def test_it_takes_ragged_batches_and_runs_in_front_ends(python: Path, tmp_path: Path) -> None:
    in_front = 'parameters { key: "front_end" value { string_value: "yes" } }'
    one_by_one = RAGGED.replace("preferred_batch_size: 2 max_queue_delay_microseconds: 60000000", "")
    for name, config in (("ragged", RAGGED), ("front", one_by_one + in_front)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.scale").write_text("2.0")
        (tmp_path / name / "config.pbtxt").write_text(config)
    with Served(python, f"--model-repository={tmp_path}", "--front-ends=1") as address:

        def runs_in() -> Any:
            return ask(address, "v2/models/front/explain")["runs_in"]

        assert eventually(lambda: runs_in()["front_ends"] == 1), runs_in()
        assert scaled(address, "front", [1, 2], rows=1) == [2, 4]

        with ThreadPoolExecutor() as pool:
            answers = pool.map(lambda values: scaled(address, "ragged", values, rows=1), ([1.0, 2.0, 3.0], [4.0]))
            assert list(answers) == [[2, 4, 6], [8]]
        (statistics,) = ask(address, "v2/models/ragged/stats")["model_stats"]
        assert statistics["execution_count"] == 1


def test_doctor_shows_what_its_models_need(python: Path, tmp_path: Path) -> None:
    (tmp_path / "twice" / "1").mkdir(parents=True)
    (tmp_path / "twice" / "1" / "model.scale").write_text("2.0")
    done = subprocess.run(
        [str(python), "-P", "-m", "charonia", "doctor", "--json", "--models-only", f"--model-repository={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )

    (model,) = json.loads(done.stdout)["Models"]
    assert model["name"] == "twice"
    assert model["value"].startswith("scaling, 1 x CPU")
    assert "problem" not in model


@pytest.fixture
def beside_the_platform(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed where the platform runs."""
    monkeypatch.syspath_prepend(str(site))
    backends.records.cache_clear()
    yield
    backends.records.cache_clear()
    for name in ("scaling", "scaling.backend"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("beside_the_platform")
def test_its_models_are_code_unless_it_says_so_and_the_platform_trusts_it() -> None:
    files, none = ["1/model.scale"], ModelConfig()

    assert code_in("m", files, none) == ["1/model.scale: a file of an unknown kind"]
    assert code_in("m", files, none, trusted=("scaling",)) == []
    assert code_in("m", ["1/model.scale", "1/x.py"], none, trusted=("scaling",)) == ["1/x.py: Python code"]
    assert code_in("m", files, ModelConfig(parameters={"x": "1"}), trusted=("scaling",)) != []


def test_what_only_a_package_of_an_environment_reads_is_code() -> None:
    assert code_in("m", ["1/model.bin"], ModelConfig()) == ["no backend here reads its files"]
    assert code_in("m.onnxruntime", ["1/model.bin"], ModelConfig(platform="other")) == [
        "backend other: its models are code"
    ]


def test_it_deploys_on_the_platform(site: Path, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
    database.migrate()
    add_version(database, tmp_path, "twice", {"1/model.scale": b"2.0"})
    environment(tmp_path / "environments" / "1" / "own", site)
    with database.transaction() as session:
        session.add(
            EnvironmentRow(
                project_id=1,
                name="own",
                requirements="",
                python="",
                state="ready",
                digest="own",
                packages=[],
                created=now(),
            )
        )
    target = LocalTarget(tmp_path / "deployments", free_ports(10), machine=lambda: LocalMachine(8, 16_384 * MIB))
    deployments = Deployments(database, {"local": target}, Workloads(tmp_path, open_artifacts("", tmp_path)))
    ada = Principal.of("Ada", [Grant(ProjectRole.ADMIN)])
    deployments.start()
    try:
        models = [{"name": "twice", "versions": "latest"}]
        deployments.changes.create(ada, "default", {"name": "scaler", "environment": "own", "models": models})
        view = deployments.reads.get
        assert eventually(lambda: view(ada, "default", "scaler").state == "ready", 110), (
            view(ada, "default", "scaler"),
            deployments.servers.log(ada, "default", "scaler"),
        )
        address = view(ada, "default", "scaler").http.removeprefix("http://")
        assert scaled(address, "twice", [1, 2]) == [2, 4]
    finally:
        deployments.changes.remove(ada, "default", "scaler")
        eventually(lambda: not deployments.reads.list(ada, "default")[0], 60)
        deployments.close()
        database.close()
