"""Options of an OpenVINO model, from its parameters and the backend's settings. Pure."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem

CPU = "CPU"
THREADS, STREAMS = "INFERENCE_NUM_THREADS", "NUM_STREAMS"

GLOBAL_PROPERTIES = ("COMPILATION_NUM_THREADS", "CACHE_DIR")
"""Properties of OpenVINO itself, not of a device."""

_PRECISION, _MODE, _HINT = "INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "PERFORMANCE_HINT"
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_OWN = (
    "TARGET_DEVICE",
    "CPU_EXTENSION_PATH",
    "HINT_BF16",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "ENABLE_BATCH_PADDING",
    "RESHAPE_IO_LAYERS",
)
_COMMON = (*_OWN, THREADS, STREAMS, _HINT, _PRECISION, _MODE, *GLOBAL_PROPERTIES)


@dataclass(frozen=True, slots=True)
class OpenVinoPlan:
    """Options of a model.

    Attributes:
        device: OpenVINO's name of the device.
        properties: Properties that the model asks for, by OpenVINO's names; without those of `GLOBAL_PROPERTIES`.
        global_properties: Those.
        extension: Path of a library with operators, "" for none.
        opens_batch: Whether a fixed batch dimension is made variable.
        pads: Whether every batch is filled up to the same size.
        reshapes: Whether inputs get the dims of the configuration.
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
    """Return the plan, and all problems in the configuration and settings.

    Args:
        config: The model's configuration; its parameters override the settings.
        settings: Settings of the backend (`--backend-config`); those that are not common parameters are ignored.
    """
    problems: list[Problem] = []
    values = {key: (f"--backend-config {key}", text) for key, text in settings.items() if key in _COMMON}
    values |= {k: (f"parameters['{k}']", text) for k, text in config.parameters.items() if k not in SERVER_PARAMETERS}

    def flag(key: str) -> bool:
        path, text = values.get(key, ("", "no"))
        if text.lower() not in _FLAGS:
            problems.append(Problem(path, f"expected YES or NO, got '{text}'"))
        return _FLAGS.get(text.lower(), False)

    properties = {key: text for key, (_, text) in values.items() if key not in (*_OWN, *GLOBAL_PROPERTIES)}
    if flag("HINT_BF16"):
        properties.setdefault(_PRECISION, "bf16")
    plan = OpenVinoPlan(
        device=values.get("TARGET_DEVICE", ("", CPU))[1],
        properties=properties,
        global_properties={key: values[key][1] for key in GLOBAL_PROPERTIES if key in values},
        extension=values.get("CPU_EXTENSION_PATH", ("", ""))[1],
        opens_batch=not flag("SKIP_OV_DYNAMIC_BATCHSIZE"),
        pads=flag("ENABLE_BATCH_PADDING"),
        reshapes=flag("RESHAPE_IO_LAYERS"),
    )
    return plan, problems


def unknown_parameters(model: str, plan: OpenVinoPlan, properties: Collection[str]) -> Iterator[str]:
    """Yield a warning for each parameter that is not a property of the device.

    Args:
        model: The model's name.
        plan: Its plan.
        properties: The properties of the device that can be set.
    """
    for key in sorted(plan.properties.keys() - set(properties) - set(_COMMON)):
        near = difflib.get_close_matches(key, [*_COMMON, *properties], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        yield f"model '{model}': OpenVINO has no parameter '{key}' for {plan.device}, it has no effect{hint}"
