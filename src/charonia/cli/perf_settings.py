"""From the options of `charonia perf` to what the load generator takes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from charonia.cli.perf_options import Parsed, described
from charonia.core.errors import invalid
from charonia.tools.perf.api import LoadPlan, MeasurePlan, Objective, RunSettings, SequencePlan, ServerPlan, Target
from charonia.tools.perf.options import (
    CallStyle,
    CertificateFormat,
    Compression,
    PerfOptions,
    TargetOptions,
    TensorFormat,
    TlsOptions,
    WireProtocol,
)
from charonia.tools.report.console import Settings
from charonia.wire.endpoint import parse_url
from charonia.wire.transport import TlsOptions as WireTls
from charonia.wire.transport import WireOptions

METRICS_PORT = 8002
METRICS_PATH = "/metrics"


def target(options: PerfOptions) -> Target:
    """Return what is measured and how it is reached.

    Raises:
        ServingError: INVALID_ARG when the URL is none.
    """
    given = options.target
    is_grpc = given.protocol is WireProtocol.GRPC
    tls = given.grpc_tls if is_grpc else given.http_tls
    return Target(
        url=_url(given),
        model=given.model,
        version=given.version,
        wire=WireOptions(
            headers=given.headers,
            tls=_tls(tls),
            request_compression=given.compression.value
            if is_grpc and given.compression is not Compression.NONE
            else "",
            timeout_s=given.request_timeout_ns / 1e9,
        ),
        streaming=given.streaming,
        json_inputs=not is_grpc and given.input_format is TensorFormat.JSON,
        json_outputs=not is_grpc and given.output_format is TensorFormat.JSON,
        shared_memory=given.shared_memory,
        output_bytes=given.output_region_bytes,
    )


def run_settings(parsed: Parsed, config: Mapping[str, Any]) -> RunSettings:
    """Return all of a run but its input data.

    Args:
        parsed: What the command line asks for.
        config: The model's configuration as JSON, {} where the server does not tell.

    Raises:
        ServingError: INVALID_ARG when the options do not fit the model.
    """
    options = parsed.options
    if is_decoupled(config) and not options.target.streaming:
        raise invalid(
            f"model '{options.target.model}' is decoupled: expected --streaming and -i grpc, got "
            f"-i {options.target.protocol.value}",
        )
    return RunSettings(
        target=target(options),
        load=_load(options),
        measure=_measure(options),
        sequences=_sequences(options) if is_sequence(config) else None,
        server=ServerPlan(
            composing=options.server.composing_models,
            metrics_url=_metrics_url(options) if options.server.collect_metrics else "",
            metrics_interval_ms=options.server.metrics_interval_ms,
            trace=options.server.trace,
        ),
        keep_requests=options.report.profile_export is not None,
        tolerance=options.data.validation_tolerance,
        options=described(parsed.named),
        command=parsed.command,
    )


def printed_settings(options: PerfOptions, config: Mapping[str, Any]) -> Settings:
    """Return what is said before the run."""
    measurement, load = options.measurement, options.load
    style = load.call_style
    if style is None:
        style = CallStyle.ASYNC if options.target.streaming or is_sequence(config) else CallStyle.SYNC
    return Settings(
        batch_size=options.target.batch_size,
        load=load.mode,
        end=load.levels.end,
        is_range=not load.levels.is_single,
        mode=measurement.mode.value,
        interval_ms=measurement.interval_ms,
        window_request_count=measurement.window_request_count,
        request_count=measurement.request_count,
        warmup_request_count=measurement.warmup_request_count,
        percentile=measurement.percentile,
        latency_limit_ms=measurement.latency_threshold_ms,
        distribution=load.distribution.value,
        binary_search=measurement.binary_search,
        is_async=style is CallStyle.ASYNC,
        decoupled=is_decoupled(config),
    )


def is_sequence(config: Mapping[str, Any]) -> bool:
    """Whether a model works on sequences."""
    return "sequence_batching" in config


def is_decoupled(config: Mapping[str, Any]) -> bool:
    """Whether a request to a model may have any number of responses."""
    return bool((config.get("model_transaction_policy") or {}).get("decoupled", False))


def _url(given: TargetOptions) -> str:
    scheme, _, rest = given.address.rpartition("://")
    if given.protocol is WireProtocol.GRPC:
        is_secure = given.grpc_tls.enabled or scheme in ("https", "grpcs")
        return f"{'grpcs' if is_secure else 'grpc'}://{rest}"
    if scheme not in ("", "http", "https"):
        raise invalid(f"-u: expected HOST:PORT, http:// or https:// with -i http, got '{given.url}'")
    return f"{scheme or 'http'}://{rest}"


def _metrics_url(options: PerfOptions) -> str:
    url = options.server.metrics_url
    if not url:
        host = parse_url(_url(options.target)).host
        return f"http://{f'[{host}]' if ':' in host else host}:{METRICS_PORT}{METRICS_PATH}"
    return url if "://" in url else f"http://{url}"


def _tls(given: TlsOptions) -> WireTls:
    def text(path: Path | None) -> str:
        return "" if path is None else str(path)

    return WireTls(
        ca_file=text(given.root),
        certificate_file=text(given.certificate),
        key_file=text(given.key),
        certificate_is_der=given.certificate_format is CertificateFormat.DER,
        key_is_der=given.key_format is CertificateFormat.DER,
        verify_peer=given.verify_peer,
        verify_host=given.verify_host,
    )


def _load(options: PerfOptions) -> LoadPlan:
    load, levels = options.load, options.load.levels
    default = LoadPlan()
    return LoadPlan(
        mode=load.mode,
        start=float(levels.start),
        end=float(levels.end) if levels.end else math.inf,
        step=float(levels.step),
        binary_search=options.measurement.binary_search,
        distribution=load.distribution,
        intervals_ns=tuple(gap * 1000 for gap in load.intervals_us),
        seed=load.seed,
        process_count_max=load.processes or default.process_count_max,
        request_period=load.request_period,
    )


def _measure(options: PerfOptions) -> MeasurePlan:
    given = options.measurement
    objectives: tuple[Objective, ...] = ()
    if given.goodput_latency_ns:
        limit_ns = given.goodput_latency_ns
        objectives = (Objective(f"latency:{limit_ns / 1e6:g}ms", limit_ns),)
    return MeasurePlan(
        mode=given.mode,
        interval_ms=given.interval_ms,
        window_request_count=given.window_request_count,
        stability=given.stability_percent / 100,
        percentile=given.percentile,
        trials_max=given.trials_max,
        request_count=given.request_count,
        warmup_request_count=given.warmup_request_count,
        latency_limit_ns=given.latency_threshold_ms * 1_000_000,
        objectives=objectives,
    )


def _sequences(options: PerfOptions) -> SequencePlan:
    given = options.sequences
    has_own_lengths = options.data.is_from_files and not given.is_length_given
    return SequencePlan(
        concurrent=given.concurrent,
        length=given.length,
        length_from_data=has_own_lengths,
        variation=given.length_variation_percent / 100,
        first_id=given.id_start,
        id_count=given.id_end - given.id_start,
        serial=given.serial,
    )
