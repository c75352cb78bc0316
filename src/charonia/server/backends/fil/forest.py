"""Finds a forest's file, reads it with treelite, and checks its trees."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import treelite

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.server.backends.api import ModelFiles
from charonia.server.backends.array_backend import model_file
from charonia.server.backends.fil.options import MODEL_TYPES, ForestPlan

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

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read, UNSUPPORTED for a forest that cannot be served.
    """
    try:
        found = _load(path, model_type, plan)
    except (treelite.TreeliteError, ValueError, OSError) as error:
        raise _unreadable(path, model_type, model, error) from error
    if problem := structure_problem(found):
        message = f"model '{model}': '{path.name}' cannot be read as {model_type}: {problem}"
        raise invalid(message, hint="the file is damaged: export it again")
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


NUMERICAL, CATEGORICAL = 1, 2
"""Types of nodes that test a value."""

OPERATORS = range(1, 6)
"""Comparisons of a node."""

_NODE_FIELDS = (
    "category_list_begin", "category_list_end", "category_list_right_child", "cleft", "cmp", "cright",
    "default_left", "leaf_value", "leaf_vector_begin", "leaf_vector_end", "node_type", "split_index", "threshold",
)  # fmt: skip


def structure_problem(model: treelite.Model) -> str:
    """Return the first thing that is wrong with a forest, "" for a sound one. treelite itself looks at none of it."""
    header: Any = model.get_header_accessor()
    targets = int(header.get_field("num_target")[0])
    classes, shape = header.get_field("num_class"), header.get_field("leaf_vector_shape")
    if model.num_feature < 1 or targets < 1 or len(classes) != targets or classes.min() < 1:
        return f"it has {model.num_feature} features, {targets} targets, and classes {classes[:8].tolist()}"
    widest = int(classes.max())
    if len(header.get_field("base_scores")) != targets * widest:
        return "its base scores are not one for each target and class"
    if len(shape) != 2 or shape[0] not in (1, targets) or shape[1] not in (1, widest):
        return f"its leaves have the shape {shape[:8].tolist()}"
    for name, count in (("target_id", targets), ("class_id", widest)):
        numbers = header.get_field(name)
        if len(numbers) != model.num_tree or ((numbers < -1) | (numbers >= count)).any():
            return f"its trees have a {name} that is missing or out of range"
    for number in range(model.num_tree):
        tree = model.get_tree_accessor(number)
        for problem in _tree_problems(tree, model.num_feature, int(shape[0]) * int(shape[1])):
            return f"tree {number}: {problem}"
    return ""


def _tree_problems(tree: Any, features: int, leaf_size: int) -> Iterator[str]:
    field = {name: tree.get_field(name) for name in _NODE_FIELDS}
    left, right, kind = field["cleft"], field["cright"], field["node_type"]
    nodes = len(left)
    if not nodes or any(len(values) != nodes for values in field.values()):
        yield "its fields do not have one value for each node"
        return
    inner = left != -1
    children = np.concatenate([left[inner], right[inner]])
    if ((children < 1) | (children >= nodes)).any():
        yield "a child is no node of the tree"
    elif np.bincount(children).max(initial=0) > 1:  # so there is no cycle: the root is nobody's child
        yield "a node has two parents"
    index = field["split_index"][inner]
    if ((index < 0) | (index >= features)).any():
        yield "a test is of a feature that a row does not have"
    tests = kind[inner]
    if not np.isin(tests, (NUMERICAL, CATEGORICAL)).all():
        yield "a node is of a type that does not exist"
    if not np.isin(field["cmp"][inner][tests == NUMERICAL], OPERATORS).all():
        yield "a comparison does not exist"
    for name, where in (("category_list", inner & (kind == CATEGORICAL)), ("leaf_vector", ~inner)):
        begin, end = field[f"{name}_begin"][where], field[f"{name}_end"][where]
        if ((begin > end) | (end > len(tree.get_field(name)))).any():
            yield f"a {name} is out of range"
        if name == "leaf_vector" and not np.isin(end - begin, (0, leaf_size)).all():
            yield "a leaf has another size than the others"
