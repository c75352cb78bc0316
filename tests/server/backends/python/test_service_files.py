"""Functions, classes and objects as models: their configurations, and what they do with requests."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.support.fake_host import FakeHost

import charonia
from charonia.server.backends.python.worker.errors import TritonError
from charonia.server.backends.python.worker.host import Inbox, ModelBatch
from charonia.server.backends.python.worker.requests import InferenceResponse
from charonia.server.backends.python.worker.runner import PythonModelRunner
from charonia.server.backends.python.worker.tensor import Tensor

HEAD = """
import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

import charonia
from charonia import BadRequest, Shape, model, serve
"""


class Host(FakeHost):
    """Notes responses, and answers calls of other models with their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.final: Inbox[None] = Inbox()
        self.outcomes = lambda call: [(InferenceResponse(call.inputs), True)]

    def respond(self, batch: ModelBatch, index: int, result: Any, final: bool) -> None:
        super().respond(batch, index, result, final)
        if final:
            self.final.put(None)

    def wait(self, inbox: Inbox[Any]) -> None:
        inbox.wait()


class Service:
    """A service file, with one of its models loaded."""

    loaded: ClassVar[list["Service"]] = []

    def __init__(self, folder: Path, code: str, name: str = "f", *, config: dict[str, Any] | None = None) -> None:
        path = folder / "service.py"
        path.write_text(HEAD + code)
        self.host = Host()
        place = (str(path), str(folder), str(folder))
        asked = PythonModelRunner(self.host, shares_process=True)
        self.config = json.loads(asked.complete(*place, json.dumps({"name": name, **(config or {})})))
        self.runner = PythonModelRunner(self.host, shares_process=True)
        arguments = {"model_name": name, "model_instance_kind": "GPU", "model_instance_device_id": "1"}
        self.is_decoupled = bool(self.config.get("model_transaction_policy", {}).get("decoupled"))
        arguments["model_config"] = json.dumps(self.config)
        self.runner.initialize(*place, arguments, self.is_decoupled)
        self.outputs = tuple(output["name"] for output in self.config["output"])
        self.loaded.append(self)

    def run(self, *requests: dict[str, Any], parameters: str = "{}") -> list[Any]:
        """Return what a batch of requests with these inputs gets: outputs by name, or code and text of an error."""
        fields = ("", 0, 0, 0, 0, parameters, self.outputs, "")
        sent = [(fields, [Tensor(name, np.asarray(value)) for name, value in inputs.items()]) for inputs in requests]
        results, _ = self.runner.execute(ModelBatch(1, len(requests)), sent)
        del sent
        gc.collect()
        return [None if result is None else shown(result) for result in results]

    def signature(self) -> dict[str, tuple[str, list[int]]]:
        tensors = [*self.config.get("input", ()), *self.config["output"]]
        return {each["name"]: (each["data_type"].removeprefix("TYPE_"), each["dims"]) for each in tensors}

    def wait(self) -> None:
        """Run the model's event loop until the last response of one request is sent."""
        self.runner.wait(self.host.final)
        self.host.final.items.popleft()

    def answers(self) -> list[Any]:
        """Return the responses that were sent, when the last of one request is there."""
        self.wait()
        return [shown(result) for *_, result, _ in self.host.responses if result is not None]


@pytest.fixture(autouse=True)
def _finalize_services() -> Iterator[None]:
    yield
    for service in Service.loaded:
        service.runner.finalize()
    Service.loaded.clear()


def shown(result: Any) -> Any:
    if result[0] >= 0:
        return result
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in result[1]}


def one(**inputs: Any) -> dict[str, Any]:
    """Inputs of plain values, as a request carries them."""
    return {name: np.array([value.encode() if isinstance(value, str) else value]) for name, value in inputs.items()}


def objects(*elements: bytes) -> np.ndarray[Any, Any]:
    return np.array(elements, object)


def test_plain_types_are_tensors_of_one_element(tmp_path: Path) -> None:
    code = """
@model
def f(a: int, b: float, c: bool, d: str, e: bytes, g: np.float32 = 2) -> str:
    return repr((a, b, c, d, e, g))
"""
    service = Service(tmp_path, code)

    assert service.signature() == {
        "a": ("INT64", [1]),
        "b": ("FP64", [1]),
        "c": ("BOOL", [1]),
        "d": ("STRING", [1]),
        "e": ("STRING", [1]),
        "g": ("FP32", [1]),
        "output": ("STRING", [1]),
    }
    assert [each["name"] for each in service.config["input"] if each.get("optional")] == ["g"]
    assert service.config["max_batch_size"] == 0
    inputs = one(a=1, b=0.5, c=True) | {"d": objects("ü".encode()), "e": objects(b"\xff")}
    assert service.run(inputs) == [{"output": [repr((1, 0.5, True, "ü", b"\xff", 2)).encode()]}]


@pytest.mark.parametrize(
    ("annotation", "datatype", "dims"),
    [
        ("NDArray[np.float32]", "FP32", [-1]),
        ("Annotated[NDArray[np.float16], Shape(3, None, 'w')]", "FP16", [3, -1, -1]),
        ("Annotated[NDArray[np.str_], Shape(2)]", "STRING", [2]),
        ("list[int]", "INT64", [-1]),
        ("list[list[float]]", "FP64", [-1, -1]),
        ("list[str]", "STRING", [-1]),
        ("dict[str, int]", "STRING", [1]),
        ("list[dict]", "STRING", [1]),
        ("Literal['a', 'b']", "STRING", [1]),
        ("int | None", "INT64", [1]),
        ("np.uint8", "UINT8", [1]),
    ],
)
def test_annotations_say_datatype_and_dims(tmp_path: Path, annotation: str, datatype: str, dims: list[int]) -> None:
    code = f"@model\ndef f(x: {annotation} = None) -> int:\n    return 1\n"

    assert Service(tmp_path, code).signature()["x"] == (datatype, dims)


