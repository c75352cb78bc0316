"""Estimators of scikit-learn as ONNX, by skl2onnx."""

import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import unsupported
from charonia.core.tensor import Array
from charonia.server.backends.conversion import ReadOptions, failed, rename, versioned
from charonia.server.backends.sklearn.features import (
    METHODS,
    answer_datatype,
    array_of,
    as_datatype,
    outputs_of,
    parts_of,
    prepare,
)
from charonia.server.backends.sklearn.files import read_estimator
from charonia.server.backends.sklearn.trust import Trust

TRUST_HINT = "--trust reads it, if you trust its source; skops.io.dump writes files that run no code"
TYPES_HINT = "if you trust its source: --trust, or --trusted-types {types}"

LOCALE = "C.UTF-8"
"""Of vectorizers: their default, en_US, is not installed in most containers, and then ONNX Runtime fails."""

ML_OPSET = 3
"""Version of the operators for classic models: the last one for which skl2onnx has all converters."""

_NAMES_WITHOUT_CONVERTER = ("MissingConverter", "MissingShapeCalculator")


class EstimatorOriginal:
    """An estimator or a pipeline."""

    scale = 100.0

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        trust = Trust(options.trust, options.trusted_types, TRUST_HINT, TYPES_HINT)
        self._estimator, self.warnings = read_estimator(path, trust)
        self._features = prepare(self._estimator)
        self._signature = options.inputs or tuple(
            SignatureTensor(t.name, DataType.FP32 if t.datatype is DataType.FP64 else t.datatype, t.shape)
            for t in self._inputs()
        )
        self._outputs: dict[str, str] = {}
        package = type(self._estimator).__module__.partition(".")[0].replace("sklearn", "scikit-learn")
        steps = ", ".join(type(step).__name__ for _, step in getattr(self._estimator, "steps", ()))
        self.title = f"{type(self._estimator).__name__}{f' ({steps})' if steps else ''} of {versioned(package)}"
        self.converter = versioned("skl2onnx")
        is_known = bool(self._features.texts or self._features.words)
        self.texts = {t.name: self._features.known_texts(t.name) for t in self._signature if is_known}

    def _inputs(self) -> Sequence[SignatureTensor]:
        """Return columns where the estimator selects them, or their values are texts; else one matrix."""
        features = self._features
        is_table = any(getattr(part, "transformers_", ()) for part, _ in parts_of(self._estimator))
        keeps = is_table or features.texts or features.is_text
        return (features if keeps else features.as_matrix()).signature()

    def to_onnx(self, path: Path, opset: int) -> None:
        import onnx
        from skl2onnx import convert_sklearn, get_latest_tested_opset_version

        estimator = self._estimator
        types = [(tensor.name, _type_of(tensor)) for tensor in self._signature]
        options: dict[object, object] = {kind: {"locale": LOCALE} for kind in (CountVectorizer, TfidfVectorizer)}
        versions = {"": opset or get_latest_tested_opset_version(), "ai.onnx.ml": ML_OPSET}

        def make(options: dict[object, object]) -> Any:
            return convert_sklearn(estimator, initial_types=types, options=options, target_opset=versions)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model = make({**options, id(estimator): {"zipmap": False}})
                except NameError:  # it has no such option
                    model = make(options)
        except Exception as error:  # the converters raise what they like
            raise self._refused(error) from error
        values = list(model.graph.output)
        self._outputs = dict(zip((value.name for value in values), self._named(), strict=False))
        for value in values[len(self._outputs) :]:
            model.graph.output.remove(value)
        rename(model, self._outputs)
        onnx.save(model, str(path))

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        table = self._features.rows(feed)
        answers = {}
        for output in self._outputs.values():
            array = array_of(output, getattr(self._estimator, METHODS[output])(table))
            answers[output] = as_datatype(array, answer_datatype(array))
        return answers

    def close(self) -> None:
        """Do nothing."""

    def _refused(self, error: Exception) -> Exception:
        hint = f"serve the estimator itself: charonia serve {shlex.quote(str(self._path))}"
        if type(error).__name__ in _NAMES_WITHOUT_CONVERTER:
            kind = next((word for word in str(error).split("'") if "." in word and " " not in word), "")
            return unsupported(f"{self.converter} has no conversion for {kind or 'a step of it'}", hint=hint)
        return failed(self.converter, error, hint=hint)

    def _named(self) -> list[str]:
        """Return the names of the outputs that skl2onnx makes, in its order; those that follow are left out.

        Scores of classifiers without probabilities are left out: skl2onnx gives them other shapes and signs.
        """
        estimator = self._estimator
        if not hasattr(estimator, "predict"):
            return ["transform"]
        return outputs_of(estimator, self._features.rows(self._features.example()))


def _type_of(tensor: SignatureTensor) -> Any:
    from skl2onnx.common import data_types

    kinds = {
        DataType.BYTES: data_types.StringTensorType,
        DataType.FP64: data_types.DoubleTensorType,
        DataType.INT64: data_types.Int64TensorType,
        DataType.INT32: data_types.Int32TensorType,
        DataType.BOOL: data_types.BooleanTensorType,
    }
    shape = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
    kind = kinds.get(tensor.datatype, data_types.FloatTensorType)
    return kind([None if dim == -1 else dim for dim in shape])
