"""A trace as the entries of a trace file. Pure.

Source: the format of Triton's trace files.
"""

import numpy as np
import orjson

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.core.trace import Trace, TraceLevel, TraceTree, ordered

ELEMENTS_MAX = 1_000_000
"""Most elements of a tensor that are written; of a larger one these, and then "..."."""


def entries(tree: TraceTree) -> bytes:
    """Return the JSON objects of all traces of a tree, with commas between them."""
    lines: list[bytes] = []
    for trace in tree.traces:
        events = trace.events + tree.front if trace is tree.root else trace.events
        if trace.model_name:
            lines.append(orjson.dumps(_head(trace)))
        if tree.level & TraceLevel.TIMESTAMPS:
            lines += [
                b'{"id":%d,"timestamps":[{"name":"%b","ns":%d}]}' % (trace.id, name.encode(), ns)
                for name, ns in ordered(events)
            ]
        lines += [_tensor(trace.id, activity, tensor) for activity, tensor in trace.tensors]
    return b",".join(lines)


def _head(trace: Trace) -> dict[str, object]:
    head: dict[str, object] = {
        "id": trace.id,
        "model_name": trace.model_name,
        "model_version": int(trace.model_version),
    }
    if trace.request_id:
        head["request_id"] = trace.request_id
    if trace.parent_id:
        head["parent_id"] = trace.parent_id
    return head


def _tensor(number: int, activity: str, tensor: Tensor) -> bytes:
    return orjson.dumps(
        {
            "id": number,
            "activity": activity,
            "tensor": {
                "name": tensor.name,
                "data": _data(tensor),
                "shape": ",".join(map(str, tensor.shape)),
                "dtype": tensor.datatype.wire,
            },
        }
    )


def _data(tensor: Tensor) -> str:
    elements = tensor.array.ravel()
    is_cut = elements.size > ELEMENTS_MAX
    elements = elements[:ELEMENTS_MAX]
    if tensor.datatype is DataType.BYTES:
        texts = [f'"{element.decode("utf-8", "backslashreplace")}"' for element in elements.tolist()]
    elif tensor.datatype is DataType.BOOL:
        texts = [str(int(element)) for element in elements.tolist()]
    elif tensor.datatype is DataType.BF16:
        texts = [_number(element) for element in (elements.astype(np.uint32) << 16).view(np.float32)]
    else:
        texts = [_number(element) for element in elements]
    return ",".join(texts) + (",..." if is_cut else "")


def _number(element: np.generic) -> str:
    return str(element).removesuffix(".0")