@pytest.mark.parametrize(
    ("annotation", "options"),
    [("Vector", ""), ("list[Vector]", "(max_batch_size=2)"), ("Vectors", "(max_batch_size=2)")],
)
def test_an_alias_means_what_it_stands_for(tmp_path: Path, annotation: str, options: str) -> None:
    code = (
        "from typing_extensions import TypeAliasType\n"  # what a `type` statement makes, in Python 3.12
        "Vector = TypeAliasType('Vector', NDArray[np.float32] | None)\n"
        "Vectors = TypeAliasType('Vectors', list[Vector])\n"
        f"@model{options}\ndef f(x: {annotation} = None) -> {annotation}:\n    return x\n"
    )

    assert Service(tmp_path, code).signature() == {"x": ("FP32", [-1]), "output": ("FP32", [-1])}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("@model\ndef f(x) -> int: ...", "parameter 'x' has no type"),
        ("@model\ndef f(x: int): ...", "what it returns has no type"),
        ("@model\ndef f(x: model) -> int: ...", "x: model is no type of a value"),
        ("@model\ndef f(x: list[slice]) -> int: ...", "x: slice is no type of a value"),
        ("@model\ndef f(x: int, **rest) -> int: ...", "'**rest': inputs have names"),
        ("@model\ndef f(*all: int) -> int: ...", "'*all: int': inputs have names"),
        ("@model\ndef f(x: NDArray[np.complex64]) -> int: ...", "an array needs a dtype that tensors have"),
        ("@model\ndef f(x: Annotated[int, Shape(3)]) -> int: ...", "Shape is for arrays"),
        ("@model\ndef f(x: int | None) -> int: ...", "may be None: give it the default None"),
        ("@model(max_batch_size=2)\ndef f(x: int) -> list[int]: ...", "write list[int]"),
        ("@model(max_batch_size=2)\ndef f(x: list[int]) -> Iterator[int]: ...", "a stream has no batches"),
        (
            "@model(max_batch_size=2)\ndef f(x: Annotated[NDArray[np.int8], Shape(3, 4)]) -> list[int]: ...",
            "the first dimension is that of the batch",
        ),
        ("@model\nclass f:\n    pass", "has no method __call__"),
        ("@model(max_batch_size=-1)\ndef f() -> int: ...", "max_batch_size: expected an integer of at least 0, got -1"),
        (
            "@model(max_delay_ms=1)\ndef f() -> int: ...",
            "expected at least 0, and max_batch_size with it",
        ),
        ("@model(name='a/b')\ndef f() -> int: ...", "expected text without '/'"),
        ("@model\ndef f() -> int: ...\n@model(name='f')\ndef g() -> int: ...", "two models are called 'f'"),
        ("x = 1", "no class TritonPythonModel, and no function or class with @charonia.model"),
        ("@model\ndef a() -> int: ...\n@model\ndef b() -> int: ...", "no model of this name; it has a, b"),
    ],
)
def test_what_cannot_be_a_model_says_why(tmp_path: Path, code: str, reason: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        Service(tmp_path, code)

    assert reason in str(caught.value)


def test_requests_of_a_batch_share_one_call(tmp_path: Path) -> None:
    code = """
calls = []

@model(max_batch_size=8, max_delay_ms=1.5, instances=3)
def f(text: list[str], x: Annotated[NDArray[np.float32], Shape(-1, 2)]) -> tuple[list[int], NDArray[np.float32]]:
    calls.append(len(text))
    return [len(calls)] * len(text), x * 2
"""
    service = Service(tmp_path, code)

    assert service.config["max_batch_size"] == 8
    assert service.config["dynamic_batching"] == {"max_queue_delay_microseconds": 1500}
    assert service.config["instance_group"] == [{"count": 3}]
    assert service.signature()["output1"] == ("FP32", [-1])
    first = {"text": objects(b"a").reshape(1, 1), "x": np.ones((1, 2), np.float32)}
    second = {"text": objects(b"b", b"c").reshape(2, 1), "x": np.full((2, 2), 3, np.float32)}
    assert service.run(first, second) == [
        {"output0": [[1]], "output1": [[2, 2]]},
        {"output0": [[1], [1]], "output1": [[6, 6], [6, 6]]},
    ]


def test_a_number_an_item_is_an_array_of_one_dimension(tmp_path: Path) -> None:
    code = """
@model(max_batch_size=8)
def f(x: Annotated[NDArray[np.int32], Shape(-1)]) -> Annotated[NDArray[np.int32], Shape(-1)]:
    assert x.ndim == 1
    return x + 1
"""
    service = Service(tmp_path, code)

    assert service.signature() == {"x": ("INT32", [1]), "output": ("INT32", [1])}
    assert service.run({"x": np.array([[1], [2]], np.int32)}) == [{"output": [[2], [3]]}]


def test_a_batch_of_another_size_is_an_error(tmp_path: Path) -> None:
    service = Service(tmp_path, "@model(max_batch_size=8)\ndef f(x: list[int]) -> list[int]:\n    return x[:1]\n")

    ((code, text),) = service.run({"x": np.array([[1], [2]])})

    assert code == TritonError.INTERNAL
    assert "'f' got a batch of 2 and returned 1" in text


def test_requests_with_other_optional_inputs_are_called_apart(tmp_path: Path) -> None:
    code = """
@model(max_batch_size=8)
def f(x: list[int], y: list[int] = None) -> list[int]:
    return [a + b for a, b in zip(x, y or [100] * len(x))]
"""
    service = Service(tmp_path, code)

    requests = [{"x": np.array([[1]]), "y": np.array([[2]])}, {"x": np.array([[3]])}]
    assert service.run(*requests) == [{"output": [[3]]}, {"output": [[103]]}]


RECORDS = """
@dataclasses.dataclass
class Order:
    item: str
    count: int = 1

    def __post_init__(self):
        if self.count < 1:
            raise ValueError("count: expected at least 1")

class Bill(NamedTuple):
    text: str
    parts: dict[str, float]
"""


def test_the_fields_of_a_record_are_inputs_and_outputs(tmp_path: Path) -> None:
    code = (
        RECORDS + "@model\ndef f(order: Order) -> Bill:\n    return Bill(order.item, {order.item: order.count / 2})\n"
    )
    service = Service(tmp_path, code)

    assert service.signature() == {
        "item": ("STRING", [1]),
        "count": ("INT64", [1]),
        "text": ("STRING", [1]),
        "parts": ("STRING", [1]),
    }
    pen = {"item": objects(b"pen")}
    assert service.run(pen) == [{"text": [b"pen"], "parts": [b'{"pen":0.5}']}]
    assert service.run(pen | one(count=0)) == [(TritonError.INVALID_ARG, "count: expected at least 1")]


def test_a_request_that_makes_no_record_does_not_fail_the_others_of_its_batch(tmp_path: Path) -> None:
    code = RECORDS + "@model(max_batch_size=4)\ndef f(orders: list[Order]) -> list[int]:\n"
    service = Service(tmp_path, code + "    return [order.count for order in orders]\n")

    requests = [{"item": objects(b"pen").reshape(1, 1), "count": np.array([[count]])} for count in (2, 0, 3)]
    first, second, third = service.run(*requests)

    assert (first, third) == ({"output": [[2]]}, {"output": [[3]]})
    assert second == (TritonError.INVALID_ARG, "count: expected at least 1")


def test_a_record_among_others_is_json(tmp_path: Path) -> None:
    code = RECORDS + "@model\ndef f(order: Order, times: int) -> list[Order]:\n    return [order] * times\n"
    service = Service(tmp_path, code)

    order = {"order": objects(b'{"item": "pen"}')} | one(times=2)
    assert service.run(order) == [{"output": [b'[{"item":"pen","count":1},{"item":"pen","count":1}]']}]
    ((code_of_error, text),) = service.run({"order": objects(b"{")} | one(times=2))
    assert code_of_error == TritonError.INVALID_ARG
    assert text.startswith("input 'order': expected JSON: ")


def test_images_are_files_base64_or_data_urls_and_come_back_as_data_urls(tmp_path: Path) -> None:
    code = """
from PIL.Image import Image

@model
def f(image: Image) -> Image:
    assert image.size == (2, 1)
    return image
"""
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 1), "red").save(file, "PNG")
    text = base64.b64encode(file.getvalue())
    service = Service(tmp_path, code)

    for given in (file.getvalue(), text, b"data:image/png;base64," + text):
        (answer,) = service.run({"image": objects(given)})
        assert answer["output"][0].startswith(b"data:image/png;base64,")
    ((code_of_error, message),) = service.run({"image": objects(b"no image")})
    assert (code_of_error, message.startswith("input 'image': expected an image")) == (TritonError.INVALID_ARG, True)


