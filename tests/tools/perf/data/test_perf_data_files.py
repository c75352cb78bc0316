import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.tools.perf.data.load import load_inputs, read_path
from charonia.tools.perf.data.spec import ModelSpec, TensorSpec
from charonia.tools.perf.options import DataOptions, PerfOptions, TargetOptions

D = DataType


def model(*inputs: TensorSpec) -> ModelSpec:
    return ModelSpec("m", "", 8, inputs, (TensorSpec("Y", D.FP32, (2,)),))


X = TensorSpec("X", D.FP32, (2,))
TEXT = TensorSpec("TEXT", D.BYTES, (-1,))
PICTURE = TensorSpec("P", D.UINT8, (-1,))


def refused(path: Path, spec: ModelSpec) -> str:
    with pytest.raises(ServingError) as caught:
        read_path(path, spec)
    return str(caught.value)


def test_a_folder_has_a_file_for_each_input_and_output(tmp_path: Path) -> None:
    (tmp_path / "X").write_bytes(np.array([1, 2], "<f4").tobytes())
    (tmp_path / "TEXT").write_text("first\nsecond line\n")
    np.save(tmp_path / "Y.npy", np.array([3, 4]))
    (tmp_path / ".DS_Store").write_text("")

    ((step,),) = read_path(tmp_path, model(X, TEXT))

    assert step.inputs["X"].tolist() == [1, 2]
    assert step.inputs["TEXT"].tolist() == [b"first", b"second line"]
    assert step.expected is not None
    assert step.expected["Y"].tolist() == [3.0, 4.0]


def test_arrays_along_a_dimension_in_front_are_steps(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.arange(6).reshape(3, 2))

    (stream,) = read_path(tmp_path / "X.npy", model(X))

    assert [step.inputs["X"].tolist() for step in stream] == [[0, 1], [2, 3], [4, 5]]


def test_a_single_item_goes_with_every_step_of_the_others(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.arange(4).reshape(2, 2))
    np.save(tmp_path / "TEXT.npy", np.array(["a", "b"]))

    (stream,) = read_path(tmp_path, model(X, TEXT))

    assert [step.inputs["TEXT"].tolist() for step in stream] == [[b"a", b"b"]] * 2


@pytest.mark.parametrize(
    ("files", "path", "inputs", "problem"),
    [
        (
            {"X.npy": np.zeros((3, 2)), "Y.npy": np.zeros((2, 2))},
            *("", [X], "FOLDER: 'Y': expected 3 items, as many as 'X', got 2"),
        ),
        (
            {"X": b"abc"},
            *("", [X], "X: 'X': expected 2 elements (FP32 of shape [2]), which takes 8 bytes, got 3 bytes"),
        ),
        ({"X.npy": b"abc"}, "", [X], "X.npy: 'X': expected an array in the format of .npy, got: "),
        ({"Z": b""}, "", [X], ": expected files named as inputs, 'X', or outputs, 'Y', got Z"),
        ({"Y": b"12345678"}, "", [X], ": expected a file for input 'X', got none"),
        ({}, "", [X], "FOLDER: expected a file for each input, 'X', got an empty folder"),
        ({"X": b"", "X.npy": b""}, "", [X], "FOLDER: 'X': expected one file, got X and X.npy"),
        (
            {"X.npy": np.zeros((3, 5))},
            *("X.npy", [X], "X.npy: 'X': expected FP32 of shape [2], or several of these, got shape [3, 5]"),
        ),
        (
            {"X.npy": np.zeros(2)},
            *("X.npy", [X, TEXT], "X.npy: expected a model with one input, got 'X', 'TEXT'"),
        ),
        (
            {"TEXT.npy": np.zeros(2)},
            *("TEXT.npy", [TEXT], "TEXT.npy: 'TEXT': expected strings for BYTES of shape [-1], got float64"),
        ),
        ({}, "X.npy", [X], "FOLDER/X.npy: cannot be read: No such file or directory"),
        ({"X.npy": np.array([{}, {}], object)}, "X.npy", [X], "Object arrays cannot be loaded"),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, files: dict[str, Any], path: str, inputs: list[TensorSpec], problem: str
) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            np.save(tmp_path / name, content)

    said = refused(tmp_path / path, model(*inputs))

    assert problem in said.replace(str(tmp_path), "FOLDER").replace(tmp_path.name, "FOLDER")


def test_bf16_is_read_as_numbers_or_as_bit_patterns(tmp_path: Path) -> None:
    spec = model(TensorSpec("X", D.BF16, (1,)))
    np.save(tmp_path / "X.npy", np.array([1.5], np.float32))
    numbers = read_path(tmp_path / "X.npy", spec)[0][0].inputs["X"].tolist()
    np.save(tmp_path / "X.npy", np.array([0x3FC0], np.uint16))

    assert numbers == read_path(tmp_path / "X.npy", spec)[0][0].inputs["X"].tolist() == [0x3FC0]


def test_booleans_become_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.array([True, False]))

    assert read_path(tmp_path / "X.npy", model(X))[0][0].inputs["X"].tolist() == [1.0, 0.0]


