"""What an endpoint asks of its callers, as options."""

import pytest

from charonia.core.errors import ServingError
from charonia.server.access.options import AccessOptions, read_restriction
from charonia.server.access.rules import Api, Restriction
from charonia.server.options import GrpcOptions, HttpOptions, ServerOptions


def test_a_restriction_names_parts_a_header_and_its_value() -> None:
    read = read_restriction("model-repository, health:X-Key=a=b:c")

    assert read == Restriction((Api.MODEL_REPOSITORY, Api.HEALTH), "X-Key", "a=b:c")


@pytest.mark.parametrize("text", ["", "health", "health:x", "health:x=", "health:=y", ":x=y", "health: =y"])
def test_a_restriction_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected <api>\[,<api>\]:<header>=<value>"):
        read_restriction(text)


def test_an_unknown_part_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown API 'models': expected of health, metadata, inference"):
        read_restriction("health,models:x=y")


@pytest.mark.parametrize("texts", [("health:a=b", "inference,health:c=d"), ("health,health:a=b",)])
def test_a_part_is_in_one_group_only(texts: tuple[str, ...]) -> None:
    access = AccessOptions(tuple(read_restriction(text) for text in texts))

    with pytest.raises(ServingError, match="--http-restricted-api: 'health' can not be specified in multiple"):
        ServerOptions(http=HttpOptions(access=access))
    with pytest.raises(ServingError, match="--grpc-restricted-protocol: 'health' can not be specified in multiple"):
        ServerOptions(grpc=GrpcOptions(access=access))


def test_a_pattern_that_is_none_is_reported_with_its_option() -> None:
    with pytest.raises(ServingError, match="--grpc-header-forward-pattern: expected a regular expression"):
        ServerOptions(grpc=GrpcOptions(access=AccessOptions(header_forward_pattern="((")))
