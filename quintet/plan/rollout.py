"""Memory of a rollout on one rank: its weights, its KV cache, and the buckets in which new weights come."""

from __future__ import annotations

from dataclasses import replace

from quintet.models import ModelShape
from quintet.plan.memory import rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from quintet.recipe.fp8 import matrices
from quintet.recipe.rollout import placement_of

GIB = 1 << 30

PREFILL_TOKENS = 16384
"""Most prompt tokens in one prefill row of a native rollout."""


def rollout_bytes(recipe: schema.Recipe, setup: Setup, device_bytes: int | None) -> tuple[int, int]:
    """Return the bytes of a rollout's weights and of its KV cache on one rank, the fullest of its stages."""
    placement, rollout, shape = placement_of(recipe), recipe.rollout, setup.shape
    layout, vllm = placement.layout, rollout.backend != "native"
    # An engine of its own spreads experts as it does the rest, or whole over the same ranks: as many weights either way.
    ranks = schema.Layout(tp=layout.tp, pp=layout.pp)
    own = replace(setup, layout=ranks, ranks=layout.tp * layout.pp, optimizer=None)
    weights = (
        0
        if placement.shares_weights
        else max(rank_memory(own, Place(pp=s)).parameters for s in range(layout.pp))
    )
    if rollout.quantization is not None:
        in_8_bits = sum(one.numel * one.copies * one.layers for one in matrices(shape, ranks)) // layout.pp
        weights -= in_8_bits * (setup.width - 1)
    if vllm and device_bytes is not None:
        return weights, max(int(rollout.memory_fraction * device_bytes) - weights, 0)
    longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    slots = rollout.sequences_per_rank
    per_stage = -(-shape.layers // layout.pp)
    return weights, slots * longest * per_stage * token_bytes(shape, layout.tp, setup.width, latent=vllm)


def bytes_under_way(recipe: schema.Recipe, setup: Setup) -> int:
    """Return the bytes of two buckets, which is how new weights travel: one fills while the other is sent."""
    return 2 * min(recipe.rollout.bucket_mib << 20, setup.shape.parameter_count * setup.width)


def without_room(recipe: schema.Recipe, setup: Setup, device_bytes: int) -> str | None:
    """Return why a rollout with an engine of its own has no room for the longest sample beside its weights; None where it has."""
    rollout = recipe.rollout
    if rollout.backend == "native":
        return None
    weights, cache = rollout_bytes(recipe, setup, None)
    sample = cache // rollout.sequences_per_rank
    share = int(rollout.memory_fraction * device_bytes)
    if weights + sample <= share:
        return None
    larger = " or rollout.memory_fraction" * (weights + sample < device_bytes)
    return (
        f"weights of {weights / GIB:.1f} GiB and {sample / GIB:.1f} of cache for the longest sample are more than "
        f"rollout.memory_fraction={rollout.memory_fraction:g} of a device, {share / GIB:.1f}; take a larger rollout.layout.tp{larger}"
    )


def token_bytes(shape: ModelShape, tp: int, width: int, *, latent: bool) -> int:
    """Return the bytes that one token takes of the KV cache in one layer on one rank. latent: whether latent attention keeps latents,
    the same on every rank, as engines of their own do; the native rollout keeps keys and values."""
    if shape.mla is not None and latent:
        return (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * width
    return 2 * max(1, shape.kv_heads // tp) * shape.head_dim * width
