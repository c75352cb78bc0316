import dataclasses
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from charonia.cli.command_line import Option
from charonia.cli.serve import parse
from charonia.cli.serve_options import LINE, METRICS_SETTINGS, TRACE_SETTINGS, UNSUPPORTED
from charonia.core.errors import ServingError
from charonia.server.model_options import ControlMode
from charonia.server.options import FRONT_ENDS_AUTO, CompressionLevel, ServerOptions
from charonia.wire.log_settings import AccessLogFormat, LogFormat

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
KNOWN = {option.name for option in (*LINE.options(), *UNSUPPORTED)}


def options(*arguments: str) -> ServerOptions:
    return parse(["models", *arguments], {})[0]


def here(name: str) -> str:
    return str(Path.cwd() / name)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ServingError) as caught:
        parse(["models", *arguments], {})
    return caught.value.message.splitlines()


def notes(*arguments: str) -> tuple[str, ...]:
    return parse(["models", *arguments], {})[1]


def test_without_options_everything_is_as_by_default() -> None:
    chosen, remarks = parse(["--model-repository=models"], {})

    assert chosen.models.repositories == (here("models"),)
    assert chosen.http == replace(ServerOptions().http, address="")
    assert chosen.grpc == replace(ServerOptions().grpc, address="")
    assert remarks == ()


def test_repositories_given_in_different_ways_add_up() -> None:
    arguments = ["--model-store=old", "c", "--model-repository", "a", "--model-repository=b", "d"]

    assert parse(arguments, {})[0].models.repositories == tuple(map(here, ("a", "b", "c", "d", "old")))


def test_a_repository_must_be_given_and_be_a_folder_or_a_store() -> None:
    with pytest.raises(ServingError, match="--model-repository must be specified"):
        parse([], {})
    assert "s3://bucket/models" in options("--model-repository=s3://bucket/models").models.repositories
    assert problems("--model-repository=ftp://host/models") == [
        "--model-repository: model repository 'ftp://host/models': expected a folder or a URI that begins with one of "
        "s3://, s3+https://, s3+http://, oss://, cos://, obs://, tos://, r2://, gs://, as://, az://, abfs://, "
        "abfss://, https://"
    ]
    assert problems("--model-repository=") == ["--model-repository: expected a value, got ''"]


@pytest.mark.parametrize("word", ["true", "1", "on", "yes", "TRUE", "On"])
def test_words_for_true(word: str) -> None:
    assert options("--reuse-http-port", word).http.reuse_port is True


@pytest.mark.parametrize("word", ["false", "0", "off", "no", "False"])
def test_words_for_false(word: str) -> None:
    assert options(f"--exit-on-error={word}").exit_on_error is False


def test_other_words_are_neither() -> None:
    assert problems("--exit-on-error=maybe") == ["--exit-on-error: expected true or false, got 'maybe'"]


@pytest.mark.parametrize("text", ["-1", "65536", "eighty", "", "1.5"])
def test_a_port_is_a_number_up_to_65535(text: str) -> None:
    assert problems(f"--http-port={text}") == [f"--http-port: expected an integer from 0 to 65535, got '{text}'"]


@pytest.mark.parametrize(("text", "level"), [("0", 0), ("1", 1), ("2147483647", 2**31 - 1), ("true", 1), ("off", 0)])
def test_verbosity_is_a_level_or_a_word(text: str, level: int) -> None:
    assert options("--log-verbose", text).log.verbose == level


def test_front_ends_are_a_number_or_chosen() -> None:
    assert options("--front-ends=4").front_ends == 4
    assert options("--front-ends=Auto").front_ends == FRONT_ENDS_AUTO
    assert problems("--front-ends=all") == ["--front-ends: expected auto or an integer from 0 to 64, got 'all'"]
    assert problems("--front-ends=-1") == ["--front-ends: expected auto or an integer from 0 to 64, got '-1'"]


def test_choices_are_read_in_any_case() -> None:
    chosen = options(
        "--model-control-mode=EXPLICIT",
        "--load-model=*",
        "--log-format=iso8601",
        "--access-log=JSON",
        "--grpc-infer-response-compression-level=High",
    )

    assert chosen.models.control_mode is ControlMode.EXPLICIT
    assert chosen.log.format is LogFormat.ISO8601
    assert chosen.log.access is AccessLogFormat.JSON
    assert chosen.grpc.response_compression is CompressionLevel.HIGH
    assert problems("--model-control-mode=pull") == [
        "--model-control-mode: expected none or poll or explicit or auto, got 'pull'"
    ]


