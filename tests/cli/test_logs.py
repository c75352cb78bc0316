import io
import logging
import re
import sys
from pathlib import Path

import pytest

from charonia.cli import logs
from charonia.cli.logs import BLOCK, LineFormatter, configure, level_of
from charonia.cli.terminal import CLEAR_LINE
from charonia.core.errors import ServingError
from charonia.server.log_file import LINES
from charonia.wire.log_settings import LogFormat, LogOptions

pytestmark = pytest.mark.usefixtures("root_logger")


def record(message: str, level: int = logging.INFO, block: str = "") -> logging.LogRecord:
    made = logging.LogRecord("charonia", level, "/x/lifecycle.py", 120, message, (), None)
    made.created = 1795320161.123456  # 2026-11-22T04:02:41 UTC
    made.__dict__[BLOCK] = block
    return made


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.ERROR, "E"), (logging.CRITICAL, "E"), (logging.WARNING, "W"), (logging.INFO, "I"), (logging.DEBUG, "I")],
)
def test_a_line_begins_as_tritons_does(level: int, letter: str) -> None:
    line = LineFormatter().format(record("loading: m:1", level))

    assert re.fullmatch(letter + r'1122 04:02:41\.123456 \d+ lifecycle\.py:120\] "loading: m:1"', line)


def test_a_line_begins_with_date_and_time_in_the_other_format() -> None:
    line = LineFormatter(LogFormat.ISO8601).format(record("loading: m:1", logging.WARNING))

    assert re.fullmatch(r'2026-11-22T04:02:41Z W \d+ lifecycle\.py:120\] "loading: m:1"', line)


def test_a_message_cannot_forge_a_line_or_drive_a_terminal() -> None:
    line = LineFormatter().format(record('id "x"\nI1122 forged\x1b[2J\x9b2J\x7f\u2028\ud800'))

    assert line.endswith(r'] "id \"x\"\nI1122 forged\u001b[2J\u009b2J\u007f\u2028\ud800"')


def test_text_in_other_scripts_stays_readable() -> None:
    assert LineFormatter().format(record("模型 'größe'")).endswith("] \"模型 'größe'\"")


def test_quoting_can_be_switched_off() -> None:
    assert LineFormatter(escape=False).format(record('a "b"')).endswith('] a "b"')


def test_a_block_follows_its_line_with_its_own_lines_set_back_and_made_safe() -> None:
    text = LineFormatter().format(record("models", block="Model\n\nm\x1b[31m\rE1122"))

    assert text.splitlines()[1:] == ["  Model", "", r"  m\u001b[31m\u000dE1122"]


def test_the_lines_of_a_message_may_follow_it_as_a_block() -> None:
    problems = record("2 problems\n  one\n  \x1btwo")
    problems.__dict__[LINES] = True

    assert LineFormatter().format(problems).split("] ", 1)[1] == '"2 problems"\n    one\n    \\u001btwo'


def test_a_traceback_is_a_block_that_cannot_forge_a_line() -> None:
    try:
        raise ValueError("broken\nE1122 forged")
    except ValueError:
        failed = record("model failed", logging.ERROR)
        failed.exc_info = sys.exc_info()

    lines = LineFormatter().format(failed).splitlines()

    assert lines[0].endswith('"model failed"')
    assert lines[1] == "  Traceback (most recent call last):"
    assert lines[-1] == "  E1122 forged"
    assert all(line.startswith("  ") for line in lines[1:])


def test_severities_are_switched_off_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogOptions(info=False, warning=True, error=False))
    logger = logging.getLogger("charonia.test")

    logger.info("information")
    logger.warning("warning")
    logger.error("error")

    assert re.findall(r'"(.*)"', capsys.readouterr().err) == ["warning"]


def test_detail_is_written_up_to_the_level_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogOptions(verbose=2, info=False))
    logger = logging.getLogger("charonia.test")

    logger.log(level_of(1), "first")
    logger.log(level_of(2), "second")
    logger.log(level_of(3), "third")

    assert re.findall(r'"(.*)"', capsys.readouterr().err) == ["first", "second"]


def test_levels_never_fall_to_not_set() -> None:
    assert [level_of(0), level_of(1), level_of(2), level_of(100)] == [logging.INFO, logging.DEBUG, 9, 1]


def test_setting_up_again_replaces_what_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogOptions())
    configure(LogOptions())

    logging.getLogger("charonia.test").info("once")

    assert capsys.readouterr().err.count("once") == 1


def test_a_log_file_is_appended_to_and_opened_anew_once_it_was_moved(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    configure(LogOptions(file=str(path)))
    logger = logging.getLogger("charonia.test")

    logger.info("first \udcff")
    path.rename(tmp_path / "server.log.1")
    logger.info("second")

    assert re.findall(r"before|first|second", (tmp_path / "server.log.1").read_text()) == ["before", "first"]
    assert "second" in path.read_text()


def test_a_log_file_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"--log-file: cannot write '.*/missing/server\.log': no such file"):
        logs.configure(LogOptions(file=str(tmp_path / "missing" / "server.log")))


def test_in_a_terminal_warnings_and_errors_are_plain_text() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logs.ServerLogControl(handler, LogOptions(), terminal=True)
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        handler.handle(record("model 'net': \x1b[2J late\nand more", level))

    assert stream.getvalue().replace(CLEAR_LINE, "").splitlines() == [
        "warning: model 'net': \\u001b[2J late",
        "and more",
        "error: model 'net': \\u001b[2J late",
        "and more",
    ]
