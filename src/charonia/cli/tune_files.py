"""The files of `charonia tune`: tables, JSON and report, and finding them again."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from charonia.cli.tune_options import ReportRequest
from charonia.core.errors import ServingError, invalid, not_found
from charonia.tools.tune.options import OutputSettings
from charonia.tools.tune.report.html import render
from charonia.tools.tune.report.pictures import pictures, require_matplotlib
from charonia.tools.tune.result import TuneRun, from_json, to_json
from charonia.tools.tune.tables import gpu_csv, inference_csv, server_csv

RESULTS = "results"
"""Folder of the export path that the files are in."""

JSON_FILE = "charonia-tune.json"
HTML_FILE = "charonia-tune.html"
JSON_STDOUT = "-"


def check_writable(output: OutputSettings) -> None:
    """Make the folders of the results, before anything is measured.

    Raises:
        ServingError: INVALID_ARG when one cannot be written.
    """
    folders = [output.export / RESULTS]
    folders += [path.parent for path in (output.json, output.html) if path is not None and str(path) != JSON_STDOUT]
    if output.png is not None:
        require_matplotlib()
        folders.append(output.png)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        if not os.access(folder, os.W_OK):
            raise invalid(f"'{folder}' cannot be written: permission denied")


def write_results(run: TuneRun, output: OutputSettings, names: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Write all files, and return their paths and the tables.

    Args:
        run: What was found.
        output: What is to be written.
        names: Variants that the page shows beside the default and the recommended one, () for all.

    Raises:
        ServingError: INVALID_ARG when one cannot be written.
    """
    folder = output.export / RESULTS
    tables = {
        output.inference_file: inference_csv(run.groups, output.inference_fields),
        output.gpu_file: gpu_csv(run.groups, output.gpu_fields),
        output.server_file: server_csv(run.idle_gpus, output.server_fields),
    }
    document = to_json(run) + "\n"
    data = {name: text for name, text in tables.items() if text} | {JSON_FILE: document}
    # What was measured first: it must not depend on what is made of it.
    written = [_write(folder / name, text.encode()) for name, text in data.items()]
    if output.json is not None and str(output.json) == JSON_STDOUT:
        sys.stdout.write(document)
    elif output.json is not None:
        written.append(_write(output.json, document.encode()))
    if output.summaries or output.html is not None:
        written.append(_write(output.html or folder / HTML_FILE, render(run, names)))
    if output.png is not None:
        written += [_write(output.png / name, content) for name, content in pictures(run).items()]
    return written, [text for text in tables.values() if text]


def read_result(request: ReportRequest) -> TuneRun:
    """Return the run that a report is asked for.

    Raises:
        ServingError: NOT_FOUND when there is none, INVALID_ARG when it is not one.
    """
    path = request.json or request.export / RESULTS / JSON_FILE
    try:
        return from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise not_found(
            f"'{path}' does not exist", hint="charonia tune profile writes it; -e names the folder that it is in"
        ) from None
    except OSError as error:
        raise invalid(f"'{path}' cannot be read: {(error.strerror or str(error)).lower()}") from error


def write_report(run: TuneRun, request: ReportRequest) -> list[Path]:
    """Write tables and page again, and return their paths.

    Raises:
        ServingError: INVALID_ARG when one cannot be written.
    """
    output = OutputSettings(export=request.export, html=request.html, png=request.png)
    check_writable(output)
    return write_results(run, output, request.names)[0]


def _write(path: Path, content: bytes) -> Path:
    """Write a file such that it is either the old one or the new one, whatever happens, and return its path."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content)
        os.replace(new, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> ServingError:
    return invalid(f"'{path}' cannot be written: {(error.strerror or str(error)).lower()}")
