# /// script
# dependencies = ["torch"]
# ///
"""How similar two texts are, from 0 to 1, by the words that they share. It fails for a text without words."""

import torch

import charonia

SIZE = 4096


@charonia.model
def similar(first: str, second: str) -> float:
    return float(torch.nn.functional.cosine_similarity(counts(first), counts(second), dim=0))


def counts(text: str) -> torch.Tensor:
    words = [torch.tensor(list(word.encode())).sum() % SIZE for word in text.lower().split()]
    return torch.bincount(torch.stack(words), minlength=SIZE).float()
