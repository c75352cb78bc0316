"""Settings of tracing and of the log: the same requests to Charonia and to Triton, and the same trace files."""

import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, write_model
from tests.support.peers import Pair
from tritonclient.grpc import service_pb2

from charonia.cli import perf
from charonia.cli.perf import ExitStatus
from charonia.client import Client

CONFIG = identity_pbtxt("python", dims=(2,), max_batch_size=0)
REQUEST = {"id": "r", "inputs": [{"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [1, 2.5]}]}
SERVER, MODEL, LOG = "/v2/trace/setting", "/v2/models/echo/trace/setting", "/v2/logging"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("traces")
    write_model(made / "models", "echo", PYTHON_IDENTITY, config=CONFIG)
    write_model(made / "models", "pipe", "", config=chain_pbtxt("echo", dims=(2,), max_batch_size=0))
    return made


@pytest.fixture(scope="module")
def pair(start_pair: Any, folder: Path) -> Pair:
    names = ("ours", "theirs")
    ours, theirs = ([f"--trace-config=triton,file={folder / name}", "--trace-config=rate=3"] for name in names)
    started: Pair = start_pair(folder / "models", ours=ours, theirs=theirs)
    return started


FILE = ["trace_file"]
"""Where each writes differs."""


def test_settings_at_start_are_those_of_the_command_line(pair: Pair, same_http: Any, same_grpc: Any) -> None:
    for path in (SERVER, MODEL):
        same_http(pair, "GET", path, lenient=FILE)
    same_grpc(pair, "TraceSetting", service_pb2.TraceSettingRequest(), lenient=FILE)
    same_grpc(pair, "TraceSetting", service_pb2.TraceSettingRequest(model_name="echo"), lenient=FILE)


@pytest.mark.parametrize(
    "steps",
    [
        [
            (SERVER, {"trace_rate": "7"}),
            (MODEL, {"trace_level": ["TIMESTAMPS", "TENSORS"]}),
            (SERVER, {"trace_rate": None}),
        ],
        [(MODEL, {"trace_count": "5"}), (SERVER, {"trace_count": "9"}), (MODEL, {"trace_count": None})],
        [(MODEL, {"log_frequency": "2", "trace_rate": "1"}), (SERVER, {"log_frequency": "4"}), (SERVER, {})],
        [(MODEL, {"trace_level": ["OFF"]}), (SERVER, {"trace_level": ["TIMESTAMPS"]}), (SERVER, {"trace_level": None})],
    ],
)
def test_a_change_and_what_falls_back_are_the_same(
    pair: Pair, same_http: Any, steps: list[tuple[str, dict[str, Any]]]
) -> None:
    for path, change in steps:
        same_http(pair, "POST", path, change, lenient=FILE)
        same_http(pair, "GET", SERVER, lenient=FILE)
        same_http(pair, "GET", MODEL, lenient=FILE)
    everything = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
    for path in (MODEL, SERVER):
        same_http(pair, "POST", path, everything, lenient=FILE)


def test_a_change_over_grpc_is_seen_over_http(pair: Pair, same_http: Any, same_grpc: Any) -> None:
    request = service_pb2.TraceSettingRequest(model_name="echo")
    request.settings["trace_rate"].value.append("11")
    same_grpc(pair, "TraceSetting", request, lenient=FILE)
    assert same_http(pair, "GET", MODEL, lenient=FILE).document["trace_rate"] == "11"
    request.settings["trace_rate"].ClearField("value")
    same_grpc(pair, "TraceSetting", request, lenient=FILE)
    same_http(pair, "GET", MODEL, lenient=FILE)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (SERVER, {"trace_file": "x"}),
        (SERVER, {"trace_level": ["OFF", "TENSORS"]}),
        (SERVER, {"trace_rate": "x"}),
        (SERVER, {"trace_rate": "99999999999"}),
        (SERVER, {"trace_count": "-2"}),
        (SERVER, {"trace_count": "x"}),
        (SERVER, {"log_frequency": "x"}),
        (SERVER, {"trace_level": ["TIMESTAMPS"], "trace_rate": "0"}),
        ("/v2/models/absent/trace/setting", {"trace_rate": "1"}),
    ],
)
def test_what_is_refused_has_the_same_status(pair: Pair, same_http: Any, path: str, change: Any) -> None:
    same_http(pair, "POST", path, change)


@pytest.mark.parametrize(
    ("name", "values"),
    [("trace_file", ["x"]), ("trace_rate", ["1", "2"]), ("trace_rate", ["x"]), ("trace_count", ["-2"])],
)
def test_what_is_refused_has_the_same_code(pair: Pair, same_grpc: Any, name: str, values: list[str]) -> None:
    request = service_pb2.TraceSettingRequest()
    request.settings[name].value.extend(values)
    same_grpc(pair, "TraceSetting", request)


@pytest.mark.parametrize("change", [{"trace_nothing": "1"}, {"trace_level": ["EVERYTHING"]}, {"trace_rate": "1x"}])
def test_what_is_no_setting_is_refused_here_and_passed_over_there(pair: Pair, change: dict[str, Any]) -> None:
    ours, theirs = pair.ask("POST", SERVER, change)

    assert (ours.status, theirs.status) == (400, 200)
    pair.ask("POST", SERVER, {"trace_rate": None})


@pytest.mark.parametrize("change", [{}, {"log_verbose_level": 1}, {"log_info": True, "log_format": "ISO8601"}])
def test_log_settings_are_the_same(pair: Pair, same_http: Any, same_grpc: Any, change: dict[str, Any]) -> None:
    same_http(pair, "POST", LOG, change)
    same_http(pair, "GET", LOG)
    same_grpc(pair, "LogSettings", service_pb2.LogSettingsRequest())
    same_http(pair, "POST", LOG, {"log_verbose_level": 0, "log_format": "default"})


def test_a_log_file_is_refused_with_the_same_status(pair: Pair, same_http: Any) -> None:
    same_http(pair, "POST", LOG, {"log_file": "x"})


@pytest.mark.parametrize(
    ("path", "change"),
    [(SERVER, b"no JSON"), (LOG, {"log_info": "yes"}), (LOG, {"log_verbose_level": "high"})],
)
def test_what_is_of_the_wrong_kind_is_the_clients_fault_here_and_the_servers_there(
    pair: Pair, path: str, change: Any
) -> None:
    ours, theirs = pair.ask("POST", path, change)

    assert (ours.status, theirs.status) == (400, 500)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_file", {"string_param": "x"}),
        ("log_info", {"string_param": "x"}),
        ("log_verbose_level", {"bool_param": True}),
        ("log_format", {"string_param": "x"}),
    ],
)
def test_log_settings_that_are_refused_have_the_same_code(
    pair: Pair, same_grpc: Any, name: str, value: dict[str, Any]
) -> None:
    request = service_pb2.LogSettingsRequest()
    request.settings[name].CopyFrom(service_pb2.LogSettingsRequest.SettingValue(**value))
    same_grpc(pair, "LogSettings", request)


