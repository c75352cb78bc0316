"""The first minutes with Charonia, LitServe and BentoML: seconds to the first answer, and images.

The tasks are a model's file, a function, a record that is checked, and an uploaded file:

python -m bench.first_minutes FOLDER --install --images BASE

`--install` makes the environments in FOLDER, in which they stay. `--images` builds images on BASE, a Debian 13 that
buildah has. The servers run one at a time, in turn, on loopback.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
from onnxruntime.datasets import get_example

from bench.compare import RESULTS
from bench.first_services import FILE, FUNCTION, JSON, MODEL, UPLOAD, Contender
from bench.machine import machine
from bench.servers import HOST, START_TIMEOUT_S, free_ports

ROWS = [[5.0, 2.0], [-10.0, 0.0], [10.0, 0.0]]
"""One of each class."""

FILE_MISTAKES: Mapping[str, object] = {
    "wrong name": {"float_inputs": ROWS},
    "wrong shape": {"float_input": [[*row, 1.0] for row in ROWS]},
}
FUNCTION_MISTAKES: Mapping[str, object] = {
    "wrong name": {"y": 3},
    "wrong shape": {"x": [1, 2]},
    "wrong type": {"x": "three"},
}
JSON_MISTAKES: Mapping[str, object] = {
    "missing": {"item": "tea"},
    "out of range": {"item": "tea", "count": 0},
    "wrong type": {"item": "tea", "count": "many"},
}
FORM_TYPE = "multipart/form-data; boundary=x"


def form(name: str) -> bytes:
    """Return a form with a file of 1000 bytes."""
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a.bin"\r\n'
    return f"{head}Content-Type: application/octet-stream\r\n\r\n{'.' * 1000}\r\n--x--\r\n".encode()


UPLOAD_MISTAKES: Mapping[str, object] = {"wrong field": form("fiel"), "JSON": {"file": 3}}

PACKAGES = {
    "file": {"charonia": ["."], "litserve": ["litserve", "onnxruntime"], "bentoml": ["bentoml", "onnxruntime"]},
    "function": {"charonia": ["."], "litserve": ["litserve"], "bentoml": ["bentoml"]},
    "json": {},
    "upload": {"litserve": ["litserve", "python-multipart"]},
}
"""What the environments have, by task; those that are not named are those of the function."""

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def install(folder: Path) -> None:
    """Make the environments; bytecode is compiled as pip does it."""
    uv = str(Path(sys.executable).with_name("uv"))
    for task, packages in PACKAGES.items():
        (folder / task).mkdir(parents=True, exist_ok=True)
        for name in PACKAGES["function"]:
            target = folder / task / name
            if target.exists():
                continue
            if name not in packages:
                target.symlink_to(folder / "function" / name)
                continue
            subprocess.run([uv, "venv", "-q", "-p", sys.executable, target], check=True)
            options = ["-q", "--compile-bytecode", "-p", str(target / "bin" / "python")]
            subprocess.run([uv, "pip", "install", *options, *packages[name]], check=True)


def build_images(base: str) -> dict[str, object]:
    """Build an image of the function for each, on the same Debian with pip; return seconds and sizes."""
    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        buildah = ["buildah", "build", "--quiet", "--isolation=chroot", f"--volume={CERTIFICATES}:/certificates.crt:ro"]
        python = "RUN apt-get update -q && apt-get install -yq --no-install-recommends python3-venv\n"
        (folder / "Dockerfile").write_text(
            f"FROM {base}\n{python}ENV PIP_CERT=/certificates.crt\nRUN python3 -m venv /app\n"
        )
        subprocess.run([*buildah, "-t", "first-base", folder], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-m", "build", "-w", "--no-isolation", "-o", folder, "."], check=True, stdout=2)
        wheel = next(folder.glob("*.whl")).name
        for one in FUNCTION:
            (folder / "service.py").write_text(one.code)
            packages = [f"/{wheel}"] if one.name == "charonia" else PACKAGES["function"][one.name]
            lines = ["FROM first-base", *([f"COPY {wheel} /"] if one.name == "charonia" else ())]
            lines += [f"RUN /app/bin/pip install -q --no-cache-dir {' '.join(packages)}", "COPY service.py /app/"]
            (folder / "Dockerfile").write_text("\n".join(lines))
            begin = time.monotonic()
            subprocess.run([*buildah, "-t", f"first-{one.name}", folder], check=True, stdout=subprocess.DEVNULL)
            seconds = round(time.monotonic() - begin, 1)
            found = subprocess.run(
                ["buildah", "images", "--json", f"first-{one.name}"], check=True, capture_output=True
            )
            size = json.loads(found.stdout)[0]["size"]
            print(f"image: {one.name}: built in {seconds} s, {size}", flush=True)
            record[f"image-{one.name}"] = {"seconds": seconds, "size": size}
    return record


def post(url: str, body: object) -> tuple[int, str]:
    """Return the status and the text of the answer to a JSON body, or a form; status 0 before the server listens."""
    is_form = isinstance(body, bytes)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": FORM_TYPE if is_form else "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@contextmanager
def started(contender: Contender, environment: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run a server in an empty folder; yield its process and the URL of a request."""
    port = str(free_ports(1)[0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MODEL).write_bytes(Path(get_example(MODEL)).read_bytes())
        (Path(folder) / "service.py").write_text(contender.code.replace("PORT", port))
        program, *arguments = contender.command.replace("PORT", port).split()
        variables = {**os.environ, "BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [str(environment / "bin" / program), *arguments]
        with open(Path(folder) / "log", "wb") as log:
            child = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        process = psutil.Process(child.pid)
        try:
            yield process, f"http://{HOST}:{port}{contender.path}"
        finally:
            family = [process, *process.children(recursive=True)]
            child.send_signal(signal.SIGINT)
            for left in psutil.wait_procs(family, timeout=15)[1]:
                left.kill()
            child.wait()


def measure(contender: Contender, environment: Path, body: object, expected: object) -> tuple[float, float]:
    """Return the seconds from the start to the first right answer, and the memory of all processes then, in MB."""
    begin = time.monotonic()
    with started(contender, environment) as (process, url):
        while (answer := post(url, contender.body(body)))[0] != 200:
            if time.monotonic() > begin + START_TIMEOUT_S:
                raise TimeoutError(f"{contender.name}: no answer, the last one was {answer}")
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        value = json.loads(answer[1])
        if (value[contender.output] if contender.output else value) != expected:
            raise ValueError(f"{contender.name}: expected {expected}, got {value}")
        family = [process, *process.children(recursive=True)]
        return seconds, memory_mb(family)


def memory_mb(family: list[psutil.Process]) -> float:
    """Return the resident memory of processes: a file that several have mapped counts once, with its largest part."""
    files: dict[str, int] = {}
    anonymous = 0
    for member in family:
        for region in member.memory_maps(grouped=True):
            if region.path.startswith("/"):
                files[region.path] = max(files.get(region.path, 0), region.rss)
            else:
                anonymous += region.pss
    return (anonymous + sum(files.values())) / 1e6


def errors(contender: Contender, environment: Path, body: object, mistakes: Mapping[str, object]) -> list[str]:
    """Return the answer to each mistake, after a right request."""
    with started(contender, environment) as (_, url):
        while post(url, contender.body(body))[0] != 200:
            time.sleep(0.02)
        answers = {kind: post(url, contender.body(mistake)) for kind, mistake in mistakes.items()}
        return [f"{kind}: {' '.join(map(str, answer))}" for kind, answer in answers.items()]


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def size_mb(environment: Path) -> float:
    """Size of an environment's files in MB."""
    return sum(path.lstat().st_size for path in environment.rglob("*") if not path.is_symlink()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--install", action="store_true", help="make the environments")
    parser.add_argument("--images", metavar="BASE", help="build images on this one, too")
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.folder.resolve())
    session = onnxruntime.InferenceSession(get_example(MODEL))
    labels = session.run(["label"], {"float_input": np.array(ROWS, np.float32)})[0].tolist()
    tasks = (
        ("file", FILE, {"float_input": ROWS}, labels, FILE_MISTAKES),
        ("function", FUNCTION, {"x": 3}, 9.0, FUNCTION_MISTAKES),
        ("json", JSON, {"item": "tea", "count": 3}, 7.5, JSON_MISTAKES),
        ("upload", UPLOAD, form("file"), 1000, UPLOAD_MISTAKES),
    )
    record: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    if arguments.images:
        record |= build_images(arguments.images)
    for task, contenders, body, expected, mistakes in (each for each in tasks if each[0] in arguments.tasks):
        folder = (arguments.folder / task).resolve()
        runs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contenders}
        for number in range(arguments.rounds + 1):
            for one in contenders[:: 1 if number % 2 else -1]:
                run = measure(one, folder / one.name, body, expected)
                runs[one.name] += [run] * bool(number)  # the first round warms the file system's cache
        for one in contenders:
            environment = folder / one.name
            seconds, memory = ([run[index] for run in runs[one.name]] for index in (0, 1))
            packages = len(list(environment.glob("lib/*/site-packages/*.dist-info")))
            said = errors(one, environment, body, mistakes)
            print(
                f"{task}: {one.name}: {one.lines} lines, {packages} packages, {size_mb(environment):.0f} MB installed"
            )
            print(f"  {spread(seconds, 2)} s, {spread(memory, 0)} MB resident", *said, sep="\n  ")
            facts = {"lines": one.lines, "packages": packages, "installed_mb": round(size_mb(environment), 1)}
            record[f"{task}-{one.name}"] = {**facts, "seconds": seconds, "memory_mb": memory, "errors": said}
    (RESULTS / "first_minutes.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
