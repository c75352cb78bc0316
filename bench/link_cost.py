"""CPU time of a request between a front end and the engine, by the number of requests that come together.

python -m bench.link_cost
python -m bench.link_cost --model engine_image --together 1 4 16

Both ends are in this process, which does nothing else: no HTTP, no gRPC, no client. The same request without separate
front ends is measured for comparison. An input of more than 64 KiB is in memory that the engine reads, and in a second
measurement in the front end's own memory, from where it has to be copied. Each figure is the 10th percentile of many
short runs, so that other work on the machine disturbs it little.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.compare import RESULTS
from bench.machine import machine
from bench.models import INPUT_SHAPES, MODEL, MODELS
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.server.app import InferenceServer, new_event_loop
from charonia.server.channel.channel import INLINE_BYTES_MAX
from charonia.server.facade import Engine
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.remote_engine import RemoteEngine
from charonia.server.options import ServerOptions
from charonia.wire.tensors import Lend

TOGETHER = (1, 4, 16, 64)
RUNS = 400
WARM_UP = 200


class Requests:
    """Makes requests for a model.

    Args:
        model: The model.
        lend: Lends the memory of large inputs, None for private memory.
    """

    def __init__(self, model: str, lend: Lend | None = None) -> None:
        self._shape = INPUT_SHAPES[model]
        self._zeros = np.zeros(self._shape, "<f4")
        self._lend = lend if self._zeros.nbytes > INLINE_BYTES_MAX else None

    def __call__(self) -> InferRequest:
        """Return a request whose input has just been written."""
        lent = self._lend(self._zeros.nbytes) if self._lend is not None else None
        array = np.empty(self._shape, "<f4") if lent is None else np.ndarray(self._shape, "<f4", lent)
        array[:] = self._zeros
        return InferRequest(MODEL, {"INPUT0": Tensor("INPUT0", DataType.FP32, array)})


class _Outcomes(list[Outcome]):
    """The outcomes of requests."""

    def __call__(self, outcome: Outcome, final: bool) -> None:
        self.append(outcome)


async def cost_us(engine: Engine, request: Requests, count: int, runs: int) -> float:
    """Return the CPU time of a request in us if so many come together."""
    times: list[float] = []
    for _ in range(runs):
        taken = _Outcomes()
        asked = [request() for _ in range(count)]
        begin_ns = time.thread_time_ns()
        for each in asked:
            engine.infer(each, taken)
        while len(taken) < count:
            await asyncio.sleep(0)
        times.append((time.thread_time_ns() - begin_ns) / 1000 / count)
        assert all(isinstance(outcome, InferResponse) for outcome in taken), taken
    return statistics.quantiles(times, n=10)[0]


async def measure(model: str, together: Sequence[int]) -> list[dict[str, float]]:
    """Measure and print; return the figures of each number of requests."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        MODELS[model](Path(folder) / "models")
        options = ServerOptions()
        models = replace(options.models, repositories=(str(Path(folder) / "models"),))
        metrics = replace(options.metrics, enabled=False)
        port = EnginePort(Path(folder))
        server = InferenceServer(replace(options, models=models, metrics=metrics), front_ends=port)
        await server.start()
        remote = RemoteEngine(take=_nothing, ended=print)
        ours, theirs = socket.socketpair()
        port.connect(theirs)
        await remote.connect(ours)
        lent, own = Requests(model, remote.lend), Requests(model)
        await cost_us(remote, lent, max(together), WARM_UP)
        for count in together:
            apart = await cost_us(remote, lent, count, RUNS)
            copied = await cost_us(remote, own, count, RUNS)
            inside = await cost_us(server.engine, own, count, RUNS)
            print(
                f"{count:3} together: {apart:5.1f} us, {copied:5.1f} us from private memory, {inside:5.1f} us "
                "without front ends apart",
                flush=True,
            )
            rows.append({"together": count, "apart_us": apart, "private_us": copied, "one_process_us": inside})
        remote.close()
        await server.shutdown()
    return rows


async def _nothing(question: str, arguments: list[object]) -> object:
    return None


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="engine_identity")
    parser.add_argument("--together", type=int, nargs="+", default=[*TOGETHER])
    parser.add_argument("--output", type=Path, default=RESULTS / "link_cost.json")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        rows = runner.run(measure(given.model, given.together))
    result: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "model": given.model,
        "rows": rows,
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