def test_a_format_that_is_none_is_a_bad_request_here_and_unavailable_there(pair: Pair) -> None:
    ours, theirs = pair.ask("POST", LOG, {"log_format": "x"})

    assert (ours.status, theirs.status) == (400, 503)


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a trace file as soon as it is written."""
    deadline = time.monotonic() + 200
    while True:
        try:
            entries: list[dict[str, Any]] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return entries


def form(path: Path) -> list[tuple[Any, ...]]:
    """What a trace file says, without what differs by its nature: a line a trace, in the order of their numbers."""
    entries = sorted(entries_of(path), key=lambda entry: int(entry["id"]))
    lines: list[tuple[Any, ...]] = []
    for _, group in groupby(entries, key=lambda entry: int(entry["id"])):
        listed = list(group)
        (head,) = [entry for entry in listed if "model_name" in entry]
        names = {entry["timestamps"][0]["name"] for entry in listed if "timestamps" in entry}
        if "parent_id" in head:  # Triton leaves this one out for steps of an ensemble
            names.discard("INFER_RESPONSE_COMPLETE")
        shown = [(entry["activity"], entry["tensor"]) for entry in listed if "tensor" in entry]
        request = {key: value for key, value in head.items() if not key.endswith("id") or key == "request_id"}
        lines.append((request, "parent_id" in head, names, shown))
    return lines


def test_trace_files_have_the_same_entries(pair: Pair, same_http: Any, folder: Path) -> None:
    change = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "2"}
    same_http(pair, "POST", SERVER, change, lenient=FILE)
    same_http(pair, "POST", "/v2/models/pipe/infer", REQUEST, absent=["parameters"])
    same_http(pair, "POST", "/v2/models/echo/infer", REQUEST, absent=["parameters"])
    after = same_http(pair, "GET", SERVER, lenient=FILE)
    assert after.document["trace_count"] == "0"
    same_http(pair, "POST", SERVER, dict.fromkeys(change), lenient=FILE)

    assert form(folder / "ours.0") == form(folder / "theirs.0")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_has_both_trace(pair: Pair, folder: Path, protocol: str) -> None:
    for name, server in (("ours", pair.ours), ("theirs", pair.theirs)):
        endpoint = getattr(server, protocol)
        arguments = ["-m", "echo", "-u", endpoint, "-i", protocol, "--request-count=3", "--quiet", "--no-progress"]
        arguments += ["--trace-level=TIMESTAMPS", "--trace-rate=9", "--trace-count=4", "--log-frequency=2"]
        assert perf.run(arguments) in (ExitStatus.MEASURED, ExitStatus.UNSTABLE)
        with Client(f"{protocol}://{endpoint}") as client:
            shown = client.trace_settings()
            cleared = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
            client.update_trace_settings(cleared)
        assert shown == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "9",
            "trace_count": "4",
            "log_frequency": "2",
            "trace_file": str(folder / name),
            "trace_mode": "triton",
        }


def test_our_client_understands_both_over_grpc(pair: Pair) -> None:
    shown = []
    for endpoint in (pair.ours.grpc, pair.theirs.grpc):
        with Client(f"grpc://{endpoint}") as client:
            client.update_trace_settings({"trace_level": ["TENSORS"]}, "echo")
            shown.append(client.trace_settings("echo"))
            client.update_trace_settings({"trace_level": None}, "echo")

    assert {**shown[0], "trace_file": ""} == {**shown[1], "trace_file": ""}
