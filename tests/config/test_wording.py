import pytest

from charonia.config.problems import MAX_QUOTED_CHARS, field_hint, printable, short, value_hint
from charonia.schema.pool import pool

INPUT = pool().FindMessageTypeByName("inference.ModelInput")
CONFIG = pool().FindMessageTypeByName("inference.ModelConfig")
DATATYPE = pool().FindEnumTypeByName("inference.DataType")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dim", "did you mean 'dims'?"),
        ("preferred_batch_size", "'preferred_batch_size' is a field of ModelDynamicBatching, StrategyOldest"),
        ("d" * 10_000, ""),
    ],
)
def test_an_unknown_field_gets_a_hint(name: str, hint: str) -> None:
    found = field_hint(name, INPUT)

    assert found == hint or (not hint and found.startswith("known are name, data_type"))


def test_a_list_too_long_to_help_is_left_out() -> None:
    assert field_hint("zzzz", CONFIG) == ""
    assert value_hint("99", DATATYPE).startswith("known are TYPE_INVALID, TYPE_BOOL")


def test_a_word_of_the_wire_is_translated() -> None:
    assert value_hint("bytes", DATATYPE) == "did you mean TYPE_STRING?"
    assert value_hint("TYPE_FLOAT32", DATATYPE) == "did you mean TYPE_FP32?"


def test_quotes_are_bounded_and_printable() -> None:
    assert short("x" * MAX_QUOTED_CHARS) == "x" * MAX_QUOTED_CHARS
    assert short("x" * (MAX_QUOTED_CHARS + 1)) == "x" * MAX_QUOTED_CHARS + "..."
    assert printable("é\n\x1b\ud800") == "é\\n\\x1b\\ud800"
