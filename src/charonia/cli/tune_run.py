"""The subcommands of `charonia tune`: `profile` searches for a configuration, `report` reports on an earlier search.

Load generator settings go through the options of `charonia perf`. Results are in a folder of the export path. Progress
is a line for each trial.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TextIO

from charonia.cli.command_line import unknown
from charonia.cli.perf import parse
from charonia.cli.perf_run import repository_of
from charonia.client.sync_client import Client
from charonia.core.errors import ServingError, invalid, not_found
from charonia.server.machine.memory import available_memory
from charonia.tools.perf.api import MeasuredTarget
from charonia.tools.perf.data.load import load_inputs
from charonia.tools.perf.data.spec import model_spec
from charonia.tools.perf.language.load import LanguageRun, language_run
from charonia.tools.perf.language.plan import LanguageEndpoint
from charonia.tools.perf.options import WireProtocol, is_decoupled
from charonia.tools.perf.run import Subject, ask, stopped_by_signals
from charonia.tools.report.quantities import clock
from charonia.tools.report.run_files import write_whole
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import LoadPoint, Metric, TrialFailed
from charonia.tools.tune.decision import Conclusion, Ranked, loads_text
from charonia.tools.tune.measure import Prepare, PreparedLoad
from charonia.tools.tune.options import (
    EXPORT,
    LaunchMode,
    ModelRequest,
    OutputSettings,
    ReportRequest,
    TuneOptions,
    TuneRequest,
)
from charonia.tools.tune.output import CONFIG_FILE
from charonia.tools.tune.profile import Event, NoteAdded, TrialDone, TrialStarted, profile
from charonia.tools.tune.report.html import render
from charonia.tools.tune.result import GroupRecord, TuneRun, VariantRecord, exit_status, from_json, to_json
from charonia.tools.tune.servers import MeasuredServer
from charonia.tools.tune.tables import gpu_csv, inference_csv, server_csv, summary

RESULTS = "results"
"""Folder of the export path that the files are in."""

JSON_FILE = "charonia-tune.json"
HTML_FILE = "charonia-tune.html"
JSON_STDOUT = "-"

SET_HERE = (
    "model", "m", "url", "u", "batch-size", "b", "concurrency-range", "request-rate-range", "request-intervals",
    "periodic-concurrency-range", "csv", "f", "json", "html", "profile-export-file", "binary-search",
)  # fmt: skip
"""Options of `charonia perf` that the search sets itself."""

TIMED = ("measurement-mode", "measurement-interval", "p", "request-count", "measurement-request-count")
"""Options that set the duration of a measurement."""


def profile_models(request: TuneRequest, command: str) -> int:
    """Tune the models, write the results, and return the exit status."""
    output, given = request.options.output, request.options.launch.repository
    with _served(request) as request:
        check_writable(output)
        loads = loads_of(request.options)
        with stopped_by_signals() as stop:
            progress = TunePrinter(sys.stderr, quiet=output.quiet)
            found = replace(profile(request, loads, progress, stop, available_memory), command=command)
    earlier = keep_earlier(output)
    written, tables = write_results(found, output)
    if earlier is not None:
        print(f"charonia tune: the results of an earlier run are in '{earlier}' now", file=sys.stderr)
    if not output.quiet:
        text = sys.stderr if output.json is not None and str(output.json) == JSON_STDOUT else sys.stdout
        shown = summary(found, output.configs_per_model, top_configs=output.top_configs) if output.summaries else ""
        _print_results(tables if output.verbose else (), shown, written, text)
        recommended = [variant for group in found.groups if (variant := applicable(group)) is not None]
        if recommended and not found.is_remote:
            if request.options.launch.repository == given:
                where = [] if output.export == EXPORT else ["-e", str(output.export)]
                words = ["tune", "apply", *where]
            else:
                configs = [config for variant in recommended for config in variant.configs]
                words = ["serve", *(f"{each.model}={output.repository / each.name}" for each in configs)]
            print("Apply it: " + shlex.join(["charonia", *words]), file=text)
    if found.problem:
        print(f"charonia tune: {found.problem}", file=sys.stderr)
    return exit_status(found)


@contextmanager
def _served(request: TuneRequest) -> Iterator[TuneRequest]:
    """Yield the request with a repository for the path that it names, and with the only model where it names none."""
    options = request.options
    if options.launch.mode is LaunchMode.REMOTE or options.launch.repository is None:
        yield request
        return
    first = options.models.profile[0].name if options.models.profile else ""
    with repository_of(str(options.launch.repository), first) as (repository, model):
        models = replace(options.models, profile=options.models.profile or (ModelRequest(model),))
        launch = replace(options.launch, repository=repository)
        yield replace(request, options=replace(options, models=models, launch=launch))


def report_on(request: ReportRequest) -> int:
    """Report on an earlier run, and return the exit status."""
    found = read_result(request)
    variants = [variant for group in found.groups for variant in group.variants]
    known = {variant.name for variant in variants}
    missing = [name for name in request.names if not any(variant.is_named((name,)) for variant in variants)]
    if missing:
        raise not_found("\n".join(unknown("variant", name, sorted(known)) for name in missing))
    written, tables = write_report(found, request)
    if not request.quiet:
        _print_results(tables if request.verbose else (), summary(found, names=request.names), written, sys.stdout)
    return exit_status(found)


def _print_results(tables: Sequence[str], summary: str, written: Sequence[Path], out: TextIO) -> None:
    if tables:
        print(*(f"{table}\n" for table in tables), sep="\n", file=out)
    if summary:
        print(summary, file=out)
    print("\nWritten: " + ", ".join(map(str, written)), file=out)


def applicable(group: GroupRecord) -> VariantRecord | None:
    """Return the recommended variant of models, None where that is to change nothing."""
    best = group.decision.best
    if best is None or best.variant.is_default or group.decision.conclusion is Conclusion.CONSTRAINTS_NOT_MET:
        return None
    return group.variant(best.variant)


def apply(request: ReportRequest) -> int:
    """Write configurations of an earlier run into the model repository, and return the exit status."""
    run = read_result(request)
    repository = request.repository or Path(run.options.get("model_repository", ""))
    if not run.options.get("model_repository") and request.repository is None:
        raise invalid("the run does not say where its models are", hint="-m names the model repository")
    if repository.is_file():
        hint = f"charonia serve NAME=FOLDER serves a configuration of {request.export / 'models'}"
        raise invalid(f"'{repository}' is a file, which has no configuration to change", hint=hint)
    by_name = [each for group in run.groups for each in group.variants if each.is_named(request.names)]
    if request.names and not by_name:
        known = sorted(each.name for group in run.groups for each in group.variants)
        raise not_found("\n".join(unknown("variant", name, known) for name in request.names))
    chosen = by_name or [each for group in run.groups if (each := applicable(group)) is not None]
    changed = [config for each in chosen for config in each.configs if config.diff or by_name]
    for config in changed:
        folder = repository / config.model
        if not folder.is_dir():
            raise not_found(f"there is no folder '{folder}'", hint="-m names the model repository")
    for config in changed:
        path = repository / config.model / CONFIG_FILE
        before = path.with_name(f"{CONFIG_FILE}.before_tune")
        if path.exists() and not before.exists():
            _write(before, path.read_bytes())
        _write(path, config.text.encode())
        if not request.quiet:
            print(f"{path}: {config.short_name}", *[f"  {line}" for line in config.diff.splitlines()[2:]], sep="\n")
    if not changed and not request.quiet:
        print("Nothing to apply: the run recommends the configuration that is there. -n names another one.")
    return 0


def check_writable(output: OutputSettings) -> None:
    """Create the folders of the results, before anything is measured."""
    folders = [output.export / RESULTS]
    folders += [path.parent for path in (output.json, output.html) if path is not None and str(path) != JSON_STDOUT]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        if not os.access(folder, os.W_OK):
            raise invalid(f"'{folder}' cannot be written: permission denied")


def keep_earlier(output: OutputSettings) -> Path | None:
    """Rename the folder of an earlier run's results, and return its new path; None where there are none."""
    folder = output.export / RESULTS
    if not (folder / JSON_FILE).is_file():
        return None
    kept = next(path for number in count(1) if not (path := folder.with_name(f"{RESULTS}-{number}")).exists())
    try:
        folder.rename(kept)
        folder.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    return kept


