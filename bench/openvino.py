"""OpenVINO against ONNX Runtime, the same ONNX networks: `python -m bench.openvino`.

Both run as backends of the server, as the engine calls them, with one request for each row and the same threads. Rounds
alternate; a ratio is of the two medians of one round, and above 1 OpenVINO is faster. Its precision is f32 unless
`--precision` says another.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from tests.support import models

from bench.backend_cases import ocr_model
from bench.backends import times_us
from bench.machine import machine
from charonia.config.complete import normalise
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.dtypes import BY_NUMPY
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, BlockingInstance, ModelFiles, Placement
from charonia.server.backends.registry import installed_backends
from charonia.server.machine.cores import usable_cores

Row = Mapping[str, NDArray[np.float32] | NDArray[np.int64]]
ENCODER = Path(__file__).parents[1] / "examples" / "sentence_encoder" / "make_repository.py"


@dataclass(frozen=True, slots=True)
class Network:
    """A network.

    Attributes:
        name: Its name in the table.
        content: Returns the ONNX file.
        row: Returns the inputs of one row, which is made from a seed.
        batches: Rows of the batches that are measured.
    """

    name: str
    content: Callable[[], bytes]
    row: Callable[[int], Row]
    batches: tuple[int, ...] = (1, 4, 8)


def _picture(name: str, *shape: int) -> Callable[[int], Row]:
    return lambda seed: {name: np.random.default_rng(seed).random((1, *shape), np.float32)}


def _tokens(length: int) -> Callable[[int], Row]:
    def row(seed: int) -> Row:
        ids = np.random.default_rng(seed).integers(1000, 30000, (1, length), np.int64)
        return {"input_ids": ids, "attention_mask": np.ones((1, length), np.int64)}

    return row


def _minilm() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ENCODER, folder], check=True, stdout=subprocess.DEVNULL)
        return (Path(folder) / "encoder_onnx" / "1" / "model.onnx").read_bytes()


NETWORKS = (
    Network("mlp", models.mlp, _picture("input", 128), (1, 8, 64)),
    Network("resnet18", models.resnet18, _picture("input", 3, 224, 224)),
    Network("pp-ocrv4 detection", lambda: ocr_model("ch_PP-OCRv4_det_infer"), _picture("x", 3, 640, 640), (1,)),
    Network("pp-ocrv4 recognition", lambda: ocr_model("ch_PP-OCRv4_rec_infer"), _picture("x", 3, 48, 320)),
    Network("minilm, 16 tokens", _minilm, _tokens(16)),
    Network("minilm, 128 tokens", _minilm, _tokens(128)),
)


@contextmanager
def loaded(backend_name: str, folder: Path, parameters: Mapping[str, str], threads: int) -> Iterator[BlockingInstance]:
    """Load a model's folder with a backend, as the server does."""
    backend = installed_backends()[backend_name]()
    files, settings = ModelFiles(folder, 1, folder / "1"), BackendSettings({}, default_max_batch_size=64)
    config = ModelConfig(
        name="m", backend=backend_name, default_model_filename="model.onnx", parameters=dict(parameters)
    )
    with asyncio.Runner() as runner:
        config = runner.run(backend.complete(files, config, settings)).config
        config = normalise(config, name="m", gpu_count=0, default_instance_count=1)
        model = runner.run(backend.load(files, config, settings))
        instance = runner.run(model.create_instance(Placement("m_0", InstanceKind.KIND_CPU, 0, threads)))
        assert isinstance(instance, BlockingInstance)
        yield instance
        instance.close()
        runner.run(model.aclose())
        runner.run(backend.aclose())


def requests_of(network: Network, batch: int) -> list[InferRequest]:
    """Return a request for each row of a batch."""
    return [
        InferRequest("m", {k: Tensor(k, BY_NUMPY[array.dtype], array) for k, array in network.row(seed).items()})
        for seed in range(batch)
    ]


def compare(network: Network, rounds: int, threads: int, precision: str) -> Iterator[dict[str, float | str | int]]:
    """Measure a network with each batch."""
    with tempfile.TemporaryDirectory() as name:
        folder = models.write_model(Path(name), "m", network.content())
        with (
            loaded("openvino", folder, {"INFERENCE_PRECISION_HINT": precision}, threads) as openvino,
            loaded("onnxruntime", folder, {}, threads) as onnxruntime,
        ):
            for batch in network.batches:
                requests = requests_of(network, batch)
                pairs = []
                for number in range(rounds):
                    taken = {}
                    for instance in (openvino, onnxruntime) if number % 2 else (onnxruntime, openvino):
                        taken[instance] = times_us(lambda: instance.execute(requests))[0]  # noqa: B023 # called immediately
                    pairs.append((taken[openvino], taken[onnxruntime]))
                ratios = [other / own for own, other in pairs]
                yield {
                    "model": network.name,
                    "batch": batch,
                    "threads": threads,
                    "precision": precision,
                    "openvino_us": round(median(own for own, _ in pairs), 1),
                    "onnxruntime_us": round(median(other for _, other in pairs), 1),
                    "ratio": round(median(ratios), 2),
                    "ratio_min": round(min(ratios), 2),
                    "ratio_max": round(max(ratios), 2),
                }


def verdict(result: Mapping[str, float | str | int]) -> str:
    """Return which is better; neither where the rounds do not agree."""
    if float(result["ratio_min"]) > 1:
        return "OpenVINO"
    return "ONNX Runtime" if float(result["ratio_max"]) < 1 else "-"


def main() -> None:
    """Measure the networks, and print the table and, on request, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="*", help="only networks whose name begins so (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--output", type=Path, help="write the figures and the machine there")
    arguments = parser.parse_args()
    print(f"{'network':<22}{'batch':>6}{'OpenVINO us':>13}{'ONNX Rt. us':>13}{'ratio':>7}  least-greatest  better")
    results = []
    for network in NETWORKS:
        if arguments.network and not network.name.startswith(tuple(arguments.network)):
            continue
        for result in compare(network, arguments.rounds, arguments.threads, arguments.precision):
            results.append(result)
            print(
                f"{network.name:<22}{result['batch']:>6}{result['openvino_us']:>13}{result['onnxruntime_us']:>13}"
                f"{result['ratio']:>7}  {result['ratio_min']:>5} - {result['ratio_max']:<6}  {verdict(result)}",
                flush=True,
            )
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
