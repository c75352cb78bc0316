"""What an export says beyond the models. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from charonia.core.errors import invalid

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

NAME = re.compile(r"[a-z]([-a-z0-9]{0,49}[a-z0-9])?")
"""Names of services: KServe puts `-transformer` behind them, and a label of DNS has 63 characters."""

CANARY_NAME_CHARS_MAX = 46
"""The same beside a canary, whose Service has `-canary-predictor` behind the name."""

QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
PERCENT_MAX = 100
REPLICAS_MAX = 10_000


class RuntimeScope(Enum):
    """Who may use the runtime."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"


class Mode(Enum):
    """How KServe runs services: with Knative, or as plain Deployments."""

    KNATIVE = "knative"
    STANDARD = "standard"


class Protocol(Enum):
    """The protocol of a service's clients."""

    V2 = "v2"
    GRPC = "grpc-v2"
    V1 = "v1"


class ScaleMetric(Enum):
    """What the number of replicas follows."""

    CONCURRENCY = "concurrency"
    RPS = "rps"
    CPU = "cpu"
    MEMORY = "memory"
    BUSY = "busy-share"


REQUESTS = (ScaleMetric.CONCURRENCY, ScaleMetric.RPS)
"""What only Knative counts."""

USED = (ScaleMetric.CPU, ScaleMetric.MEMORY, ScaleMetric.BUSY)
"""What the target of is a percentage."""


@dataclass(frozen=True, slots=True)
class KserveOptions:
    """Options of `charonia export kserve`. Its help says what each one means."""

    path: str = ""
    output: str = ""
    name: str = ""
    namespace: str = ""
    storage_uri: str = ""
    image: str = "charonia"
    scope: RuntimeScope = RuntimeScope.NAMESPACE
    runtime: str = ""
    mode: Mode = Mode.KNATIVE
    protocol: Protocol = Protocol.V2
    replicas_min: int | None = None
    replicas_max: int | None = None
    scale_metric: ScaleMetric | None = None
    scale_target: int | None = None
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    canary_percent: int | None = None
    canary_uri: str = ""
    cpu: str = "1"
    memory: str = "2Gi"
    gpus: int = 0
    model_memory: str = ""
    multi_model: bool = False
    transformer: bool = False
    predictor: str = ""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ServingError: INVALID_ARG, with a line for every problem.
        """
        problems = list(self._problems())
        if problems:
            raise invalid("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        if self.name and not NAME.fullmatch(self.name):
            yield f"--name: expected lower-case letters, digits and '-', a letter first, at most 51, got '{self.name}'"
        for option, name in (("--namespace", self.namespace), ("--runtime", self.runtime)):
            if name and not LABEL.fullmatch(name):
                yield f"{option}: expected lower-case letters, digits and '-', at most 63, got '{name}'"
        sizes = (("--cpu", self.cpu), ("--memory", self.memory), ("--model-memory", self.model_memory))
        for option, quantity in sizes:
            if quantity and not QUANTITY.fullmatch(quantity):
                yield f"{option}: expected a quantity of Kubernetes, such as 500m or 2Gi, got '{quantity}'"
        for option, uri in (("--storage-uri", self.storage_uri), ("--canary-uri", self.canary_uri)):
            if uri and "://" not in uri:
                yield f"{option}: expected a URI, such as s3://bucket/iris, got '{uri}'"
        if (self.replicas_min or 0) > (self.replicas_max or REPLICAS_MAX):
            yield f"--min-replicas {self.replicas_min} is more than --max-replicas {self.replicas_max}"
        if self.scale_target is not None and self.scale_metric is None:
            yield "--scale-target: --scale-metric says what it is the target of"
        if self.scale_metric in USED and (self.scale_target or 1) > PERCENT_MAX:
            yield f"--scale-target: expected a percentage of what is requested, 1 to 100, got {self.scale_target}"
        if self.model_memory and not self.multi_model:
            yield "--model-memory: only with --multi-model, which adds models one by one"
        if self.predictor and not self.transformer:
            yield "--predictor: only with --transformer, which divides an ensemble"
        if self.transformer and self.multi_model:
            yield "--transformer and --multi-model exclude each other"
        if self.mode is Mode.STANDARD:
            yield from self._problems_without_knative()
        elif self.canary_uri:
            yield "--canary-uri: Knative keeps the previous revision itself; --storage-uri is that of the new one"
        elif self.scale_metric is ScaleMetric.BUSY:
            yield "--scale-metric busy-share: KServe has KEDA in --mode standard only"

    def _problems_without_knative(self) -> Iterator[str]:
        if (self.canary_percent is None) is not (not self.canary_uri):
            yield "--canary-percent and --canary-uri, where the new models are: expected both, or --mode knative"
        if self.canary_uri and (self.transformer or self.multi_model):
            yield "--canary-uri: KServe divides traffic of predictors only, without --transformer and --multi-model"
        if self.scale_metric is ScaleMetric.BUSY and not (self.namespace and self.replicas_max):
            yield "--scale-metric busy-share: expected --namespace, whose pods it measures, and --max-replicas, too"
        if self.replicas_min == 0:
            yield "--min-replicas 0: only Knative starts a replica for a request; use --mode knative"
        if self.scale_metric in REQUESTS:
            yield f"--scale-metric {self.scale_metric.value}: only Knative counts requests; use cpu or --mode knative"
        if self.scale_metric is ScaleMetric.MEMORY and self.scale_target is None:
            yield "--scale-metric memory: KServe has no target of its own for it; --scale-target gives it one"
