"""CPU time of the server per inference, of its pure and its compiled form in turn, after `make install-fast`.

python -m bench.forms --rounds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from bench.compare import RESULTS
from bench.machine import machine
from bench.models import MODEL
from bench.servers import Server
from charonia import compiled

CASES = [
    ("identity", "http", "binary"),
    ("identity", "grpc", "binary"),
    ("identity", "http", "json"),
    ("mlp", "http", "binary"),
]
"""Model, protocol and encoding of tensors."""


def cpu_us(server: Server, protocol: str, encoding: str, concurrency: int) -> float:
    """Put load on a server for about two seconds; return its CPU time per inference."""
    cpu_s, count = server.cpu_seconds(), server.inference_count()
    address = server.http if protocol == "http" else server.grpc
    formats = [f"--input-tensor-format={encoding}", f"--output-tensor-format={encoding}"] if encoding == "json" else []
    load = [f"--concurrency-range={concurrency}", "-p=600", "-r=3", "-s=90", *formats]
    command = [sys.executable, "-m", "charonia", "perf", "-m", MODEL, "-u", address, "-i", protocol, *load]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)  # 2: never stable
    return (server.cpu_seconds() - cpu_s) / max(1, server.inference_count() - count) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    results: dict[str, object] = {"machine": machine()}
    for model, protocol, encoding in CASES:
        os.environ[compiled.PURE] = "1"
        with Server(f"charonia:{model}") as pure:
            os.environ[compiled.PURE] = "0"
            with Server(f"charonia:{model}") as fast:
                pairs: list[tuple[float, float]] = []
                for number in range(options.rounds + 1):
                    order = (pure, fast) if number % 2 else (fast, pure)
                    took = {server: cpu_us(server, protocol, encoding, options.concurrency) for server in order}
                    pairs.append((took[pure], took[fast]))
        name = f"{model} {protocol} {encoding}, {options.concurrency} in flight"
        results[name] = [{"pure_us": a, "compiled_us": b} for a, b in pairs[1:]]  # the first only warms up
        ratio = statistics.median(b / a for a, b in pairs[1:])
        print(name, *(f"{statistics.median(each):.1f} us" for each in zip(*pairs[1:], strict=True)), f"{ratio:.2f}")
        (RESULTS / "forms.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
