"""The files that the container image is built of: what the Dockerfile promises, and what the lock files hold."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hatch_build
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
TOOL = runpy.run_path(str(ROOT / "tools" / "lock_image.py"))
VARIANTS = sorted(TOOL["EXTRAS"])
TARGET = {
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "python_version": TOOL["PYTHON_VERSION"],
    "python_full_version": f"{TOOL['PYTHON_VERSION']}.0",
}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage with their arguments; those before the first one have an empty name."""
    text = re.sub(r"^\s*#.*\n", "", (IMAGE / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            instruction, arguments = line.split(maxsplit=1)
            if instruction == "FROM":
                name = arguments.partition(" AS ")[2] or "last"
                found[name] = []
            found[name].append((instruction, arguments))
    return found


def history(name: str) -> list[tuple[str, str]]:
    """Return what a stage inherits from those that it begins with, and its own instructions, in their order."""
    own = stages()[name]
    parent = own[0][1].split()[0]
    return (history(parent) if parent in stages() else []) + own


def last(name: str, instruction: str) -> str:
    return [arguments for found, arguments in history(name) if found == instruction][-1]


def locked(variant: str) -> dict[str, Requirement]:
    text = (IMAGE / "requirements" / f"{variant}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    requirements = [Requirement(line.split(" --hash")[0]) for line in text.splitlines()]
    return {canonicalize_name(found.name): found for found in requirements}


def test_the_image_begins_with_a_named_release() -> None:
    arguments = dict(found.split("=") for kind, found in stages()[""] if kind == "ARG")
    name, _, tag = arguments["BASE"].partition(":")

    assert (name, arguments["VARIANT"]) == ("debian", "cpu")
    assert tag
    assert "latest" not in tag


def test_every_variant_has_a_stage_and_a_lock_file() -> None:
    assert sorted(name.removeprefix("image-") for name in stages() if name.startswith("image-")) == VARIANTS
    assert stages()["last"][0] == ("FROM", "image-${VARIANT}")
    assert sorted(path.stem for path in IMAGE.glob("requirements/*.txt")) == sorted([*VARIANTS, "build"])


def test_no_stage_leaves_a_container() -> None:
    assert [name for name, stage in stages().items() if {kind for kind, _ in stage} <= {"FROM", "ARG"} and name] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_runs_without_root_and_says_whether_it_is_ready(variant: str) -> None:
    stage = f"image-{variant}"
    command = ["charonia", "platform" if variant == "platform" else "serve"]

    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(stage, "USER"))  # Kubernetes cannot tell whether a name is root
    assert json.loads(last(stage, "ENTRYPOINT"))[:2] == command
    assert last(stage, "CMD").startswith('["--')
    assert last(stage, "STOPSIGNAL") == "SIGTERM"
    assert last(stage, "HEALTHCHECK").endswith('CMD ["charonia-health"]')
    assert "image.description=" in last(stage, "LABEL")


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_builds_an_image_is_not_in_it(variant: str) -> None:
    runs = [found for kind, found in history(f"image-{variant}") if kind == "RUN"]
    installed = {word for run in runs if "apt-get install" in run for word in shlex.split(run.split("&&")[1])[4:]}
    copied = [found for kind, found in history(f"image-{variant}") if kind == "COPY"]

    assert installed == {"ca-certificates", "libgomp1", "python3"}
    assert all("rm -rf /var/lib/apt/lists/*" in run for run in runs if "apt-get" in run)
    assert not any(re.search(r"\b(pip|uv)\b", run) for run in runs)
    assert not any(found.startswith((". ", "--from=build /build/source")) for found in copied)


def test_the_image_holds_no_file_that_is_not_in_the_repository() -> None:
    sources = [found.split()[-2] for stage in stages().values() for kind, found in stage if kind == "COPY"]
    ours = [source for source in sources if not source.startswith("/") and "$" not in source]

    assert ours
    assert [source for source in ours if not (ROOT / source).exists()] == []


def test_the_image_is_built_of_all_that_the_wheel_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    hooks = [hook.get("path", "hatch_build.py") for hook in wheel["hooks"].values()]
    read = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *hooks]
    read += [*wheel["packages"], *wheel["sbom-files"], *wheel["force-include"]]
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}

    assert {path.split("/")[0] for path in read} - kept == set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lock_file_satisfies_the_project(variant: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in TOOL["EXTRAS"][variant]:
        wanted += project["optional-dependencies"][extra]
    found = locked(variant)
    if variant in TOOL["ON_GPU"]:
        wanted = [line.replace("onnxruntime", "onnxruntime-gpu") for line in wanted]
        assert "onnxruntime" not in found

    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(TARGET):
            pinned = found[canonicalize_name(requirement.name)]
            version = str(pinned.specifier).removeprefix("==")
            assert requirement.specifier.contains(version), f"{requirement}: {version} in {variant}.txt"


@pytest.mark.parametrize("variant", [*VARIANTS, "build"])
def test_a_lock_file_pins_every_package_with_its_hashes_and_names_no_index(variant: str) -> None:
    text = (IMAGE / "requirements" / f"{variant}.txt").read_text(encoding="utf-8")

    assert "://" not in text
    for line in text.replace("\\\n", " ").splitlines():
        assert re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)


def test_the_wheel_of_the_image_is_compiled_with_the_locked_compiler() -> None:
    builds = [found for kind, found in stages()["wheel"] if kind == "RUN" and "hatchling build" in found]
    pinned = {str(locked("build")[Requirement(line).name]).partition(";")[0].strip() for line in hatch_build.REQUIRES}

    assert builds
    assert all("CHARONIA_COMPILE=1 " in found for found in builds)
    assert pinned == set(hatch_build.REQUIRES)


def test_the_bill_of_materials_has_the_installed_packages_of_debian() -> None:
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.41-12\nDescription: C\n a\n\n"
    )
    status += "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"

    components = runpy.run_path(str(IMAGE / "sbom.py"))["debian_components"](status)

    assert [found["purl"] for found in components] == ["pkg:deb/debian/libc6@2.41-12?arch=amd64"]


class Answer(BaseHTTPRequestHandler):
    """Answers as a server that is ready at /ready only."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 400)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "status"), [("/ready", 0), ("/loading", 1)])
def test_the_health_check_ends_with_what_the_server_says(address: str, path: str, status: int) -> None:
    environment = {**os.environ, "CHARONIA_HEALTH_URL": address + path}
    done = subprocess.run(
        [sys.executable, str(IMAGE / "healthcheck.py")], env=environment, stderr=subprocess.PIPE, check=False
    )

    assert done.returncode == status
    assert bool(done.stderr) == bool(status)
