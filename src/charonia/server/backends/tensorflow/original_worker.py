"""The process that holds TensorFlow: converts one model, then runs it on samples.

A line of JSON comes in, a line goes out. The first asks for the conversion and is answered with new names for tensors
of the file; each later one asks for a run on the arrays of a file.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_DEFAULT_SIGNATURE = "serving_default"


class _RefusedError(Exception):
    """What the model is not, with a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def main() -> None:
    """Answer until the input ends. Libraries that print get stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    run: Run | None = None
    folder = Path()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if run is None:
                folder = Path(question["folder"])
                run, answer = _convert(question)
            else:
                with np.load(folder / question["run"]) as arrays:
                    results = run({name: arrays[name] for name in arrays.files})
                np.savez(folder / "out.npz", **{name: _plain(value) for name, value in results.items()})
                answer = {}
        except (Exception, SystemExit) as error:  # the libraries raise what they like
            text = str(error) if isinstance(error, _RefusedError) else f"{type(error).__name__}: {error}"
            answer = {"error": text, "hint": getattr(error, "hint", "")}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _convert(question: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    path, kind = question["path"], question["kind"]
    if kind == "tflite":
        run, names = _lite(path)
        _tf2onnx(question, "--tflite", path)
        return run, names
    if kind == "keras":
        path = _exported(path, question["folder"], is_trusted=question["trust"])
    signature, run = _saved(path, question["signature"])
    _tf2onnx(question, "--saved-model", path, "--tag", "serve", "--signature_def", signature)
    return run, {}


def _tf2onnx(question: Mapping[str, Any], *arguments: str) -> None:
    from tf2onnx import convert

    sys.argv = ["tf2onnx", *arguments, "--output", question["output"]]
    if question["opset"]:
        sys.argv += ["--opset", str(question["opset"])]
    convert.main()


def _exported(path: str, folder: str, *, is_trusted: bool) -> str:
    """Return the folder of a SavedModel that a Keras model was exported to."""
    import keras

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=not is_trusted)
    except ValueError as error:
        if "safe_mode" in str(error) or "unsafe" in str(error):
            raise _RefusedError(
                "the model has a Lambda layer, which can run any code when it is read",
                "--trust reads it, if you trust its source",
            ) from error
        raise
    exported = os.path.join(folder, "exported")
    model.export(exported, verbose=False)
    return exported


def _saved(path: str, wanted: str) -> tuple[str, Run]:
    import tensorflow as tf

    loaded = tf.saved_model.load(path, tags=["serve"])
    signatures = loaded.signatures
    name = wanted or (_DEFAULT_SIGNATURE if _DEFAULT_SIGNATURE in signatures else next(iter(signatures), ""))
    if name not in signatures:
        known = ", ".join(signatures) or "none"
        raise _RefusedError(f"the SavedModel has no signature '{name}': it has {known}", "--signature NAME chooses one")
    function = signatures[name]

    def run(feed: Mapping[str, Any]) -> Mapping[str, Any]:
        _ = loaded  # a signature does not keep its variables alive
        tensors = {key: tf.constant(array) for key, array in feed.items()}
        return {key: value.numpy() for key, value in function(**tensors).items()}

    return name, run


def _lite(path: str) -> tuple[Run, dict[str, str]]:
    """Return how to run a TensorFlow Lite model, and the names of its signature for tensors of the file."""
    from tensorflow import lite

    interpreter = lite.Interpreter(path)
    inputs = {each["name"]: each["index"] for each in interpreter.get_input_details()}
    outputs = {each["name"]: each["index"] for each in interpreter.get_output_details()}
    names: dict[str, str] = {}
    signatures = interpreter.get_signature_list()
    if len(signatures) == 1:
        runner = interpreter.get_signature_runner(next(iter(signatures)))
        for details in (runner.get_input_details(), runner.get_output_details()):
            names.update({each["name"]: key for key, each in details.items()})
    own = {new: old for old, new in names.items()}

    def run(feed: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, array in feed.items():
            interpreter.resize_tensor_input(inputs[own.get(name, name)], array.shape)
        interpreter.allocate_tensors()
        for name, array in feed.items():
            interpreter.set_tensor(inputs[own.get(name, name)], array)
        interpreter.invoke()
        return {names.get(name, name): interpreter.get_tensor(index) for name, index in outputs.items()}

    return run, {old: new for old, new in names.items() if old in inputs or old in outputs}


def _plain(value: Any) -> Any:
    """Return an array that can be written without a pickle."""
    return value.astype("S") if value.dtype == object else value


if __name__ == "__main__":
    main()