def test_a_class_is_made_once_an_instance_and_closed(tmp_path: Path) -> None:
    code = """
events = []

@model
class f:
    def __init__(self, device: str):
        events.append(device)

    def __call__(self, x: int) -> list[str]:
        return events

    def close(self):
        events.append("closed")
"""
    service = Service(tmp_path, code)

    (answer,) = service.run(one(x=1))
    assert service.run(one(x=1)) == [answer] == [{"output": [b"cuda:1"]}]
    service.runner.finalize()
    assert service.run(one(x=1)) == [{"output": [b"cuda:1", b"closed"]}]


def test_a_bad_request_is_the_callers_error_and_anything_else_the_models(tmp_path: Path) -> None:
    code = """
@model
def f(x: int) -> int:
    if x == 1:
        raise BadRequest("x must not be 1")
    return 1 // x
"""
    service = Service(tmp_path, code)

    assert service.run(one(x=1)) == [(TritonError.INVALID_ARG, "x must not be 1")]
    ((code_of_error, text),) = service.run(one(x=0))
    assert code_of_error == TritonError.INTERNAL
    assert "ZeroDivisionError" in text
    assert "service.py" in text


def test_a_generator_is_a_stream(tmp_path: Path) -> None:
    service = Service(tmp_path, "@model\ndef f(n: int) -> Iterator[int]:\n    yield from range(n)\n")

    assert service.config["model_transaction_policy"] == {"decoupled": True}
    assert service.run(one(n=3)) == [None]
    assert service.answers() == [{"output": [0]}, {"output": [1]}, {"output": [2]}]
    assert [final for *_, final in service.host.responses] == [False, False, False, True]


