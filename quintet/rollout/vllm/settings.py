"""A recipe as arguments of vLLM's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from quintet.engine.weights.fp8 import quantized_names
from quintet.errors import UserError
from quintet.models import ModelShape, read_shape, table_of
from quintet.models.family import read_config
from quintet.plan.rollout import token_bytes
from quintet.recipe import schema
from quintet.recipe.lora import lora_shape
from quintet.recipe.rollout import placement_of
from quintet.recipe.vllm import CPU_LAYOUT, DECIDED
from quintet.rollout.draft_length import Choice, drafts_of
from quintet.rollout.external_engine import longest
from quintet.rollout.options import check_options
from quintet.rollout.vllm import compat, runners
from quintet.rollout.vllm.adapters import adapter_arguments
from quintet.rollout.vllm.extension import Extension
from quintet.rollout.vllm.sampling import mode_of

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_BLOCK = 128  # tokens: the largest block of vLLM's KV caches
_BATCHED_TOKENS = 2048  # of a step on CPU, if that is enough for the longest sequence
_GRAPHED = 512  # tokens: the largest step that vLLM captures as a CUDA graph where it is not told
_GRAPHS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"}


def engine_arguments(recipe: schema.Recipe, model_dir: Path, device: str) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs. Raises UserError for an option in rollout.vllm that vLLM does not know."""
    rollout = recipe.rollout
    layout = placement_of(recipe).layout
    if device == "cpu" and layout.ep * layout.pp > 1:
        raise UserError(f"rollout.layout.pp={layout.pp}, ep={layout.ep}: {CPU_LAYOUT}")
    shape, drafted = read_shape(model_dir), draft_length(recipe, model_dir, device).draft_tokens
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "trust_remote_code": recipe.model.trust_remote_code,
        # Prompts come as tokens. Only stop strings are looked for in text.
        "skip_tokenizer_init": not rollout.stop,
        "dtype": _DTYPES[recipe.model.dtype_on(device)],
        "seed": recipe.run.seed % 2**32,  # as numpy takes it
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "enable_expert_parallel": layout.ep > 1,
        "max_model_len": longest(recipe),
        "max_num_seqs": rollout.sequences_per_rank,
        # On CPU routes are heard at the routers, which a token found in the cache does not pass.
        "enable_prefix_caching": not (device == "cpu" and rollout.return_routes),
        "generation_config": "vllm",  # what ends a response is said with each request
        "logprobs_mode": mode_of(rollout),
        "disable_log_stats": False,  # counters of speculation
        "worker_extension_cls": f"{Extension.__module__}.{Extension.__name__}",
    }
    if layout.tp * layout.pp > 1:
        arguments["distributed_executor_backend"] = "mp"
    if device == "cpu":
        arguments |= _cpu_arguments(recipe, shape, drafted)
    else:
        arguments |= _gpu_arguments(rollout, layout.pp)
        if shape.moe and shape.moe.biases:
            # FlashInfer's kernels, which vLLM 0.20.2 may choose, leave experts' biases out.
            arguments["moe_backend"] = "triton"
    names = f"the EngineArgs of vLLM {compat.require()}"
    check_options("vllm", rollout.vllm, DECIDED, names)
    arguments |= rollout.vllm
    if placement_of(recipe).adapters_separate:
        lora = lora_shape(recipe, shape)
        assert lora is not None
        arguments |= adapter_arguments(shape, lora)
    tokens = rollout.sequences_per_rank * (1 + drafted)
    if drafted:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafted}
        if device == "cpu":
            arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], tokens)
    elif device == "cuda" and runners.takes_second() and layout.pp == 1:
        # Of drafted tokens, and where stages share the layers, vLLM tells log-probs itself.
        arguments |= {
            "worker_cls": f"{__package__}.gpu_worker.StoringWorker",
            "additional_config": {"routes": rollout.return_routes},
        }
    if device == "cuda" and tokens > _GRAPHED and not _GRAPHS & rollout.vllm.keys():
        arguments["cudagraph_capture_sizes"] = captured_sizes(tokens)
    if rollout.quantization == "fp8" or read_config(model_dir).get("quantization_config"):
        # The directory holds no such weights: the first sync brings them. None has vLLM forget what config.json says of 8 bits.
        told = fp8_config(shape) if rollout.quantization == "fp8" else None
        arguments["hf_overrides"] = dict(arguments.get("hf_overrides") or {}) | {"quantization_config": told}
        arguments["load_format"] = "dummy"
    return arguments


