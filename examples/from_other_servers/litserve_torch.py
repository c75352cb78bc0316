"""A module of PyTorch on the device that the server assigns: LitServe's `setup(device)`."""

import torch

import charonia


@charonia.model
class Linear:
    def __init__(self, device: str):
        self.network = torch.nn.Linear(1, 1, device=device)
        torch.nn.init.constant_(self.network.weight, 2)
        torch.nn.init.constant_(self.network.bias, 1)

    def __call__(self, input: float) -> float:
        with torch.inference_mode():
            return self.network(torch.tensor([input], device=self.network.bias.device)).item()
