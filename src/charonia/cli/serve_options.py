"""Every option of `charonia serve`, a line each: the one place to add one.

Names and defaults are tritonserver's, and an option's default that of its field in `ServerOptions`. Start scripts use
options that do not apply here: one that only tunes tritonserver's internals is accepted, with a warning; one that
requests an unsupported behaviour is refused. Options of other servers lead to their equivalents here.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia.cli.command_line import CommandLine, Fields, Option, flag, ignored_options, joined, refused
from charonia.cli.values import (
    FALSE,
    TRUE,
    assignment,
    boolean,
    choice,
    filled,
    integer,
    name_and_value,
    names,
    number,
    path_or_none,
    path_text,
)
from charonia.config.backends import PYTHON
from charonia.core.errors import ServingError
from charonia.core.trace import TraceLevel
from charonia.server.access.options import read_restriction
from charonia.server.files.options import BATCH_SIZE_MAX, CONTEXT_MAX, WORKERS_MAX, read_mount
from charonia.server.files.served_files import split_name
from charonia.server.machine.cores import read_policies
from charonia.server.model_options import (
    DOWNLOADS_MAX,
    IDLE_SECS_MAX,
    MEMORY_MB_MAX,
    WAIT_SECS_MAX,
    WAITING_MAX,
    ControlMode,
    ReadyWhen,
)
from charonia.server.options import (
    ALL_INTERFACES,
    BUSY_POLL_US_MAX,
    CPU_CORES_MAX,
    FRONT_ENDS_AUTO,
    FRONT_ENDS_MAX,
    GRPC_INPUT_BYTES_MAX,
    PORT_MAX,
    CompressionLevel,
    ServerOptions,
)
from charonia.server.rate_limiter.options import RateLimitMode, ResourceLimit
from charonia.server.response_cache.options import CACHE_BYTES_MAX, cache_options
from charonia.server.tracing.sampling import TraceMode
from charonia.stores.location import StoreKind, is_store, parse_address
from charonia.wire.log_settings import VERBOSE_MAX, AccessLogFormat, LogFormat
from charonia.wire.orca import LOAD_METRICS

CACHE_VARIABLE = "CHARONIA_CACHE"
"""Environment variable: folder of all disk caches of the server."""

KNATIVE_VARIABLE = "K_SERVICE"
"""Environment variable that Knative and Cloud Run set in a service's containers."""

PORT_VARIABLE = "PORT"
"""Environment variable with the port on which they expect HTTP."""

