"""What `charonia perf` prints while it runs and leaves behind."""

import json
from pathlib import Path
from typing import Any, TextIO

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, unavailable
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import Event, InputSource, LevelBegun, LevelDone, WindowDone
from charonia.tools.perf.data.convert import from_bfloat
from charonia.tools.perf.options import PerfOptions
from charonia.tools.report.console import View, level_text, level_title, pass_text, summary_text
from charonia.tools.report.csv import csv_files
from charonia.tools.report.run_files import write_profile, write_run, write_whole
from charonia.tools.results.json_form import to_json
from charonia.tools.results.records import Run

EXPORT_ELEMENTS_MAX = 4096
"""Largest input that is written to an export; a larger one is null."""

STDOUT = Path("-")


class Printer:
    """Prints results as they come.

    Args:
        options: The options.
        decoupled: Whether the model is.
        out: Where to print.
    """

    def __init__(self, options: PerfOptions, decoupled: bool, out: TextIO) -> None:
        self._out = out
        self._verbose = options.report.verbosity > 0
        self._percentile = options.measurement.percentile
        self._view = View(
            protocol=options.target.protocol.value,
            percentile=options.measurement.percentile,
            verbose=self._verbose,
            decoupled=decoupled,
            metrics=options.server.collect_metrics,
        )

    def __call__(self, event: Event) -> None:
        """Print what an event is worth."""
        match event:
            case LevelBegun():
                title = level_title(event.level)
                if title:
                    self._print(title)
            case WindowDone() if self._verbose:
                self._print(pass_text(event.number, event.window, event.deviation_ns, self._percentile))
            case LevelDone():
                self._print(level_text(event.result, self._view))

    def end(self, run: Run) -> None:
        """Print what is said at the end."""
        self._print(summary_text(run))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def write_reports(run: Run, options: PerfOptions, source: InputSource) -> None:
    """Write every file that was asked for.

    Raises:
        ServingError: UNAVAILABLE when one cannot be written; the others are written all the same.
    """
    problems: list[str] = []
    for write in (_write_json, _write_csv, _write_html, _write_profile):
        try:
            write(run, options, source)
        except OSError as error:
            problems.append(f"{error.filename}: cannot be written: {error.strerror}")
        except ServingError as error:
            problems.append(str(error))
    if problems:
        raise unavailable("\n".join(problems))


def _write_json(run: Run, options: PerfOptions, source: InputSource) -> None:
    path = options.report.json
    if path == STDOUT:
        print(to_json(run), flush=True)
    elif path is not None:
        write_run(path, run)


def _write_csv(run: Run, options: PerfOptions, source: InputSource) -> None:
    report = options.report
    if report.csv is None:
        return
    files = csv_files(run, report.csv, verbose=report.verbose_csv, metrics=options.server.collect_metrics)
    for path, text in files.items():
        write_whole(path, text.encode())


def _write_html(run: Run, options: PerfOptions, source: InputSource) -> None:
    path = options.report.html
    if path is not None:
        # Imported late: few runs write a page.
        from charonia.tools.report.html import render

        write_whole(path, render([run]))


def _write_profile(run: Run, options: PerfOptions, source: InputSource) -> None:
    path = options.report.profile_export
    if path is not None:
        write_profile(path, run, Inputs(source))


class Inputs:
    """The inputs of requests as JSON, each made once.

    Args:
        source: Where the requests are from.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source
        self._texts: dict[tuple[int, int], str] = {}

    def __call__(self, stream: int, step: int) -> str:
        """Return the inputs of a request as JSON text."""
        text = self._texts.get((stream, step))
        if text is None:
            inputs = self._source.request(stream, step).inputs
            text = json.dumps({name: plain(tensor) for name, tensor in inputs.items()}, separators=(",", ":"))
            self._texts[stream, step] = text
        return text


def plain(tensor: Tensor) -> object:
    """Return a tensor as JSON: one element as itself, more as a flat list, many as null."""
    if tensor.array.size > EXPORT_ELEMENTS_MAX:
        return None
    array = from_bfloat(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
    elements: list[Any] = array.ravel().tolist()
    if tensor.datatype is DataType.BYTES:
        elements = [element.decode(errors="replace") for element in elements]
    return elements[0] if len(elements) == 1 else elements
