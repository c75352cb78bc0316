"""Settings of tracing: what a change may say, and what a model falls back to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.core.trace import TraceLevel
from charonia.wire.trace_settings import SettingsTable, TraceSettings, level_names, read_change

DEFAULT = TraceSettings(TraceLevel.OFF, 1000, -1, 0)


def refused(**texts: list[str]) -> ServingError:
    with pytest.raises(ServingError) as caught:
        read_change(texts)
    return caught.value


def test_a_model_falls_back_to_the_server_and_that_to_the_command_line() -> None:
    table = SettingsTable(DEFAULT)
    table.change("", {"rate": 10})
    table.change("m", {"count": 5})
    assert table.of_model("m") == TraceSettings(TraceLevel.OFF, 10, 5, 0)
    assert table.models == ["m"]

    table.change("", {"rate": None})
    table.change("m", {"count": None})

    assert table.of_model("m") == table.of_server() == DEFAULT
    assert table.models == []


def test_a_level_that_was_set_is_a_level_again() -> None:
    table = SettingsTable(DEFAULT)
    table.change("m", {"level": TraceLevel.TIMESTAMPS | TraceLevel.TENSORS})

    assert level_names(table.of_model("m").level) == ["TIMESTAMPS", "TENSORS"]
    assert level_names(table.of_server().level) == ["OFF"]


def test_a_copy_is_changed_alone() -> None:
    table = SettingsTable(DEFAULT)
    table.change("m", {"rate": 3})
    table.copy().change("m", {"rate": 4})

    assert table.of_model("m").rate == 3


def test_every_setting_can_be_given_or_cleared() -> None:
    texts = {"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"], "trace_count": ["-1"], "log_frequency": ["0"]}

    assert read_change(texts) == {"level": TraceLevel.TIMESTAMPS, "rate": 1, "count": -1, "log_frequency": 0}
    most = {"trace_rate": ["4294967295"], "trace_count": ["2147483647"], "log_frequency": ["4294967295"]}
    assert read_change(most) == {"rate": 2**32 - 1, "count": 2**31 - 1, "log_frequency": 2**32 - 1}
    assert read_change(dict.fromkeys(texts)) == dict.fromkeys(("level", "rate", "count", "log_frequency"))


def test_the_file_cannot_be_moved() -> None:
    error = refused(trace_file=["/etc/passwd"])

    assert error.code is Code.UNSUPPORTED
    assert "trace file location can not be updated through network protocol" in error.message


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": ["MAX"]}, "no trace level 'MAX'"),
        ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": ["-1"]}, "'trace_rate', value is out of range [ 0, 4294967295 ], got: -1"),
        ({"trace_rate": ["4294967296"]}, "out of range"),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"trace_count": ["2147483648"]}, "out of range [ -1, 2147483647 ]"),
        ({"log_frequency": ["1", "2"]}, "expect only 1 value for 'log_frequency'"),
        ({"trace_mode": ["triton"]}, "no trace setting 'trace_mode'"),
    ],
)
def test_what_is_no_value_of_a_setting_is_refused(texts: dict[str, list[str]], part: str) -> None:
    error = refused(**texts)

    assert error.code is Code.INVALID_ARG
    assert part in error.message


changes = st.dictionaries(
    st.sampled_from(["rate", "count", "log_frequency"]), st.none() | st.integers(0, 5), max_size=3
)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), changes), max_size=8))
def test_what_is_cleared_everywhere_is_as_on_the_command_line(steps: list[tuple[str, dict[str, int | None]]]) -> None:
    table = SettingsTable(DEFAULT)
    for model, change in steps:
        table.change(model, change)
    for model in ("", "a", "b"):
        table.change(model, dict.fromkeys(("rate", "count", "log_frequency")))

    assert {table.of_server(), table.of_model("a"), table.of_model("b")} == {DEFAULT}