def write_results(run: TuneRun, output: OutputSettings, names: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Write all files, and return their paths and the tables.

    Args:
        names: Variants that the page shows beside the default and the recommended one, () for all.
    """
    folder = output.export / RESULTS
    tables = {
        output.inference_file: inference_csv(run.groups, output.inference_fields),
        output.gpu_file: gpu_csv(run.groups, output.gpu_fields),
        output.server_file: server_csv(run.idle_gpus, output.server_fields),
    }
    document = to_json(run) + "\n"
    data = {name: text for name, text in tables.items() if text} | {JSON_FILE: document}
    # The measurements first: a failure of a report must not lose them.
    written = [_write(folder / name, text.encode()) for name, text in data.items()]
    if output.json is not None and str(output.json) == JSON_STDOUT:
        sys.stdout.write(document)
    elif output.json is not None:
        written.append(_write(output.json, document.encode()))
    if output.summaries or output.html is not None:
        written.append(_write(output.html or folder / HTML_FILE, render(run, names)))
    return written, [text for text in tables.values() if text]


def read_result(request: ReportRequest) -> TuneRun:
    """Return the run to report on."""
    path = request.json or request.export / RESULTS / JSON_FILE
    try:
        return from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise not_found(
            f"'{path}' does not exist", hint="charonia tune profile writes it; -e names the folder that it is in"
        ) from None
    except OSError as error:
        raise invalid(f"'{path}' cannot be read: {(error.strerror or str(error)).lower()}") from error


def write_report(run: TuneRun, request: ReportRequest) -> tuple[list[Path], list[str]]:
    """Write tables and page of an earlier run, and return their paths and the tables."""
    output = OutputSettings(export=request.export, html=request.html)
    check_writable(output)
    return write_results(run, output, request.names)


def _write(path: Path, content: bytes) -> Path:
    """Replace a file atomically and return its path."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> ServingError:
    return invalid(f"'{path}' cannot be written: {(error.strerror or str(error)).lower()}")


def loads_of(options: TuneOptions) -> Prepare:
    """Return the function that prepares loads."""
    flags = {
        request.name: {**_by_name(options.measure.perf_flags), **_by_name(request.perf_flags)}
        for request in options.models.profile
    }
    for model, given in flags.items():
        for name in given:
            if name.lstrip("-") in SET_HERE:
                raise invalid(f"perf_analyzer_flags of '{model}': '{name}' is set by the search itself")

    languages: dict[str, LanguageRun] = {}

    def prepare(client: Client, load: LoadPoint, server: MeasuredServer) -> PreparedLoad:
        given = flags.get(load.model, {})
        protocol = _protocol(given, options.measure.protocol)
        url = server.url(protocol)
        target = MeasuredTarget(url=url, model=load.model)
        subject = ask(client, target)
        arguments = ["-m", load.model, "-u", url.partition("://")[2], "-i", protocol.value, "-b", str(load.batch_size)]
        if url.startswith(("https", "grpcs")):
            arguments[3] = f"https://{arguments[3]}"
        if is_decoupled(subject.config) and not given.keys() & {"streaming", "llm"}:
            arguments.append("--streaming")
        try:
            parsed = parse([*arguments, *_shapes(options.measure.shapes, subject), *_arguments(given)])
        except ServingError as error:
            raise ServingError(error.code, f"perf_analyzer_flags of '{load.model}': {error.message}") from None
        settings = parsed.settings(subject.config)
        is_timed = any(name in given for name in TIMED)
        if parsed.options.is_language:
            # Made once: prompts of exact length take time.
            language = languages.get(load.model) or language_run(parsed.options, subject)
            languages[load.model] = language
            return PreparedLoad(language.settings(settings), language.source, subject, is_timed, language.replies)
        spec = model_spec(subject.metadata, subject.config, parsed.options.target.version)
        try:
            source = load_inputs(spec, parsed.options)
        except ServingError as error:
            raise ServingError(error.code, error.message, hint=_in_yaml(load.model, error.hint)) from None
        return PreparedLoad(settings, source, subject, is_timed)

    return prepare


def _shapes(shapes: Sequence[str], subject: Subject) -> list[str]:
    """Return the shapes that belong to inputs of a model."""
    inputs = {tensor.name for tensor in subject.metadata.inputs}
    return [word for text in shapes if text.rpartition(":")[0] in inputs for word in ("--shape", text)]


def _in_yaml(model: str, hint: str) -> str:
    """Rephrase a hint about options of the load generator that are none here in terms of the YAML file."""
    if hint.startswith("--shape "):
        return hint
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


def _protocol(given: dict[str, list[str]], default: WireProtocol) -> WireProtocol:
    named = given.get("protocol") or given.get("i")
    if not named and "llm" in given and given.get("endpoint") != [LanguageEndpoint.INFER.value]:
        return WireProtocol.HTTP
    return WireProtocol(named[-1].lower()) if named else default


def _arguments(given: dict[str, list[str]]) -> list[str]:
    arguments = []
    for name, values in given.items():
        if name in ("protocol", "i"):
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        for value in values:
            arguments += [option, value] if value else [option]
    return arguments


class TunePrinter:
    """Prints a line for each event: a terminal keeps it, and so does a file. Nothing if quiet."""

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self._out = out
        self._quiet = quiet
        self._names: dict[str, str] = {}
        self._left = ""
        self._reasons: dict[str, int] = {}
        self._measured_s: list[float] = []

    def __call__(self, event: Event) -> None:
        if self._quiet:
            return
        match event:
            case TrialStarted():
                self._names[event.trial.variant.key] = event.name
                left_s = event.left_s
                if left_s is None and self._measured_s:
                    left_s = event.trials_left * sum(self._measured_s) / len(self._measured_s)
                self._left = "" if left_s is None else f"; at most {clock(left_s)} left"
            case TrialDone():
                self._measured_s += [] if event.resumed else [event.outcome.elapsed_s]
                name = self._names.get(event.trial.variant.key, str(event.trial.variant))
                self._print(
                    f"[{event.trial.number}] {name}, {loads_text(event.trial.loads)}: {self._found(event)}{self._left}"
                )
            case NoteAdded():
                self._print(event.text)

    def _print(self, text: str) -> None:
        # Names are a model's: control characters must not reach a terminal. A closed one must not end the run.
        with suppress(OSError, ValueError):
            print(
                "".join(each if each.isprintable() or each == "\n" else "?" for each in text),
                file=self._out,
                flush=True,
            )

    def _found(self, event: TrialDone) -> str:
        outcome = event.outcome
        if isinstance(outcome, TrialFailed):
            first = self._reasons.setdefault(outcome.reason, event.trial.number)
            return f"failed: {outcome.reason.splitlines()[0] if first == event.trial.number else f'as [{first}]'}"
        parts = []
        for metrics in outcome.metrics.values():
            (rate, per_s), (latency, name) = _figures(metrics)
            parts.append(f"{metrics[rate].value:,.0f} {per_s}, {name} {metrics[latency].value:.2f} ms")
        text = "; ".join(parts) + (" (from the journal)" if event.resumed else "")
        return text + (f"; best so far {self._best(event.best)}" if event.best is not None else "")

    def _best(self, best: Ranked) -> str:
        rate, unit = _rate(best.metrics)
        return f"{self._names.get(best.variant.key, str(best.variant))} ({rate:,.0f} {unit})"


_Metrics = Mapping[str, Estimate]


def _figures(metrics: _Metrics) -> tuple[tuple[Metric, str], tuple[Metric, str]]:
    """Return the rate and the latency of a model that are shown, each with its name."""
    if Metric.OUTPUT_TOKENS in metrics:
        return (Metric.OUTPUT_TOKENS, "tokens/s"), (Metric.TTFT_P99, "TTFT p99")
    return (Metric.THROUGHPUT, "infer/s"), (Metric.LATENCY_P99, "p99")


def _rate(found: Mapping[str, _Metrics]) -> tuple[float, str]:
    """Return the rate of all models together, and its unit: that of the first."""
    (_, unit), _ = _figures(next(iter(found.values())))
    return sum(metrics[_figures(metrics)[0][0]].value for metrics in found.values()), unit
