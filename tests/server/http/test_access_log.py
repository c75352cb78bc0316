import errno
import json
import os
from io import StringIO

import pytest

from charonia.core.response import ExecutionRecord
from charonia.server.access_log import VALUE_CHARS_MAX, AccessEntry, AccessLog


def line(entry: AccessEntry, *, as_json: bool = False) -> str:
    stream = StringIO()
    AccessLog(stream, as_json=as_json, wall_clock=lambda: 1_700_000_000.25).write(entry)
    return stream.getvalue()


def test_a_request_is_one_line_of_text() -> None:
    entry = AccessEntry(
        "http",
        "POST /v2/models/m/infer",
        200,
        "m",
        "1",
        "r1",
        10,
        20,
        1_234_567,
        ExecutionRecord("m_0", 4, 1000, 2_000_000),
    )

    assert line(entry) == (
        'time=2023-11-14T22:13:20.250Z protocol=http method="POST /v2/models/m/infer" model=m version=1 id=r1 '
        "status=200 bytes_in=10 bytes_out=20 duration_ms=1.235 queue_ms=0.001 compute_ms=2.0 batch_size=4 "
        "instance=m_0\n"
    )


def test_a_request_is_one_json_object() -> None:
    assert json.loads(line(AccessEntry("grpc", "ServerLive", "OK", duration_ns=400), as_json=True)) == {
        "time": "2023-11-14T22:13:20.250Z",
        "protocol": "grpc",
        "method": "ServerLive",
        "status": "OK",
        "bytes_in": 0,
        "bytes_out": 0,
        "duration_ms": 0.0,
    }


def test_a_client_cannot_forge_a_line_nor_fill_the_log() -> None:
    text = line(AccessEntry("http", "GET /", 200, request_id="a\n status=500 " + "x" * 1000))

    assert text.count("\n") == 1
    assert 'id="a\\n status=500 xxx' in text
    assert len(text) < VALUE_CHARS_MAX + 200


class Disk(StringIO):
    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_full_disk_costs_lines_and_is_told_once_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    log = AccessLog(disk)
    for is_full in (True, True, False, True):
        disk.is_full = is_full
        log.write(AccessEntry("grpc", "ServerLive", "OK"))

    assert len(disk.getvalue().splitlines()) == 1
    assert [r.message for r in caplog.records] == [
        "access log: lines are lost, they cannot be written: No space left on device"
    ] * 2
