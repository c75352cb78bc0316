"""Reading what the commands print that check a version."""

import json

from charonia.platform.models.check import read_config, read_warnings

FOLDER = "/data/incoming/x/echo"


def test_the_configuration_stands_between_what_else_is_printed() -> None:
    config = json.dumps({"name": "echo", "input": [{"name": "x"}]}, indent=2)
    lines = [
        "WARNING: something",
        "Inferred:",
        f"  backend: onnxruntime, from the file '{FOLDER}/1/model.onnx'",
        "  max_batch_size: 4",
        "With --front-ends: in the engine.",
        *config.splitlines(),
        "WARNING: at the end",
        "}",
    ]

    found, notes = read_config(lines, FOLDER)

    assert found == {"name": "echo", "input": [{"name": "x"}]}
    assert notes == ["backend: onnxruntime, from the file '1/model.onnx'", "max_batch_size: 4"]


def test_without_a_configuration_there_is_none() -> None:
    assert read_config(["charonia config: x:", "  cannot be read"], FOLDER) == (None, [])
    assert read_config(["Nothing was inferred.", "{", "}"], FOLDER) == ({}, [])


def test_warnings_are_what_the_doctor_has_against_the_model() -> None:
    report = {
        "Machine": [{"name": "port 8000", "value": "used", "problem": "somebody has it"}],
        "Models": [{"name": "echo", "value": "2 x CPU", "problem": "they wait", "hint": "count: 1"}],
        "All models together": [{"name": "memory", "value": "much", "problem": "too little"}],
    }
    lines = ["a line before", *json.dumps(report, indent=2).splitlines(), "a line after"]

    assert read_warnings(lines) == ["they wait (hint: count: 1)", "too little"]
    assert read_warnings(["it failed"]) == []
