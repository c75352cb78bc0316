"""Tracing as the server sees it: settings in force, and the sampler that follows from them."""

import asyncio
import json
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.core.trace import REQUEST_START, TraceLevel, TraceTree
from charonia.server.tracing.sampling import OtelOptions, TraceMode, TraceOptions
from charonia.server.tracing.service import TracingService

ON = TraceLevel.TIMESTAMPS


def finish(tree: TraceTree | None) -> None:
    assert tree is not None
    tree.root.model_name, tree.root.model_version = "m", "1"
    tree.root.mark(REQUEST_START, 1)
    tree.release()


def test_a_server_without_a_file_has_no_sampler_and_refuses_a_level() -> None:
    made = TracingService(TraceOptions())
    assert made.sampler is None
    assert not made.can_trace

    with pytest.raises(ServingError) as caught:
        asyncio.run(made.change("", {"level": ON}))

    assert caught.value.code is Code.INVALID_ARG
    assert "Attempting to set invalid trace setting :trace file name is not given" in caught.value.message
    assert asyncio.run(made.settings())["trace_level"] == ["OFF"]
    asyncio.run(made.aclose())


def test_a_level_at_run_time_begins_to_trace_and_off_ends_it(tmp_path: Path) -> None:
    made = TracingService(TraceOptions(file=str(tmp_path / "t")))
    assert made.sampler is None

    asyncio.run(made.change("", {"level": ON, "rate": 1}))
    sampler = made.sampler
    assert sampler is not None
    finish(sampler.sample("m"))
    asyncio.run(made.change("", {"level": None}))

    assert made.sampler is None
    asyncio.run(made.aclose())
    assert len(json.loads((tmp_path / "t").read_text())) == 2


def test_one_model_is_traced_alone(tmp_path: Path) -> None:
    made = TracingService(TraceOptions(file=str(tmp_path / "t"), rate=1))
    asyncio.run(made.change("m", {"level": ON}))
    sampler = made.sampler
    assert sampler is not None

    assert sampler.sample("other") is None
    finish(sampler.sample("m"))
    asyncio.run(made.change("m", {"level": None}))

    assert made.sampler is None
    assert asyncio.run(made.settings("m")) == asyncio.run(made.settings())
    asyncio.run(made.aclose())


def test_a_change_of_the_server_begins_anew_for_models_that_follow_it(tmp_path: Path) -> None:
    made = TracingService(TraceOptions(file=str(tmp_path / "t"), level=ON, rate=1))
    asyncio.run(made.change("m", {"count": 2}))
    assert made.sampler is not None
    finish(made.sampler.sample("m"))
    assert asyncio.run(made.settings("m"))["trace_count"] == ["1"]

    asyncio.run(made.change("", {"rate": 2}))

    assert asyncio.run(made.settings("m")) == {**asyncio.run(made.settings()), "trace_count": ["2"]}
    assert asyncio.run(made.settings("m"))["trace_rate"] == ["2"]
    asyncio.run(made.aclose())


def test_a_count_that_is_used_up_ends_the_sampler(tmp_path: Path) -> None:
    made = TracingService(TraceOptions(file=str(tmp_path / "t"), level=ON, rate=1, count=1))
    assert made.sampler is not None

    finish(made.sampler.sample("m"))

    assert made.sampler is None
    assert asyncio.run(made.settings())["trace_count"] == ["0"]
    asyncio.run(made.aclose())
    assert (tmp_path / "t.0").exists()


def test_a_refused_change_changes_nothing(tmp_path: Path) -> None:
    made = TracingService(TraceOptions(file=str(tmp_path / "t"), level=ON, rate=5))
    before = made.sampler

    with pytest.raises(ServingError, match="sample rate must be non-zero"):
        asyncio.run(made.change("", {"rate": 0}))

    assert asyncio.run(made.settings())["trace_rate"] == ["5"]
    assert made.sampler is before
    asyncio.run(made.aclose())


def test_no_change_keeps_the_count() -> None:
    made = TracingService(TraceOptions())
    asyncio.run(made.change("m", {}))

    assert asyncio.run(made.settings("m")) == asyncio.run(made.settings())
    asyncio.run(made.aclose())


def test_settings_of_a_collector_are_those_that_were_given() -> None:
    options = TraceOptions(
        mode=TraceMode.OPENTELEMETRY,
        otel=OtelOptions(url="http://127.0.0.1:9/v1/traces", resource=(("a", "b"),), queue_size=7),
    )
    made = TracingService(options)

    assert asyncio.run(made.settings()) == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "trace_mode": ["opentelemetry"],
        "url": ["http://127.0.0.1:9/v1/traces"],
        "resource": ["a=b"],
        "bsp_max_queue_size": ["7"],
    }
    asyncio.run(made.aclose())
