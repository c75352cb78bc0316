"""Options of the response cache and the rate limiter, and warm-up samples that do not fit."""

import pytest

from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.server.lifecycle.validation import warmup_problems
from charonia.server.options import ServerOptions
from charonia.server.rate_limiter.options import RateLimitMode, RateLimitOptions, ResourceLimit
from charonia.server.response_cache.options import (
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    CacheOptions,
    RedisOptions,
    cache_options,
)


def refusal(name: str, **settings: str) -> str:
    with pytest.raises(ServingError) as caught:
        cache_options(name, settings, {})
    return caught.value.message


def test_a_local_cache_has_a_size() -> None:
    assert cache_options("local", {"size": "1048576"}, {}) == CacheOptions(local_bytes=1048576)
    assert CacheOptions(byte_size=5).size == CacheOptions(local_bytes=5).size == 5


def test_every_setting_of_redis_is_read() -> None:
    text = {
        "host": "h",
        "port": "1",
        "user": "u",
        "password": "p,=",
        "db": "2",
        "connect_timeout": "3",
        "socket_timeout": "4",
        "pool_size": "5",
        "wait_timeout": "6",
        "ttl": "7",
        "tls_enabled": "true",
        "cert": "c",
        "key": "k",
        "cacert": "a",
        "cacert_dir": "d",
        "sni": "n",
    }

    assert cache_options("redis", text, {}).redis == RedisOptions(
        *("h", 1, "u", "p,=", 2, 3, 4, 5, 6, 7, True, "c", "k", "a", "d", "n")
    )


def test_defaults_of_redis_have_limits_and_0_means_the_default() -> None:
    text = {"host": "h", "connect_timeout": "0", "socket_timeout": "0", "wait_timeout": "0"}

    assert cache_options("redis", text, {}).redis == RedisOptions("h")


def test_user_and_password_may_come_from_the_environment() -> None:
    environment = {USER_VARIABLE: "u", PASSWORD_VARIABLE: "p"}

    from_there = cache_options("redis", {"host": "h"}, environment).redis
    given = cache_options("redis", {"host": "h", "username": "v", "password": "q"}, environment).redis

    assert from_there == RedisOptions("h", user="u", password="p")
    assert given == RedisOptions("h", user="v", password="q")


def test_everything_that_is_wrong_is_said_at_once_and_never_the_password() -> None:
    message = refusal("redis", prot="1", port="0", tls_enabled="maybe", cert="c", password="secret", ttl="-1")

    for part in (
        "--cache-config=redis,prot: there is no such setting, expected one of host, port",
        "--cache-config=redis,host: must be given",
        "--cache-config=redis,port: expected an integer from 1 to 65535, got '0'",
        "--cache-config=redis,tls_enabled: expected true or false, got 'maybe'",
        "--cache-config=redis: cert and key belong together",
        "--cache-config=redis,ttl: expected an integer",
    ):
        assert part in message
    assert "secret" not in message
    assert "secret" not in repr(RedisOptions("h", password="secret"))


@pytest.mark.parametrize("settings", [{}, {"size": "0"}, {"size": "x"}, {"size": "1", "host": "h"}])
def test_a_local_cache_without_a_size_or_with_another_setting_is_refused(settings: dict[str, str]) -> None:
    assert refusal("local", **settings).startswith("--cache-config=local,")


def test_an_unknown_cache_is_refused() -> None:
    assert "there is no such cache, expected local or redis" in refusal("memcached", host="h")


def test_the_old_and_the_new_form_together_are_refused() -> None:
    with pytest.raises(ServingError, match="give only one of them"):
        ServerOptions(cache=CacheOptions(local_bytes=1, byte_size=1))
    with pytest.raises(ServingError, match="give only one of them"):
        ServerOptions(cache=CacheOptions(redis=RedisOptions("h"), byte_size=1))


def test_a_resource_that_is_given_twice_must_be_given_alike() -> None:
    same = (ResourceLimit("R", 1), ResourceLimit("R", 1), ResourceLimit("R", 2, 0))
    assert ServerOptions(rate_limit=RateLimitOptions(RateLimitMode.EXECUTION_COUNT, same)).rate_limit.is_on

    with pytest.raises(ServingError) as caught:
        ServerOptions(rate_limit=RateLimitOptions(resources=(*same, ResourceLimit("R", 3), ResourceLimit("R", 3, 0))))

    assert caught.value.message == (
        "--rate-limit-resource: 'R' is given as 1 and as 3\n"
        "--rate-limit-resource: 'R' of device 0 is given as 2 and as 3"
    )


INPUTS = (
    'input { name: "A" data_type: TYPE_FP32 dims: [ 2, -1 ] } '
    'input { name: "B" data_type: TYPE_INT64 dims: [ 1 ] optional: true } max_batch_size: 4 '
)
GOOD = '{ key: "A" value { data_type: TYPE_FP32 dims: [ 2, 5 ] zero_data: true } }'


def problems(sample: str, more: str = "") -> list[tuple[str, str]]:
    config = parse(f"{INPUTS} {more} model_warmup {{ {sample} }}")
    return [(problem.path.removeprefix("model_warmup[0]"), problem.message) for problem in warmup_problems(config)]


def test_a_sample_that_fits_has_no_problem() -> None:
    optional = 'inputs { key: "B" value { data_type: TYPE_INT64 dims: [ 1 ] random_data: true } }'

    assert problems(f'name: "s" batch_size: 4 inputs {GOOD} {optional}') == []


@pytest.mark.parametrize(
    ("sample", "path", "message"),
    [
        (f"batch_size: 1 inputs {GOOD}", ".name", "must specify 'name'"),
        (f'name: "s" batch_size: 5 inputs {GOOD}', ".batch_size", "must not exceed max_batch_size 4, got 5"),
        ('name: "s" batch_size: 1', ".inputs", "must specify 'inputs'"),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { dims: [ 2, 5 ] zero_data: true } }',
            *(".inputs[A].data_type", "must specify 'data_type'"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 2, 5 ] } }',
            *(".inputs[A]", "must specify one of zero_data, random_data and input_data_file"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP16 dims: [ 2, 5 ] zero_data: true } }',
            *(".inputs[A].data_type", "must be TYPE_FP32, got TYPE_FP16"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 3, 5 ] zero_data: true } }',
            *(".inputs[A].dims", "must have dims [2, -1], got [3, 5]"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "B" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }',
            *(".inputs", "lacks input 'A'"),
        ),
        (
            f'name: "s" batch_size: 1 inputs {GOOD} '
            'inputs { key: "C" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }',
            *(".inputs[C]", "is not an input of the model, which has A, B"),
        ),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_with_its_path(sample: str, path: str, message: str) -> None:
    ((where, said),) = problems(sample)

    assert where == path
    assert message in said


def test_a_name_is_given_once() -> None:
    sample = f"model_warmup {{ name: 's' batch_size: 1 inputs {GOOD} }} "
    config = parse(INPUTS + 2 * sample)

    assert [problem.path for problem in warmup_problems(config)] == ["model_warmup[0].name", "model_warmup[1].name"]


def test_a_sample_of_a_sequence_model_brings_the_inputs_that_its_scheduler_would_add() -> None:
    sequence = 'sequence_batching { control_input { name: "START" } state { input_name: "S" output_name: "T" } }'
    extra = " ".join(
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }} }}'
        for name in ("START", "S")
    )

    assert problems(f'name: "s" batch_size: 1 inputs {GOOD} {extra}', sequence) == []
