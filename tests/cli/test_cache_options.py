import pytest

from charonia.cli.serve import parse
from charonia.core.errors import ServingError
from charonia.server.options import ServerOptions
from charonia.server.rate_limiter.options import RateLimitMode, ResourceLimit
from charonia.server.response_cache.options import CacheOptions, RedisOptions


def options(*arguments: str) -> ServerOptions:
    return parse([*arguments, "models"], {})[0]


def problem(*arguments: str) -> str:
    with pytest.raises(ServingError) as caught:
        options(*arguments)
    return caught.value.message


@pytest.mark.parametrize(
    "arguments",
    [("--cache-config=local,size=5",), ("--cache-config", "local,size=5"), ("--response-cache-byte-size=5",)],
)
def test_a_local_cache_has_a_size_in_the_old_and_the_new_form(arguments: tuple[str, ...]) -> None:
    assert options(*arguments).cache.size == 5


def test_settings_of_redis_may_be_given_together_or_one_by_one_and_the_last_one_counts() -> None:
    expected = CacheOptions(redis=RedisOptions("h", 7, password="a,B=c"))

    assert options("--cache-config=redis,host=h,port=7,password=a,B=c").cache == expected
    assert (
        options(
            *(
                "--cache-config=redis,host=x,port=7",
                "--cache-config=redis,host=h",
                "--cache-config=redis,password=a,B=c",
            )
        ).cache
        == expected
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cache-config=local",), "expected <cache>,<key>=<value>, e.g. local,size=1048576"),
        (("--cache-config=local,size",), "expected <cache>,<key>=<value>"),
        (("--cache-config=,size=1",), "expected <cache>,<key>=<value>"),
        (("--cache-config=local,size=-1",), "expected an integer from 1"),
        (("--cache-config=local,size=1", "--cache-config=redis,host=h"), "found multiple cache configurations"),
        (("--cache-config=local,size=1", "--response-cache-byte-size=1"), "give only one of them"),
        (("--cache-config=other,a=b",), "expected the cache local or redis"),
        (("--rate-limit=on",), "expected off or execution_count, got 'on'"),
        (("--rate-limit-resource=R",), "expected <name>:<count> or <name>:<count>:<device>, got 'R'"),
        (("--rate-limit-resource=R:x",), "expected an integer"),
        (("--rate-limit-resource=R:1:x",), "expected an integer"),
        (("--rate-limit-resource=R:1:0:0",), "expected <name>:<count>"),
        (("--rate-limit-resource=:1",), "expected <name>:<count>"),
        (("--rate-limit-resource=R:1", "--rate-limit-resource=R:2"), "'R' is given as 1 and as 2"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in problem(*arguments)


def test_a_password_is_never_shown() -> None:
    assert "secret" not in problem("--cache-config=redis,password=secret,port=x")


def test_resources_are_read_with_and_without_a_device() -> None:
    given = options(
        "--rate-limit=execution_count", "--rate-limit-resource=R:1", "--rate-limit-resource=Q:2:3"
    ).rate_limit

    assert given.mode is RateLimitMode.EXECUTION_COUNT
    assert given.resources == (ResourceLimit("R", 1), ResourceLimit("Q", 2, 3))
    assert not options().rate_limit.is_on
