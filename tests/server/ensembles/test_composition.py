"""Every way in which an ensemble and the models of its steps do not fit together."""

import pytest

from charonia.config.model import ModelConfig, TransactionPolicy
from charonia.config.pbtxt import parse
from charonia.server.ensembles.configuration import composed, composition_problems, scheduling_of

CHAIN = """
    step { model_name: 'a' model_version: -1 input_map { key: 'X' value: 'in' } output_map { key: 'Y' value: 'mid' } }
    step { model_name: 'b' model_version: -1 input_map { key: 'X' value: 'mid' } output_map { key: 'Y' value: 'out' } }
"""
FLOAT = "data_type: TYPE_FP32 dims: [ 4 ]"


def ensemble(given: str = FLOAT, wanted: str = FLOAT, *, steps: str = CHAIN, more: str = "") -> ModelConfig:
    tensors = f"input {{ name: 'in' {given} }} output {{ name: 'out' {wanted} }}"
    return parse(f"name: 'e' platform: 'ensemble' {tensors} ensemble_scheduling {{ {steps} }} {more}")


def model(name: str, given: str = FLOAT, wanted: str = FLOAT, more: str = "") -> ModelConfig:
    return parse(f"name: '{name}' input {{ name: 'X' {given} }} output {{ name: 'Y' {wanted} }} {more}")


def texts(config: ModelConfig, *models: ModelConfig | None) -> list[str]:
    return [str(problem) for problem in composition_problems(config, models)]


def test_models_that_fit_have_no_problems() -> None:
    assert texts(ensemble(), model("a"), model("b")) == []


def test_a_model_that_is_not_known_is_not_looked_at() -> None:
    assert texts(ensemble(), None, model("b")) == []
    assert scheduling_of(model("a")).step == ()


def test_tensors_that_a_model_does_not_have_are_named() -> None:
    steps = CHAIN.replace("key: 'X' value: 'in'", "key: 'Z' value: 'in'").replace(
        "key: 'Y' value: 'out'", "key: 'W' value: 'out'"
    )

    assert texts(ensemble(steps=steps), model("a"), model("b")) == [
        "ensemble_scheduling.step[0].input_map[Z]: in ensemble e, ensemble tensor in is mapping to non-existing input "
        "Z in model a; its inputs are X",
        "ensemble_scheduling.step[0].input_map: in ensemble e, input X in model a is not mapped to any ensemble "
        "tensors",
        "ensemble_scheduling.step[1].output_map[W]: in ensemble e, ensemble tensor out is mapped from non-existing "
        "output W in model b; its outputs are Y",
    ]


def test_an_optional_input_need_not_be_mapped() -> None:
    more = "input { name: 'maybe' data_type: TYPE_FP32 dims: [ 1 ] optional: true }"

    assert texts(ensemble(), model("a", more=more), model("b")) == []


def test_datatypes_must_agree_along_a_tensor() -> None:
    other = "data_type: TYPE_INT32 dims: [ 4 ]"

    assert texts(ensemble(), model("a", wanted=other), model("b", given=FLOAT, wanted=other)) == [
        "ensemble_scheduling.step[1].input_map[X]: in ensemble e, ensemble tensor mid: inconsistent data type: "
        "TYPE_INT32 is inferred from model a while TYPE_FP32 is inferred from model b",
        "output[0]: in ensemble e, ensemble tensor out: inconsistent data type: TYPE_INT32 is inferred from model b "
        "while TYPE_FP32 is inferred from model e",
    ]


