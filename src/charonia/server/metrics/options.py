"""Metric settings of a model's configuration: tags, and buckets of histograms. Pure."""

import math
import re
from collections.abc import Iterator

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem

HISTOGRAM_UNITS = {
    "nv_inference_first_response_histogram_ms": 1_000_000,
    "charonia_request_duration_seconds": 1_000_000_000,
    "charonia_queue_duration_seconds": 1_000_000_000,
    "charonia_compute_duration_seconds": 1_000_000_000,
    "charonia_batch_size": 1,
}
"""Histograms whose buckets a model may choose, with the factor to their internal unit: ns, or batch elements."""

BUCKETS_MAX = 256
"""Limit of buckets of a histogram."""

_TAG = re.compile(r"[a-zA-Z0-9_]+")


def tag_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield tags that are not valid names of labels."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            message = f"the key of a metric tag takes letters, digits and '_', got '{tag}'"
            yield Problem(f"metric_tags[{tag}]", message)


def bucket_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        path = f"model_metrics.metric_control[{index}]"
        buckets = control.histogram_options.buckets if control.histogram_options is not None else ()
        if len(buckets) > BUCKETS_MAX:
            message = f"at most {BUCKETS_MAX} buckets are counted, got {len(buckets)}"
            yield Problem(f"{path}.histogram_options.buckets", message)
        elif buckets and math.isinf(buckets[0]):
            yield Problem(f"{path}.histogram_options.buckets", "at least one bucket must have a finite bound")


def unknown_families(config: ModelConfig) -> list[str]:
    """Return the families that the configuration controls and the server does not have; they are left out."""
    controls = config.model_metrics.metric_control if config.model_metrics else ()
    families = [control.metric_identifier.family for control in controls if control.metric_identifier is not None]
    return [family for family in families if family and family not in HISTOGRAM_UNITS]


def chosen_buckets(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the upper bounds that a valid configuration chooses, by histogram, in the internal unit."""
    chosen = {}
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is not None and control.histogram_options is not None:
            unit = HISTOGRAM_UNITS.get(control.metric_identifier.family)
            if unit is None:
                continue
            finite = [bound for bound in control.histogram_options.buckets if math.isfinite(bound)]
            chosen[control.metric_identifier.family] = tuple(sorted({round(bound * unit) for bound in finite}))
    return chosen
