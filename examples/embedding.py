"""Serves a model from this program and calls it: `python examples/embedding.py`. It needs only charonia."""

import tempfile
from pathlib import Path

import numpy as np

import charonia

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy() for request in requests]
        greetings = [[b"Hello, " + name + b"!" for name in batch] for batch in names]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("GREETING", np.array(g, object))]) for g in greetings]
"""

CONFIG = """
backend: "python"
input { name: "NAME" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "GREETING" data_type: TYPE_STRING dims: [ -1 ] }
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as repository:
        version = Path(repository, "greeter", "1")
        version.mkdir(parents=True)
        version.joinpath("model.py").write_text(MODEL)
        version.parent.joinpath("config.pbtxt").write_text(CONFIG)
        with charonia.Server(repository) as server:
            outputs = server.infer("greeter", {"NAME": np.array(["Ada", "Grace"])})
            print(*(greeting.decode() for greeting in outputs["GREETING"]), sep="\n")
            try:
                server.infer("greeter", {"NAME": np.array([1, 2])})
            except charonia.ServingError as error:
                print(f"{error.code.name}: {error}")


if __name__ == "__main__":
    main()
