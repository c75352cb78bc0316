from collections import OrderedDict
from typing import NamedTuple

import pytest

from charonia.core.errors import ServingError
from charonia.server.backends.pytorch.naming import (
    MISSING,
    Leaf,
    Leaves,
    Parameter,
    ParameterKind,
    Parameters,
    ResultNames,
    Slot,
    Template,
    bind_results,
    output_names,
    place_of,
    result_paths,
)

X, Y = Parameter("x"), Parameter("y")


def call(template: Template, *values: object) -> tuple[list[object], dict[str, object]]:
    return template.fill(values)


@pytest.mark.parametrize(
    ("names", "args"),
    [
        (["x", "y"], [1, 2]),
        (["y", "x"], [2, 1]),
        (["INPUT__0", "INPUT__1"], [1, 2]),
        (["b__1", "a__0"], [2, 1]),
        (["ARGS[1]", "ARGS[0]"], [2, 1]),
        (["KWARGS[y]", "ARGS[0]"], [2, 1]),
        (["first", "second"], [1, 2]),
        (["x", "second"], [1, 2]),
    ],
)
def test_inputs_find_their_arguments_by_name_by_number_by_place_or_by_order(names: list[str], args: list[int]) -> None:
    assert call(Parameters((X, Y)).bind(names), 1, 2) == (args, {})


def test_an_argument_with_a_default_is_given_by_name_so_that_it_can_be_left_out() -> None:
    template = Parameters((X, Parameter("mask", is_required=False))).bind(["x", "mask"])

    assert call(template, 1, 2) == ([1], {"mask": 2})
    assert call(template, 1, MISSING) == ([1], {})
    assert template.positional == {0}


def test_a_lone_dictionary_is_filled_by_its_keys() -> None:
    parameter = Parameter("inputs", ParameterKind.DICTIONARY)

    assert call(Parameters((parameter,)).bind(["ids", "mask"]), 1, 2) == ([{"ids": 1, "mask": 2}], {})


def test_keys_of_a_dictionary_beside_other_arguments_are_places() -> None:
    parameters = [X, Parameter("options", ParameterKind.DICTIONARY)]

    assert call(Parameters(tuple(parameters)).bind(["ARGS[0]", "ARGS[1][bias]"]), 1, 2) == ([1, {"bias": 2}], {})


def test_a_model_that_takes_any_keyword_gets_every_name() -> None:
    assert call(Parameters((), takes_any=True).bind(["ids", "mask"]), 1, 2) == ([], {"ids": 1, "mask": 2})


@pytest.mark.parametrize(
    ("names", "parameters", "message"),
    [
        (["x"], [X, Y], "no input is given for argument 'y'"),
        (["INPUT__0"], [X, Y], "no input is given for argument 'y'"),
        (["a", "b", "c"], [X, Y], "3 inputs are configured"),
        (["INPUT__0", "INPUT__2"], [X, Y], "do not fit"),
        (["ARGS[0]", "ARGS[2]"], [X, Y], "'ARGS[2]' is no argument"),
        (["RESULT"], [X], "'RESULT' is no argument"),
        (["x"], [Parameter("x", ParameterKind.OTHER)], "takes something that no input can be"),
        (["a"], [], "the model takes no arguments"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_the_model_takes(
    names: list[str], parameters: list[Parameter], message: str
) -> None:
    with pytest.raises(ServingError) as caught:
        Parameters(tuple(parameters)).bind(names)

    assert message in caught.value.message


LEAVES = (Leaf(("ARGS", 0), "x"), Leaf(("ARGS", 1, "bias")), Leaf(("KWARGS", "scale"), "scale"))
CALL = Template((Slot(0), {"bias": Slot(1)}), {"scale": Slot(2)})


@pytest.mark.parametrize(
    "names",
    [
        ["x", "ARGS[1][bias]", "scale"],
        ["ARGS[0]", "ARGS[1]['bias']", "KWARGS[scale]"],
        ["INPUT__0", "INPUT__1", "INPUT__2"],
        ["a", "b", "c"],
    ],
)
def test_inputs_find_their_leaves_in_the_arguments_of_an_exported_program(names: list[str]) -> None:
    assert call(Leaves(CALL, tuple(LEAVES)).bind(names), 1, 2, 3) == ([1, {"bias": 2}], {"scale": 3})


def test_a_leaf_that_is_part_of_the_program_takes_no_input() -> None:
    leaves = (Leaf(("ARGS", 0), "x"), Leaf(("ARGS", 1), "flag", is_constant=True))

    assert call(Leaves(Template((Slot(0), True)), tuple(leaves)).bind(["INPUT__0"]), 1) == ([1, True], {})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x", "scale"], "no input is given for 'ARGS[1][bias]'"),
        (["a", "b"], "inputs 'a', 'b' do not fit: the model takes 'x' (ARGS[0]), ARGS[1][bias], 'scale'"),
        (["x", "ARGS[1][other]", "scale"], "do not fit"),
    ],
)
def test_leaves_without_an_input_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ServingError) as caught:
        Leaves(CALL, tuple(LEAVES)).bind(names)

    assert message in caught.value.message


class Pair(NamedTuple):
    mean: int
    std: int


@pytest.mark.parametrize(
    ("names", "result", "values"),
    [
        (["y"], 5, [5]),
        (["RESULT"], 5, [5]),
        (["OUTPUT__0"], 5, [5]),
        (["a", "b"], (5, 6), [5, 6]),
        (["a"], (5, 6), [5]),
        (["a", "OUTPUT__1"], (5, 6), [5, 6]),
        (["OUTPUT__1"], [5, 6], [6]),
        (["b", "a"], {"a": 5, "b": 6}, [6, 5]),
        (["OUTPUT__1", "OUTPUT__0"], OrderedDict(a=5, b=6), [6, 5]),
        (["std"], Pair(5, 6), [6]),
        (["RESULT[parts][1]", "RESULT[sum]"], {"sum": 5, "parts": (6, 7)}, [7, 5]),
        (["texts", "n"], (["a", "b"], 7), [["a", "b"], 7]),
    ],
)
def test_outputs_find_their_part_of_the_result(names: list[str], result: object, values: list[object]) -> None:
    found = ResultNames(names)

    assert found.select(result) == values
    assert found.select(result) == values


@pytest.mark.parametrize("names", [["a", "b", "c"], ["OUTPUT__2"], ["OUTPUT__1", "a"], ["RESULT[sum]"]])
def test_a_result_without_such_a_part_is_an_error_that_shows_what_came(names: list[str]) -> None:
    with pytest.raises(ServingError) as caught:
        bind_results(names, result_paths((5, 6)))

    assert "the model returned RESULT[0], RESULT[1]" in caught.value.message


def test_a_result_is_named_by_its_keys_or_by_number() -> None:
    assert output_names(result_paths({"a": 1, "b": 2})) == ["a", "b"]
    assert output_names(result_paths((1, {"b": 2}))) == ["OUTPUT__0", "OUTPUT__1"]
    assert output_names(result_paths(1)) == ["OUTPUT__0"]


def test_a_place_is_read_with_and_without_quotes() -> None:
    assert place_of("ARGS[2]['key']") == ("ARGS", 2, "key")
    assert place_of("RESULT") == ("RESULT",)
    assert place_of("ARGSx[0]") is None
