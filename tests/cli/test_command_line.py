"""The rules by which every command splits its arguments."""

from dataclasses import dataclass

import pytest

from charonia.cli.command_line import NEVER, CommandLine, Fields, Option, flag, ignored_options, refused
from charonia.cli.values import integer
from charonia.core.errors import ServingError


@dataclass(frozen=True, slots=True)
class Record:
    model: str = ""
    count: int = 1
    low: int = 0
    high: int = 9
    loud: bool = False
    items: tuple[str, ...] = ()


def both(text: str) -> Fields:
    low, _, high = text.partition(":")
    return Fields(low=int(low), high=int(high))


LINE = CommandLine(
    command="charonia try",
    intro="usage: charonia try [OPTIONS] MODEL [ITEM...]",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL", "What to try"),
            Option("--item -i ITEM", "items", str, "ITEM", "Thing; repeatable", tuple),
            Option("--count -c", "count", integer(1), "N", "How often"),
            Option("--range", "", both, "LOW:HIGH", "From where to where"),
            flag("--loud -l", "loud", True, "Be heard"),
            Option("--counter", "count", integer(1), "N", "Of a second rank", default="", rank=1),
            Option("--secret", "model", str, "X", "Understood in full only", default="", rank=NEVER),
        )
    },
    record=Record(),
    unlisted={"Not here": [*ignored_options("it is not needed", "--threads"), *refused("no", "--gpu", metavar="")]},
    abbreviates=True,
)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ServingError) as caught:
        LINE.parse(arguments)
    return caught.value.message.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("m", "--count", "5", "-l"),
        ("--count=5", "-l", "m"),
        ("-lc5", "m"),
        ("-l", "-c=5", "--", "m"),
        ("m", "--coun", "5", "--lo"),
        ("m", "-c9", "--count", "5", "-l"),
    ],
)
def test_order_is_free_every_form_of_an_option_is_the_same_and_the_last_counts(arguments: tuple[str, ...]) -> None:
    assert LINE.parse(arguments) == Record(model="m", count=5, loud=True)


def test_arguments_without_a_name_fill_the_places_in_order_the_last_with_all_that_are_left() -> None:
    assert LINE.parse(["m", "a", "--item", "b", "c"]) == Record(model="m", items=("b", "a", "c"))


def test_a_value_may_begin_with_a_dash_unless_it_is_an_option() -> None:
    assert LINE.parse(["m", "--item", "-x", "--item=--count"]).items == ("-x", "--count")
    assert "--item: expected a value behind it, got none" in problems("m", "--item", "--count=3")


def test_an_option_may_set_several_fields() -> None:
    made = LINE.parse(["m", "--range", "3:7"])

    assert (made.low, made.high) == (3, 7)


def test_a_prefix_means_an_option_of_the_first_rank_and_never_one_of_none() -> None:
    assert LINE.parse(["m", "--c", "2"]).count == 2
    assert LINE.parse(["--secret", "m", "x"]).model == "m"
    assert problems("m", "--sec", "x")[0].startswith("unknown option '--sec'")


def test_what_is_not_supported_is_noted_or_refused() -> None:
    given = LINE.split(["m", "--threads", "4"])
    LINE.read(given)

    assert given.notes == ["--threads has no effect: it is not needed"]
    assert problems("m", "--gpu") == ["--gpu: no"]


def test_every_mistake_has_its_line() -> None:
    assert problems("--cuont", "3", "--loud=1", "-c", "none", "-z") == [
        "unknown option '--cuont' (hint: did you mean --count?)",
        "unknown option '-z' (hint: charonia try --help lists the options)",
        "--count: expected an integer from 1 to 2147483647, got 'none'",
        "--loud: expected no value, got '1'",
    ]
    assert problems() == ["expected MODEL, got none"]


def test_the_help_shows_names_values_and_defaults() -> None:
    assert "  -c, --count N                   How often (default: 1)\n" in LINE.help()
    assert "Not here: --threads, --gpu" in LINE.help()
