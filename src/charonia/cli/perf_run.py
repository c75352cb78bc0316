"""The measurement of `charonia perf`: from parsed options to reports."""

import sys
from typing import TextIO

from charonia.cli.perf_options import Parsed
from charonia.cli.perf_output import STDOUT, Printer, write_reports
from charonia.cli.perf_progress import watched
from charonia.cli.perf_settings import is_decoupled, printed_settings, run_settings, target
from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.core.errors import ServingError
from charonia.tools.perf.data.load import load_inputs
from charonia.tools.perf.data.spec import model_spec
from charonia.tools.perf.options import PerfOptions
from charonia.tools.perf.run import Subject, ask, run, stopped_by_signals
from charonia.tools.report.console import settings_text
from charonia.tools.results.records import Run
from charonia.wire.transport import Failure

CONTEXT = "failed to get model metadata"
"""What perf_analyzer says before the reason why there is no such model or server."""

_OTHER_PROTOCOL = (
    "does another protocol have that port? HTTP has 8000, -i grpc 8001; "
    "TLS is -u https://HOST:PORT, or --ssl-grpc-use-ssl with -i grpc"
)
_HINTS = {
    "this port speaks gRPC": _OTHER_PROTOCOL,
    "expected HTTP/2 of": _OTHER_PROTOCOL,
    "closed the connection before": _OTHER_PROTOCOL,
    "certificate is not trusted": "options of `charonia perf --help`, under TLS, name certificates to trust",
    "needs an API key": "-H 'authorization: Bearer KEY'",
}
"""What to do, by what the client says."""


def measure(parsed: Parsed) -> Run:
    """Run what the options ask for, print and write what they want, and return what was measured.

    Raises:
        ServingError: Nothing can be measured, or a report cannot be written.
    """
    options = parsed.options
    wanted = target(options)
    with Client(wanted.url, options=wanted.wire) as client:
        subject = _asked(client, options)
        settings = run_settings(parsed, subject.config)
        source = load_inputs(model_spec(subject.metadata, subject.config, options.target.version), options)
        out = _text_output(options)
        printer = None if out is None else Printer(options, is_decoupled(subject.config), out)
        if out is not None:
            print(settings_text(printed_settings(options, subject.config)), file=out, flush=True)
        with stopped_by_signals() as stop, watched(options.report, printer) as progress:
            made = run(settings, source, client, subject, progress, stop)
    if printer is not None:
        printer.end(made)
    write_reports(made, options, source)
    return made


def _asked(client: Client, options: PerfOptions) -> Subject:
    try:
        return ask(client, target(options))
    except ServingError as error:
        raise ServingError(error.code, f"{CONTEXT}: {error.message}", hint=_hint(error)) from None


def _hint(error: ServingError) -> str:
    """Return what to do where the server does not answer, or not in the way that it is asked."""
    for text, hint in _HINTS.items():
        if text in error.message:
            return hint
    return "-u names the server" if isinstance(error, ClientError) and error.failure is Failure.REFUSED else error.hint


def _text_output(options: PerfOptions) -> TextIO | None:
    """Return where text goes: nowhere when it is not wanted, to stderr when stdout is taken by JSON."""
    if options.report.quiet:
        return None
    return sys.stderr if options.report.json == STDOUT else sys.stdout
