"""Options of a TensorFlow Lite model, from its parameters and the backend's settings. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Param, Params

_THREADS = "tflite_num_threads"

# fmt: off
PARAMETERS = Params(
    "tflite",
    Param(_THREADS, "threads of an instance", int, 0, "the instance's share of the cores", ge=0),
    Param("SIGNATURE", "the signature that is served", str, "", "the only one, or `serving_default`"),
    settings=(_THREADS,),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class TflitePlan:
    """The values of `PARAMETERS`; 0 threads are the instance's share of the thread budget."""

    threads: int = 0
    signature: str = ""


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TflitePlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings."""
    problems, given = list[Problem](), dict[str, tuple[str, str]]()
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    for index, each in enumerate(accelerators.cpu_execution_accelerator if accelerators is not None else ()):
        place = f"optimization.execution_accelerators.cpu_execution_accelerator[{index}]"
        if each.name != "xnnpack":
            problems.append(Problem(f"{place}.name", f"expected xnnpack, which is always on, got '{each.name}'"))
        if "num_threads" in each.parameters:
            given[_THREADS] = (f"{place}.parameters['num_threads']", each.parameters["num_threads"])
    values = PARAMETERS.values(config, settings, given)
    return TflitePlan(values[_THREADS], values["SIGNATURE"]), [*problems, *values.problems]