def test_files_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "X").write_bytes(b"12345678")
    monkeypatch.setattr("charonia.tools.perf.data.load.FILE_BYTES_MAX", 5)

    assert refused(tmp_path, model(X)) == "X: expected at most 5 bytes, got 8"


@pytest.mark.parametrize("spec", [PICTURE, TensorSpec("P", D.BYTES, (1,))])
def test_a_folder_of_pictures_is_a_stream_of_the_files_themselves(tmp_path: Path, spec: TensorSpec) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.png").write_bytes(name.encode() * 9)

    (stream,) = read_path(tmp_path, model(spec))

    assert [step.where for step in stream] == ["a.png", "b.png"]
    array = stream[0].inputs["P"]
    assert (b"".join(array.tolist()) if spec.datatype is D.BYTES else array.tobytes()) == b"a" * 9


@pytest.mark.parametrize("spec", [TensorSpec("P", D.FP32, (3, 4, 6)), TensorSpec("P", D.BYTES, (2,))])
def test_an_input_that_takes_no_file_is_refused_for_a_picture(tmp_path: Path, spec: TensorSpec) -> None:
    (tmp_path / "p.png").write_bytes(b"x")

    assert refused(tmp_path / "p.png", model(spec)) == (
        f"p.png: input 'P': expected an input that takes one file, got one of {spec} (hint: save the pixels as .npy)"
    )


def inputs_of(path: Path, spec: ModelSpec, batch_size: int) -> list[list[object]]:
    options = PerfOptions(TargetOptions("m", batch_size=batch_size), data=DataOptions((str(path),)))
    inputs = pickle.loads(pickle.dumps(load_inputs(spec, options)))
    return [inputs.request(0, step).inputs["X"].array.tolist() for step in range(inputs.step_count(0))]


def test_batches_are_made_of_steps_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"data": [{"X": [0, 0]}, {"X": [1, 1]}, {"X": [2, 2]}]}')

    assert inputs_of(tmp_path / "d.json", model(X), 2) == [
        [[0.0, 0.0], [1.0, 1.0]],
        [[2.0, 2.0], [0.0, 0.0]],
        [[1.0, 1.0], [2.0, 2.0]],
    ]


def test_a_model_without_batches_gets_the_items_themselves(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"data": [{"X": [0, 0]}, {"X": [1, 1]}]}')

    assert inputs_of(tmp_path / "d.json", ModelSpec("m", "", 0, (X,)), 1) == [[0.0, 0.0], [1.0, 1.0]]


def test_items_of_different_shapes_do_not_make_a_batch(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"data": [{"X": [0, 0]}, {"X": [1]}]}')
    spec = ModelSpec("m", "", 8, (TensorSpec("X", D.FP32, (-1,)),))

    with pytest.raises(ServingError) as caught:
        inputs_of(tmp_path / "d.json", spec, 2)

    assert caught.value.message == (
        "d.json: step 1: input 'X': expected shape [2], that of the step before it in the batch, got [1]"
    )


def test_validation_data_make_batches_too(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(
        '{"data": [{"X": [0, 0]}, {"X": [1, 1]}], "validation_data": [{"Y": [5, 5]}, {"Y": [6, 6]}]}'
    )
    options = PerfOptions(TargetOptions("m", batch_size=2), data=DataOptions((str(tmp_path / "d.json"),)))

    expected = load_inputs(model(X), options).expected(0, 0)

    assert expected is not None
    assert expected["Y"].array.tolist() == [[5, 5], [6, 6]]


def test_generated_items_of_a_batch_differ_and_are_one_request() -> None:
    options = PerfOptions(TargetOptions("m", batch_size=4, parameters=(("n", 5),)))

    inputs = load_inputs(model(X), options)

    assert (inputs.stream_count, inputs.step_count(0), inputs.batch_size) == (1, 1, 4)
    request = inputs.request(0, 0)
    assert request.inputs["X"].shape == (4, 2)
    assert len(np.unique(request.inputs["X"].array)) == 8
    assert request.parameters == {"n": 5}


def test_zeros_are_one_item_for_any_batch() -> None:
    options = PerfOptions(TargetOptions("m", batch_size=3), data=DataOptions(("zero",)))

    inputs = load_inputs(model(X), options)

    assert inputs.request(0, 0).inputs["X"].array.tolist() == [[0, 0]] * 3
    assert inputs.expected(0, 0) is None


def test_a_model_without_inputs_cannot_be_asked() -> None:
    with pytest.raises(ServingError, match="model 'm': expected inputs, got none"):
        load_inputs(model(), PerfOptions(TargetOptions("m")))


def test_an_optional_input_is_in_all_items_of_a_batch_or_in_none(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"data": [{"X": [0, 0]}, {}]}')
    spec = model(TensorSpec("X", D.FP32, (2,), optional=True))

    with pytest.raises(ServingError, match=r"d\.json: step 1: input 'X': expected in all steps of a batch or in none"):
        inputs_of(tmp_path / "d.json", spec, 2)
