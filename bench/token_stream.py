"""Hundreds of open streams over an engine that costs nothing: `python -m bench.token_stream MODEL PYTHON`.

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
from bench.vllm_service import bodies, serving


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--pace", type=float, default=100.0, help="words a second for each stream")
    given = parser.parse_args()
    os.environ[PACE] = str(given.pace)
    arguments = {"enforce_eager": True, "max_model_len": 2048}
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    record |= {name: getattr(given, name) for name in ("streams", "tokens", "pace")}
    runs: dict[str, list[StreamsRun]] = {"vllm": [], "charonia": []}
    for number in range(given.rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            with serving(name, given.python, given.model, arguments, has_engine=False) as (port, server):
                measure(port, server, bodies(8, 16, -1), 16)
                runs[name].append(measure(port, server, bodies(given.streams, given.tokens, number), given.tokens))
            print(f"{name:9} {middle(runs[name][-1:])}", flush=True)
    for name, each in runs.items():
        print(f"median of {name:9} {middle(each)}", flush=True)
        record[name] = [asdict(run) for run in each]
    (RESULTS / "token_stream.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
