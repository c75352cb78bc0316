"""The cost of statistics, metrics and histograms: their CPU time per request, and its share of the server's.

The counters cannot be switched off, so their time is measured in this process and compared with the server's total CPU
time of a small inference, which is measured from outside.

python -m bench.counting_cost
"""

import timeit

from bench.load import Load, run
from bench.servers import Server
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.scheduling.api import CloseReason

REPEATS = 200_000


def main() -> None:
    """Measure and print."""
    metrics = ModelMetrics("m", "1")

    def count() -> None:
        metrics.batch_done(
            arrivals_ns=[1_000],
            inferences=1,
            batch_size=1,
            reason=CloseReason.FULL,
            marks_ns=(20_000, 21_000, 90_000, 95_000),
            wall_ms=1,
        )

    own = min(timeit.repeat(count, number=REPEATS, repeat=5)) / REPEATS * 1e6
    with Server("charonia:identity") as server:
        run(server, Load("wrk", "http", 16, 1.0))
        total = run(server, Load("wrk", "http", 16, 4.0)).cpu_us
    print(f"counting {own:.2f} us of {total:.1f} us of server CPU a request: {own / total:.1%}")


if __name__ == "__main__":
    main()
