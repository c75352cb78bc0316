"""Options of an OpenVINO model, from its parameters and the backend's settings. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Param, Params

CPU = "CPU"
THREADS, STREAMS = "INFERENCE_NUM_THREADS", "NUM_STREAMS"

GLOBAL_PROPERTIES = ("COMPILATION_NUM_THREADS", "CACHE_DIR")
"""Properties of OpenVINO itself, not of a device."""

_PRECISION, _MODE, _HINT = "INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "PERFORMANCE_HINT"

# fmt: off
PARAMETERS = Params(
    "openvino",
    Param(THREADS, "threads of all streams together", shown="the share of the cores of all instances"),
    Param(STREAMS, "inferences at a time; `AUTO` or `NUMA` leave it to OpenVINO", shown="the number of instances"),
    Param(_HINT, "`LATENCY` or `THROUGHPUT`; OpenVINO then chooses the streams, unless `NUM_STREAMS` is given",
          shown="none"),
    Param("HINT_BF16", "compute in bf16", bool, False),
    Param(_PRECISION, "`bf16`, `f16` or `f32`", shown="`f32`"),
    Param(_MODE, "`PERFORMANCE` leaves the precision to OpenVINO", shown="`ACCURACY`"),
    Param("SKIP_OV_DYNAMIC_BATCHSIZE", "keep a fixed batch dimension", bool, False),
    Param("ENABLE_BATCH_PADDING", "fill every batch up to one size", bool, False),
    Param("RESHAPE_IO_LAYERS", "give the model's inputs the dims of the configuration, -1 for any", bool, False),
    Param("TARGET_DEVICE", "another device of OpenVINO: `GPU`, `AUTO`, `HETERO:GPU,CPU`; tried are CPU, AUTO and "
          "HETERO:CPU", str, CPU),
    Param("CPU_EXTENSION_PATH", "a library with operators that OpenVINO does not have", str, "", "none"),
    Param("COMPILATION_NUM_THREADS", "threads that compile the model", shown="OpenVINO's"),
    Param("CACHE_DIR", "a folder for compiled models", shown="none"),
    settings=None,
)
# fmt: on
_OWN = ("TARGET_DEVICE", "CPU_EXTENSION_PATH", *(each.name for each in PARAMETERS.declared if each.kind is bool))


@dataclass(frozen=True, slots=True)
class OpenVinoPlan:
    """The values of `PARAMETERS`.

    Attributes:
        properties: Properties that the model asks for, by OpenVINO's names; without those of `GLOBAL_PROPERTIES`.
        opens_batch: Whether a fixed batch dimension is made variable.
    """

    device: str = CPU
    properties: Mapping[str, str] = field(default_factory=dict)
    global_properties: Mapping[str, str] = field(default_factory=dict)
    extension: str = ""
    opens_batch: bool = True
    pads: bool = False
    reshapes: bool = False

    def defaults(self, instances: int, threads: int) -> dict[str, str]:
        """Return the properties of the CPU that the model does not ask for.

        Args:
            instances: Instances that share the compiled model.
            threads: Threads of each.
        """
        found = {THREADS: str(instances * threads), "ENABLE_CPU_PINNING": "NO"}
        if _HINT not in self.properties:  # else OpenVINO chooses the streams
            found[STREAMS] = str(instances)
        if not {_PRECISION, _MODE} & self.properties.keys():
            found |= {_PRECISION: "f32", _MODE: "ACCURACY"}
        return {key: text for key, text in found.items() if key not in self.properties}


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[OpenVinoPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings."""
    values = PARAMETERS.values(config, settings)
    given = {name: text for name, (_, text) in values.given.items()}
    given |= {name: text for name, text in config.parameters.items() if name not in SERVER_PARAMETERS}
    properties = {name: text for name, text in given.items() if name not in (*_OWN, *GLOBAL_PROPERTIES)}
    if values["HINT_BF16"]:
        properties.setdefault(_PRECISION, "bf16")
    plan = OpenVinoPlan(
        device=values["TARGET_DEVICE"],
        properties=properties,
        global_properties={name: given[name] for name in GLOBAL_PROPERTIES if name in given},
        extension=values["CPU_EXTENSION_PATH"],
        opens_batch=not values["SKIP_OV_DYNAMIC_BATCHSIZE"],
        pads=values["ENABLE_BATCH_PADDING"],
        reshapes=values["RESHAPE_IO_LAYERS"],
    )
    return plan, values.problems


def ineffective_parameters(config: ModelConfig, plan: OpenVinoPlan, properties: Collection[str]) -> Iterator[str]:
    """Yield a warning for each parameter that is not a property of the device.

    Args:
        config: The model's configuration.
        plan: Its plan.
        properties: The properties of the device that can be set.
    """
    for key, near in PARAMETERS.unknown(config, properties):
        hint = f"; did you mean '{near}'?" if near else ""
        yield f"model '{config.name}': OpenVINO has no parameter '{key}' for {plan.device}, it has no effect{hint}"
