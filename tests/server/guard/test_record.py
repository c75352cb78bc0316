"""The guard's record of its processes: on its way to the engine, and on the metrics page."""

from charonia.server.metrics.processes import ProcessRecord, families, from_text, to_text
from charonia.server.metrics.prometheus import render

RECORDS = (
    ProcessRecord("engine", 12, 5_000_000_000, {"SIGKILL": 2, "exit status 1": 1}, "SIGKILL"),
    ProcessRecord("front_end_0", 0, 0, {}, "hung"),
)


def test_a_record_arrives_as_it_was() -> None:
    assert from_text(to_text(RECORDS)) == RECORDS


def test_the_metrics_page_shows_restarts_by_reason_and_what_each_process_uses() -> None:
    ended = ProcessRecord("front_end_1", 13, 5_000_000_000)
    used = {12: (1.25, 4096), 13: None}
    page = render([], families=families((*RECORDS, ended), 7_500_000_000, used.__getitem__)).decode()

    lines = [line for line in page.splitlines() if line.startswith("charonia_process_")]
    assert lines == [
        'charonia_process_restarts_total{process="engine",reason="SIGKILL"} 2',
        'charonia_process_restarts_total{process="engine",reason="exit status 1"} 1',
        'charonia_process_uptime_seconds{process="engine"} 2.5',
        'charonia_process_uptime_seconds{process="front_end_0"} 0.0',
        'charonia_process_uptime_seconds{process="front_end_1"} 2.5',
        'charonia_process_cpu_seconds_total{process="engine"} 1.25',
        'charonia_process_resident_memory_bytes{process="engine"} 4096',
    ]


def test_a_server_of_one_process_has_no_such_metrics() -> None:
    assert families((), 0, lambda pid: None) == []
