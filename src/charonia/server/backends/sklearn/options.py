"""Options of a model, from its parameters. Pure."""

from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem

TRUSTED = "TRUSTED"
TRUSTED_TYPES = "TRUSTED_TYPES"
N_JOBS = "N_JOBS"
PARAMETERS = (TRUSTED, TRUSTED_TYPES, N_JOBS)

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class EstimatorPlan:
    """Options of a model.

    Attributes:
        is_trusted: Whether its file may run code while it is read.
        types: Types that a file of skops may make beyond those that skops trusts itself.
        jobs: Threads among which the estimator's own loops are divided, such as those over the trees of a forest.
    """

    is_trusted: bool = False
    types: tuple[str, ...] = ()
    jobs: int = 1


def read_plan(config: ModelConfig) -> tuple[EstimatorPlan, list[Problem]]:
    """Return the options of a model, and what is wrong with them."""
    problems = []
    trusted = config.parameters.get(TRUSTED, "false")
    if trusted.lower() not in _FLAGS:
        problems.append(Problem(f"parameters['{TRUSTED}']", f"expected true or false, got '{trusted}'"))
    jobs = config.parameters.get(N_JOBS, "1")
    if not (jobs.isascii() and jobs.isdigit() and int(jobs) > 0):
        problems.append(Problem(f"parameters['{N_JOBS}']", f"expected a whole number of at least 1, got '{jobs}'"))
        jobs = "1"
    types = tuple(name.strip() for name in config.parameters.get(TRUSTED_TYPES, "").split(",") if name.strip())
    return EstimatorPlan(_FLAGS.get(trusted.lower(), False), types, int(jobs)), problems