def test_an_asynchronous_generator_is_a_stream(tmp_path: Path) -> None:
    code = """
@model
async def f(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        if i == 2:
            raise BadRequest("only two")
        yield i
"""
    service = Service(tmp_path, code)

    assert service.run(one(n=3)) == [None]
    assert service.answers() == [{"output": [0]}, {"output": [1]}, (TritonError.INVALID_ARG, "only two")]


def test_an_async_function_works_on_several_requests_at_a_time_up_to_a_limit(tmp_path: Path) -> None:
    code = """
met = asyncio.Barrier(2)

@model(concurrency=2)
async def f(x: int) -> int:
    await met.wait()  # returns when two are here
    return x
"""
    service = Service(tmp_path, code)

    for x in range(4):  # the third begins when one of the first two has left
        assert service.run(one(x=x)) == [None]

    for _ in range(4):
        service.wait()
    answers = [shown(result) for *_, result, _ in service.host.responses]
    assert sorted(answer["output"][0] for answer in answers) == [0, 1, 2, 3]


def test_an_exception_in_an_async_function_is_the_error_of_its_request(tmp_path: Path) -> None:
    service = Service(tmp_path, "@model\nasync def f(x: int) -> int:\n    return 1 // x\n")

    service.run(one(x=0))

    ((code, text),) = service.answers()
    assert code == TritonError.INTERNAL
    assert "ZeroDivisionError" in text
    ((_, logged),) = service.host.tracebacks
    assert "Traceback" in logged


CALLS = """
@model(max_batch_size=4)
def other(text: list[str]) -> list[str]: ...

@model
{keyword}def f(x: int) -> str:
    outputs = {call}("other", text="hello")
    raw = {call}("resnet", x=np.ones((1, 2), np.float32), name="a", n=3)
    return f"{{outputs['text'].tolist()}} {{raw['name'].tolist()}} {{raw['n'].tolist()}}"
"""


@pytest.mark.parametrize(("keyword", "call"), [("", "charonia.call"), ("async ", "await charonia.call_async")])
def test_a_function_calls_other_models_by_name(tmp_path: Path, keyword: str, call: str) -> None:
    service = Service(tmp_path, CALLS.format(keyword=keyword, call=call))

    answers = service.run(one(x=1))
    if keyword:
        answers = service.answers()

    # A model of the same file gets its batch dimension.
    assert answers == [{"output": [b"[[b'hello']] [b'a'] [3]"]}]
    assert [made.model_name for made in service.host.calls] == ["other", "resnet"]


def test_an_object_says_its_tensors_by_example(tmp_path: Path) -> None:
    code = """
class Sum:
    def predict(self, x):
        return np.asarray(x).sum(axis=1)

serve(Sum(), example=[[1.0, 2.0], [3.0, 4.0]], name="f")
"""
    service = Service(tmp_path, code)

    assert service.signature() == {"x": ("FP64", [2]), "output": ("FP64", [1])}
    assert service.config["max_batch_size"] == 256
    assert json.loads(service.config["parameters"]["EXAMPLE"]["string_value"]) == {"x": [[1.0, 2.0]]}
    assert service.run({"x": np.array([[1.0, 2.0], [5.0, 6.0]])}, {"x": np.array([[0.0, 1.0]])}) == [
        {"output": [[3.0], [11.0]]},
        {"output": [[1.0]]},
    ]


def test_the_columns_of_a_data_frame_are_inputs(tmp_path: Path) -> None:
    code = """
class Frame(dict):  # like that of pandas: columns by name, made from such a dictionary
    columns = property(lambda self: list(self))

class Model:
    def predict(self, frame):
        assert type(frame) is Frame
        return np.array([f"{city} {age}" for city, age in zip(frame["city"], frame["age"])])

serve(Model(), example=Frame(age=np.array([1, 2]), city=np.array(["Ulm", "Bonn"], object)), name="f")
"""
    service = Service(tmp_path, code)

    assert service.signature() == {"age": ("INT64", [1]), "city": ("STRING", [1]), "output": ("STRING", [1])}
    request = {"age": np.array([[7]]), "city": objects(b"Graz").reshape(1, 1)}
    assert service.run(request) == [{"output": [[b"Graz 7"]]}]


FRAMES = """
import pandas as pd

class Model:
    classes_ = np.array(["no", "yes"])

    def predict(self, frame):
        return np.array([str(frame.dtypes.to_dict())] * len(frame))

    def predict_proba(self, frame):
        if not (frame["city"].isin(["Ulm", "Bonn"]) | frame["city"].isna()).all():
            raise ValueError("unknown city")
        return np.column_stack([frame["age"].isna(), ~frame["age"].isna()]).astype(float)

rows = pd.DataFrame({
    "age": [1, 2],
    "city": pd.Categorical(["Ulm", "Bonn"]),
    "day": pd.to_datetime(["2024-01-31", "2024-02-01"]),
    "member": [True, False],
})
"""


