"""Parameters of a forest. Pure.

Source: the documentation of Triton's FIL backend, "FIL Backend Model Configuration", of this and of earlier releases.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Params, declared_by, parameter

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


@dataclass(frozen=True, slots=True)
class ForestPlan:
    """The parameters of a forest; 0 threads are the instance's share of the thread budget."""

    # fmt: off
    model_type: str = parameter("model_type", "see above", {name: name for name in MODEL_TYPES}, "",
                                "detected from the file")
    is_classifier: bool = parameter("is_classifier", "`output__0` holds classes, or their probabilities; the second "
                                    "name is the older one", bool, False, also="output_class")
    has_probabilities: bool = parameter("predict_proba", "of a classifier: probabilities rather than a class", bool,
                                        False)
    threshold: float = parameter("threshold", "of a binary classifier: 1 above it", float, 0.5)
    allows_unknown: bool = parameter("xgboost_allow_unknown_field", "skip fields of an XGBoost file that treelite does "
                                     "not know, because a newer release wrote them", bool, False)
    predictor: str = parameter("predictor", "`treelite`, `library` (XGBoost or LightGBM), or `auto`: whichever is "
                               "faster for the batch", {name: name for name in (AUTO, TREELITE, LIBRARY)}, AUTO)
    threads: int = parameter("cpu_nthread", "threads of an instance", int, 0,
                             "the share of the [thread budget](threads.md)")
    # fmt: on


PARAMETERS = Params("fil", *declared_by(ForestPlan), others=WITHOUT_EFFECT)


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[ForestPlan, list[Problem]]:
    values = PARAMETERS.values(config)
    newer, older = (values.entries.get(name, ("", ""))[1] for name in ("is_classifier", "output_class"))
    if newer and older and newer.lower() != older.lower():
        message = f"'{older}' contradicts is_classifier, which is its newer name: leave one of them out"
        values.problems.append(Problem("parameters['output_class']", message))
    return values.into(ForestPlan, threads=max(0, values["cpu_nthread"])), values.problems


def remarks(config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each parameter without effect, known or not."""
    for key in sorted(config.parameters.keys() & WITHOUT_EFFECT):
        yield f"model '{config.name}': parameter '{key}' has no effect: it tunes the code of Triton's FIL backend"
    yield from PARAMETERS.remarks(config)
