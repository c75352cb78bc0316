"""A built image runs as it does in a container: read-only, as another user, as process 1. `make image` builds it.

bubblewrap stands in for the container engine: it needs neither root nor a service.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from packaging.utils import canonicalize_name
from tests.support.models import add_sub, write_model
from tests.support.ports import free_port
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.stock_clients import infer_input

TREE = Path(os.environ.get("CHARONIA_IMAGE_TREE", ""))
SIZE_BYTES_MAX = 300_000_000
WASTE = re.compile(r"(.*-)?(pip|uv|uvx|gcc|g\+\+|cc|c\+\+|clang|ld|as|ar|strip|make|hatchling|cyclonedx-py)(-?[\d.]+)?")
"""Programs that build, by whatever name Debian has them: x86_64-linux-gnu-gcc-14."""

SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("slow has begun")
        time.sleep(2)
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in inputs]
"""
SLOW_CONFIG = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""

GROUPED = """
import humanize
from charonia import model

@model
def grouped(n: int) -> str:
    return humanize.intcomma(n)
"""

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CHARONIA_IMAGE_TREE") and shutil.which("bwrap")),
    reason="there is no built image, or no bubblewrap: make image",
)


class Contained(subprocess.Popen[str]):
    """A command in the tree of the image; what is sent to it goes to its process 1."""

    def __init__(
        self, models: Path, user: str, arguments: list[str], stdout: int | None = None, mounts: Sequence[str] = ()
    ) -> None:
        uid, gid = user.split(":")
        command = ["bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--die-with-parent", "--clearenv"]
        command += ["--uid", uid, "--gid", gid, "--ro-bind", f"{TREE}/root", "/", "--ro-bind", str(models), "/models"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *mounts]
        command += [word for line in image_config()["Env"] for word in ("--setenv", *line.split("=", 1))]
        super().__init__([*command, "--", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True)

    def send_signal(self, sig: int) -> None:
        psutil.Process(self.pid).children()[0].send_signal(sig)


class ImageServer(ServeProcess):
    """The image's own command, on free ports of the loopback interface."""

    def __init__(self, models: Path, *arguments: str, user: str = "") -> None:
        super().__init__(models, *arguments)
        self._models = models
        self._user = user or image_config()["User"]

    def _start(self) -> Any:
        config = image_config()
        return Contained(self._models, self._user, [*config["Entrypoint"], *config["Cmd"], *self._arguments[2:]])


def variant() -> str:
    version: str = image_config()["Labels"]["org.opencontainers.image.version"]
    return version.rpartition("-")[2]


@pytest.fixture
def of_a_server() -> None:
    if variant() == "platform":
        pytest.skip("this image is for the platform")


def image_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TREE / "image.json").read_text(encoding="utf-8"))["Docker"]["config"]
    return config


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to the image's user
        os.chmod(folder, 0o755)
        write_model(Path(folder), "add_sub", add_sub())
        write_model(Path(folder), "slow", SLOW, config=SLOW_CONFIG)
        yield Path(folder)


def infer(module: Any, address: str, model: str, shape: tuple[int, ...], count: int) -> list[Any]:
    """Send one request of `count` inputs with tritonclient and return as many outputs."""
    inputs = [module.InferInput(f"INPUT{index}", shape, "FP32") for index in range(count)]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.arange(16, dtype=np.float32).reshape(shape))
    client = module.InferenceServerClient(address)
    try:
        answer = client.infer(model, inputs)
        return [answer.as_numpy(f"OUTPUT{index}") for index in range(count)]
    finally:
        client.close()


@pytest.mark.usefixtures("of_a_server")
@pytest.mark.parametrize("arguments", SHAPES)
@pytest.mark.parametrize("user", ["", "1234567890:0"], ids=["own-user", "any-user"])
def test_the_image_answers_over_both_protocols_and_drains(models: Path, user: str, arguments: Shape) -> None:
    with ImageServer(models, *arguments, user=user) as server, ThreadPoolExecutor() as pool:
        for module, address in ((http_client, server.http), (grpc_client, server.grpc)):
            total, difference = infer(module, address, "add_sub", (1, 16), 2)
            assert total.tolist() == [list(range(0, 32, 2))]
            assert not difference.any()

        asked = pool.submit(infer, http_client, server.http, "slow", (16,), 1)
        assert server.logs("slow has begun")
        server.begin_to_stop()

        assert asked.result()[0].tolist() == list(range(16))
        assert server.wait() == 0
        for complaint in ("Traceback", "Read-only", "Permission denied"):
            assert complaint not in server.log


@pytest.mark.usefixtures("of_a_server")
def test_the_image_runs_the_compiled_form(models: Path) -> None:
    config = image_config()
    with ImageServer(models) as server:
        metadata = http_client.InferenceServerClient(server.http).get_server_metadata()
        metrics = server.metrics_page()
    with Contained(models, config["User"], ["charonia", "doctor"], stdout=subprocess.PIPE) as doctor:
        checked, _ = doctor.communicate()

    assert "compiled" in metadata["extensions"]
    assert 'form="compiled"' in metrics
    assert ", compiled form" in server.log
    assert re.search(r"charonia +\S+, compiled", checked)