def test_an_object_gets_a_data_frame_with_the_dtypes_of_its_example(tmp_path: Path) -> None:
    service = Service(tmp_path, FRAMES + "serve(Model(), example=rows, name='f')\n")

    optional = {each["name"] for each in service.config["input"] if each.get("optional")}
    assert optional == {"age", "city", "day", "member"}
    sent = {"age": np.array([[7.0]]), "city": objects(b"Ulm").reshape(1, 1)}
    sent |= {"day": objects(b"2024-05-01T10:00").reshape(1, 1), "member": np.array([[1.0]])}
    [answer] = service.run(sent)
    [[text]] = answer["output"]
    assert [word in text for word in (b"'age': dtype('int64')", b"CategoricalDtype", b"datetime64", b"dtype('bool')")]
    example = json.loads(service.config["parameters"]["EXAMPLE"]["string_value"])
    assert example == {"age": [1.0], "city": ["Ulm"], "day": ["2024-01-31T00:00:00"], "member": [1.0]}


def test_columns_that_are_left_out_are_missing_in_the_data_frame(tmp_path: Path) -> None:
    service = Service(tmp_path, FRAMES + "serve(Model(), example=rows, name='f', method='predict_proba')\n")

    answers = service.run({"age": np.array([[7.0]])}, {"city": objects(b"\xff", b"Ulm").reshape(2, 1)})

    assert answers == [{"output": [[0.0, 1.0]]}, {"output": [[1.0, 0.0], [1.0, 0.0]]}]
    schema = json.loads(service.config["parameters"]["JSON_SCHEMA"]["string_value"])["outputs"]["output"]
    assert [each["title"] for each in schema["prefixItems"]] == ["no", "yes"]


def test_an_example_says_the_types_of_a_function_without_annotations(tmp_path: Path) -> None:
    code = "@model(example={'x': 2.0, 'name': 'a'})\ndef f(x, name):\n    return name * int(x)\n"
    service = Service(tmp_path, code)

    assert service.signature() == {"x": ("FP64", [1]), "name": ("STRING", [1]), "output": ("STRING", [1])}
    assert json.loads(service.config["parameters"]["EXAMPLE"]["string_value"]) == {"x": 2.0, "name": "a"}


@pytest.mark.parametrize(
    "code",
    [
        "@model\ndef f(item: str, count: int = 1) -> int:\n    return count\n",
        "@model(max_batch_size=2)\ndef f(item: list[str], count: list[int] | None = None) -> list[int]:\n"
        "    return [1] * len(item)\n",
    ],
)
def test_a_parameter_that_resembles_an_input_which_is_not_there_is_refused(tmp_path: Path, code: str) -> None:
    service = Service(tmp_path, code)
    lead = (1,) if "max_batch_size" in code else ()
    item = objects(b"pen").reshape(*lead, 1)
    both = {"item": item, "count": np.ones((*lead, 1), np.int64)}

    ((kind, message),) = service.run({"item": item}, parameters='{"cuont": 2}')

    assert kind == TritonError.INVALID_ARG
    assert message == "model 'f' has no input 'cuont' (hint: did you mean 'count'?)"
    assert len(service.run({"item": item}, parameters='{"user": "a"}')[0]["output"]) == 1
    assert len(service.run(both, parameters='{"counts": 2}')[0]["output"]) == 1


def test_a_request_is_made_up_of_what_annotations_say(tmp_path: Path) -> None:
    code = """
@dataclasses.dataclass
class Item:
    name: str
    parts: list["Item"]
    size: Literal["S", "L"]
    count: int = 3

@model
def f(items: list[Item], options: dict, scale: float, mode: Literal["a", "b"], more: list[Item] | None = None) -> int:
    return len(items)
"""
    service = Service(tmp_path, code)
    example = json.loads(service.config["parameters"]["EXAMPLE"]["string_value"])

    assert list(example) == ["items", "options", "mode"]  # a number is made up of the datatype
    assert example["mode"] == "a"
    (item,) = example["items"]
    assert item == {"name": "hello", "parts": [], "size": "S", "count": 3}
    request = {name: objects(json.dumps(example[name]).encode()) for name in ("items", "options")}
    assert service.run(request | {"mode": objects(b"a"), "scale": np.array([0.5])}) == [{"output": [1]}]


def test_an_empty_list_may_be_returned_at_any_depth(tmp_path: Path) -> None:
    service = Service(tmp_path, "@model\ndef f(x: int) -> list[list[float]]:\n    return []\n")

    assert service.run({"x": np.array([1])}) == [{"output": []}]


def test_json_is_made_up_for_a_record_that_refuses_the_example(tmp_path: Path) -> None:
    code = """
import pydantic

class Item(pydantic.BaseModel):
    code: str = pydantic.Field(pattern="^[0-9]+$")

@model
def f(items: list[Item]) -> int:
    return len(items)
"""
    service = Service(tmp_path, code)

    assert json.loads(service.config["parameters"]["EXAMPLE"]["string_value"]) == {"items": [{"code": "hello"}]}


def test_an_image_is_made_up_for_a_function_that_takes_one(tmp_path: Path) -> None:
    service = Service(
        tmp_path, "from PIL.Image import Image\n\n@model\ndef f(image: Image) -> int:\n    return image.width\n"
    )
    text = json.loads(service.config["parameters"]["EXAMPLE"]["string_value"])["image"]

    assert service.run({"image": objects(text.encode())}) == [{"output": [32]}]


