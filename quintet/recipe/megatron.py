"""Which fields of megatron-core's TransformerConfig `engine.megatron` may set: those that exist and are free.

Read without importing megatron-core, which would bring in torch and take seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

_MODEL = "decided by the model"
_DTYPE = "decided by model.dtype"
_DEVICE = "decided by the device"
_RANDOM = "decided by quintet, which trains without dropout so that log-probs can be computed again"
_PIPELINE = "decided by quintet: packed rows differ in length"
_WEIGHTS = "decided by quintet: weights are loaded, never drawn by megatron-core"
_FUSION = "decided by quintet: its own layers stand where this fusion would be"

SET_BY_ENGINE = {
    "num_layers": _MODEL,
    "hidden_size": _MODEL,
    "ffn_hidden_size": _MODEL,
    "num_attention_heads": _MODEL,
    "num_query_groups": _MODEL,
    "kv_channels": _MODEL,
    "layernorm_epsilon": _MODEL,
    "qk_layernorm": _MODEL,
    "add_qkv_bias": _MODEL,
    "add_bias_linear": _MODEL,
    "normalization": _MODEL,
    "gated_linear_unit": _MODEL,
    "activation_func": _MODEL,
    "hidden_dropout": _RANDOM,
    "attention_dropout": _RANDOM,
    "params_dtype": _DTYPE,
    "pipeline_dtype": _DTYPE,
    "bf16": _DTYPE,
    "tensor_model_parallel_size": "decided by layout.tp",
    "pipeline_model_parallel_size": "decided by layout.pp",
    "context_parallel_size": "decided by layout.cp",
    "sequence_parallel": "decided by layout.sp",
    "variable_seq_lengths": _PIPELINE,
    "moe_token_dispatcher_type": _PIPELINE,
    "calculate_per_token_loss": "decided by algorithm.aggregation",
    "bias_activation_fusion": _DEVICE,
    "bias_dropout_fusion": _FUSION,
    "masked_softmax_fusion": _FUSION,
    "gradient_accumulation_fusion": _FUSION,
    "use_cpu_initialization": _DEVICE,
    "perform_initialization": _WEIGHTS,
    "deallocate_pipeline_outputs": "decided by quintet, for its pipeline schedule",
}
"""Every field that `quintet.engine.model.transformer_config` sets, and what decides it."""

REFUSED = SET_BY_ENGINE | {
    "fp16": _DTYPE,
    "virtual_pipeline_model_parallel_size": "decided by layout.vpp",
    "expert_model_parallel_size": "decided by layout.ep",
    "expert_tensor_parallel_size": "decided by layout.etp",
    "batch_p2p_comm": "decided by layout.pp",
    "num_moe_experts": "models with experts cannot be trained yet",
    "multi_latent_attention": "models with latent attention cannot be trained yet",
}
"""All that `engine.megatron` may not set, and why."""


@functools.cache
def transformer_config_fields() -> frozenset[str]:
    """Names of TransformerConfig's fields, from the source of the installed megatron-core; empty if it is not found."""
    spec = importlib.util.find_spec("megatron")  # a namespace package: finding it imports nothing
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        core = Path(folder) / "core"
        files = (core / "model_parallel_config.py", core / "transformer" / "transformer_config.py")
        if all(file.is_file() for file in files):
            return frozenset(
                _fields(files[0], "ModelParallelConfig") | _fields(files[1], "TransformerConfig")
            )
    return frozenset()


def _fields(file: Path, name: str) -> set[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
    return set()
