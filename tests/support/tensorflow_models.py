"""Small models of TensorFlow, for tests. Run as a script, it makes them in a folder; their weights are always the same.

The import of TensorFlow takes longer than everything else here, so the models are kept for later runs.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.kept import kept_folder

ROOT = Path(__file__).parents[2]


def models(config: pytest.Config) -> Path:
    """Return a folder with all models, SavedModels and a Keras file, made now if need be."""
    return kept_folder(config, "tensorflow", _make, sources=[Path(__file__)], packages=["tensorflow-cpu", "keras"])


def place(source: Path, model_dir: Path, config: str = "") -> Path:
    """Make a model of a repository from a SavedModel or Keras file; return the folder of its version."""
    version = model_dir / "1"
    version.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, version / "model.savedmodel")
    else:
        shutil.copy(source, version / "model.keras")
    if config:
        (model_dir / "config.pbtxt").write_text(config)
    return version


def _make(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tensorflow_models", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _build(folder: Path) -> None:
    import keras
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    def saved(name: str, function: Any, *specs: Any, **state: Any) -> None:
        module = tf.Module()
        module.state = state  # tracked
        call = tf.function(function, input_signature=specs)
        tf.saved_model.save(module, folder / name, signatures=call)

    def spec(name: str, shape: list[int | None] | None, dtype: Any = tf.float32) -> Any:
        return tf.TensorSpec(shape, dtype, name=name)

    def roots(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, "a root of a negative number")]):
            root = tf.sqrt(x)
        return {"ROOT": root, "TEXT": tf.strings.as_string(root[:, :2], 3), "SUM": tf.reduce_sum(root, 1)}

    saved("roots", roots, spec("X", [None, 4]))
    saved("texts", lambda s: {"TWICE": tf.strings.join([s, s])}, spec("S", [None, None], tf.string))
    saved("unranked", lambda x: {"Y": x * 2}, spec("X", None))
    saved("total", lambda x: {"Y": tf.reduce_sum(x, 0, keepdims=True)}, spec("X", [None, 4]))
    saved("angles", lambda x: {"Y": tf.complex(x, x)}, spec("X", [None, 4]))

    def repeated(x: Any, n: Any) -> Any:
        return {"Y": tf.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, y * 2), (0, x))[1]}

    saved("repeated", repeated, spec("X", [4]), spec("N", [], tf.int32))
    last = tf.Variable(tf.zeros([64]))

    def kept(x: Any) -> Any:
        before = tf.identity(last)
        with tf.control_dependencies([before]):
            last.assign(x)
        return {"BEFORE": before}

    saved("kept", kept, spec("X", [64]), last=last)
    two = tf.Module()
    calls = {
        name: tf.function(lambda x, factor=factor: {"Y": x * factor}, input_signature=[spec("X", [None, 4])])
        for name, factor in (("double", 2.0), ("triple", 3.0))
    }
    tf.saved_model.save(two, folder / "two", signatures=calls)

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        factor = v1.get_variable("factor", [], initializer=v1.zeros_initializer(), use_resource=True)
        v1.assign(factor, 5.0, name="set_five")
        y = x * factor
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(folder / "old"))
        signature = v1.saved_model.predict_signature_def({"X": x}, {"Y": y})
        builder.add_meta_graph_and_variables(session, ["mine", "cpu"], {"only": signature})
        builder.save()

    def changed(name: str, change: Any) -> None:
        shutil.copytree(folder / "roots", folder / name)
        path = folder / name / "saved_model.pb"
        model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
        change(model.meta_graphs[0])
        path.write_bytes(model.SerializeToString())

    def sparse(graph: Any) -> None:
        graph.signature_def["serving_default"].inputs["X"].coo_sparse.values_tensor_name = "x:0"

    def ragged(graph: Any) -> None:
        graph.signature_def["serving_default"].outputs["ROOT"].composite_tensor.SetInParent()

    def unknown(graph: Any) -> None:
        for function in graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == "Sqrt":
                    node.op = "MyOwnSqrt"

    changed("sparse", sparse)
    changed("ragged", ragged)
    changed("unknown", unknown)

    keras.utils.set_random_seed(7)
    layers = [keras.Input((8,), name="features"), keras.layers.Dense(4)]
    keras.Sequential(layers).save(folder / "dense.keras")


if __name__ == "__main__":
    _build(Path(sys.argv[1]))