def test_what_a_configuration_says_already_counts(tmp_path: Path) -> None:
    code = "@model(max_batch_size=4, max_delay_ms=1, instances=2)\ndef f(x: list[int]) -> list[int]:\n    return x\n"
    given = {
        "max_batch_size": 16,
        "instance_group": [{"count": 7}],
        "dynamic_batching": {"max_queue_delay_microseconds": 5},
        "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [1]}],
    }

    config = Service(tmp_path, code, config=given).config

    assert {key: config[key] for key in ("max_batch_size", "instance_group", "dynamic_batching")} == {
        key: given[key] for key in ("max_batch_size", "instance_group", "dynamic_batching")
    }


def test_a_batch_size_for_a_function_of_single_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes one request at a time, and the configuration says max_batch_size 4"):
        Service(tmp_path, "@model\ndef f(x: int) -> int:\n    return x\n", config={"max_batch_size": 4})


def test_decorated_functions_and_classes_stay_what_they_are() -> None:
    @charonia.model(max_batch_size=2)
    def double(x: list[int]) -> list[int]:
        return [2 * each for each in x]

    assert double([1, 2]) == [2, 4]
    served = object()
    with pytest.raises(TypeError, match=r"expected an object with predict\(\), got object"):
        charonia.serve(served, example=[1])
    assert charonia.serve(sorted, example=[[2, 1]]) is sorted
    with pytest.raises(RuntimeError, match="call works only in a model that a server runs"):
        charonia.call("m")


TYPES = """
import datetime, decimal, enum, uuid
import pandas as pd
from pydantic import BaseModel, Field

class Size(enum.Enum):
    SMALL = "S"
    LARGE = "L"

class Item(BaseModel):
    name: str = Field(description="What it is")
    count: int = Field(1, ge=1)
"""


