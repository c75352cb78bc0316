# /// script
# dependencies = ["torch"]
# ///
"""How similar two texts are, from 0 to 1, by the groups of three letters that they share."""

import torch

import charonia

SIZE = 4096


@charonia.model
def similar(first: str, second: str) -> float:
    return float(torch.nn.functional.cosine_similarity(counts(first), counts(second), dim=0))


def counts(text: str) -> torch.Tensor:
    text = f" {text.lower()} "
    groups = [int.from_bytes(text[start : start + 3].encode()) % SIZE for start in range(len(text) - 1)]
    return torch.bincount(torch.tensor(groups), minlength=SIZE).float()