def test_models_to_load_are_repeatable() -> None:
    chosen = options("--model-control-mode=explicit", "--load-model=a", "--load-model", "b")

    assert chosen.models.load == ("a", "b")


def test_automatic_completion_is_on_unless_one_of_two_options_says_no() -> None:
    assert options().models.auto_complete is True
    assert options("--disable-auto-complete-config").models.auto_complete is False
    assert options("--strict-model-config=true").models.auto_complete is False
    assert options("--strict-model-config=false").models.auto_complete is True


def test_backend_settings_are_kept_by_backend_and_the_global_ones_apart() -> None:
    chosen = options(
        "--backend-config=onnxruntime,intra_op_thread_count=2",
        "--backend-config=default-max-batch-size=8",
        "--backend-config=python,flags=a=b,c=d",
        "--backend-config=onnxruntime,intra_op_thread_count=4",
    )

    assert chosen.backends == {
        "onnxruntime": {"intra_op_thread_count": "4"},
        "": {"default-max-batch-size": "8"},
        "python": {"flags": "a=b,c=d"},
    }


@pytest.mark.parametrize("text", ["onnxruntime", "onnxruntime,x", "=3", ",x=3", "onnxruntime,=3"])
def test_a_backend_setting_has_a_name_and_a_value(text: str) -> None:
    assert problems(f"--backend-config={text}") == [
        f"--backend-config: expected <name>,<key>=<value> or <key>=<value>, got '{text}'"
    ]


