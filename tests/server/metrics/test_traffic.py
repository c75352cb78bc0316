"""What endpoints have taken in, on the metrics page."""

from charonia.server.metrics.processes import Traffic, traffic_families
from charonia.server.metrics.prometheus import render


def test_the_metrics_page_shows_connections_and_requests_by_process_and_protocol() -> None:
    traffic = [Traffic("front_end_1", "http", 2, 5, 40), Traffic("front_end_2", "grpc", 0, 1, 7)]
    page = render([], families=traffic_families(traffic)).decode()

    lines = [line for line in page.splitlines() if line.startswith(("charonia_connections_", "charonia_requests_"))]
    assert lines == [
        'charonia_connections_open{process="front_end_1",protocol="http"} 2',
        'charonia_connections_open{process="front_end_2",protocol="grpc"} 0',
        'charonia_connections_accepted_total{process="front_end_1",protocol="http"} 5',
        'charonia_connections_accepted_total{process="front_end_2",protocol="grpc"} 1',
        'charonia_requests_received_total{process="front_end_1",protocol="http"} 40',
        'charonia_requests_received_total{process="front_end_2",protocol="grpc"} 7',
    ]


def test_what_is_counted_while_one_process_takes_the_place_of_another_is_added_up() -> None:
    traffic = [Traffic("front_end_1", "http", 2, 5, 40), Traffic("front_end_1", "http", 1, 1, 3)]
    page = render([], families=traffic_families(traffic)).decode()

    assert [line.split()[-1] for line in page.splitlines() if 'process="front_end_1"' in line] == ["3", "6", "43"]