@pytest.mark.parametrize(
    ("written", "read", "fits"),
    [
        ("[ 4 ]", "[ 4 ]", True),
        ("[ 4 ]", "[ -1 ]", True),
        ("[ -1 ]", "[ 4 ]", True),
        ("[ 4 ]", "[ 5 ]", False),
        ("[ 4 ]", "[ 4, 1 ]", False),
        ("[ -1, 4 ]", "[ 3, -1 ]", True),
    ],
)
def test_shapes_must_agree_along_a_tensor(written: str, read: str, fits: bool) -> None:
    found = texts(
        ensemble(),
        model("a", wanted=f"data_type: TYPE_FP32 dims: {written}"),
        model("b", given=f"data_type: TYPE_FP32 dims: {read}"),
    )

    assert (found == []) is fits
    if not fits:
        assert found[0].startswith(
            "ensemble_scheduling.step[1].input_map[X]: in ensemble e, ensemble tensor mid: inconsistent shape: "
            f"{written.replace(' ', '')} is inferred from model a while {read.replace(' ', '')} is inferred"
        )


def test_a_batch_dimension_may_be_missing_on_one_side() -> None:
    batching = "max_batch_size: 8"
    full = "data_type: TYPE_FP32 dims: [ -1, 4 ]"

    assert texts(ensemble(), model("a", more=batching), model("b")) == []
    assert texts(ensemble(), model("a", more=batching), model("b", given=full)) == []
    assert texts(ensemble(), model("a", wanted=full), model("b", more=batching)) == []
    assert len(texts(ensemble(), model("a", wanted=full), model("b"))) == 1


def test_the_inputs_of_an_ensemble_must_fit_its_steps() -> None:
    found = texts(ensemble(given="data_type: TYPE_FP16 dims: [ 4 ]"), model("a"), model("b"))

    assert found == [
        "ensemble_scheduling.step[0].input_map[X]: in ensemble e, ensemble tensor in: inconsistent data type: "
        "TYPE_FP16 is inferred from model e while TYPE_FP32 is inferred from model a"
    ]


@pytest.mark.parametrize(("shape", "expected"), [("4", []), ("2, 2", ["output[0]"])])
def test_steps_see_the_tensors_of_an_ensemble_as_reshape_says(shape: str, expected: list[str]) -> None:
    given, wanted = (f"data_type: TYPE_FP32 dims: [ 4, 1 ] reshape {{ shape: [ {s} ] }}" for s in ("4", shape))

    assert [text.split(":")[0] for text in texts(ensemble(given, wanted), model("a"), model("b"))] == expected


def test_an_ensemble_may_not_batch_more_than_its_models() -> None:
    batching = "max_batch_size: 8"

    assert texts(ensemble(more=batching), model("a", more="max_batch_size: 4"), model("b", more=batching)) == [
        "ensemble_scheduling.step[0].model_name: ensemble e allows maximum batch size 8, but it contains model a which "
        "only allows maximum batch size to be 4; reduce the one of the ensemble, or set max_batch_size in the "
        "config.pbtxt of a: where that is silent, it is completed to --backend-config=default-max-batch-size, which is "
        "4 by default"
    ]


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8), (0, 0), (16, 0)])
def test_models_that_do_not_batch_may_be_in_an_ensemble_that_does(sizes: tuple[int, int]) -> None:
    first, second = (f"max_batch_size: {size}" for size in sizes)

    assert texts(ensemble(more="max_batch_size: 8"), model("a", more=first), model("b", more=second)) == []


def test_the_shapes_of_models_that_do_not_batch_are_checked_in_an_ensemble_that_does() -> None:
    batching = "max_batch_size: 8"
    (problem,) = texts(
        ensemble(more=batching), model("a", more=batching), model("b", given="data_type: TYPE_FP32 dims: [ 2, 5 ]")
    )

    assert problem.endswith("inconsistent shape: [-1,4] is inferred from model a while [2,5] is inferred from model b")


def test_the_configuration_of_an_ensemble_says_that_it_is_decoupled_where_a_step_is() -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    plain, streaming = model("a"), model("b", more=decoupled)

    assert composed(ensemble(), [plain, streaming]).is_decoupled
    for written in (ensemble(more=decoupled), ensemble()):
        assert composed(written, [plain, plain]).model_transaction_policy == TransactionPolicy(decoupled=False)
