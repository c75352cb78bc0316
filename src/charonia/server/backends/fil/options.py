"""Parameters of a forest. Pure.

Source: the documentation of Triton's FIL backend, "FIL Backend Model Configuration", of this and of earlier releases.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import unknown_parameters

MODEL_TYPES = {
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
    "xgboost": "xgboost.model",
}
"""Default name of the file by `model_type`."""

WITHOUT_EFFECT = (
    "algo",
    "blocks_per_sm",
    "chunk_size",
    "layout",
    "storage_type",
    "threads_per_tree",
    "transfer_threshold",
    "use_experimental_optimizations",
)
"""Parameters that tune the code of Triton's backend, most of them on GPUs; they change no result."""

AUTO, TREELITE, LIBRARY = "auto", "treelite", "library"
"""Values of the parameter `predictor`."""

_KNOWN = (
    "cpu_nthread",
    "is_classifier",
    "model_type",
    "output_class",
    "predict_proba",
    "predictor",
    "threshold",
    "xgboost_allow_unknown_field",
)
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class ForestPlan:
    """What the parameters say.

    Attributes:
        model_type: Format of the file, "" to tell it from the file.
        is_classifier: Whether `output__0` is about classes; otherwise it has the scores as they are.
        has_probabilities: Whether a classifier answers with a probability for each class, rather than with a class.
        threshold: A binary classifier answers 1 above it.
        allows_unknown: Whether fields of an XGBoost file that treelite does not know are skipped.
        predictor: `AUTO`, `TREELITE` or `LIBRARY`.
        threads: Threads of an instance, 0 for its share of the thread budget.
    """

    model_type: str = ""
    is_classifier: bool = False
    has_probabilities: bool = False
    threshold: float = 0.5
    allows_unknown: bool = False
    predictor: str = AUTO
    threads: int = 0


def read_plan(config: ModelConfig) -> tuple[ForestPlan, list[Problem]]:
    """Return the plan, and all problems of the parameters."""
    problems: list[Problem] = []
    values = config.parameters

    def choice(key: str, choices: tuple[str, ...], default: str) -> str:
        text = values.get(key, default)
        if text != default and text not in choices:
            problems.append(Problem(f"parameters['{key}']", f"expected one of {', '.join(choices)}, got '{text}'"))
        return text

    def flag(key: str) -> bool:
        return _FLAGS.get(choice(key, tuple(_FLAGS), "false").lower(), False)

    def number(key: str, default: float) -> float:
        try:
            value = float(values.get(key, default))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            problems.append(Problem(f"parameters['{key}']", f"expected a number, got '{values[key]}'"))
            return default
        return value

    classifier, older = flag("is_classifier"), flag("output_class")
    if classifier != older and {"is_classifier", "output_class"} <= values.keys():
        message = (
            f"'{values['output_class']}' contradicts is_classifier, which is its newer name: leave one of them out"
        )
        problems.append(Problem("parameters['output_class']", message))
    plan = ForestPlan(
        model_type=choice("model_type", tuple(MODEL_TYPES), ""),
        is_classifier=classifier or older,
        has_probabilities=flag("predict_proba"),
        threshold=number("threshold", ForestPlan().threshold),
        allows_unknown=flag("xgboost_allow_unknown_field"),
        predictor=choice("predictor", (AUTO, TREELITE, LIBRARY), AUTO),
        threads=max(0, int(number("cpu_nthread", 0))),
    )
    return plan, problems


def remarks(config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each parameter without effect, known or not."""
    for key in sorted(config.parameters.keys() & WITHOUT_EFFECT):
        yield f"model '{config.name}': parameter '{key}' has no effect: it tunes the code of Triton's FIL backend"
    yield from unknown_parameters(config, "fil", (*_KNOWN, *WITHOUT_EFFECT))
