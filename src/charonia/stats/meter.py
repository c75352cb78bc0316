"""Counts what happens to the requests of one model version: the statistics and the metrics, in one place.

Called once a batch rather than once a request where that says the same, since this is on every request's path.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from charonia.sched.api import CloseReason
from charonia.stats.histogram import Histogram
from charonia.stats.model import BatchStatistics, ModelStatistics

_US = 1_000
_MS = 1_000_000
_S = 1_000_000_000

DURATION_BOUNDS_NS = (
    *(50 * _US, 100 * _US, 250 * _US, 500 * _US),
    *(1 * _MS, 5 * _MS // 2, 5 * _MS, 10 * _MS, 25 * _MS, 50 * _MS, 100 * _MS, 250 * _MS, 500 * _MS),
    *(1 * _S, 5 * _S // 2, 5 * _S, 10 * _S, 30 * _S),
)
"""Upper bounds of the latency histograms: 50 us to 30 s."""

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the histogram of executed batch sizes."""


class FailureReason(Enum):
    """Why a request failed, as label values of the failure counter."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class Meter:
    """All counters of one model version. Only the event loop's thread calls it.

    Attributes:
        statistics: What the statistics extension reports.
        failures: Failed requests by reason.
        closes: Batches by the reason they were sent.
        request_ns: Histogram of the time from arrival to answer of successful requests.
        queue_ns: Histogram of the time from arrival to execution.
        compute_ns: Histogram of the time of an execution, counted for each request in it.
        batch_size: Histogram of the batch elements of an execution.
        load_seconds: Time it took to load the version.
    """

    def __init__(self, name: str, version: str) -> None:
        self.statistics = ModelStatistics(name, version)
        self.failures = dict.fromkeys(FailureReason, 0)
        self.closes = dict.fromkeys(CloseReason, 0)
        self.request_ns = Histogram(DURATION_BOUNDS_NS)
        self.queue_ns = Histogram(DURATION_BOUNDS_NS)
        self.compute_ns = Histogram(DURATION_BOUNDS_NS)
        self.batch_size = Histogram(BATCH_BOUNDS)
        self.load_seconds = 0.0

    def failed(self, reason: FailureReason, duration_ns: int) -> None:
        """Count a request that failed `duration_ns` after it arrived."""
        self.failures[reason] += 1
        self.statistics.fail.add(duration_ns)

    def batch_done(
        self,
        *,
        arrivals_ns: Sequence[int],
        inferences: int,
        batch_size: int,
        reason: CloseReason,
        marks_ns: tuple[int, int, int, int],
        wall_ms: int,
    ) -> None:
        """Count an executed batch and its successful requests.

        Args:
            arrivals_ns: Arrival of each request that succeeded.
            inferences: Batch elements of those requests.
            batch_size: Batch elements of all requests in the batch.
            reason: Why the batch was sent.
            marks_ns: Start, inputs in place, computed, end.
            wall_ms: Wall-clock time in ms since the epoch.
        """
        start, input_end, output_start, end = marks_ns
        statistics = self.statistics
        statistics.execution_count += 1
        statistics.last_inference_ms = wall_ms
        self.closes[reason] += 1
        self.batch_size.observe(batch_size)
        batch = statistics.batches.get(batch_size)
        if batch is None:
            batch = statistics.batches[batch_size] = BatchStatistics()
        batch.compute_input.add(input_end - start)
        batch.compute_infer.add(output_start - input_end)
        batch.compute_output.add(end - output_start)
        count = len(arrivals_ns)
        if not count:
            return
        statistics.inference_count += inferences
        waited = took = 0
        for arrival in arrivals_ns:
            queue = start - arrival
            request = end - arrival
            waited += queue
            took += request
            self.queue_ns.observe(queue)
            self.request_ns.observe(request)
        self.compute_ns.observe(end - start, count)
        statistics.success.add(took, count)
        statistics.queue.add(waited, count)
        statistics.compute_input.add((input_end - start) * count, count)
        statistics.compute_infer.add((output_start - input_end) * count, count)
        statistics.compute_output.add((end - output_start) * count, count)

    def labels(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the labels of this version's metrics: model, version and the configuration's tags, prefixed "_"."""
        statistics = self.statistics
        return {"model": statistics.name, "version": statistics.version} | {f"_{k}": v for k, v in tags.items()}