def schemas(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(service.config["parameters"]["JSON_SCHEMA"]["string_value"])
    return found


@pytest.mark.parametrize(
    ("annotation", "datatype", "sent", "shown"),
    [
        ("datetime.date", "STRING", b"2024-02-03", "datetime.date(2024, 2, 3)"),
        (
            "uuid.UUID",
            "STRING",
            b"00000000-0000-0000-0000-000000000003",
            "UUID('00000000-0000-0000-0000-000000000003')",
        ),
        ("Size", "STRING", b"S", "<Size.SMALL: 'S'>"),
        ("Literal['a', 'b']", "STRING", b"b", "'b'"),
        ("Literal[1, 2]", "INT64", 2, "2"),
        ("Annotated[int, Field(ge=3)]", "INT64", 3, "3"),
        ("decimal.Decimal", "STRING", b'"1.50"', "Decimal('1.50')"),
        ("int | str", "STRING", b'"a"', "'a'"),
        ("list[Item]", "STRING", b'[{"name": "pen"}]', "[Item(name='pen', count=1)]"),
        ("dict[str, Item]", "STRING", b'{"a": {"name": "pen", "count": 2}}', "{'a': Item(name='pen', count=2)}"),
        ("pd.DataFrame", "STRING", b'[{"a": 1}, {"a": 2}]', "   a\n0  1\n1  2"),
        ("pd.DataFrame", "STRING", b'{"a": [1, 2]}', "   a\n0  1\n1  2"),
    ],
)
def test_a_value_is_of_its_annotated_type(
    tmp_path: Path, annotation: str, datatype: str, sent: object, shown: str
) -> None:
    service = Service(tmp_path, TYPES + f"@model\ndef f(x: {annotation}) -> str:\n    return repr(x)\n")

    assert service.signature()["x"] == (datatype, [1])
    array = objects(sent) if isinstance(sent, bytes) else np.array([sent])
    assert service.run({"x": array}) == [{"output": [shown.encode()]}]


@pytest.mark.parametrize(
    ("annotation", "sent", "problem"),
    [
        ("datetime.date", b"now", "valid date"),
        ("Size", b"M", "Input should be 'S' or 'L'"),
        ("Literal['a', 'b']", b"c", "Input should be 'a' or 'b'"),
        ("Annotated[int, Field(ge=3)]", 2, "greater than or equal to 3"),
        ("int | str", b"[1]", "valid integer"),
        ("list[Item]", b'[{"name": "pen", "count": 0}]', "0.count: Input should be greater than or equal to 1"),
        ("dict[str, int]", b'{"a": "b"}', "a: Input should be a valid integer"),
    ],
)
def test_a_value_of_another_type_is_the_callers_error(
    tmp_path: Path, annotation: str, sent: object, problem: str
) -> None:
    service = Service(tmp_path, TYPES + f"@model\ndef f(x: {annotation}) -> str:\n    return ''\n")

    array = objects(sent) if isinstance(sent, bytes) else np.array([sent])
    ((code, text),) = service.run({"x": array})
    assert code == TritonError.INVALID_ARG
    assert text.startswith("input 'x': ")
    assert problem in text


@pytest.mark.parametrize(
    ("annotation", "returned", "expected"),
    [
        ("dict", "{'a': [1, None, {'b': np.float32(0.5)}]}", '{"a":[1,null,{"b":0.5}]}'),
        ("dict", "{'nan': float('nan'), 'array': np.arange(2)}", '{"nan":null,"array":[0,1]}'),
        ("list[Item]", "[Item(name='pen')]", '[{"name":"pen","count":1}]'),
        ("float | None", "None", "null"),
        ("float | None", "1.5", "1.5"),
        ("None", "None", "null"),
        ("dict", "{'when': datetime.date(2024, 2, 3), 'size': Size.LARGE}", '{"when":"2024-02-03","size":"L"}'),
        ("datetime.date", "datetime.date(2024, 2, 3)", "2024-02-03"),
        ("Size", "Size.LARGE", "L"),
        ("pd.DataFrame", "pd.DataFrame({'a': [1, 2]})", '[{"a":1},{"a":2}]'),
    ],
)
def test_what_is_returned_is_json(tmp_path: Path, annotation: str, returned: str, expected: str) -> None:
    service = Service(tmp_path, TYPES + f"@model\ndef f(x: int) -> {annotation}:\n    return {returned}\n")

    assert service.run(one(x=1)) == [{"output": [expected.encode()]}]


@pytest.mark.parametrize(
    ("options", "annotation", "returned", "problem"),
    [
        ("", "int", "3.7", "expected integers, got 3.7"),
        ("", "list[int]", "[1, 2.5]", "expected integers, got 2.5"),
        ("", "int", "float('nan')", "expected integers, got nan"),
        ("", "np.int8", "300", "'f' returned a wrong 'output': OverflowError"),
        ("", "str", "b'a'", "expected a string, got bytes"),
        ("", "Literal['a']", "'b'", "Input should be 'a'"),
        ("allow_nan=False", "float", "float('nan')", "holds NaN or infinity in 'output'"),
        ("allow_nan=False", "dict", "{'a': [float('inf')]}", "Out of range float values"),
    ],
)
def test_what_is_not_of_the_annotated_type_is_an_error(
    tmp_path: Path, options: str, annotation: str, returned: str, problem: str
) -> None:
    service = Service(tmp_path, f"@model({options})\ndef f(x: int) -> {annotation}:\n    return {returned}\n")

    ((code, text),) = service.run(one(x=1))
    assert code == TritonError.INTERNAL
    assert problem in text


def test_tensors_of_pytorch_are_arrays(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import torch\n\n@model\ndef f(x: Annotated[torch.Tensor, Shape(2, -1)]) -> torch.Tensor:\n"
    code += "    return x.sum(1)\n"
    service = Service(tmp_path, code)

    assert service.signature() == {"x": ("FP32", [2, -1]), "output": ("FP32", [-1])}
    assert service.run({"x": np.ones((2, 3), np.float32)}) == [{"output": [3, 3]}]


def test_the_schemas_of_a_function_are_in_its_configuration(tmp_path: Path) -> None:
    code = "@model\ndef f(items: list[Item], size: Size, n: list[int], raw: bytes) -> list[float]:\n    return []\n"
    found = schemas(Service(tmp_path, TYPES + code))

    assert found["inputs"]["size"] == {"title": "Size", "enum": ["S", "L"], "type": "string"}
    assert found["inputs"]["n"] == {"type": "array", "items": {"type": "integer"}}
    assert found["inputs"]["raw"] == {"type": "string", "format": "binary"}
    assert found["outputs"] == {"output": {"type": "array", "items": {"type": "number"}}}
    items = found["inputs"]["items"]["contentSchema"]
    assert items["items"] == {"$ref": "#/$defs/Item"}
    assert items["$defs"]["Item"]["properties"]["name"]["description"] == "What it is"


def test_the_fields_of_a_record_have_their_own_descriptions_and_limits(tmp_path: Path) -> None:
    found = schemas(Service(tmp_path, TYPES + "@model\ndef f(item: Item) -> Item:\n    return item\n"))

    assert found["inputs"]["name"]["description"] == "What it is"
    assert found["inputs"]["count"]["minimum"] == 1


BAD_ITEMS = """
@model(max_batch_size=8)
def f(x: list[int]) -> list[int]:
    calls.append(x)
"""


@pytest.mark.parametrize(
    "body",
    [
        "    if 0 in x:\n        raise BadRequest('no zeros')\n    return x\n",
        "    return [BadRequest('no zeros') if each == 0 else each for each in x]\n",
    ],
)
def test_a_bad_item_of_a_batch_refuses_its_own_request_alone(tmp_path: Path, body: str) -> None:
    service = Service(tmp_path, "calls = []\n" + BAD_ITEMS + body)

    first, second, third = service.run(*({"x": np.array(rows)} for rows in ([[1], [2]], [[3], [0]], [[4]])))

    assert (first, third) == ({"output": [[1], [2]]}, {"output": [[4]]})
    assert second == (TritonError.INVALID_ARG, "no zeros")


def test_a_model_may_have_each_request_of_a_failed_batch_run_alone(tmp_path: Path) -> None:
    code = "@model(max_batch_size=8)\ndef f(x: list[int]) -> list[float]:\n    return [1 / each for each in x]\n"
    retry = {"parameters": {"RETRY_ALONE": {"string_value": "true"}}}
    requests = [{"x": np.array([[value]])} for value in (1, 0, 2)]

    together = Service(tmp_path, code).run(*requests)
    alone = Service(tmp_path, code, config=retry).run(*requests)

    assert [code for code, _ in together] == [TritonError.INTERNAL] * 3
    assert (alone[0], alone[2]) == ({"output": [[1]]}, {"output": [[0.5]]})
    assert "ZeroDivisionError" in alone[1][1]


def test_a_function_says_how_many_requests_wait_and_how_long(tmp_path: Path) -> None:
    service = Service(tmp_path, "@model(max_queue_size=3, timeout_ms=1.5)\ndef f(x: int) -> int:\n    return x\n")

    policy = service.config["dynamic_batching"]["default_queue_policy"]
    assert policy == {"max_queue_size": 3, "default_timeout_microseconds": 1500}


RECEIVED = json.dumps({"a": 1, "triton_http_request": json.dumps({"method": "GET", "path": "/p", "client": "::1"})})


def test_a_function_sees_the_http_request_and_the_request_parameters(tmp_path: Path) -> None:
    code = """
@model
def f(x: int, request: charonia.Request) -> str:
    return f"{x} {request.method} {request.path} {request.client} {request.headers} {request.parameters}"
"""
    service = Service(tmp_path, code)

    assert service.config["parameters"]["HTTP_REQUEST"] == {"string_value": "true"}
    assert list(service.signature()) == ["x", "output"]
    assert service.run(one(x=1), parameters=RECEIVED) == [{"output": [b"1 GET /p ::1 {} {'a': 1}"]}]
    assert service.run(one(x=1)) == [{"output": [b"1    {} {}"]}]


def test_a_batch_has_a_request_for_each_item_and_a_record_has_one_beside_it(tmp_path: Path) -> None:
    code = """
@model(max_batch_size=4)
def f(x: list[int], requests: list[charonia.Request]) -> list[str]:
    return [f"{each} {request.path}" for each, request in zip(x, requests, strict=True)]

@dataclasses.dataclass
class Item:
    x: int

@model
def g(item: Item, request: charonia.Request) -> str:
    return f"{item.x} {request.path}"
"""
    batched = Service(tmp_path, code)
    inputs = {"x": np.array([[1], [2]])}

    assert batched.run(inputs, {"x": np.array([[3]])}, parameters=RECEIVED) == [
        {"output": [[b"1 /p"], [b"2 /p"]]},
        {"output": [[b"3 /p"]]},
    ]
    assert Service(tmp_path, code, "g").run(one(x=1), parameters=RECEIVED) == [{"output": [b"1 /p"]}]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("@model(max_batch_size=2)\ndef f(x: list[int], r: charonia.Request) -> list[int]: ...", "one for each item"),
        ("@model\ndef f(x: int, r: list[charonia.Request]) -> int: ...", "expected charonia.Request"),
        ("@model(path='/a', method='get')\ndef f(x: int) -> int: ...", "method: expected one of GET, POST"),
        ("@model(path='/a')\ndef f(x: int) -> int: ...\n@model(path='/a')\ndef g(x: int) -> int: ...", "'POST /a'"),
    ],
)
def test_a_request_or_path_that_cannot_be_is_refused(tmp_path: Path, code: str, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Service(tmp_path, code)


METHODS = """
@model(max_batch_size=2)
class Text:
    def __init__(self):
        self.calls = []

    @charonia.method
    def upper(self, x: list[str]) -> list[str]:
        return [each.upper() for each in x]

    @charonia.method(name="text_length", max_batch_size=0, path="/length", method="GET")
    def length(self, x: str) -> int:
        return len(x)
"""


def test_methods_of_a_class_are_models_with_its_options_or_their_own(tmp_path: Path) -> None:
    upper, length = (Service(tmp_path, METHODS, name) for name in ("upper", "text_length"))

    assert [each.config["max_batch_size"] for each in (upper, length)] == [2, 0]
    assert length.config["parameters"]["HTTP_ROUTE"] == {"string_value": "GET /length"}
    assert upper.config["parameters"]["SHARED_PROCESS"] == {"string_value": "true"}
    assert upper.run({"x": objects(b"a").reshape(1, 1)}) == [{"output": [[b"A"]]}]
    assert length.run(one(x="abc")) == [{"output": [3]}]


def test_only_several_functions_share_a_process_and_none_that_has_its_own(tmp_path: Path) -> None:
    code = "@model\ndef f(x: int) -> int: ...\n@model(own_process=True)\ndef g(x: int) -> int: ...\n"

    assert "SHARED_PROCESS" not in Service(tmp_path, code).config["parameters"]
    assert "SHARED_PROCESS" not in Service(tmp_path, METHODS + code, "g").config["parameters"]


@pytest.mark.parametrize(
    ("accept", "form"),
    [("", "png"), ("image/jpeg", "jpeg"), ("image/webp;q=0.9", "webp"), ("image/jpeg, image/*", "png"), ("a/b", "png")],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_image_has_the_form_that_the_client_accepts(tmp_path: Path, kind: str, accept: str, form: str) -> None:
    code = f"""
import PIL.Image
@model
{kind} f(size: int) -> PIL.Image.Image:
    return PIL.Image.new("RGBA", (size, size))
"""
    service = Service(tmp_path, code)
    parameters = json.dumps({"triton_http_request": json.dumps({"headers": {"accept": accept}})})

    answers = service.run(one(size=2), parameters=parameters)
    (answer,) = service.answers() if answers == [None] else answers

    assert answer["output"][0].startswith(f"data:image/{form};base64,".encode())


def test_a_function_that_shares_memory_has_its_own_processes(tmp_path: Path) -> None:
    code = """
@model(share_memory=True)
def f(x: int) -> int:
    return x

@model
def g(x: int) -> int:
    return x
"""
    assert "SHARED_PROCESS" not in Service(tmp_path, code).config["parameters"]
    assert Service(tmp_path, code).config["parameters"]["SHARE_MEMORY"] == {"string_value": "true"}
