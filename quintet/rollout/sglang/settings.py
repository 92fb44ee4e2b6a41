"""A recipe as arguments of SGLang's engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.recipe.sglang import DECIDED, deterministic
from quintet.rollout.external_engine import longest
from quintet.rollout.options import check_options
from quintet.rollout.sglang import compat

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_MOST_OF_FREE = 0.95
"""What is besides weights and cache, graphs and the memory of kernels, has the rest."""
_KEPT_BACK = 8
"""Tokens of the context that SGLang gives to no request (srt/managers/tp_worker.py: max_req_len, max_req_input_len)."""


def engine_arguments(recipe: schema.Recipe, model_dir: Path, free: float) -> dict[str, Any]:
    """Return the arguments of SGLang's ServerArgs. free: which share of its fullest device's memory nobody has. Raises UserError for a
    share that is not free, and for an option in rollout.sglang that SGLang does not know."""
    rollout = recipe.rollout
    layout = placement_of(recipe).layout
    if rollout.memory_fraction > _MOST_OF_FREE * free:
        raise UserError(
            f"rollout.memory_fraction={rollout.memory_fraction:g}: {free:.2f} of its fullest device's memory are free, and SGLang takes at most "
            f"{_MOST_OF_FREE:g} of that; use {math.floor(100 * _MOST_OF_FREE * free) / 100:g} or less, or free memory"
        )
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "trust_remote_code": recipe.model.trust_remote_code,
        # Prompts come as tokens. Only stop strings are looked for in text.
        "skip_tokenizer_init": not rollout.stop,
        "dtype": _DTYPES[recipe.model.dtype_on("cuda")],
        "random_seed": recipe.run.seed % 2**32,  # as numpy takes it
        "tp_size": layout.tp,
        "ep_size": layout.ep,
        "context_length": longest(recipe) + _KEPT_BACK,
        "max_running_requests": rollout.sequences_per_rank,
        # Of what is free before it starts; rollout.memory_fraction is of the whole.
        "mem_fraction_static": rollout.memory_fraction / free,
        "enable_memory_saver": True,
        # What becomes of weights that are given up is fixed when they are loaded first.
        "enable_weights_cpu_backup": rollout.sleep_level == 1,
        "enable_return_routed_experts": rollout.return_routes,
        "enable_deterministic_inference": deterministic(rollout),
        # Others, which SGLang takes by itself on Blackwell or for gpt-oss, tell no routes, or pack experts as no sync can load them.
        "moe_runner_backend": "triton",
        "sampling_defaults": "openai",  # and not the model's generation_config.json
        "log_level": "warning",
    }
    names = f"the ServerArgs of sglang {', '.join(compat.SUPPORTED)}"
    check_options("sglang", rollout.sglang, DECIDED, names)
    return arguments | rollout.sglang
