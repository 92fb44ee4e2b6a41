"""Tiny models that vLLM runs: its attention on CPU has no heads of 16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.oracle.models import CONFIGS, MOE_CONFIGS, of_config

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

SIZED: dict[str, tuple[str, dict[str, Any]]] = {
    # 10 MB in fp32, of which two copies more show in a process of 1.3 GB.
    "qwen3-wide": ("qwen3", {"intermediate_size": 3072}),
    # vLLM's kernel on CPU multiplies 32 columns at a time, on two ranks, and its activation knows no other limit.
    "gpt_oss": ("gpt_oss", {"intermediate_size": 64, "swiglu_limit": 7.0}),
}
"""Models of another's kind and other sizes."""


def model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """The oracle's model of this name with wider heads, in transformers; the same weights at each call of a seed."""
    kind, sizes = SIZED.get(name, (name, {}))
    config = copy.deepcopy((CONFIGS | MOE_CONFIGS)[kind])
    for key, value in (HEADS | {"hidden_size": 128} | sizes | changes).items():
        setattr(config, key, value)
    return of_config(config, seed)


def save(name: str, path: Path, **changes: Any) -> Path:
    """Write it as a Hugging Face directory."""
    model(name, **changes).save_pretrained(path)
    return path
