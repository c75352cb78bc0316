"""Writes a PaddlePaddle model without PaddlePaddle; the field numbers are those of its framework.proto."""

from collections.abc import Sequence

from tests.support.onnx_writer import _bytes, _number, _text

_FP32, _LOD_TENSOR, _FEED, _FETCH = 5, 7, 9, 10
_INT = 0
_ANY = -1


def relu(columns: int) -> bytes:
    """Return the content of a .pdmodel file without weights: x [-1, columns] -> y."""
    shape = _number(1, _FP32) + _number(2, _ANY) + _number(2, columns)
    variables = [("feed", _FEED, b""), ("fetch", _FETCH, b""), ("x", _LOD_TENSOR, shape), ("y", _LOD_TENSOR, shape)]
    operators = [("feed", "feed", "x", [_column()]), ("relu", "x", "y", []), ("fetch", "y", "fetch", [_column()])]
    block = _number(1, 0) + _number(2, _ANY)
    block += b"".join(_bytes(3, _variable(*variable)) for variable in variables)
    block += b"".join(_bytes(4, _operator(*operator)) for operator in operators)
    return _bytes(1, block) + _bytes(4, _number(1, 0))


def _variable(name: str, kind: int, tensor: bytes) -> bytes:
    described = _number(1, kind) + (_bytes(3, _bytes(1, tensor)) if tensor else b"")
    return _text(1, name) + _bytes(2, described)


def _operator(kind: str, given: str, result: str, attributes: Sequence[bytes]) -> bytes:
    names = _bytes(1, _text(1, "X") + _text(2, given)) + _bytes(2, _text(1, "Out") + _text(2, result))
    return names + _text(3, kind) + b"".join(_bytes(4, attribute) for attribute in attributes)


def _column() -> bytes:
    return _text(1, "col") + _number(2, _INT) + _number(3, 0)
