from collections.abc import Callable

import pytest

from charonia.core.errors import Code, ServingError, internal, invalid, not_found, unavailable, unsupported


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (invalid, Code.INVALID_ARG),
        (not_found, Code.NOT_FOUND),
        (unavailable, Code.UNAVAILABLE),
        (unsupported, Code.UNSUPPORTED),
        (internal, Code.INTERNAL),
    ],
)
def test_each_kind_of_problem_has_its_code(make: Callable[..., ServingError], code: Code) -> None:
    error = make("it broke", hint="mend it")

    assert (error.code, error.message, error.hint) == (code, "it broke", "mend it")


def test_the_text_of_an_error_ends_with_the_hint_if_there_is_one() -> None:
    assert str(invalid("it broke", hint="mend it")) == "it broke (hint: mend it)"
    assert str(invalid("it broke")) == "it broke"


def test_an_error_shows_its_code() -> None:
    assert repr(invalid("it broke")) == "ServingError(INVALID_ARG, 'it broke')"
