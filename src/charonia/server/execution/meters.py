"""The counters of a model version, as its configuration wants them."""

from charonia.config.model import ModelConfig
from charonia.server.metrics.model_metrics import Meter
from charonia.server.metrics.options import chosen_buckets


def make_meter(config: ModelConfig, version: str) -> Meter:
    """Return the counters of a version of a model.

    Args:
        config: Its configuration, which was validated.
        version: The version, as text.
    """
    return Meter(config.name, version, chosen_buckets(config))
