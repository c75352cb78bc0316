"""Put the TorchScript network of the package silero-vad in place of the ONNX one, in a repository of the example.

The package's file keeps its memory inside, for one stream. Here the network in it is given its memory as tensors, batch
first, so that the server keeps it for each of many streams. In the configuration of the example, only
the backend changes.

Usage: python examples/voice_activity/torch_network.py FOLDER    (after make_repository.py FOLDER)
"""

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch

NETWORK = "silero_vad/data/silero_vad.jit"


class ForStreams(torch.nn.Module):
    """The network with its memory as arguments and results."""

    def __init__(self, network: torch.jit.ScriptModule):
        super().__init__()
        self.network = network

    def forward(self, AUDIO: torch.Tensor, MEMORY: torch.Tensor, CONTEXT: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: N803 - tensor names
        heard = torch.cat([CONTEXT, AUDIO], 1)
        speech, memory = self.network(heard, MEMORY.transpose(0, 1).contiguous())
        return {"SPEECH": speech, "NEXT_MEMORY": memory.transpose(0, 1), "NEXT_CONTEXT": heard[:, -64:]}


def shipped() -> Path:
    """Return the package's file. Raises SystemExit where the package is not installed."""
    try:
        for file in files("silero-vad") or ():
            if file.as_posix() == NETWORK:
                return Path(str(file.locate()))
    except PackageNotFoundError:
        pass
    sys.exit(f"{NETWORK} is not there: pip install silero-vad")


def replace_network(repository: Path) -> None:
    """Write model.pt, and change the backend."""
    folder = repository / "voice_activity"
    network = torch.jit.load(shipped(), map_location="cpu")._model
    torch.jit.script(ForStreams(network).eval()).save(folder / "1" / "model.pt")
    (folder / "1" / "model.onnx").unlink(missing_ok=True)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "onnxruntime"', 'backend: "pytorch"'))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    replace_network(Path(sys.argv[1]))
    print(f"written; serve it with: charonia serve --model-repository={sys.argv[1]}")
