"""Whether PyTorch can use the GPU that an instance is to run on."""

from typing import Any

import torch

from charonia.core.errors import ServingError, unsupported


def count() -> int:
    """Return the number of GPUs that the installed PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check(instance: str, index: int, api: Any = torch.cuda) -> None:
    """Check that an instance can run on GPU `index`.

    Raises:
        ServingError: UNSUPPORTED with the reason.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        raise _missing(
            instance, f"the installed PyTorch {torch.__version__} is a build for the CPU", "install a CUDA build of it"
        )
    if not api.is_available():
        raise _missing(
            instance,
            f"CUDA {torch.version.cuda} of the installed PyTorch does not start",
            "is there a GPU that this process may see, with a driver that is new enough?",
        )
    if index >= api.device_count():
        raise _missing(instance, f"PyTorch sees {api.device_count()} GPUs", "correct `gpus`, or CUDA_VISIBLE_DEVICES")


def _missing(instance: str, reason: str, hint: str) -> ServingError:
    return unsupported(
        f"instance '{instance}' needs a GPU: {reason}",
        hint=f"{hint}; or use instances of KIND_CPU. `charonia doctor` shows what this machine offers",
    )
