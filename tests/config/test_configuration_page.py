"""docs/model_configuration.md says what the code does."""

import re
from pathlib import Path

import pytest

from charonia.config.backends import formats
from charonia.config.complete import normalise
from charonia.config.pbtxt import MAX_TEXT_CHARS, parse
from charonia.config.problems import check_problems
from charonia.core.errors import ServingError
from charonia.server.lifecycle.validation import INSTANCE_COUNT_MAX, validate
from charonia.server.scheduling.configuration import PRIORITY_LEVELS_MAX

PAGE = (Path(__file__).parents[2] / "docs" / "model_configuration.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```pbtxt\n(.*?)```", PAGE, re.DOTALL)[0]


def test_the_example_is_valid() -> None:
    config = normalise(parse(EXAMPLE), name="digits", gpu_count=0, default_instance_count=1)

    assert validate(config, gpu_count=0) == []


def test_the_errors_shown_are_the_errors_made() -> None:
    texts = (
        'name: "m"\n\nmax_bach_size: 8',
        "input_pinned_memory { enable: true }",
        "\n" * 6 + "            input { data_type: TYPE_BYTES }",
    )

    for text in texts:
        with pytest.raises(ServingError) as caught:
            parse(text)
        assert f"{caught.value}\n" in PAGE


def test_the_problems_shown_are_the_problems_found() -> None:
    text = EXAMPLE.replace("1, 28, 28", "1, 0, 28").replace("KIND_CPU", "KIND_GPU")
    config = normalise(
        parse(text.replace("max_queue_delay_microseconds: 500", "preferred_batch_size: [8, 16]")),
        name="digits",
        gpu_count=0,
        default_instance_count=1,
    )

    with pytest.raises(ServingError) as caught:
        check_problems("digits", validate(config, gpu_count=0))

    assert f"```\n{caught.value.message}\n```" in PAGE


def test_the_table_lists_the_formats() -> None:
    rows = re.findall(r"^ +\| `(\S+)` \| (\w+) \| (\w*) ?\|$", PAGE, re.MULTILINE)

    assert rows == [(form.filename, form.backend, form.platform) for form in formats()]


def test_the_limits_are_the_limits() -> None:
    assert f"at most {MAX_TEXT_CHARS >> 20} Mi characters" in PAGE
    assert f"at most {INSTANCE_COUNT_MAX} instances" in PAGE
    assert f"at most {PRIORITY_LEVELS_MAX} priority levels" in PAGE
