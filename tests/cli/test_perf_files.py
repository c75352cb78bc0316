"""The files that a run of `charonia perf` leaves."""

from pathlib import Path
from typing import cast

import pytest
from tests.support.runs import synthetic_run

from charonia.cli.perf_run import write_reports
from charonia.core.errors import ServingError
from charonia.tools.perf.api import InputSource
from charonia.tools.perf.options import PerfOptions, ReportOptions, TargetOptions

# No file that is written here has the inputs of requests.
NO_INPUTS = cast(InputSource, None)


def wanted(report: ReportOptions) -> PerfOptions:
    return PerfOptions(TargetOptions("identity"), report=report)


def test_each_report_that_is_asked_for_is_written(tmp_path: Path) -> None:
    page, table = tmp_path / "run.html", tmp_path / "run.md"

    write_reports(synthetic_run(), wanted(ReportOptions(html=page, markdown=table)), NO_INPUTS)

    assert page.read_bytes().startswith(b"<!doctype html>")
    assert table.read_text(encoding="utf-8").startswith("## identity\n")


def test_a_report_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table = tmp_path / "run.md"

    with pytest.raises(ServingError, match=r"run\.html: cannot be written"):
        write_reports(
            synthetic_run(), wanted(ReportOptions(html=tmp_path / "file" / "run.html", markdown=table)), NO_INPUTS
        )

    assert table.exists()
