"""From a load of `charonia tune` to what the load generator takes: by the options of `charonia perf`."""

from collections.abc import Sequence

from charonia.cli.perf_options import parse
from charonia.cli.perf_settings import is_decoupled, run_settings
from charonia.client.sync_client import Client
from charonia.core.errors import ServingError, invalid
from charonia.tools.perf.api import Target
from charonia.tools.perf.data.load import load_inputs
from charonia.tools.perf.data.spec import model_spec
from charonia.tools.perf.run import ask
from charonia.tools.tune.api import LoadPoint
from charonia.tools.tune.measure import Prepare, Prepared
from charonia.tools.tune.options import ClientProtocol, TuneOptions
from charonia.tools.tune.servers import Server

SET_HERE = (
    *("model", "m", "url", "u", "batch-size", "b", "concurrency-range", "request-rate-range", "request-intervals"),
    *("periodic-concurrency-range", "csv", "f", "json", "html", "profile-export-file", "binary-search"),
)
"""Options of `charonia perf` that the search sets itself."""

TIMED = ("measurement-mode", "measurement-interval", "p", "request-count", "measurement-request-count")
"""Options that say how long is measured."""


def loads_of(options: TuneOptions) -> Prepare:
    """Return what makes loads ready.

    Raises:
        ServingError: INVALID_ARG for an option of the load generator that is set here.
    """
    flags = {
        request.name: {**_by_name(options.measure.perf_flags), **_by_name(request.perf_flags)}
        for request in options.models.profile
    }
    for model, given in flags.items():
        for name in given:
            if name.lstrip("-") in SET_HERE:
                raise invalid(f"perf_analyzer_flags of '{model}': '{name}' is set by the search itself")

    def prepare(client: Client, load: LoadPoint, server: Server) -> Prepared:
        given = flags.get(load.model, {})
        protocol = _protocol(given, options.measure.protocol)
        url = server.url(protocol)
        target = Target(url=url, model=load.model)
        subject = ask(client, target)
        arguments = ["-m", load.model, "-u", url.partition("://")[2], "-i", protocol.value, "-b", str(load.batch_size)]
        if url.startswith(("https", "grpcs")):
            arguments[3] = f"https://{arguments[3]}"
        if is_decoupled(subject.config) and "streaming" not in given:
            arguments.append("--streaming")
        try:
            parsed = parse([*arguments, *_arguments(given)])
        except ServingError as error:
            raise ServingError(error.code, f"perf_analyzer_flags of '{load.model}': {error.message}") from None
        settings = run_settings(parsed, subject.config)
        spec = model_spec(subject.metadata, subject.config, parsed.options.target.version)
        try:
            source = load_inputs(spec, parsed.options)
        except ServingError as error:
            raise ServingError(error.code, error.message, hint=_in_yaml(load.model, error.hint)) from None
        return Prepared(settings, source, subject, is_timed=any(name in given for name in TIMED))

    return prepare


def _in_yaml(model: str, hint: str) -> str:
    """Return a hint at options of the load generator as one at the file that gives them to it."""
    flag, _, value = hint.removeprefix("--").partition(" ")
    if not hint.startswith("--") or not value:
        return hint
    value, _, _ = value.partition(" ")
    text = f'profile_models: {{{model}: {{perf_analyzer_flags: {{{flag}: "{value}"}}}}}}'
    return f"-f FILE with this in it says which to send: {text}"


def _by_name(flags: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in flags:
        found.setdefault(name.lstrip("-"), []).append(value)
    return found


def _protocol(given: dict[str, list[str]], default: ClientProtocol) -> ClientProtocol:
    named = given.get("protocol") or given.get("i")
    return ClientProtocol(named[-1].lower()) if named else default


def _arguments(given: dict[str, list[str]]) -> list[str]:
    arguments = []
    for name, values in given.items():
        if name in ("protocol", "i"):
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        for value in values:
            arguments += [option, value] if value else [option]
    return arguments
