"""CPU time of a request between a front end and the engine, by the number of requests that come together.

python -m bench.link_cost

Both ends are in this process, which does nothing else: no HTTP, no gRPC, no client. Beside it stands the same request
without front ends apart. Each figure is the 10th percentile of many short runs, so that other work on the machine
disturbs it little.
"""

import asyncio
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.models import MODEL, identity
from charonia.core.calls import Outcome
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.app import InferenceServer, new_event_loop
from charonia.server.facade import Engine
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.remote_engine import RemoteEngine
from charonia.server.options import ServerOptions

TOGETHER = (1, 4, 16, 64)
RUNS = 400
WARM_UP = 200


def request() -> InferRequest:
    """Return a request for the model."""
    return InferRequest(MODEL, {"INPUT0": Tensor("INPUT0", DataType.FP32, np.zeros(16, "<f4"))})


class _Outcomes(list[Outcome]):
    """The outcomes of requests."""

    def __call__(self, outcome: Outcome, final: bool) -> None:
        self.append(outcome)


async def cost_us(engine: Engine, count: int, runs: int) -> float:
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


async def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        identity(Path(folder) / "models")
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
        await cost_us(remote, TOGETHER[-1], WARM_UP)
        for count in TOGETHER:
            apart = await cost_us(remote, count, RUNS)
            inside = await cost_us(server.engine, count, RUNS)
            print(f"{count:3} together: {apart:5.1f} us, {inside:4.1f} us of them without front ends apart", flush=True)
        remote.close()
        await server.shutdown()


async def _nothing(question: str, arguments: list[object]) -> object:
    return None


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
