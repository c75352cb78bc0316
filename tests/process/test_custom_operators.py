"""Operators that a library brings to ONNX Runtime."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as http_client
from onnx import TensorProto, helper
from tests.support.models import write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input


def shouting() -> bytes:
    """TEXT [batch, 1] -> LOUD [batch, 1], by an operator that ONNX Runtime does not have."""
    shape: list[str | int | None] = ["batch", 1]
    node = helper.make_node("StringUpper", ["TEXT"], ["LOUD"], domain="ai.onnx.contrib")
    text = helper.make_tensor_value_info("TEXT", TensorProto.STRING, shape)
    loud = helper.make_tensor_value_info("LOUD", TensorProto.STRING, shape)
    graph = helper.make_graph([node], "shouting", [text], [loud])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return model.SerializeToString()


def test_a_model_uses_the_operators_of_the_library_in_its_folder(tmp_path: Path) -> None:
    extensions = pytest.importorskip("onnxruntime_extensions")
    for name, library in (("loud", "operators.so"), ("lost", "nowhere.so"), ("plain", "")):
        config = f'model_operations {{ op_library_filename: "{library}" }}' if library else ""
        folder = write_model(tmp_path, name, shouting(), config=config)
        if name == "loud":
            shutil.copy(extensions.get_library_path(), folder / library)

    with (
        ServeProcess(tmp_path, "--exit-on-error=false") as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        tensor = infer_input(http_client, "TEXT", np.array([[b"quiet"]], np.object_))
        assert client.infer("loud", [tensor]).as_numpy("LOUD").tolist() == [[b"QUIET"]]
        reasons = {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}

    assert "nowhere.so" in reasons["lost"]
    assert "StringUpper" in reasons["plain"]
