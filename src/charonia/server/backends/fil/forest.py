"""Finds a forest's file, and reads it with treelite."""

import re
from dataclasses import dataclass
from pathlib import Path

import treelite

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.server.backends.api import ModelFiles
from charonia.server.backends.fil.options import MODEL_TYPES, ForestPlan
from charonia.server.backends.model_file import model_file

START_BYTES = 64
"""Bytes of a file that tell its format."""

LIGHTGBM_END = b"end of trees"
"""Line behind the last tree of a LightGBM file."""

_WITH_CATEGORIES = "category_container"
"""What treelite's error names for a file of XGBoost with categories of a data frame."""

_TYPES = {Path(name).suffix: model_type for model_type, name in MODEL_TYPES.items() if name != "xgboost.model"}


@dataclass(frozen=True, slots=True)
class Forest:
    """A forest as treelite reads it.

    Attributes:
        model: The model.
        features: Values of a row.
        scores: Scores of a row: one for a regression or a binary classification, else one for each class or target.
        targets: Targets of a row; 1 for most forests.
        averaged: By how many trees the sum of a score is divided; 1 for none.
    """

    model: treelite.Model
    features: int
    scores: int
    targets: int
    averaged: int


def forest_file(files: ModelFiles, config: ModelConfig, plan: ForestPlan) -> tuple[Path, str]:
    """Return the model's file and its `model_type`.

    Raises:
        ServingError: INVALID_ARG when there is no such file, or it has another format.
    """
    if plan.model_type or config.default_model_filename:
        path = model_file(files, config, MODEL_TYPES.get(plan.model_type, ""))
    else:
        present = [name for name in MODEL_TYPES.values() if (files.version_dir / name).is_file()]
        if len(present) != 1:
            found = " and ".join(present) or f"none of {', '.join(MODEL_TYPES.values())}"
            raise invalid(
                f"model '{config.name}' version {files.version}: expected one file of a forest, found {found}",
                hint="parameters: model_type says what it is, default_model_filename how it is called",
            )
        path = files.version_dir / present[0]
    with path.open("rb") as file:
        found = format_of(file.read(START_BYTES))
    model_type = plan.model_type or found or _TYPES.get(path.suffix, "xgboost")
    if found not in ("", model_type):
        raise invalid(
            f"model '{config.name}': expected '{path.name}' to be of model_type {model_type}, but it has the format of "
            f"{found}",
            hint=f'model_type: "{found}"',
        )
    return path, model_type


def format_of(start: bytes) -> str:
    """Return the `model_type` of a file that begins like this, "" where its beginning does not tell."""
    text = start.lstrip()
    if text.startswith(b"{"):
        return "xgboost_json" if text[1:].lstrip()[:1] in (b'"', b"}", b"") else "xgboost_ubj"
    if start.startswith(b"binf"):
        return "xgboost"
    if start.startswith((b"tree\n", b"tree\r")):
        return "lightgbm"
    # A checkpoint begins with the version of treelite, as three numbers of 32 bits.
    return "treelite_checkpoint" if len(start) > 3 and start[0] in (3, 4, 5) and start[1:4] == bytes(3) else ""


def read_forest(path: Path, model_type: str, plan: ForestPlan, model: str) -> Forest:
    """Read a file.

    Args:
        path: The file.
        model_type: Its format.
        plan: How it is read.
        model: The model's name, for errors.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read, UNSUPPORTED for a forest that cannot be served.
    """
    try:
        found = _load(path, model_type, plan)
    except (treelite.TreeliteError, ValueError, OSError) as error:
        raise _unreadable(path, model_type, model, error) from error
    header = found.get_header_accessor()
    targets = int(header.get_field("num_target")[0])
    classes = int(max(header.get_field("num_class")))
    if targets > 1 and classes > 1:
        raise unsupported(
            f"model '{model}': the forest has {targets} targets of up to {classes} classes, expected one target",
            hint="train a forest for each target",
        )
    per_class = classes if int(header.get_field("leaf_vector_shape")[1]) == 1 else 1
    averaged = found.num_tree // per_class if header.get_field("average_tree_output")[0] else 1
    return Forest(found, int(found.num_feature), targets * classes, targets, averaged)


def _load(path: Path, model_type: str, plan: ForestPlan) -> treelite.Model:
    load = treelite.frontend
    if model_type == "treelite_checkpoint":
        return treelite.Model.deserialize(path)
    if model_type == "lightgbm":
        # Without its end, treelite reads fewer trees, or beyond the text.
        if LIGHTGBM_END not in path.read_bytes():
            raise ValueError(f"the line '{LIGHTGBM_END.decode()}' is missing: the file is not complete")
        return load.load_lightgbm_model(path)
    if model_type == "xgboost":
        return load.load_xgboost_model_legacy_binary(path)
    name = "json" if model_type == "xgboost_json" else "ubjson"
    return load.load_xgboost_model(path, format_choice=name, allow_unknown_field=plan.allows_unknown)


def reason_of(error: Exception) -> str:
    """Return what an error of a library says, without the time, the line of its source and the stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[0]).rstrip(": ")


def _unreadable(path: Path, model_type: str, model: str, error: Exception) -> ServingError:
    hints = {
        "treelite_checkpoint": f"treelite {treelite.__version__} reads checkpoints of its major release and of 3.9",
        "xgboost": "save the model as xgboost.ubj or xgboost.json, with a release of XGBoost before 3.1",
        "lightgbm": "forests without linear trees are read, as Booster.save_model writes them",
    }
    newer = (
        "is the file complete? Forests are read, boosters of linear models are not; for a file of a newer XGBoost, the "
        'parameter xgboost_allow_unknown_field: "true" skips what is not known'
    )
    hint = hints.get(model_type, newer)
    if _WITH_CATEGORIES in str(error):
        hint = "treelite reads no categories of a data frame: joblib.dump(model, 'model.joblib'), and serve that file"
    return invalid(f"model '{model}': '{path.name}' cannot be read as {model_type}: {reason_of(error)}", hint=hint)
