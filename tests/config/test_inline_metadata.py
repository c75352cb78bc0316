"""Inline script metadata: dependencies that a file names in itself."""

import pytest

from charonia.config.inline_metadata import InlineMetadata, inline_metadata
from charonia.core.errors import ServingError


def block(*lines: str) -> str:
    return "import os\n# /// script\n" + "".join(f"# {line}\n" for line in lines) + "# ///\nx = 1\n"


def test_a_block_names_dependencies_and_python() -> None:
    found = inline_metadata(block('requires-python = ">=3.11"', "dependencies = [", '  "torch",', "]"), "a.py")

    assert found == InlineMetadata(("torch",), ">=3.11")


def test_a_file_without_a_block_names_nothing() -> None:
    assert inline_metadata("# script\nimport os\n", "a.py") is None


def test_lines_may_end_as_on_windows() -> None:
    assert inline_metadata(block('dependencies = ["a"]').replace("\n", "\r\n"), "a.py") == InlineMetadata(("a",))


def test_this_package_is_there_anyway() -> None:
    found = inline_metadata(block('dependencies = ["Charonia>=0.1", "charonia[torch]", "charonia-tools"]'), "a.py")

    assert found is not None
    assert found.packages == ("charonia-tools",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (block("dependencies = ["), "the block '# /// script' is not valid TOML"),
        (block('dependencies = "torch"'), "dependencies: expected a list of strings, got 'torch'"),
        (block("requires-python = 3"), "requires-python: expected text such as '>=3.11', got 3"),
        (block('requires-python = "new"'), "requires-python: expected text such as '>=3.11', got 'new'"),
        (block("x = 1") + block("y = 2"), "expected one block '# /// script', got 2"),
    ],
)
def test_a_block_that_is_no_metadata_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ServingError) as caught:
        inline_metadata(text, "'a.py'")

    assert caught.value.message.startswith(f"'a.py': {reason}")


@pytest.mark.parametrize(
    ("specifier", "accepted", "refused"),
    [
        (">=3.11", [(3, 11), (3, 12, 1)], [(3, 10, 9)]),
        (">=3.9,<3.13", [(3, 12, 9)], [(3, 13), (3, 13, 0), (3, 8)]),
        ("==3.11.*", [(3, 11, 7)], [(3, 12, 0)]),
        ("!=3.11.*", [(3, 12, 0)], [(3, 11, 7)]),
        ("~=3.11", [(3, 11), (3, 12)], [(3, 10), (4, 0)]),
        ("==3.11.7", [(3, 11, 7)], [(3, 11, 8)]),
        (">3.11", [(3, 11, 1)], [(3, 11, 0)]),
        ("<=3.12", [(3, 12)], [(3, 12, 1)]),
        ("", [(3, 8)], []),
    ],
)
def test_a_specifier_accepts_versions(
    specifier: str, accepted: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    wanted = InlineMetadata(requires_python=specifier)

    assert all(wanted.accepts(version) for version in accepted)
    assert not any(wanted.accepts(version) for version in refused)
