"""Open streams over an engine that costs nothing: `python -m bench.token_stream MODEL PYTHON`.

Arguments as for `bench.vllm_service`. Both servers have the same stand-in for vLLM's engine (`bench.fake_vllm`), which
gives every stream so many words a second. Server-sent events a second that arrive, and the CPU time of each.
"""

import argparse
import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compare import RESULTS
from bench.fake_vllm import PACE
from bench.machine import machine
from bench.token_load import StreamsRun, measure, middle
from bench.vllm_service import bodies, serving, spread


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 500])
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--pace", type=float, default=100.0, help="words a second for each stream")
    given = parser.parse_args()
    os.environ[PACE] = str(given.pace)
    arguments = {"enforce_eager": True, "max_model_len": 2048}
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    record |= {name: getattr(given, name) for name in ("streams", "tokens", "pace")}
    names = ("vllm", "charonia")
    runs: dict[tuple[int, str], list[StreamsRun]] = {(streams, name): [] for streams in given.streams for name in names}
    for number in range(given.rounds):
        for name in names[:: 1 if number % 2 else -1]:
            with serving(name, given.python, given.model, arguments, has_engine=False) as (port, server):
                measure(port, server, bodies(8, 16, -1), 16)
                for streams in given.streams:
                    run = measure(port, server, bodies(streams, given.tokens, number), given.tokens)
                    runs[streams, name].append(run)
                    print(f"{streams:3} streams {name:9} {middle([run])}", flush=True)
    for streams in given.streams:
        for name in names:
            print(f"median of {streams:3} streams {name:9} {middle(runs[streams, name])}", flush=True)
        pairs = zip(runs[streams, "charonia"], runs[streams, "vllm"], strict=True)
        costs = spread([mine.serving_us / its.serving_us for mine, its in pairs])
        print(f"{streams:3} streams charonia to vllm: CPU of the serving {costs}", flush=True)
        record[f"{streams} streams"] = {name: [asdict(run) for run in runs[streams, name]] for name in names} | {
            "serving_cpu": costs
        }
    (RESULTS / "token_stream.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
