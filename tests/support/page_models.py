"""A repository with a model of each kind that the page and the OpenAPI document tell apart."""

from pathlib import Path

from tests.support.models import write_model

from charonia.core.dtypes import DataType

STORY = """
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()[0].decode()
            self.send(sender, prompt + ",")
            go = pathlib.Path(__file__).with_name("go")
            while prompt == "wait" and not sender.is_cancelled() and not go.exists():
                time.sleep(0.01)
            if prompt == "fail":
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("the story has no end")))
            elif not sender.is_cancelled():
                self.send(sender, " he said")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, text):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], object))]))
"""
_STORY_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# A sequence that outlives the slowest browser.
_SEQUENCE = "max_batch_size: 1 sequence_batching { max_sequence_idle_microseconds: 600000000 }"


def write_page_models(repository: Path) -> None:
    """Write the repository.

    - `numbers`: an input of each datatype but BYTES, in batches, which comes back.
    - `text`: a text, and an optional number.
    - `picture`: pixels of any size in bytes, and of a fixed one in numbers, which come back.
    - `classes`: four scores with labels.
    - `steps`: a part of a sequence.
    - `story`: a stream of texts; the prompt "wait" holds the second one up until there is a file `go` beside the model,
      "fail" fails instead.
    - `broken`: cannot be loaded.
    """
    numeric = [datatype for datatype in DataType if datatype is not DataType.BYTES]
    _write(repository, "numbers", "max_batch_size: 8", *((f"_{each.wire}", each, "2", "") for each in numeric))
    text = ("_TEXT", DataType.BYTES, "1", "")
    _write(repository, "text", "", text, ("_COUNT", DataType.INT32, "1", "optional: true"))
    pixels = ("_IMAGE", DataType.UINT8, "-1, -1, 3", "")
    _write(repository, "picture", "", pixels, ("_SCALED", DataType.FP32, "3, 8, 8", ""))
    folder = _write(repository, "classes", "", ("_SCORES", DataType.FP32, "4", ""), label_file="labels.txt")
    (folder / "labels.txt").write_text("cat\ndog\nferry\noar\n", encoding="utf-8")
    _write(repository, "steps", _SEQUENCE, ("_VALUE", DataType.FP32, "1", ""))
    write_model(repository, "story", STORY, config=_STORY_CONFIG)
    write_model(repository, "broken", b"", config='backend: "identity" input [ { name: "X" dims: [ 1 ] } ]')


def _write(
    repository: Path, name: str, extra: str, *tensors: tuple[str, DataType, str, str], label_file: str = ""
) -> Path:
    labels = f'label_filename: "{label_file}"' if label_file else ""
    lines = [f'backend: "identity" {extra}']
    for suffix, datatype, dims, option in tensors:
        lines.append(f'input {{ name: "INPUT{suffix}" data_type: {datatype.config} dims: [ {dims} ] {option} }}')
        lines.append(f'output {{ name: "OUTPUT{suffix}" data_type: {datatype.config} dims: [ {dims} ] {labels} }}')
    folder = write_model(repository, name, b"", config="\n".join(lines))
    (folder / "1").mkdir(exist_ok=True)
    return folder
