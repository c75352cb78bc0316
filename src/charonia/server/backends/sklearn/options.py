"""Options of a model, from its parameters. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Param, Params

TRUSTED = "TRUSTED"
TRUSTED_TYPES = "TRUSTED_TYPES"
EXAMPLE_ROWS = "EXAMPLE_ROWS"


def _file_name(text: str) -> str:
    if "/" in text or text.startswith("."):
        raise ValueError("the name of a file beside the model's")
    return text


# fmt: off
PARAMETERS = Params(
    "sklearn",
    Param(TRUSTED, "the file may do anything while it is read: pickles, and any type of skops", bool, False),
    Param(TRUSTED_TYPES, "types that a file of skops may make beyond the types skops knows, with commas between", str,
          "", "none"),
    Param("N_JOBS", "threads among which the estimator's own loops are divided, such as those over the trees of a "
          "forest", int, 1, ge=1),
    Param(EXAMPLE_ROWS, "name of the file with rows that the estimator takes, in the version's folder", _file_name, "",
          "none"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class EstimatorPlan:
    """The values of `PARAMETERS`."""

    is_trusted: bool = False
    types: tuple[str, ...] = ()
    jobs: int = 1
    rows: str = ""


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[EstimatorPlan, list[Problem]]:
    values = PARAMETERS.values(config)
    types = tuple(name.strip() for name in values[TRUSTED_TYPES].split(",") if name.strip())
    return EstimatorPlan(values[TRUSTED], types, values["N_JOBS"], values[EXAMPLE_ROWS]), values.problems
