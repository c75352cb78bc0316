"""TensorFlow models as ONNX, by tf2onnx: SavedModels, Keras models and TensorFlow Lite models.

TensorFlow runs in a process of its own (`original_worker`): it writes to stderr as it likes, takes seconds to
import, and may end its process.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from charonia.core.errors import unsupported
from charonia.core.tensor import Array
from charonia.python_command import python_module
from charonia.server.backends.conversion import ReadOptions, failed, rename, unknown_operators, versioned

WORKER = "charonia.server.backends.tensorflow.original_worker"


class TensorFlowOriginal:
    """A SavedModel, a Keras model or a TensorFlow Lite model."""

    scale = 1.0
    texts: Mapping[str, Sequence[str]] = {}

    def __init__(self, path: Path, options: ReadOptions) -> None:
        kind = {".tflite": "tflite", ".keras": "keras", ".h5": "keras"}.get(path.suffix.lower(), "saved_model")
        titles = {"tflite": "TensorFlow Lite model", "keras": "Keras model", "saved_model": "SavedModel"}
        self.title = f"{titles[kind]}, {versioned('tensorflow')}"
        self.converter = versioned("tf2onnx")
        self.warnings: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="charonia-convert-")
        self._request = {
            "path": str(path.absolute()),
            "kind": kind,
            "folder": self._folder.name,
            "signature": options.signature,
            "trust": options.trust,
        }
        self._log_path = Path(self._folder.name, "log")
        self._process: subprocess.Popen[str] | None = None

    def to_onnx(self, path: Path, opset: int) -> None:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                python_module(WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        names = self._ask({**self._request, "output": str(path.absolute()), "opset": opset})
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        unknown = unknown_operators(model)
        if unknown:  # tf2onnx leaves them as they are
            raise unsupported(
                f"{self.converter} has no conversion for {', '.join(unknown)}",
                hint="keep what uses it out of the signature, or serve the SavedModel itself",
            )
        if names:
            rename(model, {str(old): str(new) for old, new in names.items()})
            onnx.save(model, str(path))

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        arrays = {name: array if array.dtype != object else array.astype("S") for name, array in feed.items()}
        np.savez(Path(self._folder.name, "in.npz"), **arrays)  # type: ignore[arg-type]
        self._ask({"run": "in.npz"})
        with np.load(Path(self._folder.name, "out.npz")) as answers:
            return {name: answers[name] for name in answers.files}

    def close(self) -> None:
        """End the process and delete its files."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    def _ask(self, question: Mapping[str, object]) -> dict[str, object]:
        """Send a question to the process and return its answer."""
        process = self._process
        assert process is not None, "to_onnx comes before run"
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise failed(self.converter, f"its process ended with status {status}: {' '.join(lines)}")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise failed(self.converter, str(answer["error"]), hint=str(answer.get("hint", "")))
        return answer
