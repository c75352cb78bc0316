"""`charonia serve`: run a server until a signal stops it, and print a table of its models or a first request.

Exit status: 0 after a graceful shutdown; 1 if the arguments are invalid, a model fails to load at start (unless
`--exit-on-error=false`), an endpoint cannot be opened, the exit timeout expires, or a server of one process exceeds its
memory limit. A second signal exits immediately,
unless it comes within a second: supervisors, and GNU `timeout`, signal the child and its process group.
"""

import asyncio
import faulthandler
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Protocol

from charonia.cli import logs
from charonia.cli.command_line import HELP_NAMES, complain
from charonia.cli.serve_options import LINE, cache_folder, knative_port, vertex_ai_options, with_cache
from charonia.cli.terminal import ProgressSpinner, Style, is_terminal, style_of
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import EXAMPLE_REFUSED, is_language_model
from charonia.core.errors import ServingError
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.server.files.served_files import ServedFiles, UnsupportedFiles, classify, make_with_predictor
from charonia.server.guard import notify
from charonia.server.guard.notify import Notifier
from charonia.server.lifecycle.load_errors import NOT_ALL_LOADED
from charonia.server.lifecycle.repository.scan import scan
from charonia.server.machine.memory import (
    collect_less_often,
    exceeded,
    keep_freed_memory,
    limit_before_kill_mib,
    trim_idle_memory,
)
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.options import ALL_INTERFACES, LOOPBACK, WILDCARD_ADDRESSES, ServerOptions
from charonia.stores.location import is_store
from charonia.tools.report.quantities import ruled
from charonia.wire.example_inputs import takes_picture
from charonia.wire.example_request import URL, ExampleRequest, example_request

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SAME_SIGNAL_S = 1.0
"""Time after the first signal in which a second one counts as the same."""

ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
"""Environment variable: 0 writes log messages without quoting."""

SILENT = Notifier()
"""The service manager of a server that has none."""

NO_PROGRESS = ProgressSpinner(None, "")


class ListeningEndpoint(Protocol):
    """A front end that listens."""

    @property
    def port(self) -> int: ...


class StartedServer(Protocol):
    """A server that has started, as far as the banner describes it."""

    @property
    def http(self) -> ListeningEndpoint | None:
        """The HTTP front end, if it is enabled and started."""

    @property
    def grpc(self) -> ListeningEndpoint | None:
        """The gRPC front end, if it is enabled and started."""

    @property
    def metrics(self) -> ListeningEndpoint | None:
        """The metrics page, if it is enabled and started."""

    def models(self) -> list[ModelIndexEntry]:
        """Return every model with the state of its versions."""

    def model_config(self, name: str) -> ModelConfig:
        """Return the complete configuration of a model. Raises ServingError for one that is not ready."""


class RunningServer(StartedServer, Protocol):
    """The part of `charonia.server.app.InferenceServer` that this command uses."""

    async def start(self) -> None:
        """Load the models and open the endpoints. Raises ServingError."""

    async def shutdown(self) -> bool:
        """Shut down gracefully; return whether all requests in flight were answered."""


