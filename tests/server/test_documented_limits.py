"""The table of docs/faults.md has the limits of the code."""

import re
from pathlib import Path

from charonia.server.backends.python.environment import BUILD_S_MAX, UNPACKED_FILES_MAX
from charonia.server.backends.python.thread import RESPONSES_UNTAKEN_MAX
from charonia.server.backends.workers.instance import RESTART_WAIT_S_MAX
from charonia.server.grpc.limits import OFFENDERS_MAX, SETTINGS_COST, GrpcLimits
from charonia.server.http.limits import HttpLimits
from charonia.server.options import GrpcOptions
from charonia.server.scheduling.schedulers import QUEUE_SIZE_MAX
from charonia.wire.json_text import NESTING_MAX

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
NUMBER = re.compile(r"([0-9][0-9,]*)(?: ([KMG])iB)?|none")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def documented() -> dict[str, list[float]]:
    """Return the numbers in the second column of the table, and those in the first, by the first."""
    table = PAGE.read_text(encoding="utf-8").partition("## All limits\n")[2].partition("\n\nThe server checks")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return {
        row[0]: [
            float(found[1].replace(",", "")) * UNITS[found[2] or ""] if found[1] else 0.0
            for found in NUMBER.finditer(row[1])
        ]
        for row in rows
    }


def test_the_table_of_limits_is_true() -> None:
    http, grpc = HttpLimits(), GrpcLimits()

    limits: dict[str, list[float]] = {
        "HTTP body, also decompressed": [http.body_bytes_max],
        "gRPC message, also decompressed": [grpc.message_bytes_max + 1, 1],
        "HTTP header": [http.header_count_max, http.header_bytes_max],
        "gRPC headers": [grpc.header_list_bytes_max],
        "URL": [http.url_bytes_max],
        "chunks of an HTTP body": [http.chunk_count_max],
        "JSON nesting": [NESTING_MAX],
        "HTTP connections, gRPC connections of each front end": [http.connections_max],
        "requests of an HTTP connection, a gRPC stream, a gRPC connection": [
            http.pipeline_max,
            grpc.stream_inflight_max,
            grpc.streams_max,
        ],
        "unread responses of a gRPC stream": [grpc.stream_unsent_bytes_max],
        "unread responses to unary calls of a gRPC connection": [grpc.unary_unsent_bytes_max],
        f"cancelled calls of a gRPC connection; a change of settings counts as {SETTINGS_COST}": [
            grpc.resets_burst,
            grpc.resets_per_s,
        ],
        "addresses of gRPC connections that were closed for abuse": [
            OFFENDERS_MAX,
            grpc.abuser_kept_s,
            grpc.abuser_wait_s,
        ],
        "time for an HTTP header": [http.header_timeout_s],
        "time for an HTTP body": [http.body_timeout_s, 1, http.body_bytes_per_s_min],
        "HTTP client that reads nothing of its response": [http.write_timeout_s],
        "idle HTTP connection": [http.idle_timeout_s],
        "gRPC connection without its preface and settings": [grpc.handshake_timeout_s],
        "rest of a gRPC frame or of headers, without an open call": [grpc.header_timeout_s],
        "gRPC message that has begun": [grpc.body_timeout_s, 1, grpc.body_bytes_per_s_min],
        "gRPC connection without a call": [grpc.connection_idle_max_s],
        "gRPC client that does not acknowledge a ping": [grpc.keepalive_timeout_s],
        "age of a gRPC connection": [grpc.connection_age_max_s],
        "unread responses of a decoupled model on a gRPC stream": [grpc.stream_response_bytes_max],
        "responses of a decoupled model that are not taken in process, or wait for `preserve_ordering`": [
            RESPONSES_UNTAKEN_MAX
        ],
        "queue of a model": [QUEUE_SIZE_MAX],
        "building or unpacking its environment": [BUILD_S_MAX, 2**36, UNPACKED_FILES_MAX],
        "batch that waits for a new Python process": [RESTART_WAIT_S_MAX],
    }
    found = documented()
    assert {label: found.get(label) for label in limits} == limits


def test_the_defaults_of_the_options_are_those_of_the_front_ends() -> None:
    assert GrpcLimits.of(GrpcOptions()) == GrpcLimits()
