"""The `tensorrtllm` backend: serves repositories of Triton's TensorRT-LLM backend over the LLM API."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import yaml

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.backends.api import BackendSettings, ModelFiles
from charonia.server.backends.language.backend import LanguageBackend
from charonia.server.backends.tensorrtllm.options import ARGUMENTS_FILE, INPUTS, OUTPUTS, engine_options


class TensorRtLlmBackend(LanguageBackend):
    """The `tensorrtllm` backend."""

    name = "tensorrtllm"
    engine = Path(__file__).parent / "worker" / "engine.py"
    kind = InstanceKind.KIND_MODEL
    more_inputs = INPUTS
    more_outputs = OUTPUTS

    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        """Return the arguments of the engine and the GPUs of each instance."""
        return engine_options(config, await asyncio.to_thread(_document, files, config))


def _document(files: ModelFiles, config: ModelConfig) -> object:
    path = files.version_dir / ARGUMENTS_FILE
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise invalid(
            f"model '{config.name}' version {files.version} has no file {ARGUMENTS_FILE}",
            hint="it holds arguments of tensorrt_llm.LLM, such as `model: name or folder`; an engine built for the C++ "
            "backend is named there with `backend: tensorrt`",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise invalid(f"model '{config.name}': {ARGUMENTS_FILE} cannot be read: {error}") from None
