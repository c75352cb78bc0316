"""The models of `bench.backends`: for each, its files, and the library called directly."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.support import models, tflite_models

Call = Callable[[NDArray[np.float32]], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the rows of a batch.

    Attributes:
        backend: Name of the backend.
        model: Name of the model.
        write: Writes the model's files into the folder of a version.
        library: Loads the model from there with the library alone, for a number of threads; returns what runs a batch.
        row: Shape of a row, FP32.
        batch: Rows of a batch.
        config: Text of config.pbtxt beside the backend.
    """

    backend: str
    model: str
    write: Callable[[Path], object]
    library: Callable[[Path, int], Call]
    row: tuple[int, ...]
    batch: int
    config: str = ""

    def rows(self) -> list[NDArray[np.float32]]:
        """Return the rows, each as a batch of one."""
        random = np.random.default_rng(0)
        return [random.random((1, *self.row), np.float32) for _ in range(self.batch)]


def ocr_model(name: str) -> bytes:
    """Return a model of PP-OCRv4 from the package that ships it."""
    found = find_spec("rapidocr_onnxruntime")
    if found is None or found.origin is None:
        raise SystemExit("rapidocr-onnxruntime is not installed: pip install 'charonia[demo]'")
    return (Path(found.origin).parent / "models" / f"{name}.onnx").read_bytes()


def _recognition_model() -> bytes:
    return ocr_model("ch_PP-OCRv4_rec_infer")


def _onnx(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.onnx").write_bytes(content())


def _onnxruntime(folder: Path, threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})


ONNX = [
    *(Case("onnxruntime", "mlp", _onnx(models.mlp), _onnxruntime, (128,), batch) for batch in (1, 8, 64)),
    *(Case("onnxruntime", "resnet18", _onnx(models.resnet18), _onnxruntime, (3, 224, 224), batch) for batch in (1, 8)),
    *(
        Case("onnxruntime", "pp-ocrv4 recognition", _onnx(_recognition_model), _onnxruntime, (3, 48, 320), batch)
        for batch in (1, 4)
    ),
]


def _trained(trees: int, depth: int) -> Callable[[Path], object]:
    """Return what writes a binary classifier of 32 features, of XGBoost."""

    def write(folder: Path) -> None:
        import xgboost

        data, labels = _rows_and_labels()
        options = {"objective": "binary:logistic", "max_depth": depth}
        xgboost.train(options, xgboost.DMatrix(data, labels), trees).save_model(folder / "xgboost.ubj")

    return write


def _trained_by_lightgbm(trees: int, depth: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import lightgbm

        data, labels = _rows_and_labels()
        options = {"objective": "binary", "num_leaves": 2**depth, "verbose": -1}
        lightgbm.train(options, lightgbm.Dataset(data, labels), trees).save_model(folder / "model.txt")

    return write


def _rows_and_labels() -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    rows = np.random.default_rng(0).random((4000, 32), np.float32)
    return rows, rows[:, 0] + rows[:, 1] * rows[:, 2] > 0.75


def _xgboost(folder: Path, threads: int) -> Call:
    import xgboost

    booster = xgboost.Booster({"nthread": threads}, model_file=folder / "xgboost.ubj")
    return booster.inplace_predict


def _lightgbm(folder: Path, threads: int) -> Call:
    import lightgbm

    booster = lightgbm.Booster(model_file=folder / "model.txt")
    return lambda batch: booster.predict(batch, num_threads=threads)


FORESTS = [
    Case("fil", f"{library} {trees} trees", write(trees, depth), call, (32,), batch)
    for library, write, call in (("xgboost", _trained, _xgboost), ("lightgbm", _trained_by_lightgbm, _lightgbm))
    for trees, depth in ((50, 4), (500, 8))
    for batch in (1, 64, 1024)
]


def _estimator(name: str) -> Callable[[Path], object]:
    """Return what writes a classifier of 32 features."""

    def write(folder: Path) -> None:
        import joblib
        from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from sklearn.svm import SVC

        rows = np.random.default_rng(0).random((4000, 32))
        estimators = {
            "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
            "support vectors": make_pipeline(StandardScaler(), SVC()),
            "gradient boosting": GradientBoostingClassifier(),
            "forest of 300 trees": RandomForestClassifier(300),
        }
        estimator = estimators[name].fit(rows, rows[:, 0] + rows[:, 1] * rows[:, 2] > 0.75)
        joblib.dump(estimator, folder / "model.joblib")

    return write


def _predict(folder: Path, threads: int) -> Call:
    import joblib
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads)
    return joblib.load(folder / "model.joblib").predict  # type: ignore[no-any-return]


_ESTIMATOR_CONFIG = """
parameters { key: "TRUSTED" value { string_value: "true" } }
input { name: "X" data_type: TYPE_FP32 dims: 32 }
output { name: "label" data_type: TYPE_BOOL dims: 1 reshape { } }
max_batch_size: 64
"""

ESTIMATORS = [
    Case("sklearn", name, _estimator(name), _predict, (32,), batch, _ESTIMATOR_CONFIG)
    for name in ("logistic regression", "support vectors", "gradient boosting", "forest of 300 trees")
    for batch in (1, 64)
]


def _openvino(folder: Path, threads: int) -> Call:
    import openvino

    properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(folder / "model.onnx", "CPU", properties)  # type: ignore[no-any-return]


OPENVINO = [
    Case("openvino", case.model, case.write, _openvino, case.row, case.batch, 'default_model_filename: "model.onnx"')
    for case in ONNX
]


def _tflite(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.tflite").write_bytes(content())


def _litert(folder: Path, threads: int) -> Call:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(folder / "model.tflite"), num_threads=threads)
    given, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    shapes: list[tuple[int, ...]] = [()]

    def run(batch: NDArray[np.float32]) -> object:
        if shapes[0] != batch.shape:
            interpreter.resize_tensor_input(given, batch.shape)
            interpreter.allocate_tensors()
            shapes[0] = batch.shape
        interpreter.set_tensor(given, batch)
        interpreter.invoke()
        return interpreter.get_tensor(result)

    return run


TFLITE = [
    *(Case("tflite", "mlp", _tflite(tflite_models.mlp), _litert, (16,), batch) for batch in (1, 8, 64)),
    *(
        Case("tflite", "convolutions", _tflite(tflite_models.convolutions), _litert, (96, 96, 3), batch)
        for batch in (1, 4)
    ),
]


def _keras(network: str) -> Callable[[Path], object]:
    """Return what writes a network, in another process: once it was used, TensorFlow takes no number of threads."""

    def write(folder: Path) -> None:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_export, network, folder / "model.savedmodel").result()

    return write


def _export(network: str, folder: Path) -> None:
    import keras

    if network == "resnet50":
        model = keras.applications.ResNet50(weights=None)
    else:
        hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(10)])
    model.export(folder, verbose=False)


def _tensorflow(folder: Path, threads: int) -> Call:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    signature = tf.saved_model.load(folder / "model.savedmodel").signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    return lambda batch: [each.numpy() for each in signature(**{name: tf.constant(batch)}).values()]


TENSORFLOW = [
    *(Case("tensorflow", "mlp", _keras("mlp"), _tensorflow, (128,), batch) for batch in (1, 8, 64)),
    *(Case("tensorflow", "resnet50", _keras("resnet50"), _tensorflow, (224, 224, 3), batch) for batch in (1, 8)),
]

CASES = [*ONNX, *OPENVINO, *TFLITE, *FORESTS, *ESTIMATORS, *TENSORFLOW]