_CACHE_BACKEND, _CACHE_SETTING = PYTHON, "environment-cache"
_PLUGINS = "plugins"
_CERTIFICATES = frozenset({"cert", "key", "cacert", "cacert_dir"})
_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")
_LEVELS = {
    **dict.fromkeys(("off", "false"), TraceLevel.OFF),
    **dict.fromkeys(("timestamps", "on", "true", "min", "max"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}

trace_rate = integer(0)
trace_count = integer(-1)
log_frequency = integer(0)


def verbosity(text: str) -> int:
    """Read a level of detail: an integer, or a boolean word for 1 and 0."""
    if text.strip().lower() in (TRUE | FALSE) - {"0", "1"}:
        return int(boolean(text))
    return integer(0, VERBOSE_MAX)(text)


def negated(text: str) -> bool:
    """Read a boolean for a field with the opposite meaning."""
    return not boolean(text)


def readiness(text: str) -> ReadyWhen:
    """Read which models have to be ready."""
    try:
        return ReadyWhen("true" if boolean(text) else "false")
    except ValueError:
        return choice(ReadyWhen)(text)


def repository(text: str) -> str:
    """Read the path of a model repository or a model, perhaps as `NAME=PATH`, or the URI of a store."""
    if is_store(text):
        try:
            if parse_address(text).kind is StoreKind.FILE:
                raise ValueError(
                    "expected a repository in a folder or a store, got the address of a file "
                    "(hint: download it, or add it to a platform)"
                )
        except ServingError as error:
            raise ValueError(error.message) from None
    name, path = split_name(text)
    return f"{name}={path_text(path)}" if name else path_text(text)


def reloading(text: str) -> Fields:
    """Return the option fields of a server that reloads changed models."""
    if text:
        raise ValueError(f"expected no value, got '{text}'")
    return Fields({"models.control_mode": ControlMode.POLL, "models.poll_secs": 1})


def front_ends(text: str) -> int:
    """Read a number of front ends, or "auto"."""
    if text.strip().lower() == "auto":
        return FRONT_ENDS_AUTO
    try:
        return integer(0, FRONT_ENDS_MAX)(text)
    except ValueError as error:
        raise ValueError(str(error).replace("expected", "expected auto or", 1)) from None


def address(text: str) -> Fields:
    """Read the address of all endpoints."""
    return Fields(dict.fromkeys(("http.address", "grpc.address", "metrics.address"), filled(text)))


def ports(text: str) -> Fields:
    """Read the HTTP port; gRPC and metrics have the next ones."""
    first = integer(0, PORT_MAX - 2)(text)
    return Fields(
        {f"{endpoint}.port": first + at * bool(first) for at, endpoint in enumerate(("http", "grpc", "metrics"))}
    )


def matching(pattern: str, expected: str, clean: Callable[[str], str] = str.strip) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of texts of one form, separated by commas."""
    form = re.compile(pattern, re.IGNORECASE)

    def read(text: str) -> tuple[str, ...]:
        given = tuple(clean(part) for part in text.split(","))
        for each in given:
            if not form.fullmatch(each):
                raise ValueError(f"expected {expected}, got '{each}'")
        return given

    return read


origins = matching(
    r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+",
    "* or origins such as https://example.org",
    lambda part: part.strip().rstrip("/"),
)
hosts = matching(
    r"\*|[a-z0-9._-]+",
    "* or names such as models.example.org, without a port",
    lambda part: part.strip().lower(),
)
load_metrics = matching(r"[a-z_:][a-z0-9_:]*", "names of metrics")


def backend_settings(values: Sequence[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Collect `--backend-config` by backend and key; of a key given several times, the last counts."""
    settings: dict[str, dict[str, str]] = {}
    for backend, key, value in values:
        if key == _CACHE_SETTING:
            value = path_or_none(value)
        elif key == _PLUGINS:  # the system finds a library that is named without its folder
            value = ";".join(path_text(part) if os.sep in part else part for part in value.split(";"))
        settings.setdefault(backend, {})[key] = value
    return settings


def trace_level(text: str) -> TraceLevel:
    """Read a level; Triton's older names are accepted too."""
    level = _LEVELS.get(text.strip().lower())
    if level is None:
        raise ValueError(f"expected OFF, TIMESTAMPS or TENSORS, got '{text}'")
    return level


def all_levels(levels: Sequence[TraceLevel]) -> TraceLevel:
    """Return the union of all levels, or OFF if it is among them."""
    total = TraceLevel.OFF
    for level in levels:
        total |= level
    return total if TraceLevel.OFF not in list(levels) else TraceLevel.OFF


def _quantile(text: str) -> float:
    quantile, _, error = text.partition(":")
    try:
        values = float(quantile), float(error)
    except ValueError:
        values = None
    if values is None or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"expected QUANTILE:ERROR, both from 0 to 1, got '{text}'")
    return values[0]


def _quantiles(text: str) -> tuple[float, ...]:
    """Read `<quantile>:<error>,...`; the errors are ignored: a quantile is exact to 0.4 % of its value."""
    return tuple(_quantile(pair) for pair in text.split(","))


Settings = Mapping[tuple[str, str], tuple[str, Callable[[str], object]]]
"""The field of `ServerOptions`, and the reader of its value, by mode and key."""

METRICS_SETTINGS: Settings = {
    ("", "counter_latencies"): ("metrics.counter_latencies", boolean),
    ("", "histogram_latencies"): ("metrics.histogram_latencies", boolean),
    ("", "summary_latencies"): ("metrics.summary_latencies", boolean),
    ("", "summary_quantiles"): ("metrics.summary_quantiles", _quantiles),
}

TRACE_SETTINGS: Settings = {
    ("", "mode"): ("trace.mode", choice(TraceMode)),
    ("", "level"): ("trace.level", trace_level),
    ("", "rate"): ("trace.rate", trace_rate),
    ("", "count"): ("trace.count", trace_count),
    ("triton", "file"): ("trace.file", filled),
    ("triton", "log-frequency"): ("trace.log_frequency", log_frequency),
    ("opentelemetry", "url"): ("trace.otel.url", filled),
    ("opentelemetry", "resource"): ("trace.otel.resource", name_and_value),
    ("opentelemetry", "bsp_max_queue_size"): ("trace.otel.queue_size", integer(1)),
    ("opentelemetry", "bsp_schedule_delay"): ("trace.otel.delay_ms", integer(1)),
    ("opentelemetry", "bsp_max_export_batch_size"): ("trace.otel.batch_size", integer(1)),
}


def setting(known: Settings) -> Callable[[str], tuple[str, object]]:
    """Return a reader of `[<mode>,]<key>=<value>`: the field that it sets, and the value."""

    def read(text: str) -> tuple[str, object]:
        mode, key, value = assignment(text)
        field, read_value = known.get((mode.strip().lower(), key), ("", filled))
        if not field:
            names = ", ".join(f"{mode},{key}" if mode else key for mode, key in known)
            raise ValueError(f"expected one of {names}, got '{text}'")
        try:
            return field, read_value(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    return read


def trace_fields(settings: Sequence[tuple[str, Any]]) -> Fields:
    """Return the settings by field: levels and resources accumulate, of others the last counts."""
    fields = Fields(settings)
    levels = [value for field, value in settings if field == "trace.level"]
    if levels:
        fields["trace.level"] = all_levels(levels)
    resource = tuple(value for field, value in settings if field == "trace.otel.resource")
    if resource:
        fields["trace.otel.resource"] = resource
    return fields


def cache_setting(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read `<cache>,<key>=<value>`, with any number of `<key>=<value>`."""
    cache, comma, rest = text.partition(",")
    pairs = [pair.partition("=") for pair in _NEXT_SETTING.split(rest)]
    if not cache or not comma or not all(equals and key for key, equals, _ in pairs):
        raise ValueError("expected <cache>,<key>=<value>, e.g. local,size=1048576")
    return cache, tuple((key, value) for key, _, value in pairs)


def cache_fields(values: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> Fields:
    """Combine the settings of the response cache; of one given several times, the last counts."""
    if len({cache for cache, _ in values}) > 1:
        raise ValueError("found multiple cache configurations, but only a single cache is supported")
    settings = {
        key: path_or_none(value) if key in _CERTIFICATES else value for _, pairs in values for key, value in pairs
    }
    try:
        options = cache_options(values[0][0], settings, os.environ)
    except ServingError as error:
        raise ValueError(error.message) from error
    return Fields({"cache.local_bytes": options.local_bytes, "cache.redis": options.redis})


def resource_limit(text: str) -> ResourceLimit:
    """Read `<name>:<count>` or `<name>:<count>:<device>`."""
    name, *rest = text.split(":")
    if not name or not 1 <= len(rest) <= 2:
        raise ValueError(f"expected <name>:<count> or <name>:<count>:<device>, got '{text}'")
    return ResourceLimit(name, integer(0)(rest[0]), integer(0)(rest[1]) if len(rest) == 2 else None)


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of all disk caches, None for the default of each.

    Args:
        environment: Environment variables; `CACHE_VARIABLE` takes precedence over XDG's.
    """
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"], "charonia")
    return None


def with_cache(
    backends: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> Mapping[str, Mapping[str, str]]:
    """Return backend settings with the cache of environments of Python models, unless they set it."""
    cache = cache_folder(environment)
    if cache is None or any(_CACHE_SETTING in backends.get(name, ()) for name in ("", _CACHE_BACKEND)):
        return backends
    settings = {**backends.get(_CACHE_BACKEND, {}), _CACHE_SETTING: str(cache / "environments")}
    return {**backends, _CACHE_BACKEND: settings}


def knative_port(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that the environment of a service of Knative, or Cloud Run, sets: where HTTP is expected.

    Raises:
        ValueError: It is not a port.
    """
    text = environment.get(PORT_VARIABLE, "")
    if not text or not environment.get(KNATIVE_VARIABLE):
        return {}
    return {"http.port": _port_of(PORT_VARIABLE, text), "http.address": ALL_INTERFACES}


def _port_of(variable: str, text: str) -> int:
    try:
        return integer(1, PORT_MAX)(text)
    except ValueError as error:
        raise ValueError(f"environment variable {variable}: {error}") from error


_HTTP_INPUT_BYTES_MAX = 2**40
_CONNECTIONS_MAX = 2**20
_REQUEST_LOG_BYTES_MIN = 8 * 1024
_CLIENT_SHM_BYTES_MAX = 2**50
_RESPONSES_STORED_MAX = 100_000
_KEEP_ALIVE_S_MAX = 3600
_MEMORY_MIB_MAX = 2**40
_PID_MAX = 2**22
_PORT = integer(0, PORT_MAX)
_MS = integer(0)
_BOOL = "true|false"


def _port_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not dash:
        raise ValueError(f"expected FIRST-LAST, such as 8081-9000, got '{text}'")
    return integer(1, PORT_MAX)(first), integer(1, PORT_MAX)(last)


# fmt: off
CLOUDS = (
    Option("--allow-sagemaker", "clouds.sagemaker", boolean, _BOOL, "Serve the routes of Amazon SageMaker"),
    Option("--sagemaker-port", "clouds.sagemaker_port", _PORT, "PORT", "Port of SageMaker's routes"),
    Option("--sagemaker-safe-port-range", "clouds.safe_ports", _port_range, "FIRST-LAST",
           "Ports that other endpoints may have beside SageMaker's", default="any"),
    Option(
        "--allow-vertex-ai", "clouds.vertex_ai", boolean, _BOOL,
        "Serve the routes of Google Vertex AI; true if AIP_MODE=PREDICTION, which turns HTTP and gRPC off by default"
    ),
    Option("--vertex-ai-port", "clouds.vertex_ai_port", _PORT, "PORT",
           "Port of Vertex AI's routes; AIP_HTTP_PORT, if that is set"),
    Option("--vertex-ai-default-model", "clouds.vertex_ai_model", filled, "NAME",
           "Model that predictions run; by default the only one", default="none"),
)
# fmt: on


def vertex_ai_options(environment: Mapping[str, str], given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that the environment of Vertex AI sets; `given` are the options of the command line.

    Raises:
        ValueError: AIP_HTTP_PORT is not a port.
    """
    found: dict[str, Any] = {}
    if environment.get("AIP_MODE") == "PREDICTION":
        found |= {"clouds.vertex_ai": True, "http.enabled": False, "grpc.enabled": False}
    if not given.get("clouds.vertex_ai", found.get("clouds.vertex_ai")):
        return {} if "clouds.vertex_ai" in given else found
    if environment.get("AIP_HTTP_PORT"):
        found["clouds.vertex_ai_port"] = _port_of("AIP_HTTP_PORT", environment["AIP_HTTP_PORT"])
    if environment.get("AIP_STORAGE_URI"):
        found["models.repositories"] = (environment["AIP_STORAGE_URI"],)
    return found


# fmt: off
KSERVE = (
    Option("--model_name", "models.files.model_name", filled, "NAME",
           "Name of the model at PATH, if that is one model and no repository; KServe gives that of its service"),
    Option("--predictor", "models.files.predictor", filled, "MODEL",
           "The model of the repository that another server runs: requests to it are passed on"),
    Option("--predictor_host", "models.files.predictor_host", filled, "HOST",
           "The server that runs the model of --predictor; KServe gives it to transformers"),
    flag("--kserve-v1", "http.kserve_v1", True, "Serve KServe's v1 protocol, POST /v1/models/MODEL:predict"),
    Option("--mlflow-model", "http.mlflow_model", filled, "MODEL", "Model that MLflow's POST /invocations runs",
           default="none"),
)
# fmt: on


_PATH_HINT = "charonia serve PATH, the folder or file itself"
_PLACE_HINT = (
    "instance_group in a model's config.pbtxt says where its instances run; without it, on the GPUs if there are any"
)
_CERTIFICATE_HINT = "--http-use-ssl=true with --http-server-cert and --http-server-key"

FOREIGN_OPTIONS = {
    **dict.fromkeys(("--model", "--models", "--model-dir", "--model_dir", "--model-path", "--model_path"), _PATH_HINT),
    **dict.fromkeys(("--model_base_path", "--model_repository", "--model-repo", "--repository"), _PATH_HINT),
    **dict.fromkeys(("--model-name", "--served-model-name"), "--name names the model of a file"),
    **dict.fromkeys(("--rest-port", "--rest_port", "--rest_api_port"), "--http-port"),
    **dict.fromkeys(("--bind", "--address"), "--host and --port"),
    **dict.fromkeys(
        ("--device", "--devices", "--gpu", "--gpus", "--accelerator", "--tensor-parallel-size"), _PLACE_HINT
    ),
    **dict.fromkeys(("--log-level", "--log_level", "--verbose", "--debug"), "--log-verbose=1 logs more"),
    **dict.fromkeys(("--batch-size", "--batch_size", "--max_batch_size"), "--max-batch-size"),
    **dict.fromkeys(("--ssl-certfile", "--ssl-keyfile"), _CERTIFICATE_HINT),
    **dict.fromkeys(
        ("--ctx-size", "--n-ctx", "--n_ctx", "--context-length", "--max-model-len"), "--ctx, for GGUF files"
    ),
    **dict.fromkeys(("--n-gpu-layers", "--n_gpu_layers"), "--gpu-layers, for GGUF files"),
    **dict.fromkeys(("--parallel", "--max-num-seqs"), "--slots, for GGUF files"),
    "--api-key": "--api-keys FILE; charonia key makes a key",
    "--timeout": "a request has its own, the parameter timeout in microseconds; --exit-timeout-secs is for shutdown",
}
"""Equivalents of the options of other servers."""

_THREADS = "an event loop replaces these threads"
_POOL = "Charonia does not have this memory pool"

UNSUPPORTED = (
    *ignored_options(_THREADS, "--http-thread-count", "--grpc-infer-thread-count", "--buffer-manager-thread-count"),
    *ignored_options(_THREADS, "--sagemaker-thread-count", "--vertex-ai-thread-count"),
    *ignored_options(_POOL, "--grpc-infer-allocation-pool-size", "--grpc-max-response-pool-size"),
    *ignored_options(_POOL, "--cuda-memory-pool-byte-size", "--cuda-virtual-address-size"),
    *ignored_options("there are no copies between GPUs", "--enable-peer-access"),
    *ignored_options("caches are part of the server", "--cache-directory"),
    *refused("models are not limited to a share of a GPU's memory", "--model-load-gpu-limit"),
    *refused("CUDA_VISIBLE_DEVICES selects the GPUs", "--min-supported-compute-capability"),
)
"""Options of tritonserver that are known, and have no effect or are refused."""


# fmt: off
FILES = (
    Option("--name", "models.files.name", filled, "NAME", "Name of the model, where one file is served"),
    Option("--max-batch-size", "models.files.max_batch_size", integer(0, BATCH_SIZE_MAX), "N",
           "Largest batch of the models in the files, 0 for each model's own limit"),
    Option("--workers", "models.files.workers", integer(0, WORKERS_MAX), "N",
           "Instances per model in the files (Python: worker processes). 0: as the file configures, otherwise 1"),
    flag("--trust", "models.files.trust", True, "Read estimators that can run code: pickles, unknown types of skops"),
    Option("--example", "models.files.example", filled, "FILE",
           "Rows that the estimator takes, with column names: .csv, .json or .parquet", default="none"),
    Option("--ctx", "models.files.ctx", integer(0, CONTEXT_MAX), "TOKENS",
           "Context of a GGUF file, of all slots together, 0 for the model's own"),
    Option("--threads", "models.files.threads", integer(0, WORKERS_MAX), "N",
           "Threads that compute a GGUF file, 0 for the free cores without one"),
    Option("--slots", "models.files.slots", integer(0, WORKERS_MAX), "N",
           "Requests to a GGUF file that are computed at the same time, 0 for 4 that share the context"),
    Option("--chat-template", "models.files.chat_template", filled, "FILE|TEXT",
           "Chat template (Jinja) of a GGUF file", default="the file's"),
    Option("--gpu-layers", "models.files.gpu_layers", integer(-1, WORKERS_MAX), "N",
           "Layers of a GGUF file on GPUs, -1 for all that fit", default="-1"),
    Option("--mount", "models.files.mounts", lambda text: (read_mount(text),), "[FILE.py:]APP:/PATH",
           "ASGI application to serve beside the models, by default of the Python file; repeatable", joined,
           default="none"),
    Option("--reload", "", reloading, "",
           "Reload a model when its file changes: --model-control-mode=poll --repository-poll-secs=1",
           Fields.merged, default=""),
)

MODELS = (
    Option("--model-repository REPOSITORY", "models.repositories", repository, "PATH",
           "Folder of models, or URI of one in a store (s3://, oss://, gs://, ...); repeatable", tuple),
    Option("--model-store", "models.repositories", repository, "PATH", "Old name of --model-repository", tuple,
           instead="--model-repository"),
    Option("--model-control-mode", "models.control_mode", choice(ControlMode), "none|poll|explicit|auto",
           "What loads models: start (none), start and changes in the repositories (poll), the API (explicit), "
           "the first request (auto)"),
    Option("--repository-poll-secs", "models.poll_secs", integer(0), "SECONDS",
           "Time between two scans of the repositories in modes poll and auto"),
    Option("--load-model", "models.load", filled, "NAME",
           "Model to load at start in modes explicit and auto, * for all; repeatable", tuple),
    Option("--model-idle-unload", "models.auto.idle_secs", integer(0, IDLE_SECS_MAX), "SECONDS",
           "Unload a model that was not used for this long, until a request needs it; 0 for never"),
    Option("--model-memory-budget", "models.auto.memory_mb", integer(0, MEMORY_MB_MAX), "MIB",
           "Memory of the loaded models in mode auto, 0 for four fifths of this process's limit"),
    Option("--pin-model", "models.auto.pinned", filled, "NAME",
           "Model that is never evicted or unloaded while idle, and that mode auto loads at start; repeatable", tuple),
    Option("--auto-queue-size", "models.auto.waiting_max", integer(1, WAITING_MAX), "N",
           "Limit of requests that wait for a model to load on demand"),
    Option("--auto-wait-secs", "models.auto.wait_secs", integer(1, WAIT_SECS_MAX), "SECONDS",
           "Longest time that a request waits for its model to load on demand"),
    Option("--model-store-cache", "models.stores.cache", path_text, "PATH", "Cache of files from stores",
           default="~/.cache/charonia/stores"),
    Option("--model-store-cache-size", "models.stores.cache_mb", integer(1, MEMORY_MB_MAX), "MIB",
           "Size of that cache; files in use are never removed"),
    Option("--model-store-downloads", "models.stores.downloads", integer(1, DOWNLOADS_MAX), "N",
           "Concurrent downloads of parts of files"),
    Option("--model-namespacing", "models.namespacing", boolean, _BOOL,
           "Allow models of one name in several repositories"),
    Option("--repoagent-directory", "models.agents", path_text, "PATH",
           "Folder of repository agents, each in NAME/agent.py",
           default="built-in agents only"),
    Option("--model-config-name", "models.config_name", str, "NAME",
           "Use configs/NAME.pbtxt of a model if it exists, else its config.pbtxt"),
    flag("--disable-auto-complete-config", "models.auto_complete", False,
         "Do not complete configurations from the models", default="off"),
    Option("--strict-model-config", "models.auto_complete", negated, _BOOL,
           "Old form of --disable-auto-complete-config", default="false", instead="--disable-auto-complete-config"),
    Option("--model-load-thread-count", "models.load_thread_count", integer(1, 1024), "N",
           "Models loaded concurrently"),
    Option("--model-load-retry-count", "models.load_retry_count", integer(0, 1000), "N", "Retries of a failed load"),
    Option("--strict-versions", "models.strict_versions", boolean, _BOOL,
           "If one version of a model fails to load, serve none of the versions loaded with it"),
    Option("--backend-directory", "backend_directory", path_text, "PATH",
           "Folder of backends written in Python, NAME/model.py each", default="none"),
    Option("--backend-config", "backends", assignment, "[BACKEND,]KEY=VALUE",
           "Setting of one or all backends; repeatable", backend_settings),
    Option("--pinned-memory-pool-byte-size", "pinned_memory_bytes", integer(0), "BYTES",
           "Limit of pinned memory for copies to and from GPUs, 0 for none"),
    Option("--cpu-cores", "cpu_cores", integer(0, CPU_CORES_MAX), "N",
           "Cores that models may use. 0: all that this process may use, except the cores of front ends"),
    Option("--host-policy", "host_policies", assignment, "NAME,KEY=VALUE",
           "Cores for instances: NAME,cpu-cores=0-3 or NAME,numa-node=0; repeatable", read_policies),
    Option("--busy-poll-us", "busy_poll_us", integer(0, BUSY_POLL_US_MAX), "N",
           "Microseconds of busy polling between the requests of a single client, 0 for none"),
)

SERVER = (
    Option("--id", "id", filled, "NAME", "Server name in the server metadata"),
    Option("--exit-delay-secs", "exit_delay_secs", integer(0), "SECONDS",
           "How long to keep accepting requests after shutdown starts"),
    Option("--exit-timeout-secs", "exit_timeout_secs", integer(0), "SECONDS",
           "How long requests in flight may then take to finish"),
    Option("--exit-on-error", "exit_on_error", boolean, _BOOL, "Exit if a model fails to load at start"),
    Option("--strict-readiness", "readiness", readiness, "true|false|start",
           "Report ready only if all models are ready; start: as soon as the models of the startup have been ready"),
    Option("--front-ends", "front_ends", front_ends, "N|auto",
           "Processes that accept requests. 0: the process that runs the models; auto: chosen by cores and models"),
    Option(
        "--memory-limit-mib", "memory_limit_mib", integer(0, _MEMORY_MIB_MAX), "MIB",
        "Memory of all processes. Above it, the engine restarts; a server of one process exits with status 1"
    ),
    Option("--replica-port", "replica_port", integer(1, PORT_MAX), "PORT",
           "Additional HTTP port, on 127.0.0.1, of this server alone; others may share the HTTP and gRPC ports"),
    Option("--beside", "beside", integer(1, _PID_MAX), "PID",
           "Share the HTTP and gRPC ports of the server with this process id, which continues to serve"),
    Option("--api-keys", "api_keys", path_text, "PATH", "File of API keys and their scopes; reloaded when it changes"),
    Option(
        "--fairness-header", "fairness_header", filled, "HEADER",
        "Header that identifies clients that share a busy model; default: their API key, otherwise their address"
    ),
    Option("--allow-client-shm", "client_shm", boolean, _BOOL,
           "Allow clients to register shared memory of this machine"),
    Option("--client-shm-byte-size", "client_shm_bytes_max", integer(1, _CLIENT_SHM_BYTES_MAX), "BYTES",
           "Limit of registered shared memory of clients"),
)

ADDRESS = (
    Option("--host", "", address, "ADDRESS",
           "Address of all endpoints: --http-address, --grpc-address and --metrics-address; *: all, IPv4 and IPv6",
           Fields.merged,
           default="0.0.0.0; for files 127.0.0.1"),
    Option("--port", "", ports, "PORT",
           "HTTP port; gRPC has the next one, and metrics the one after that; 0 for any free ones", Fields.merged,
           default="8000"),
)

HTTP = (
    Option("--allow-http", "http.enabled", boolean, _BOOL, "Serve HTTP"),
    Option("--http-address", "http.address", filled, "ADDRESS", "Address to listen on", default="that of --host"),
    Option("--http-port --http_port", "http.port", _PORT, "PORT", "Port to listen on, 0 for any free one"),
    Option("--reuse-http-port", "http.reuse_port", boolean, _BOOL, "Allow several processes to listen on the port"),
    Option("--http-max-input-size", "http.limits.body_bytes_max", integer(1, _HTTP_INPUT_BYTES_MAX), "BYTES",
           "Largest request body, decompressed"),
    Option("--http-max-connections", "http.limits.connections_max", integer(1, _CONNECTIONS_MAX), "N",
           "Limit of connections of each front end"),
    Option("--allow-page", "http.page", boolean, _BOOL,
           "Serve a page at / to inspect and try models, and /openapi.json"),
    Option("--openai", "http.openai", boolean, _BOOL, "Serve OpenAI's API at /v1"),
    Option("--stored-responses", "http.limits.responses_stored_max", integer(0, _RESPONSES_STORED_MAX), "N",
           "Responses of OpenAI's API that previous_response_id can name; 0: none"),
    Option("--stream-keep-alive", "http.limits.stream_keep_alive_s", number(0, _KEEP_ALIVE_S_MAX), "SECONDS",
           "Longest silence in a stream of events, after which the server sends a comment; 0: no comments"),
    Option("--http-restricted-api", "http.access.restricted", read_restriction, "API[,API]:HEADER=VALUE",
           "Parts of the protocol that require a header; repeatable", tuple),
    Option("--http-header-forward-pattern", "http.access.header_forward_pattern", str, "REGEX",
           "Pattern of headers to forward as request parameters"),
    Option("--cors-origins", "http.cors_origins", origins, "ORIGIN[,ORIGIN]",
           "Sites whose pages may call the server from a browser, * for all; repeatable", joined, default="none"),
    Option("--allowed-hosts", "http.allowed_hosts", hosts, "HOST[,HOST]",
           "Hosts that requests may be for besides localhost and addresses, * for all; repeatable", joined,
           default="all; on the loopback interface none"),
    Option("--http-use-ssl", "http.tls.enabled", boolean, _BOOL, "Serve HTTPS instead of HTTP"),
    Option("--http-use-ssl-mutual", "http.tls.mutual", boolean, _BOOL, "Also require client certificates"),
    Option("--http-server-cert", "http.tls.certificate", path_text, "PATH", "Certificate chain of the server, PEM"),
    Option("--http-server-key", "http.tls.key", path_text, "PATH", "Private key of the server, PEM"),
    Option("--http-root-cert", "http.tls.root", path_text, "PATH", "Certificates to trust for clients, PEM"),
)

GRPC = (
    Option("--allow-grpc", "grpc.enabled", boolean, _BOOL, "Serve gRPC"),
    Option("--grpc-address", "grpc.address", filled, "ADDRESS", "Address to listen on", default="that of --host"),
    Option("--grpc-port", "grpc.port", _PORT, "PORT", "Port to listen on, 0 for any free one"),
    Option("--reuse-grpc-port", "grpc.reuse_port", boolean, _BOOL, "Allow several processes to listen on the port"),
    Option("--grpc-max-input-size", "grpc.input_bytes_max", integer(1, GRPC_INPUT_BYTES_MAX), "BYTES",
           "Largest request message, decompressed"),
    Option("--grpc-max-connections", "grpc.connections_max", integer(1, _CONNECTIONS_MAX), "N",
           "Limit of connections of each front end"),
    Option("--grpc-restricted-protocol", "grpc.access.restricted", read_restriction, "API[,API]:KEY=VALUE",
           "Parts of the protocol that require the header triton-grpc-protocol-KEY; repeatable", tuple),
    Option("--grpc-header-forward-pattern", "grpc.access.header_forward_pattern", str, "REGEX",
           "Pattern of headers to forward as request parameters"),
    Option("--grpc-use-ssl", "grpc.tls.enabled", boolean, _BOOL, "Serve gRPC over TLS"),
    Option("--grpc-use-ssl-mutual", "grpc.tls.mutual", boolean, _BOOL, "Also require client certificates"),
    Option("--grpc-server-cert", "grpc.tls.certificate", path_text, "PATH", "Certificate chain of the server, PEM"),
    Option("--grpc-server-key", "grpc.tls.key", path_text, "PATH", "Private key of the server, PEM"),
    Option("--grpc-root-cert", "grpc.tls.root", path_text, "PATH", "Certificates to trust for clients, PEM"),
    Option("--grpc-infer-response-compression-level", "grpc.response_compression", choice(CompressionLevel),
           "none|low|medium|high", "Compression of inference responses"),
    Option("--grpc-keepalive-time", "grpc.keepalive_time_ms", _MS, "MS",
           "Idle time of a connection after which the server sends a ping"),
    Option("--grpc-keepalive-timeout", "grpc.keepalive_timeout_ms", _MS, "MS",
           "Time to wait for the reply to a ping before the connection is closed"),
    Option("--grpc-keepalive-permit-without-calls", "grpc.keepalive_permit_without_calls", boolean, _BOOL,
           "Send and accept pings while no call is open"),
    Option("--grpc-http2-max-pings-without-data", "grpc.http2_max_pings_without_data", integer(0), "N",
           "Limit of pings without data, 0 for none"),
    Option("--grpc-http2-min-recv-ping-interval-without-data", "grpc.http2_min_recv_ping_interval_without_data_ms", _MS,
           "MS", "Shortest interval of a client's pings without data; faster ones are strikes"),
    Option("--grpc-http2-max-ping-strikes", "grpc.http2_max_ping_strikes", integer(0), "N",
           "Strikes after which the connection is closed, 0 for no limit"),
    Option("--grpc-max-connection-age", "grpc.max_connection_age_ms", _MS, "MS",
           "Age at which a connection is closed gracefully, 0 for none"),
    Option("--grpc-max-connection-age-grace", "grpc.max_connection_age_grace_ms", _MS, "MS",
           "Time for its calls to finish, 0 for no limit"),
)

METRICS = (
    Option("--allow-metrics", "metrics.enabled", boolean, _BOOL, "Serve metrics"),
    Option("--allow-cpu-metrics", "metrics.cpu", boolean, _BOOL, "Include CPU metrics"),
    Option("--allow-gpu-metrics", "metrics.gpu", boolean, _BOOL, "Include GPU metrics"),
    Option("--metrics-address", "metrics.address", filled, "ADDRESS", "Address to listen on", default="that of HTTP"),
    Option("--metrics-port", "metrics.port", _PORT, "PORT", "Port to listen on, 0 for any free one"),
    Option("--metrics-interval-ms", "metrics.interval_ms", integer(1), "MS",
           "Shortest time between two samples of the CPU and GPU metrics"),
    Option("--metrics-config", "", setting(METRICS_SETTINGS), "KEY=VALUE",
           "counter_latencies, histogram_latencies, summary_latencies (true or false), summary_quantiles; repeatable",
           Fields, default=""),
    Option("--load-metrics", "metrics.load", load_metrics, "NAME[,NAME]",
           "Metrics in reports of the server's load, also custom ones of models; repeatable", joined,
           default=",".join(LOAD_METRICS)),
)
# fmt: on

# fmt: off
LOGS = (
    Option("--log-verbose", "log.verbose", verbosity, "LEVEL", "Level of verbose messages, 0 for none"),
    Option("--log-info", "log.info", boolean, _BOOL, "Write informational messages"),
    Option("--log-warning", "log.warning", boolean, _BOOL, "Write warnings"),
    Option("--log-error", "log.error", boolean, _BOOL, "Write errors"),
    Option("--log-format", "log.format", choice(LogFormat), "default|ISO8601", "Format of the start of a line"),
    Option("--log-file", "log.file", str, "PATH", "File to append to", default="stderr"),
    Option("--access-log", "log.access", choice(AccessLogFormat), "none|text|json", "One line for each request"),
    Option(
        "--access-log-file",
        "log.access_file",
        path_or_none,
        "PATH",
        "File to append to; needs --access-log",
        default="stderr",
    ),
    Option("--request-log", "request_log.target", path_or_none, "FOLDER|STORE",
           "Write requests with their answers as JSON lines, for `charonia perf --replay`", default="none"),
    Option("--request-log-sample", "request_log.sample", number(0, 1, above=True), "SHARE",
           "Share of the requests that are written, above 0 and at most 1", default="1, all"),
    Option("--request-log-bytes", "request_log.bytes_max", integer(_REQUEST_LOG_BYTES_MIN), "BYTES",
           "Size of all files in the folder; the oldest ones are removed"),
    Option("--request-log-header", "request_log.headers", names, "NAME[,NAME]", "Headers to write; repeatable", joined,
           default="none"),
    Option("--request-log-redact", "request_log.redact", names, "NAME[,NAME]",
           "Inputs, outputs and parameters whose values are left out; repeatable", joined, default="none"),
    Option("--request-log-hook", "request_log.hook", path_or_none, "FILE.py:FUNCTION",
           "Function that gets each record and returns the one to write, or None", default="none"),
)

TRACING = (
    Option("--trace-file", "trace.file", str, "PATH", "Old form of --trace-config triton,file", default="",
           instead="--trace-config triton,file=PATH"),
    Option("--trace-level", "trace.level", trace_level, "OFF|TIMESTAMPS|TENSORS",
           "Old form of --trace-config level; repeatable", all_levels, default="OFF",
           instead="--trace-config level=LEVEL"),
    Option("--trace-rate", "trace.rate", trace_rate, "N", "Old form of --trace-config rate",
           instead="--trace-config rate=N"),
    Option("--trace-count", "trace.count", trace_count, "N", "Old form of --trace-config count",
           instead="--trace-config count=N"),
    Option("--trace-log-frequency", "trace.log_frequency", log_frequency, "N",
           "Old form of --trace-config triton,log-frequency", instead="--trace-config triton,log-frequency=N"),
    # After the old forms, which it overrides.
    Option("--trace-config", "", setting(TRACE_SETTINGS), "[MODE,]KEY=VALUE",
           "Which requests to trace, and where to: mode, level, rate, count, triton,file and others; repeatable",
           trace_fields, default=""),
)

SHARING = (
    Option("--cache-config", "", cache_setting, "CACHE,KEY=VALUE",
           "Response cache: local,size=BYTES, or redis,host=HOST,port=PORT and others; repeatable", cache_fields,
           default=""),
    Option("--response-cache-byte-size", "cache.byte_size", integer(0, CACHE_BYTES_MAX), "BYTES",
           "Old form of --cache-config=local,size", instead="--cache-config=local,size=BYTES"),
    Option("--rate-limit", "rate_limit.mode", choice(RateLimitMode), "off|execution_count",
           "Whether instances share the resources of their models' configurations"),
    Option("--rate-limit-resource", "rate_limit.resources", resource_limit, "NAME:COUNT[:DEVICE]",
           "Amount of a resource, by default the highest demand of an instance; repeatable", tuple),
)
# fmt: on

LINE = CommandLine(
    command="charonia serve",
    intro="""\
usage: charonia serve [OPTIONS] PATH...

Serve models over HTTP and gRPC. PATH is a model repository, as in
--model-repository=PATH, one model's file or folder, or a Python file that
defines models.
""",
    groups={
        "Files": FILES,
        "Models": MODELS,
        "Server": SERVER,
        "Address": ADDRESS,
        "HTTP": HTTP,
        "gRPC": GRPC,
        "Metrics": METRICS,
        "Logs": LOGS,
        "Tracing": TRACING,
        "KServe": KSERVE,
        "SageMaker and Vertex AI": CLOUDS,
        "Cache and rate limiter": SHARING,
    },
    record=ServerOptions(),
    abbreviates=True,
    foreign_options=FOREIGN_OPTIONS,
    unlisted={
        "Accepted without effect, with the reason in the log": [o for o in UNSUPPORTED if not o.is_refused],
        "Refused": [o for o in UNSUPPORTED if o.is_refused],
    },
)
