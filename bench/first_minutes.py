"""The first minutes with Charonia, LitServe and BentoML: a model's file and a plain function, until the first answer.

python -m bench.first_minutes FOLDER    with an environment of each, FOLDER/file/charonia, FOLDER/function/charonia, ...

The servers run one at a time, in turn, on loopback. docs/first_minutes.md has the commands that make the environments.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
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
from bench.first_services import FILE, FUNCTION, MODEL, Contender
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


def post(url: str, body: object) -> tuple[int, str]:
    """Return the status and the text of the answer to a JSON body; status 0 before the server listens."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
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
        while (answer := post(url, body))[0] != 200:
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
        while post(url, body)[0] != 200:
            time.sleep(0.02)
        return [f"{kind}: {' '.join(map(str, post(url, mistake)))}" for kind, mistake in mistakes.items()]


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def size_mb(environment: Path) -> float:
    """Size of an environment's files in MB."""
    return sum(path.lstat().st_size for path in environment.rglob("*") if not path.is_symlink()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session = onnxruntime.InferenceSession(get_example(MODEL))
    labels = session.run(["label"], {"float_input": np.array(ROWS, np.float32)})[0].tolist()
    tasks = (
        ("file", FILE, {"float_input": ROWS}, labels, FILE_MISTAKES),
        ("function", FUNCTION, {"x": 3}, 9.0, FUNCTION_MISTAKES),
    )
    record: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    for task, contenders, body, expected, mistakes in tasks:
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
