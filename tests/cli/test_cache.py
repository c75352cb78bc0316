import pytest

from charonia.cli.serve import parse
from charonia.cli.serve_options import with_cache


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CHARONIA_CACHE": "/c"}, "/c/environments"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/charonia/environments"),
        ({"CHARONIA_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c/environments"),
        ({"CHARONIA_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/charonia/environments"),
    ],
)
def test_variables_name_the_folder_of_environments(environment: dict[str, str], folder: str) -> None:
    settings = {"": {"a": "1"}, "python": {"b": "2"}}

    assert with_cache(settings, environment) == {"": {"a": "1"}, "python": {"b": "2", "environment-cache": folder}}
    assert settings == {"": {"a": "1"}, "python": {"b": "2"}}


def test_without_variables_nothing_is_set() -> None:
    assert with_cache({}, {}) == {}


@pytest.mark.parametrize("backend", ["", "python"])
def test_a_folder_that_was_given_counts_more(backend: str) -> None:
    settings = {backend: {"environment-cache": "/given"}}

    assert with_cache(settings, {"CHARONIA_CACHE": "/c"}) == settings


def test_the_command_line_reads_the_variable() -> None:
    options, _ = parse(["models"], {"CHARONIA_CACHE": "/c"})

    assert options.backends == {"python": {"environment-cache": "/c/environments"}}