@pytest.mark.parametrize(
    ("text", "reaction"),
    [
        ("--htp-port=80", "unknown option '--htp-port' (hint: did you mean --http-port?)"),
        ("--model-repositry=m", "unknown option '--model-repositry' (hint: did you mean --model-repository?)"),
        ("--xyzzy", "unknown option '--xyzzy' (hint: charonia serve --help lists the options)"),
        ("-v", "unknown option '-v' (hint: charonia serve --help lists the options)"),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion(text: str, reaction: str) -> None:
    assert problems(text) == [reaction]


def test_a_unique_prefix_of_an_option_is_enough() -> None:
    assert options("--log-warn=false").log.warning is False
    assert problems("--log-f=x") == ["option '--log-f' is ambiguous: --log-file, --log-format"]


def test_all_problems_are_reported_at_once() -> None:
    assert problems("--htp-port=80", "--grpc-port=x", "--model-load-gpu-limit=0:1", "--load-model=a") == [
        "unknown option '--htp-port' (hint: did you mean --http-port?)",
        "--grpc-port: expected an integer from 0 to 65535, got 'x'",
        "--model-load-gpu-limit=0:1: models are not limited to a share of a GPU's memory",
        "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
    ]


def test_a_server_without_any_api_is_refused() -> None:
    assert problems("--allow-http=false", "--allow-grpc=false") == [
        "at least one of --allow-http and --allow-grpc must be true"
    ]


@pytest.mark.parametrize("text", ["--http-thread-count=16", "--cuda-memory-pool-byte-size=1", "--cache-directory=/x"])
def test_an_option_that_only_tunes_triton_is_accepted_with_a_note(text: str) -> None:
    (note,) = notes(text)

    assert note.startswith(f"{text.partition('=')[0]} has no effect: ")


@pytest.mark.parametrize(
    "text",
    [
        "--min-supported-compute-capability=8.0",
        "--model-load-gpu-limit=0:0.5",
    ],
)
def test_an_option_that_asks_for_what_is_not_there_is_refused_with_the_reason(text: str) -> None:
    (problem,) = problems(text)

    assert problem.startswith(f"{text}: ")


def test_an_old_form_of_an_option_works_and_says_what_replaces_it() -> None:
    assert notes("--trace-level=OFF") == ("--trace-level is deprecated: use --trace-config level=LEVEL",)
    assert notes("--model-store=models") == ("--model-store is deprecated: use --model-repository",)
    assert options("--trace-level=OFF") == options()


@pytest.mark.parametrize(
    "text",
    [
        "--rate-limit=off",
        "--model-namespacing=false",
        "--allow-sagemaker=0",
        "--allow-vertex-ai=false",
    ],
)
def test_an_option_that_asks_for_what_happens_anyway_is_accepted_in_silence(text: str) -> None:
    assert notes(text) == ()
    assert options(text) == options()


def test_quoting_of_log_messages_can_be_switched_off_by_the_environment() -> None:
    assert parse(["models"], {})[0].log.escape is True
    assert parse(["models"], {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"})[0].log.escape is False
    assert parse(["models"], {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "1"})[0].log.escape is True


def other_text(option: Option) -> str:
    default = LINE.default_text(option)
    if default in ("true", "false"):
        return "false" if default == "true" else "true"
    if default.removeprefix("-").isdecimal():
        return str(int(default) - 1) if int(default) > 1 else "2"
    if option.metavar.startswith("API"):
        return "health:key=value"
    if "|" in option.metavar:
        return next(word for word in option.metavar.split("|") if word != default)
    if option.metavar.startswith("ORIGIN"):
        return "https://example.org"
    texts = {
        "[BACKEND,]KEY=VALUE": "a=b",
        "NAME:COUNT[:DEVICE]": "R:2",
        "NAME,KEY=VALUE": "cpu,cpu-cores=0-1",
        "FIRST-LAST": "1-65535",
        "SHARE": "0.5",
        "[FILE.py:]APP:/PATH": "app.py:app:/ui",
    }
    return texts.get(option.metavar, "other")


@pytest.mark.parametrize("option", [o for o in LINE.options() if o.field and o.metavar], ids=lambda option: option.name)
def test_every_option_changes_its_field_and_no_other(option: Option) -> None:
    needed = {
        "http.tls.enabled": ("--http-server-cert=c", "--http-server-key=k"),
        "http.tls.mutual": ("--http-server-cert=c", "--http-server-key=k", "--http-root-cert=r"),
        "grpc.tls.enabled": ("--grpc-server-cert=c", "--grpc-server-key=k"),
        "grpc.tls.mutual": ("--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"),
        "models.load": ("--model-control-mode=explicit",),
        **{
            f"models.auto.{field}": ("--model-control-mode=auto",)
            for field in ("memory_mb", "pinned", "waiting_max", "wait_secs")
        },
        "http.port": ("--grpc-port=9001",),
        "grpc.port": ("--http-port=9000",),
        "metrics.port": ("--grpc-port=9001",),
        "trace.level": ("--trace-file=traces.json",),
        "log.access_file": ("--access-log=text",),
        **{
            f"request_log.{field}": ("--request-log=folder",)
            for field in ("sample", "bytes_max", "headers", "redact", "hook")
        },
        "models.files.predictor": ("--predictor_host=other",),
        "replica_port": ("--front-ends=1",),
        "beside": ("--front-ends=1", "--replica-port=9000"),
    }.get(option.field, ())

    before, after = options(*needed), options(*needed, f"{option.name}={other_text(option)}")

    assert differing(before, after) == [option.field]


SHOWN = ("models.repositories", "log.file", "trace.file")
"""Fields that clients see as they are given."""


@pytest.mark.parametrize(
    "option",
    [option for option in LINE.options() if option.metavar == "PATH" and option.field not in SHOWN],
    ids=lambda option: option.name,
)
def test_relative_paths_begin_at_the_current_folder(option: Option) -> None:
    needed = {"log.access_file": ("--access-log=text",)}.get(option.field, ())

    assert attrgetter(option.field)(options(*needed, f"{option.name}=some/file")) == here("some/file")


def test_relative_paths_in_settings_do_so_too() -> None:
    caches = "--cache-config=redis,host=h,cert=c,key=k,cacert=a,cacert_dir=d,user=u"
    given = options(
        *("--backend-config=python,environment-cache=e", "--backend-config=tensorrt,plugins=a/b.so;/c.so;libd.so"),
        *("--backend-config=mine,key=k", caches),
    )

    assert given.backends == {
        "python": {"environment-cache": here("e")},
        "tensorrt": {"plugins": f"{here('a/b.so')};/c.so;libd.so"},
        "mine": {"key": "k"},
    }
    redis = given.cache.redis
    assert redis is not None
    assert (redis.cert, redis.key, redis.cacert, redis.cacert_dir) == tuple(map(here, "ckad"))
    assert (redis.host, redis.user) == ("h", "u")


def differing(one: object, other: object, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in (field.name for field in dataclasses.fields(one)):  # type: ignore[arg-type]  # a record
        old, new = getattr(one, name), getattr(other, name)
        if dataclasses.is_dataclass(old):
            found += differing(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(prefix + name)
    return found


FIXED_LIMITS = (
    *("discard_bytes_max", "url_bytes_max", "header_count_max", "header_bytes_max", "chunk_count_max", "pipeline_max"),
    *("stream_unsent_bytes_max", "header_timeout_s", "body_timeout_s", "body_bytes_per_s_min", "write_timeout_s"),
    "idle_timeout_s",
)
"""Limits of HTTP that no option changes."""


def test_every_field_has_an_option() -> None:
    fields = {option.field for option in LINE.options() if option.field}
    of_others = {field for field, _ in (*TRACE_SETTINGS.values(), *METRICS_SETTINGS.values())} - fields

    in_cache_config = {"cache.local_bytes", "cache.redis"}
    inherited = {f"{endpoint}.descriptors" for endpoint in ("http", "grpc", "metrics")}
    fixed = {f"http.limits.{name}" for name in FIXED_LIMITS}
    assert leaves(ServerOptions()) - fields == {"log.escape"} | of_others | in_cache_config | inherited | fixed


def leaves(record: object, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name in (field.name for field in dataclasses.fields(record)):  # type: ignore[arg-type]  # a record
        value = getattr(record, name)
        found |= leaves(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else {prefix + name}
    return found


def test_the_page_documents_the_options_without_effect_and_the_refused_ones() -> None:
    page = PAGE.read_text(encoding="utf-8")

    rows = [f"| `{option.name}` | {option.unsupported} |" for option in UNSUPPORTED]
    assert [row for row in rows if row not in page] == []


def test_the_page_documents_nothing_that_does_not_exist() -> None:
    named = set(re.findall(r"`(--[a-z0-9_-]+)", PAGE.read_text(encoding="utf-8")))

    assert named - KNOWN - {"--help"} == set()


def test_a_service_of_knative_has_http_where_its_environment_says() -> None:
    knative = {"K_SERVICE": "iris", "PORT": "9000"}

    assert parse(["models"], knative)[0].http.port == 9000
    assert parse(["models", "--http_port=8080"], knative)[0].http.port == 8080
    assert parse(["models", "--port=7000"], knative)[0].http.port == 7000
    assert parse(["models"], {"PORT": "9000"})[0].http.port == 8000
    with pytest.raises(ServingError, match="environment variable PORT: expected an integer"):
        parse(["models"], knative | {"PORT": "x"})


def test_the_arguments_that_kserve_gives_are_understood() -> None:
    given = ("--predictor=iris", "--model_name", "pipe", "--predictor_host", "iris.prod", "--http_port", "8080")
    files = options(*given).models.files

    assert (files.predictor, files.model_name, files.predictor_host) == ("iris", "pipe", "iris.prod")
    assert problems("--predictor=iris") == ["--predictor: --predictor_host HOST says which server runs it"]
    assert problems("--model_name=a/b") == [
        "--model_name: expected a name without '/' that does not begin with '.', got 'a/b'"
    ]


def in_environment(*arguments: str, **environment: str) -> ServerOptions:
    return parse(("models", *arguments), environment)[0]


def test_in_an_environment_of_vertex_ai_its_endpoint_takes_the_place_of_the_others() -> None:
    found = in_environment(AIP_MODE="PREDICTION", AIP_HTTP_PORT="5234")
    assert (found.clouds.vertex_ai, found.clouds.vertex_ai_port) == (True, 5234)
    assert (found.http.enabled, found.grpc.enabled) == (False, False)

    found = in_environment("--allow-grpc=true", "--vertex-ai-port=1", AIP_MODE="PREDICTION", AIP_HTTP_PORT="5234")
    assert (found.clouds.vertex_ai_port, found.http.enabled, found.grpc.enabled) == (1, False, True)

    found = in_environment("--allow-vertex-ai=false", "--allow-http=true", AIP_MODE="PREDICTION")
    assert (found.clouds.vertex_ai, found.http.enabled) == (False, True)
    assert in_environment(AIP_HTTP_PORT="5234") == options()


def test_other_endpoints_keep_to_the_safe_ports_of_sagemaker() -> None:
    assert problems("--allow-sagemaker=true", "--sagemaker-safe-port-range=8001-9000") == [
        "The server cannot listen to HTTP requests at port 8000, allowed port range is [8001, 9000] "
        "(hint: --http-port, --sagemaker-safe-port-range)"
    ]
    assert problems("--allow-sagemaker=true", "--sagemaker-safe-port-range=8000") == [
        "--sagemaker-safe-port-range: expected FIRST-LAST, such as 8081-9000, got '8000'"
    ]
    assert problems("--allow-sagemaker=true", "--sagemaker-port=8000") == [
        "--sagemaker-port: port 8000 is already that of --http-port"
    ]
    assert problems("--allow-sagemaker=true", "--front-ends=2") == [
        "--allow-sagemaker, --allow-vertex-ai: expected --front-ends=0, a server of one process"
    ]
