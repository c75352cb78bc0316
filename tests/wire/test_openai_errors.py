"""Errors in the form of OpenAI's API: their status."""

from charonia.core.errors import Code, invalid, too_large, unsupported
from charonia.wire.openai_answer import openai_status


def test_a_body_that_is_too_large_has_its_own_status() -> None:
    assert openai_status(too_large("the body is too large")) == 413


def test_what_is_wrong_or_not_supported_is_the_fault_of_the_client() -> None:
    assert too_large("").code is Code.INVALID_ARG
    assert [openai_status(error) for error in (invalid("wrong"), unsupported("not offered"))] == [400, 400]
