"""Options of a TensorFlow Lite model, from its parameters and the backend's settings. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem

THREADS, SIGNATURE = "tflite_num_threads", "SIGNATURE"
PARAMETERS = (THREADS, SIGNATURE)


@dataclass(frozen=True, slots=True)
class TflitePlan:
    """Options of a model.

    Attributes:
        threads: Threads of an instance, 0 for its share of the thread budget.
        signature: Name of the signature that is served, "" for the only one, or `serving_default`.
    """

    threads: int = 0
    signature: str = ""


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TflitePlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings.

    Args:
        config: The model's configuration; its parameters override the settings.
        settings: Settings of the backend (`--backend-config`); unknown ones are ignored.
    """
    problems = []
    path, text = f"--backend-config {THREADS}", settings.get(THREADS, "0")
    if THREADS in config.parameters:
        path, text = f"parameters['{THREADS}']", config.parameters[THREADS]
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    for index, each in enumerate(accelerators.cpu_execution_accelerator if accelerators is not None else ()):
        place = f"optimization.execution_accelerators.cpu_execution_accelerator[{index}]"
        if each.name != "xnnpack":
            problems.append(Problem(f"{place}.name", f"expected xnnpack, which is always on, got '{each.name}'"))
        if "num_threads" in each.parameters:
            path, text = f"{place}.parameters['num_threads']", each.parameters["num_threads"]
    if not (text.isascii() and text.isdigit()):
        problems.append(Problem(path, f"expected a whole number of at least 0, got '{text}'"))
        text = "0"
    return TflitePlan(int(text), config.parameters.get(SIGNATURE, "")), problems