@pytest.mark.usefixtures("of_a_server")
def test_the_health_check_follows_the_server(models: Path) -> None:
    config = image_config()
    with ImageServer(models) as server:
        address = f"CHARONIA_HEALTH_URL=http://{server.http}/v2/health/ready"
        check = ["env", address, *config["Healthcheck"]["Test"][1:]]
        with Contained(models, config["User"], check) as ready:
            ready.wait()
        server.stop()
        with Contained(models, config["User"], check) as stopped:
            stopped.wait()

    assert (ready.returncode, stopped.returncode) == (0, 1)


@pytest.mark.timeout(900)
def test_the_platform_deploys_a_function_in_an_environment_of_the_compiled_form(tmp_path: Path) -> None:
    if variant() != "platform":
        pytest.skip("this image is for servers")
    config, port = image_config(), free_port()
    address, data = f"http://127.0.0.1:{port}", Path(tempfile.mkdtemp())  # pytest's own folders are closed
    data.chmod(0o777)
    (tmp_path / "requirements.txt").write_text("humanize")
    (tmp_path / "grouped.py").write_text(GROUPED)
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")  # those of a proxy, too
    mounts = ["--bind", str(data), "/data", "--ro-bind", certificates, "/etc/ssl/certs/ca-certificates.crt"]
    mounts += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf", "--ro-bind", "/etc/hosts", "/etc/hosts"]
    mounts += ["--setenv", "SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"]
    arguments = [*config["Entrypoint"], *config["Cmd"], f"--port={port}", "--host=127.0.0.1", "--isolation=available"]

    def run(*command: str) -> str:
        key = (data / "owner.key").read_text().strip()
        given = [sys.executable, "-m", "charonia", *command, f"--server={address}", f"--key={key}"]
        done = subprocess.run(given, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return done.stdout

    try:
        with Contained(tmp_path, config["User"], arguments, mounts=mounts) as platform, ExitStack() as stack:

            def end() -> None:
                if platform.poll() is None:
                    platform.kill()

            stack.callback(end)
            check = ["env", f"CHARONIA_HEALTH_URL={address}/login", *config["Healthcheck"]["Test"][1:]]

            def is_healthy() -> bool:
                with Contained(tmp_path, config["User"], check) as asked:
                    return asked.wait() == 0

            assert eventually(is_healthy, 120)

            built = run("environments", "add", "--name=small", f"--requirements={tmp_path}/requirements.txt")
            deployed = run("deploy", f"{tmp_path}/grouped.py", "--environment=small")
            [served] = re.findall(r"serves at http://([\d.:]+)", deployed)
            asked = infer_input(http_client, "n", np.array([1234567]))
            client = http_client.InferenceServerClient(served)
            answer = client.infer("grouped", [asked]).as_numpy("output")
            metadata = client.get_server_metadata()
            platform.send_signal(signal.SIGTERM)
            _, log = platform.communicate()
    finally:
        subprocess.run(["rm", "-rf", str(data)], check=True)

    assert "charonia: compiled form" in built
    assert answer is not None
    assert answer.tolist() == [b"1,234,567"]
    assert "compiled" in metadata["extensions"]
    for complaint in ("Traceback", "Read-only", "Permission denied"):
        assert complaint not in log


def test_the_image_holds_no_more_than_it_needs() -> None:
    files = [path for path in (TREE / "root").rglob("*") if path.is_file() and not path.is_symlink()]

    if variant() == "cpu":
        assert sum(path.stat().st_size for path in files) < SIZE_BYTES_MAX
    programs = {path.name for path in files if WASTE.fullmatch(path.name) and path.stat().st_mode & 0o111}
    assert programs == ({"uv", "uvx"} if variant() == "platform" else set())  # it builds environments
    assert [path for path in files if path.stat().st_mode & 0o6000] == []
    assert [path for path in files if "/var/lib/apt/lists/" in str(path) or "/.cache/" in str(path)] == []


def test_the_bill_of_materials_is_that_of_the_image() -> None:
    document = json.loads((TREE / "root/usr/share/sbom/charonia.cdx.json").read_text(encoding="utf-8"))
    listed = {(canonicalize_name(found["name"]), found["version"]) for found in document["components"]}
    folders = [str(path) for path in (TREE / "root/opt/charonia").glob("lib/python3*/site-packages")]
    installed = {(canonicalize_name(each.name), each.version) for each in distributions(path=folders)}
    for folder in folders:
        for path in Path(folder).glob("charonia-*.dist-info/sboms/*.json"):
            packed = json.loads(path.read_text(encoding="utf-8"))["components"]
            installed |= {(canonicalize_name(each["name"]), each["version"]) for each in packed}
    for paragraph in (TREE / "root/var/lib/dpkg/status").read_text(encoding="utf-8").strip().split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", paragraph, re.MULTILINE))
        if fields["Status"].endswith(" installed"):
            installed.add((canonicalize_name(fields["Package"]), fields["Version"]))

    assert document["bomFormat"] == "CycloneDX"
    assert listed == installed
    runtime = "onnxruntime-gpu" if variant() in ("cuda", "torch") else "onnxruntime"
    assert {"charonia", runtime, "libc6", "python3", "mypy", "htmx-org"} <= {name for name, _ in listed}