def run(arguments: Sequence[str]) -> int:
    if not HELP_NAMES.isdisjoint(arguments):
        print(LINE.help())
        return 0
    try:
        options, notes = parse(arguments, os.environ)
    except ServingError as error:
        complain("charonia serve", error)
        print("`charonia serve --help` lists the options.", file=sys.stderr)
        return 1
    try:
        served = classify(options.models)
        options = with_addresses(options, served)
        is_watched = served.needs_repository and not options.front_ends and is_terminal(sys.stderr)
        log = logs.configure(options.log, terminal=is_watched)
    except ServingError as error:
        complain("charonia serve", error)
        if isinstance(error, UnsupportedFiles):
            print(f"Wrap it like this:\n\n{error.lines}\n", file=sys.stderr)
        return 1
    for note in notes:
        _log.warning("%s", note)
    notifier = Notifier.taken_from(os.environ)
    if notifier.limit_s:
        faulthandler.enable()  # a service manager that misses heartbeats sends SIGABRT: the log then shows what hangs
    _allow_open_files()
    keep_freed_memory(os.environ)
    try:
        folders = [path for path in served.repositories if not is_store(path)]
        for note in scan(folders, fingerprints=False).notes:
            _log.warning("%s", note)
    except ServingError as error:
        if options.exit_on_error:
            _log.error("%s", error)
            return 1
    # Imported late, so that invalid arguments are reported before backends and front ends are imported.
    from charonia.server.app import InferenceServer, new_event_loop
    from charonia.server.front_ends.processes import ServerProcesses

    def make_server(options: ServerOptions) -> RunningServer:
        if options.front_ends:
            return ServerProcesses(options, arguments=arguments, notifier=notifier)
        return InferenceServer(options, log=log)

    with PrivateFolder() as folder, asyncio.Runner(loop_factory=new_event_loop) as runner:
        progress = ProgressSpinner(
            sys.stderr if is_watched else None,
            f"loading {', '.join(Path(each).name for each in options.models.repositories)}",
        )
        status, is_clean = runner.run(serve_files(options, served, folder.path, make_server, notifier, progress))
        if not is_clean:
            # Threads that still compute would delay the exit.
            folder.remove()
            _end_now(status)
    # The loop gave its handlers back: a signal that is sent twice would end the process with another status.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return status


def with_addresses(options: ServerOptions, files: ServedFiles) -> ServerOptions:
    """Return the options with addresses to listen on where none are given.

    A repository is served to other machines, as the original does; files to this one only, unless KServe or a cloud
    runs the server.
    """
    is_hosted = bool(options.models.files.model_name) or options.clouds.sagemaker or options.clouds.vertex_ai
    is_local = files.needs_repository and not files.repositories and not is_hosted
    default = LOOPBACK if is_local else ALL_INTERFACES
    return replace(
        options,
        http=replace(options.http, address=options.http.address or default),
        grpc=replace(options.grpc, address=options.grpc.address or default),
    )


async def serve_files(
    options: ServerOptions,
    served: ServedFiles,
    folder: Path,
    make_server: Callable[[ServerOptions], RunningServer],
    notifier: Notifier = SILENT,
    progress: ProgressSpinner = NO_PROGRESS,
) -> tuple[int, bool]:
    """Run a server as `serve` does, with files and folders of models in a repository that is made for them."""
    if options.models.files.predictor:
        try:
            files = options.models.files
            make_with_predictor(served.repositories, files.predictor, files.predictor_host, folder)
        except ServingError as error:
            _log_refusal(error)
            return 1, True
        models = replace(options.models, repositories=(str(folder),))
        return await serve(replace(options, models=models), make_server, notifier=notifier)
    if not (served.needs_repository or options.models.files.mounts):
        return await serve(options, make_server, notifier=notifier)
    # Imported late: it needs the backends.
    from charonia.server.files.repository import file_repository

    repository = file_repository(served, options.models.files, folder, options.backends)
    progress.show()
    try:
        names = await repository.make()
    except ServingError as error:
        progress.clear()
        _log_refusal(error)
        return 1, True
    models = replace(options.models, repositories=(*served.repositories, str(folder)))
    interval_s = models.poll_interval_secs
    following = asyncio.create_task(repository.follow(interval_s)) if interval_s and repository.has_services else None
    try:
        return await serve(
            replace(options, models=models), make_server, show=names, notifier=notifier, progress=progress
        )
    finally:
        if following is not None:
            following.cancel()


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[ServerOptions, tuple[str, ...]]:
    """Return the options, and notes about options without effect."""
    parsed = LINE.split(arguments)
    updates = LINE.read(parsed)
    if environment.get(ESCAPE_VARIABLE) == "0":
        updates["log.escape"] = False
    updates["backends"] = with_cache(updates.get("backends", LINE.record.backends), environment)
    cache = cache_folder(environment)
    if cache is not None:
        updates.setdefault("models.stores.cache", str(cache / "stores"))
    try:
        updates = knative_port(environment) | vertex_ai_options(environment, updates) | updates
    except ValueError as error:
        parsed.problems.append(str(error))
    # Default addresses depend on the kind of model.
    options = LINE.filled({"http.address": "", "grpc.address": ""} | updates, parsed)
    if not options.models.repositories and not parsed.problems:
        parsed.problems.append(
            "--model-repository must be specified, e.g. `charonia serve models` or `charonia serve model.onnx`"
        )
    clouds = options.clouds
    if not (options.http.enabled or options.grpc.enabled or clouds.sagemaker or clouds.vertex_ai):
        parsed.problems.append("at least one of --allow-http and --allow-grpc must be true")
    parsed.check()
    return options, tuple(parsed.notes)


