"""The time from the start of `charonia serve` to its first response, and its memory then.

python -m bench.startup
"""

import json
import statistics
from datetime import UTC, datetime

from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import Server

RUNS = 5


def main() -> None:
    """Start the server several times with a model that needs no library and with an ONNX model."""
    rows = []
    print(f"{'model':<10} {'first answer s, median [least-greatest]':<42} {'memory MiB':>10}")
    for model in ("identity", "mlp"):
        seconds, memory = [], []
        for _ in range(RUNS):
            with Server(f"charonia:{model}") as server:
                seconds.append(server.start_seconds)
                memory.append(server.memory_bytes() >> 20)
        text = f"{statistics.median(seconds):.2f} [{min(seconds):.2f}-{max(seconds):.2f}]"
        print(f"{model:<10} {text:<42} {round(statistics.median(memory)):>10}")
        rows.append({"model": model, "first_answer_s": seconds, "memory_mib": memory})
    record = {"format": 1, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "startup.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
