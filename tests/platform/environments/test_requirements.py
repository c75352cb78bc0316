"""What an environment is to have, as it is written and as a script states it."""

import pytest

from charonia.core.errors import ServingError
from charonia.platform.environments.requirements import LINES_MAX, check_python, read_requirements, read_script

SCRIPT = """\
# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "pillow>=10",
#   "charonia[torch]",
# ]
# ///
import PIL
"""


def test_lines_are_packages_options_and_comments() -> None:
    found = read_requirements(
        "# those of the reader\npillow>=10  # pictures\n\n--extra-index-url https://example.org/simple\n"
    )

    assert found.lines == ("pillow>=10", "--extra-index-url https://example.org/simple")
    assert (found.names, found.extras) == (("pillow",), ())


def test_extras_of_the_server_are_united_and_its_release_is_not_chosen() -> None:
    found = read_requirements("charonia[torch]==0.0.1\nCharonia[openai,torch]\nnumpy")

    assert (found.lines, found.extras) == (("numpy",), ("openai", "torch"))


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ServingError) as raised:
        read_requirements("pillow >>= 3\nnumpy\n-r other.txt\n-e .\n")

    assert [":".join(line.split(":")[:2]) for line in raised.value.message.splitlines()] == [
        "requirements: line 1",
        "requirements: line 3",
        "requirements: line 4",
    ]


def test_there_is_a_limit_of_lines() -> None:
    with pytest.raises(ServingError, match=f"at most {LINES_MAX} lines"):
        read_requirements("numpy\n" * (LINES_MAX + 1))


def test_equal_requirements_share_a_folder_in_any_order() -> None:
    first, second = read_requirements("numpy\npillow>=10"), read_requirements("pillow>=10\n# one more\nnumpy")

    assert first.digest("3.11", "charonia==1", ()) == second.digest("3.11", "charonia==1", ())
    others = {first.digest("3.12", "charonia==1", ()), first.digest("3.11", "charonia==2", ())}
    others.add(read_requirements("numpy\npillow>=10\ncharonia[torch]").digest("3.11", "charonia==1", ()))
    others.add(first.digest("3.11", "charonia==1", ("PIL",)))
    assert len(others | {first.digest("3.11", "charonia==1", ())}) == 5


def test_a_script_states_its_dependencies() -> None:
    python, text = read_script(SCRIPT.replace("\n", "\r\n"))

    assert (python, read_requirements(text).extras, read_requirements(text).lines) == (
        "3.12",
        ("torch",),
        ("pillow>=10",),
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("import PIL\n", "states no dependencies"),
        ("# /// script\n# dependencies = [\n# ///\n", "not valid TOML"),
        ('# /// script\n# dependencies = "numpy"\n# ///\n', "expected a list of strings"),
        ('# /// script\n# requires-python = "newest"\n# ///\n', "expected text such as '>=3.11', got 'newest'"),
        ('# /// script\n# requires-python = "<3.8"\n# ///\n', "3.8 or newer"),
    ],
)
def test_a_script_that_states_them_badly_is_refused(content: str, problem: str) -> None:
    with pytest.raises(ServingError, match=problem):
        read_script(content)


def test_the_first_version_of_python_is_the_default_and_others_must_be_known() -> None:
    assert check_python("", ("3.12", "3.11")) == "3.12"
    with pytest.raises(ServingError, match=r"expected one of 3.12, 3.11, got '2.7'"):
        check_python("2.7", ("3.12", "3.11"))