async def serve(
    options: ServerOptions,
    make_server: Callable[[ServerOptions], RunningServer],
    *,
    show: Sequence[str] = (),
    notifier: Notifier = SILENT,
    progress: ProgressSpinner = NO_PROGRESS,
) -> tuple[int, bool]:
    """Run a server until it fails to start or a signal arrives.

    Args:
        show: Models to print on standard output when they are ready, with requests.
        progress: Cleared when the server has started, or cannot.

    Returns:
        The exit status, and whether the shutdown was clean.
    """
    from charonia.server.front_ends.processes import with_number  # late, as it imports backends

    stopped = _stop_event()
    try:
        options = with_memory_limit(with_number(options))
        server = make_server(options)
    except ServingError as refused:
        _log.error("%s", refused)
        return 1, True
    pings = asyncio.create_task(notifier.ping())
    notifier.send(notify.status("loading models"))
    starting = asyncio.ensure_future(server.start())
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    progress.clear()
    status, is_clean = 0, starting.done()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    if starting.cancelled():
        _log.info("stopped while starting")
    elif starting.exception() is not None:
        status = 1
    else:
        collect_less_often()
        _announce(options, server)
        if show:
            print(banner(options, server, show, style_of(sys.stdout)), flush=True)
        notifier.send(notify.READY, notify.status(summary(server.models())))
        giving_back = asyncio.create_task(trim_idle_memory())
        exceeding = asyncio.ensure_future(exceeded(0 if options.front_ends else options.memory_limit_mib))
        await asyncio.wait({waiting, exceeding}, return_when=asyncio.FIRST_COMPLETED)
        if exceeding.done():
            status = 1
            _log.error(
                "the server has %d MiB of memory, more than --memory-limit-mib=%d: shutting down",
                exceeding.result(),
                options.memory_limit_mib,
            )
        exceeding.cancel()
        giving_back.cancel()
    waiting.cancel()
    notifier.send(notify.STOPPING, notify.status("stopping: requests in flight are finished"))
    finished = await server.shutdown()
    pings.cancel()
    # Last, so that the messages of unloaded models do not hide it.
    _log_end(None if starting.cancelled() else starting.exception())
    return status if finished else 1, finished and is_clean


def with_memory_limit(options: ServerOptions) -> ServerOptions:
    """Return the options with a limit that acts before the kernel would end all processes of the container."""
    if options.memory_limit_mib or not (limit_mib := limit_before_kill_mib()):
        return options
    _log.info(
        "memory.oom.group: the kernel would end all processes of this container when its memory runs out. "
        "At %d MiB, nine tenths of it, %s (--memory-limit-mib)",
        limit_mib,
        "the engine restarts" if options.front_ends else "the server shuts down, with exit status 1",
    )
    return replace(options, memory_limit_mib=limit_mib)


def started_line(service: str, address: str, port: int) -> str:
    """Return a line that start scripts wait for."""
    host = f"[{address}]" if ":" in address else address
    return f"Started {service} at {host}:{port}"


def _announce(options: ServerOptions, server: RunningServer) -> None:
    """Log the table of models, then the lines that start scripts wait for, metrics last."""
    entries = server.models()
    if entries:
        _log.info("%s", summary(entries), extra={logs.BLOCK: models_table(entries)})
    else:
        _log.warning("no models: a repository is a folder of model folders, such as <repository>/resnet/1/model.onnx")
    for service, address, endpoint in (
        ("GRPCInferenceService", options.grpc.address, server.grpc),
        ("HTTPService", options.http.address, server.http),
        ("Metrics Service", options.metrics_address, server.metrics),
    ):
        if endpoint is not None:
            _log.info("%s", started_line(service, address, endpoint.port))


