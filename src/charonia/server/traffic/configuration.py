"""The check of the model parameter `traffic`, and its settings. Pure."""

from collections.abc import Iterator

from charonia.config.model import ModelConfig
from charonia.config.parameters import TRAFFIC
from charonia.config.problems import Problem
from charonia.core.errors import ServingError
from charonia.wire.json_text import parse_object
from charonia.wire.traffic import TrafficSettings
from charonia.wire.traffic_form import read_settings


def traffic_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield all problems of the parameter."""
    text = config.parameters.get(TRAFFIC, "")
    if not text:
        return
    try:
        settings = read_settings(parse_object(text.encode()))
    except ServingError as error:
        yield Problem(f"parameters[{TRAFFIC}]", f"must be a JSON object with weights, sticky or shadow: {error}")
        return
    reason = shadow_obstacle(config)
    if settings.shadow and reason:
        yield Problem(f"parameters[{TRAFFIC}]", reason)


def configured(config: ModelConfig) -> TrafficSettings | None:
    """Return the settings of a valid configuration, None without any."""
    text = config.parameters.get(TRAFFIC, "")
    return read_settings(parse_object(text.encode())) if text else None


def shadow_obstacle(config: ModelConfig) -> str:
    """Return why a model cannot have shadow versions, "" if it can."""
    if config.sequence_batching is not None:
        return "a model that works on sequences cannot have shadow versions: a copy would be no part of a sequence"
    if config.is_decoupled:
        return "a decoupled model cannot have shadow versions: its responses cannot be compared one by one"
    return ""


def policy_obstacle(config: ModelConfig) -> str:
    """Return how the version policy keeps a model from having several versions, "" where it does not."""
    policy = config.version_policy
    if policy is None or (policy.latest is not None and policy.latest.num_versions <= 1):
        return "the version policy of the model keeps only its latest version"
    return ""


POLICY_HINT = "'version_policy: { all { } }' in config.pbtxt keeps all versions"
