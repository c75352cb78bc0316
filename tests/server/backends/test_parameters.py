"""Parameters of models are declared once: what is read, what is refused, and what the documentation says."""

from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

from charonia.config.model import ModelConfig
from charonia.server.backends.parameters import Kind, Param, Params

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    "fil.options": "forests",
    "identity": "",
    "image.options": "image",
    "llama_cpp.backend": "llama_cpp",
    "onnxruntime.options": "onnx_models",
    "openvino.backend": "openvino",
    "workers.model": "python_models",
    "pytorch.program": "pytorch",
    "sklearn.options": "sklearn",
    "tensorflow.backend": "tensorflow",
    "tensorrt.options": "tensorrt",
    "tflite.backend": "tflite",
    "vllm.backend": "vllm",
}


class Color(Enum):
    RED = "Red"


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


@pytest.mark.parametrize(
    ("kind", "ge", "text", "value"),
    [
        (bool, None, "TRUE", True),
        (bool, None, "0", False),
        (bool, None, "No", False),
        (int, 0, "3", 3),
        (int, -1, "-1", -1),
        (float, None, "0.5", 0.5),
        (str, None, " as it is ", " as it is "),
        ({"a": 1, "B": 2}, None, "b", 2),
        (Color, None, "red", Color.RED),
        (len, None, " abc ", 3),
    ],
)
def test_a_value_is_read_as_its_kind(kind: Kind, ge: float | None, text: str, value: object) -> None:
    values = Params("b", Param("p", kind=kind, ge=ge)).values(config(p=text))

    assert (values["p"], values.problems) == (value, [])


@pytest.mark.parametrize(
    ("kind", "ge", "text", "expected"),
    [
        (bool, None, "maybe", "true or false"),
        (int, 1, "0", "a whole number of at least 1"),
        (int, None, "1.5", "a whole number"),
        (int, 0, "\u0663", "a whole number of at least 0"),
        (float, 0, "nan", "a number of at least 0"),
        (float, None, "inf", "a number"),
        ({"a": 1, "B": 2}, None, "c", "one of a, B"),
        (Color, None, "blue", "one of Red"),
    ],
)
def test_another_value_is_refused_with_what_was_expected(
    kind: Kind, ge: float | None, text: str, expected: str
) -> None:
    values = Params("b", Param("p", kind=kind, default="usual", ge=ge)).values(config(p=text))

    assert values["p"] == "usual"
    assert [str(problem) for problem in values.problems] == [f"parameters['p']: expected {expected}, got '{text}'"]


def test_the_parameter_of_a_model_counts_before_the_setting_of_the_backend() -> None:
    declared = Params("b", Param("p", kind=int), Param("q", kind=int), settings=("p",))

    assert declared.values(config(p="1"), {"p": "2"})["p"] == 1
    assert declared.values(config(), {"p": "2", "q": "2"})["p"] == 2
    assert declared.values(config(), {"q": "2"})["q"] is None
    (problem,) = declared.values(config(), {"p": "x"}).problems
    assert str(problem) == "--backend-config b,p: expected a whole number, got 'x'"


def test_a_setting_alone_is_no_parameter() -> None:
    declared = Params("b", Param("s", kind=bool, is_setting_only=True))

    assert declared.values(config(s="true"))["s"] is None
    assert declared.values(config(), {"s": "true"})["s"] is True
    assert [key for key, _ in declared.unknown(config(s="true"))] == ["s"]


def test_the_first_of_two_names_counts() -> None:
    declared = Params("b", Param("new", kind=int, also="old"))

    assert declared.values(config(old="1"))["new"] == 1
    assert declared.values(config(old="1", new="2"))["new"] == 2


def test_what_is_unknown_is_named_with_the_name_that_is_almost_the_same() -> None:
    declared = Params("b", Param("threads"), others=("environment",))

    assert list(declared.remarks(config(Treads="1", xyz="1", environment="1", threads="1"))) == [
        "model 'm': the b backend has no parameter 'Treads', it has no effect; did you mean 'threads'?",
        "model 'm': the b backend has no parameter 'xyz', it has no effect",
    ]


@pytest.mark.parametrize(("module", "page"), PAGES.items(), ids=PAGES)
def test_the_page_of_a_backend_has_each_parameter_as_it_is_declared(module: str, page: str) -> None:
    declared: Params = import_module(f"charonia.server.backends.{module}").PARAMETERS
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8") if page else ""

    rows = [each.row() for each in declared.declared if each.help]
    assert not page or [row for row in rows if row not in text] == []
    assert not page or [name for name in declared.names if f"`{name}`" not in text] == []


def test_every_backend_with_parameters_is_on_the_list() -> None:
    folder = Path(__file__).parents[3] / "src" / "charonia" / "server" / "backends"
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\nPARAMETERS = Params(" in path.read_text(encoding="utf-8")
    }

    assert found == PAGES.keys()
