"""Writes a tiny EXAONE checkpoint with random weights, as a Hugging Face directory.

python examples/custom_model/make_checkpoint.py tiny-exaone
"""

import json
import sys
from pathlib import Path

import torch
from exaone import Exaone  # the file beside this one
from safetensors.torch import save_file

from quintet.data.tokenizer import build_char_tokenizer

SIZES = {
    "architectures": ["ExaoneForCausalLM"],
    "model_type": "exaone",
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "activation_function": "silu",
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def make_checkpoint(path: Path) -> None:
    """config.json, model.safetensors and a tokenizer of the characters that additions have."""
    tokenizer = build_char_tokenizer("0123456789+=>", path)
    config = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    family, generator = Exaone(), torch.Generator().manual_seed(0)
    tensors = {}
    for weight in family.weights(family.shape_of(config)):
        for name, shape in zip(weight.hf, weight.shapes, strict=True):
            norm = len(shape) == 1
            tensors[name] = torch.ones(shape) if norm else 0.05 * torch.randn(shape, generator=generator)
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]))
