"""Whether a forest that was read is sound: predicting with it stays within its memory, and ends."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import treelite

NUMERICAL, CATEGORICAL = 1, 2
"""Types of nodes that test a value."""

OPERATORS = range(1, 6)
"""Comparisons of a node."""

_NODE_FIELDS = (
    *("category_list_begin", "category_list_end", "category_list_right_child", "cleft", "cmp", "cright"),
    *("default_left", "leaf_value", "leaf_vector_begin", "leaf_vector_end", "node_type", "split_index", "threshold"),
)


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
