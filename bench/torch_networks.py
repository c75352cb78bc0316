"""Networks with well-known shapes and random weights, as their cost does not depend on the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

WORDS = 30522


class Bottleneck(nn.Module):
    """Three convolutions and a residual connection."""

    def __init__(self, inner: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.path = nn.Sequential(
            *(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both ways give."""
        return torch.relu(self.path(x) + self.around(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    channels = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inner, channels, stride if number == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Bert(nn.Module):
    """BERT-base: twelve layers of 768; token ids in, the first token's vector out."""

    def __init__(self, layers: int = 12, size: int = 768, heads: int = 12, length: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, size)
        self.places = nn.Parameter(torch.randn(length, size) / 50)
        self.norm = nn.LayerNorm(size)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vector of the first token."""
        x = self.norm(self.words(ids) + self.places[: ids.shape[1]])
        result: torch.Tensor = self.layers(x)[:, 0]
        return result


@dataclass(frozen=True, slots=True)
class Network:
    """A network and its inputs.

    Attributes:
        make: Makes it.
        row: Shape of one item.
        datatype: Datatype of its input, as in configurations.
        out: Shape of one answer.
    """

    make: Callable[[], nn.Module]
    row: tuple[int, ...]
    datatype: str
    out: int

    def sample(self, batch: int) -> torch.Tensor:
        """Return a batch of items."""
        if self.datatype == "TYPE_INT64":
            return torch.randint(0, WORDS, (batch, *self.row))
        return torch.rand(batch, *self.row)


NETWORKS = {
    "resnet50": Network(resnet50, (3, 224, 224), "TYPE_FP32", 1000),
    "bert_base": Network(Bert, (128,), "TYPE_INT64", 768),
    # For trying out the measurement itself.
    "tiny": Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)), (3, 8, 8), "TYPE_FP32", 4),
}


def save(name: str, path: Path) -> None:
    """Write a network as TorchScript."""
    torch.manual_seed(1)
    network = NETWORKS[name]
    module = network.make().eval()
    with torch.inference_mode(False), torch.no_grad():
        # Fused layers of the trace would be fixed to the batch that it was made with.
        torch.backends.mha.set_fastpath_enabled(False)
        traced = torch.jit.trace(module, network.sample(2))  # type: ignore[no-untyped-call]
    traced.save(path)