def draft_length(recipe: schema.Recipe, model_dir: Path, device: str) -> Choice:
    """Return how many tokens the model drafts, and why: `rollout.draft_tokens`, what was measured where it is auto. device: cpu or cuda."""
    named = compat.device_name(device) if recipe.rollout.draft_tokens == "auto" else device
    return drafts_of(recipe, read_shape(model_dir).mtp_layers, named)


def captured_sizes(tokens: int) -> list[int]:
    """Return the numbers of tokens of a step that CUDA graphs are captured for: vLLM's own, and above them up to `tokens`, each of
    the latter at most an eighth above the one before. A step is padded to the next; a larger one is launched kernel by kernel.
    The last is `tokens` itself: vLLM captures no whole step of more sequences than there can be."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _GRAPHED + 1, 16)]
    while sizes[-1] < tokens:
        sizes.append(min(sizes[-1] + sizes[-1] // 64 * 8, tokens))
    return sizes


def _gpu_arguments(rollout: schema.Rollout, stages: int) -> dict[str, Any]:
    made = {"gpu_memory_utilization": rollout.memory_fraction, "enable_sleep_mode": True}
    # With more stages than two, vLLM 0.20.2 takes wrong tokens into requests that it preempts with steps of theirs under way.
    if rollout.vllm.get("async_scheduling", stages <= 2) is False:
        return made | {"async_scheduling": False}
    return made | {"scheduler_cls": f"{__package__}.scheduler.WholeScheduler"}


def _cpu_arguments(recipe: schema.Recipe, shape: ModelShape, drafted: int) -> dict[str, Any]:
    return {
        # Compiling takes longer than it saves; vLLM's own choice of memory is a share of the machine, for every rank anew.
        "enforce_eager": True,
        "kv_cache_memory_bytes": _kv_bytes(recipe, shape, drafted),
        # A prompt is read in one step: of one cut over two, vLLM sets the seed's generator back, which none on a CPU can be.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, longest(recipe), recipe.rollout.sequences_per_rank),
    }


def _kv_bytes(recipe: schema.Recipe, shape: ModelShape, drafted: int) -> int:
    """KV cache on CPU, a rank: every slot's longest sequence, within its share of the machine's memory."""
    layout = placement_of(recipe).layout
    blocks = recipe.rollout.sequences_per_rank * -(-(longest(recipe) + drafted) // _BLOCK) + 1
    layers = -(-shape.layers // layout.pp) + (shape.mtp_layers if drafted else 0)
    width = 4 if recipe.model.dtype_on("cpu") == "fp32" else 2
    needed = blocks * _BLOCK * layers * token_bytes(shape, layout.tp, width, latent=True)
    share = recipe.rollout.memory_fraction * psutil.virtual_memory().total / (layout.tp * layout.pp)
    return min(needed, int(share))


def fp8_config(shape: ModelShape) -> dict[str, Any]:
    """Return the quantization_config with which vLLM makes FP8 layers: 8 bits and a scale for each block of 128 × 128, as `sync` sends
    them.

    Not quantised are embedding, head and routers, as in the FP8 models on the hub.
    """
    weights = table_of(shape)
    quantized = quantized_names(shape)
    others = {
        name.removesuffix(".weight")
        for weight in weights
        for name, size in zip(weight.hf, weight.shapes, strict=True)
        if len(size) == 2 and name not in quantized
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(others),
    }
