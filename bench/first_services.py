"""The services that `bench.first_minutes` compares, in the few lines that their documentation shows."""

from dataclasses import dataclass

MODEL = "logreg_iris.onnx"

LITSERVE_FILE = f"""\
import litserve as ls
import numpy as np
import onnxruntime


class Iris(ls.LitAPI):
    def setup(self, device):
        self.session = onnxruntime.InferenceSession("{MODEL}")

    def predict(self, request):
        x = np.array(request["float_input"], np.float32)
        return {{"label": self.session.run(["label"], {{"float_input": x}})[0].tolist()}}


if __name__ == "__main__":
    ls.LitServer(Iris()).run(host="127.0.0.1", port=PORT)
"""

LITSERVE_FUNCTION = """\
import litserve as ls


class Square(ls.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        return {"output": request["x"] ** 2}


if __name__ == "__main__":
    ls.LitServer(Square()).run(host="127.0.0.1", port=PORT)
"""

BENTOML_FILE = f"""\
from typing import Annotated

import bentoml
import numpy as np
import onnxruntime
from bentoml.validators import DType, Shape


@bentoml.service
class Iris:
    def __init__(self):
        self.session = onnxruntime.InferenceSession("{MODEL}")

    @bentoml.api
    def predict(self, float_input: Annotated[np.ndarray, DType("float32"), Shape((3, 2))]) -> np.ndarray:
        return self.session.run(["label"], {{"float_input": float_input}})[0]
"""

BENTOML_FUNCTION = """\
import bentoml


@bentoml.service
class Square:
    @bentoml.api
    def square(self, x: float) -> float:
        return x**2
"""

CHARONIA_FUNCTION = """\
import charonia


@charonia.model
def square(x: float) -> float:
    return x**2
"""


@dataclass
class Contender:
    """A server for one task: the file to write ("" for none), the command that starts it, the path of a request."""

    name: str
    code: str
    command: str
    path: str
    output: str

    @property
    def lines(self) -> int:
        """Lines of code that are not blank."""
        return sum(bool(line.strip()) for line in self.code.splitlines())


CHARONIA = "charonia serve {} --host=127.0.0.1 --port=PORT"
BENTOML = "bentoml serve service:{} --host=127.0.0.1 --port=PORT"
FILE = (
    Contender("charonia", "", CHARONIA.format(MODEL), "/v2/models/logreg_iris/generate", "label"),
    Contender("litserve", LITSERVE_FILE, "python service.py", "/predict", "label"),
    Contender("bentoml", BENTOML_FILE, BENTOML.format("Iris"), "/predict", ""),
)
FUNCTION = (
    Contender("charonia", CHARONIA_FUNCTION, CHARONIA.format("service.py"), "/v2/models/square/generate", "output"),
    Contender("litserve", LITSERVE_FUNCTION, "python service.py", "/predict", "output"),
    Contender("bentoml", BENTOML_FUNCTION, BENTOML.format("Square"), "/square", ""),
)
