import pytest

from charonia.core.errors import ServingError
from charonia.server.options import ServerOptions
from charonia.server.rate_limiter.options import RateLimitMode, RateLimitOptions, ResourceLimit


def test_a_resource_that_is_given_twice_must_be_given_alike() -> None:
    same = (ResourceLimit("R", 1), ResourceLimit("R", 1), ResourceLimit("R", 2, 0))
    assert ServerOptions(rate_limit=RateLimitOptions(RateLimitMode.EXECUTION_COUNT, same)).rate_limit.is_on

    with pytest.raises(ServingError) as caught:
        ServerOptions(rate_limit=RateLimitOptions(resources=(*same, ResourceLimit("R", 3), ResourceLimit("R", 3, 0))))

    assert caught.value.message == (
        "--rate-limit-resource: 'R' is given as 1 and as 3\n"
        "--rate-limit-resource: 'R' of device 0 is given as 2 and as 3"
    )
