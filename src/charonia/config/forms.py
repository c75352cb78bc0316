"""What people have: the forms of models, how each is recognised, and how it comes to be served. Pure.

Backends' records have the forms that are served. The others are recognised here, and their lines, to be
pasted into a shell, lead to something that is served.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from charonia.config.backends import PYTHON, Form, served

GRAPH_LINES = """\
python - <<'EOF'
import tensorflow.compat.v1 as tf

graph = tf.GraphDef.FromString(open({path_text}, "rb").read())
with tf.Graph().as_default(), tf.Session() as session:
    x, y = tf.import_graph_def(graph, name="", return_elements=["INPUT:0", "OUTPUT:0"])  # its own names
    tf.saved_model.simple_save(session, "{name}.savedmodel", {"INPUT": x}, {"OUTPUT": y})
EOF
"""
"""Lines for a shell that make a SavedModel of a frozen graph: a template with `{path_text}` and `{name}`."""


def _service(dependencies: str, code: str) -> str:
    """Return the lines that write a service file and serve it; the file ends with `code`."""
    header = f"# /// script\n# dependencies = [{dependencies}]\n# ///\n"
    return f"cat > service.py <<'EOF'\n{header}{code.strip()}\nEOF\ncharonia serve service.py"


_STATE = """\
        weights = {weights}{remark}
        self.network = Network().to(device).eval()
        self.network.load_state_dict(weights)"""

_WHOLE = "        self.network = {weights}.eval(){remark}"


def _network(dependencies: str, imports: str, weights: str, remark: str = "", *, is_whole: bool = False) -> str:
    """Return the lines for a network of which there are weights, or the whole module."""
    if not is_whole:
        imports += "\nfrom mymodel import Network  # the class that the weights belong to\n"
    load = (_WHOLE if is_whole else _STATE).format(weights=weights, remark=remark)
    return _service(
        dependencies,
        f"""
from typing import Annotated

import charonia
import numpy as np
import torch
from numpy.typing import NDArray
{imports}
@charonia.model(max_batch_size=16)
class {{class_name}}:
    def __init__(self, device: str):
        self.device = device
{load}

    def __call__(
        self, x: Annotated[NDArray[np.float32], charonia.Shape(-1, 3, 224, 224)]
    ) -> Annotated[NDArray[np.float32], charonia.Shape(-1, 1000)]:
        with torch.inference_mode():
            return self.network(torch.from_numpy(x).to(self.device)).cpu().numpy()
""",
    )


SENTENCES = Form(
    "a sentence-transformers model",
    members=("modules.json", "config_sentence_transformers.json"),
    filename="model.py",
    backend=PYTHON,
    package="sentence-transformers",
    service="""
from typing import Annotated

import charonia
import numpy as np
from numpy.typing import NDArray


@charonia.model(max_batch_size=32)
class Sentences:
    def __init__(self, device: str):
        from sentence_transformers import SentenceTransformer  # late: it takes long

        self.encoder = SentenceTransformer({path_text}, device=device, local_files_only=True)

    def __call__(self, text_input: list[str]) -> Annotated[NDArray[np.float32], charonia.Shape(-1, -1)]:
        return self.encoder.encode(text_input, show_progress_bar=False)
""",
)
"""A folder that is served by a service file around its library."""

CHECKPOINT = Form("a checkpoint of PyTorch", (".ckpt", ".bin"), lines="checkpoint")
"""What `torch.save` writes, also in a file that is called as one that is served."""


def pickled_module(class_path: str) -> Form:
    """Return the form of a file that `torch.save` made of a whole module, whose code is not in the file.

    Args:
        class_path: Module and name of its class.
    """
    module, _, name = class_path.rpartition(".")
    imported = f"import {module}  # the file needs the class, not only its name"
    if module == "__main__":
        imported = f"import __main__\nfrom train import {name}  # the script that defines it\n__main__.{name} = {name}"
    return Form(
        f"a pickled module of PyTorch, of class {class_path}",
        lines=_network(
            '"torch"',
            f"{imported}\n",
            "torch.load({path_text}, map_location=device, weights_only=False)",
            "  # runs code of the file",
            is_whole=True,
        ),
    )


RECOGNISED = (
    Form(
        "a Hugging Face model",
        members=("config.json", "*.safetensors"),
        lines=_service(
            '"transformers", "torch"',
            """
import charonia
from transformers import pipeline

@charonia.model
class {class_name}:
    def __init__(self, device: str):
        self.pipe = pipeline("{task}", model={path_text}, device=device)

    def __call__(self, {parameter}) -> {result}:
        return self.pipe({argument})
""",
        ),
    ),
    Form("a Hugging Face model", members=("config.json", "pytorch_model*.bin"), lines="hugging face"),
    Form(
        "an MLflow model",
        members=("MLmodel",),
        lines=_service(
            '"mlflow"',
            """
import charonia
import mlflow.pyfunc

