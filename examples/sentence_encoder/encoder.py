"""The network of all-MiniLM-L6-v2 in plain PyTorch: token ids and their mask in, one vector of length 1 out."""

import torch
from torch import nn

WORDS, POSITIONS, SIZE, HEADS, LAYERS = 30522, 512, 384, 12, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.mixed = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.mixed_norm = nn.LayerNorm(SIZE, eps=1e-12)
        self.wide = nn.Linear(SIZE, 4 * SIZE)
        self.narrow = nn.Linear(4 * SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE, eps=1e-12)

    def forward(self, x, mask):
        heads = [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        seen = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = self.mixed_norm(x + self.mixed(seen.transpose(1, 2).flatten(2)))
        return self.norm(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.positions = nn.Embedding(POSITIONS, SIZE)
        self.kinds = nn.Embedding(2, SIZE)
        self.norm = nn.LayerNorm(SIZE, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(places) + self.kinds.weight[0])
        mask = attention_mask.bool()
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        weights = mask.unsqueeze(-1).to(x.dtype)
        mean = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return {"vector": nn.functional.normalize(mean, dim=1)}


PLACES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "mixed",
    "attention.output.LayerNorm": "mixed_norm",
    "intermediate.dense": "wide",
    "output.dense": "narrow",
    "output.LayerNorm": "norm",
}


def renamed(weights):
    """Return the weights of the published file under the names that they have here."""
    found = {}
    for name, tensor in weights.items():
        path, _, kind = name.rpartition(".")
        layer = ""
        if path.startswith("encoder.layer."):
            number, _, path = path.removeprefix("encoder.layer.").partition(".")
            layer = f"layers.{number}."
        if path in PLACES:
            found[f"{layer}{PLACES[path]}.{kind}"] = tensor
    return found
