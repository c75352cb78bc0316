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

ORDER = """\
from pydantic import BaseModel, Field


class Order(BaseModel):
    item: str
    count: int = Field(ge=1, le=100)


"""

CHARONIA_JSON = f"""\
import charonia
{ORDER}@charonia.model
def price(order: Order) -> float:
    return order.count * 2.5
"""

LITSERVE_JSON = f"""\
import litserve as ls
{ORDER}class Price(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request: Order):
        return request

    def predict(self, order):
        return {{"output": order.count * 2.5}}


if __name__ == "__main__":
    ls.LitServer(Price()).run(host="127.0.0.1", port=PORT)
"""

BENTOML_JSON = f"""\
import bentoml
{ORDER}@bentoml.service
class Price:
    @bentoml.api
    def price(self, order: Order) -> float:
        return order.count * 2.5
"""

CHARONIA_UPLOAD = """\
import charonia


@charonia.model
def size(file: bytes) -> int:
    return len(file)
"""

LITSERVE_UPLOAD = """\
import litserve as ls


class Size(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["file"].file.read()

    def predict(self, data):
        return {"output": len(data)}


if __name__ == "__main__":
    ls.LitServer(Size()).run(host="127.0.0.1", port=PORT)
"""

BENTOML_UPLOAD = """\
from pathlib import Path

import bentoml


@bentoml.service
class Size:
    @bentoml.api
    def size(self, file: Path) -> int:
        return len(file.read_bytes())
"""


@dataclass
class Contender:
    """A server for one task: the file to write ("" for none), the command that starts it, the path of a request.

    `member` is the member of the request that has the value, "" for the request itself.
    """

    name: str
    code: str
    command: str
    path: str
    output: str
    member: str = ""

    def body(self, value: object) -> object:
        return {self.member: value} if self.member and not isinstance(value, bytes) else value

    @property
    def lines(self) -> int:
        """Lines of code that are not blank."""
        return sum(bool(line.strip()) for line in self.code.splitlines())


CHARONIA = "charonia serve {} --host=127.0.0.1 --port=PORT --grpc-port=0 --metrics-port=0"
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
JSON = (
    Contender("charonia", CHARONIA_JSON, CHARONIA.format("service.py"), "/v2/models/price/generate", "output"),
    Contender("litserve", LITSERVE_JSON, "python service.py", "/predict", "output"),
    Contender("bentoml", BENTOML_JSON, BENTOML.format("Price"), "/price", "", "order"),
)
UPLOAD = (
    Contender("charonia", CHARONIA_UPLOAD, CHARONIA.format("service.py"), "/v2/models/size/generate", "output"),
    Contender("litserve", LITSERVE_UPLOAD, "python service.py", "/predict", "output"),
    Contender("bentoml", BENTOML_UPLOAD, BENTOML.format("Size"), "/size", ""),
)