model = mlflow.pyfunc.load_model({path_text})
charonia.serve(model, example=model.input_example, name="{name}")
""",
        ),
    ),
    Form(
        "a Keras model of an earlier version",
        (".h5",),
        lines=(
            "pip install tensorflow\n"
            "python - <<'EOF'\n"
            "import keras\n\n"
            'keras.saving.load_model({path_text}, compile=False).save("{name}.keras")\n'
            "EOF\n"
            "charonia serve {name}.keras"
        ),
    ),
    Form("weights without their model", (".safetensors", ".msgpack", ".npz"), lines="weights"),
    CHECKPOINT,
    Form("a Core ML model", (".mlmodel", ".mlpackage"), lines="source"),
    Form("a TensorFlow graph", (".pb", ".graphdef"), lines="graph"),
)
"""The forms that are recognised only."""

_HUGGING_FACE = next(form.lines for form in RECOGNISED if form.members == ("config.json", "*.safetensors"))

_SHARED = {
    "hugging face": _HUGGING_FACE,
    "weights": _network('"torch", "safetensors"', "from safetensors.torch import load_file", "load_file({path_text})"),
    "checkpoint": _network(
        '"torch"', "", "torch.load({path_text}, map_location=device)", '  # perhaps with ["state_dict"] behind it'
    ),
    "source": "charonia serve {name}.onnx    # the ONNX model that it was made from",
    "graph": f"pip install tensorflow\n{GRAPH_LINES}charonia serve {{name}}.savedmodel",
}
"""Lines that several forms have in common, by the word that stands for them in the table."""

_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForCTC": "automatic-speech-recognition",
}
"""Task of `transformers.pipeline` by the end of the architecture's name; others compute features."""

_ARGUMENTS = {
    "image-classification": ("image", "Image"),
    "object-detection": ("image", "Image"),
    "automatic-speech-recognition": ("audio", "bytes"),
}
"""Input of a task, and its type; other tasks take text."""

_RESULTS = {"feature-extraction": "list[list[list[float]]]", "automatic-speech-recognition": "dict"}
"""Type of a task's output; other tasks give a list of records."""


def form_of(name: str, entries: Sequence[str] | None, start: bytes = b"") -> Form | None:
    """Return the form of a file or folder, None for none that is known.

    Args:
        name: Its name.
        entries: Names in the folder, None for a file.
        start: The first bytes of a file.
    """
    return next((form for form in (SENTENCES, *served(), *RECOGNISED) if form.fits(name, entries, start)), None)


def advice(form: Form, path: str, config: str = "") -> str:
    """Return the lines for a shell that lead to something that is served.

    Args:
        form: The form of the file or folder at `path`.
        path: Where it is.
        config: Text of the `config.json` of a Hugging Face model.
    """
    name = model_name(path)
    task = _task(config)
    argument, kind = _ARGUMENTS.get(task, ("text", "str"))
    values = {
        "path": shlex.quote(path),
        "path_text": json.dumps(path, ensure_ascii=False),
        "name": name,
        "class_name": "".join(word.capitalize() for word in re.split(r"\W|_", name) if word) or "Model",
        "task": task,
        "parameter": f"{argument}: {kind}",
        "argument": argument,
        "result": _RESULTS.get(task, "list[dict]"),
    }
    lines = form.service or _SHARED.get(form.lines, form.lines)
    if kind == "Image":
        lines = lines.replace('"torch"]', '"torch", "pillow"]', 1)
        lines = lines.replace("import charonia\n", "import charonia\nfrom PIL.Image import Image\n", 1)
    for key, value in values.items():
        lines = lines.replace(f"{{{key}}}", value)
    return lines


def model_name(path: str) -> str:
    """Return the name of a model for the path of its file or folder."""
    file = PurePosixPath(path)
    known = {suffix for form in (*served(), *RECOGNISED) for suffix in form.suffixes} | {".savedmodel"}
    stem = file.stem if file.suffix.lower() in known else file.name
    return re.sub(r"[^\w.-]+", "_", stem).strip("._-") or "model"


def suffixes() -> str:
    """Return the suffixes that mark files that are served, for messages."""
    return ", ".join(suffix for form in served() if not form.start for suffix in form.suffixes)


def is_model_folder(entries: Sequence[str]) -> bool:
    """Return whether a folder with these entries may be one model of a repository: it has something like a version."""
    return any(re.fullmatch("[1-9][0-9]*", entry) for entry in entries)


def generates_text(config: str) -> bool:
    """Return whether a model of Hugging Face, by its `config.json`, continues text."""
    return _task(config) == "text-generation"


def _task(config: str) -> str:
    try:
        names = json.loads(config)["architectures"]
        architecture = str(names[0])
    except (ValueError, TypeError, LookupError):
        return "feature-extraction"
    return next((task for end, task in _TASKS.items() if architecture.endswith(end)), "feature-extraction")
