"""What `charonia serve` prints of its models: a table of their states, and for files how to send the first request."""

import re
from collections.abc import Sequence
from dataclasses import replace
from textwrap import indent
from typing import Protocol

from charonia.cli.terminal import Style
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import EXAMPLE_REFUSED, is_language_model
from charonia.core.errors import ServingError
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.server.options import LOOPBACK, WILDCARD_ADDRESSES, ServerOptions
from charonia.tools.report.quantities import ruled
from charonia.wire.example_inputs import takes_picture
from charonia.wire.example_request import URL, ExampleRequest, example_request

REQUEST_CHARACTERS_MAX = 100
"""Longest request that is printed with its values; of a longer one, `charonia infer` makes the values up."""

_HEADINGS = ("Model", "Version", "Status")
_RULE_MAX = 60


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