def _log_end(failure: BaseException | None) -> None:
    """Log that the server has stopped, and why it could not start; errors of models are in the log already."""
    reason = ""
    if isinstance(failure, ServingError) and failure.message.startswith(NOT_ALL_LOADED):
        reason = f": {NOT_ALL_LOADED}" + (f" ({failure.hint})" if failure.hint else "")
    elif isinstance(failure, ServingError):
        _log_refusal(failure)
    elif failure is not None:
        _log.error("the server cannot start", exc_info=failure)
    _log.info("server stopped%s", reason)


def _log_refusal(error: ServingError) -> None:
    fact, _, further = error.message.partition("\n")
    if further:
        hint = f"\n(hint: {error.hint})" if error.hint else ""
        _log.error("the server cannot start: %s", fact, extra={logs.BLOCK: further + hint})
    else:
        _log.error("the server cannot start: %s%s", fact, f" ({error.hint})" if error.hint else "")


def _stop_event() -> asyncio.Event:
    """Return an event that the first signal sets; a second one after `SAME_SIGNAL_S` exits immediately."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    first_s = 0.0

    def stop(number: int) -> None:
        nonlocal first_s
        name = signal.Signals(number).name
        if event.is_set() and loop.time() - first_s < SAME_SIGNAL_S:
            return
        if event.is_set():
            _log.error("%s again: exiting immediately", name)
            _end_now(1)
        _log.info("%s: shutting down", name)
        first_s = loop.time()
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    # SIGUSR2 requests an upgrade, and would kill a process that does not handle it.
    hint = "it has not started yet, or is one process: --front-ends 1 and more can be upgraded"
    loop.add_signal_handler(signal.SIGUSR2, lambda: _log.error("the server cannot be upgraded (hint: %s)", hint))
    return event


def _end_now(status: int) -> None:
    logging.shutdown()
    os._exit(status)


def _allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one, for connections and workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("at most %d files and connections can be open: %s", soft, error)


REQUEST_CHARACTERS_MAX = 100
"""Longest request that is printed with its values; of a longer one, `charonia infer` makes the values up."""

_HEADINGS = ("Model", "Version", "Status")
_RULE_MAX = 60


def banner(options: ServerOptions, server: StartedServer, names: Sequence[str], style: Style) -> str:
    """Return what to print when a server of files has started: its models, its address and a first request.

    Args:
        names: The models of the files, in the order in which they were given.
    """
    configs = []
    for name in names:
        try:
            configs.append(server.model_config(name))
        except ServingError:
            continue  # it has failed, as the table of all models says
    lines = [f"  {style.bold(config.name)}: {signature(config)}" for config in configs]
    if len(configs) < len(names):
        lines = [indent(models_table(server.models()), "  "), "", *lines]
    if server.http is not None:
        url = f"{'https' if options.http.tls.active else 'http'}://{_shown(options.http.address, server.http.port)}"
        if options.http.page:
            lines += ["", f"  Open {style.bold(url + '/')}"]
        lines += ["", *(f"    {line}" for config in configs[:1] for line in _first_request(config, url))]
        if len(configs) > 1 and options.http.page:
            lines += ["", "  The page has a request for each model, for curl and Python."]
    lines += ["", style.dim("  " + _endpoints(options, server))]
    return "\n" + "\n".join(line.rstrip() for line in lines) + "\n"


def _shown(address: str, port: int) -> str:
    """Return where a client on this machine connects to."""
    if address in WILDCARD_ADDRESSES or address == LOOPBACK:
        return f"localhost:{port}"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _endpoints(options: ServerOptions, server: StartedServer) -> str:
    """Return the other addresses, and who can reach them."""
    parts = []
    if server.grpc is not None:
        parts.append(f"gRPC {_shown(options.grpc.address, server.grpc.port)}")
    if server.metrics is not None:
        parts.append(f"metrics http://{_shown(options.metrics_address, server.metrics.port)}/metrics")
    if options.http.address == LOOPBACK:
        parts.append("this machine only (--host=0.0.0.0 for others, too)")
    elif options.http.address in WILDCARD_ADDRESSES:
        parts.append("reachable from other machines (--host=127.0.0.1 for this one only)")
    return ", ".join(parts)


def _first_request(config: ModelConfig, url: str) -> list[str]:
    """Return the lines of a short request to a model."""
    short = url.removeprefix("http://")
    if is_language_model(config):
        chat = f"charonia chat {config.name}" + (f" -u {short}" if short != URL else "")
        return [
            chat,
            "",
            f"Base URL for clients of OpenAI's API: {url}/v1",
            "",
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="none")',
            f'client.chat.completions.create(model="{config.name}", messages=[{{"role": "user", "content": "Hello"}}])',
        ]
    request = example_request(config, url=short)
    if EXAMPLE_REFUSED in config.parameters:
        return _own_request(request)
    command, curl = request.infer_command(), request.curl()
    if len(command) > REQUEST_CHARACTERS_MAX:
        command = replace(request, inputs={}).infer_command()
    # A picture keeps its own size where that is variable, which a model that takes only some may refuse.
    pictures = [i.name for i in config.input if takes_picture(config, i) and not config.model_warmup]
    lines = [command + "".join(f"    # or -i {name}=@cat.jpg" for name in pictures[:1])] if command else []
    return lines + ([curl] if curl and len(curl) <= REQUEST_CHARACTERS_MAX else [])


def _own_request(request: ExampleRequest) -> list[str]:
    """Return why no made-up request works, and a command that sends arrays of other shapes."""
    files = {name: re.sub(r"\W", "_", name) + ".npy" for name in request.inputs}
    refusal = request.config.parameters[EXAMPLE_REFUSED].splitlines()
    return [
        f"Generated inputs do not work here. The model answered: {refusal[0]}",
        *refusal[1:],
        "This sends arrays of your own, written by numpy.save:",
        "",
        replace(request, inputs={}, files=files).infer_command(),
    ]


def signature(config: ModelConfig) -> str:
    """Return inputs and outputs of a model: "x FP32[-1,3] -> y FP32[-1,10]"."""
    lead = (-1,) if config.max_batch_size > 0 else ()

    def tensors(ports: Sequence[ModelInput | ModelOutput]) -> str:
        return ", ".join(
            f"{port.name}{'?' * getattr(port, 'optional', False)} {port.data_type.wire if port.data_type else '?'}"
            f"[{','.join(map(str, (*lead, *port.dims)))}]"
            for port in ports
        )

    arrow = " ->> " if config.is_decoupled else " -> "
    return f"{tensors(config.input)}{arrow}{tensors(config.output)}"


def models_table(entries: Sequence[ModelIndexEntry]) -> str:
    """Return the models as a table: name, version, and state, with the reason if it is not ready.

    A reason of several lines is aligned with its column. One that quotes another model's names that model instead.
    """
    rows = [_HEADINGS]
    for entry in _without_quotations(entries):
        status, *further = status_lines(entry)
        rows += [(entry.name, entry.version or "-", status), *(("", "", line) for line in further)]
    return ruled(rows, _RULE_MAX)


def _without_quotations(entries: Sequence[ModelIndexEntry]) -> list[ModelIndexEntry]:
    causes = sorted((each for each in entries if " " in each.reason), key=lambda each: -len(each.reason))
    shortened = []
    for entry in entries:
        reason = entry.reason
        for cause in causes:
            if cause.name != entry.name:
                reason = reason.replace(cause.reason, f"see '{cause.name}'")
        shortened.append(replace(entry, reason=reason))
    return shortened


def status_lines(entry: ModelIndexEntry) -> list[str]:
    """Return the state of a model version and its reason, in lines."""
    if entry.state is None:
        return ["not loaded"]
    if entry.state is ModelState.READY or not entry.reason:
        return [entry.state.value]
    return f"{entry.state.value}: {entry.reason}".split("\n")


def summary(entries: Sequence[ModelIndexEntry]) -> str:
    """Return the number of ready model versions, and of all that should be ready."""
    asked = [entry for entry in entries if entry.state is not None]
    ready = sum(entry.state is ModelState.READY for entry in asked)
    return f"{ready} of {len(asked)} model versions ready"
