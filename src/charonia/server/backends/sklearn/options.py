"""Options of a model, from its parameters. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Params, declared_by, parameter

TRUSTED = "TRUSTED"
TRUSTED_TYPES = "TRUSTED_TYPES"
EXAMPLE_ROWS = "EXAMPLE_ROWS"


def _types(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _file_name(text: str) -> str:
    if "/" in text or text.startswith("."):
        raise ValueError("the name of a file beside the model's")
    return text


@dataclass(frozen=True, slots=True)
class EstimatorPlan:
    """The parameters of an estimator."""

    # fmt: off
    is_trusted: bool = parameter(TRUSTED, "the file may do anything while it is read: pickles, and any type of skops",
                                 bool, False)
    types: tuple[str, ...] = parameter(TRUSTED_TYPES, "types that a file of skops may make beyond the types skops "
                                       "knows, with commas between", _types, (), "none")
    jobs: int = parameter("N_JOBS", "threads among which the estimator's own loops are divided, such as those over the "
                          "trees of a forest", int, 1, ge=1)
    rows: str = parameter(EXAMPLE_ROWS, "name of the file with rows that the estimator takes, in the version's folder",
                          _file_name, "", "none")
    # fmt: on


PARAMETERS = Params("sklearn", *declared_by(EstimatorPlan))


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[EstimatorPlan, list[Problem]]:
    values = PARAMETERS.values(config)
    return values.into(EstimatorPlan), values.problems
