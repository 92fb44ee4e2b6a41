"""Memory of a rank in each phase of a step, from the recipe and a config.json alone.

What a rank holds of the trainer follows `quintet.plan.memory`. While it generates, the shares that engine.offload_* name are away, and a
colocated vLLM or SGLang takes rollout.memory_fraction of the device, or where that is not known its weights and the KV cache of
rollout.sequences_per_rank of the longest samples. Not counted are what a process has before any tensor and fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quintet.models import ModelShape
from quintet.plan.activations import kept_in_layer
from quintet.plan.fullest import setup_of
from quintet.plan.memory import CHUNK_LOGITS_BYTES, Memory, rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of

PHASES = ("load", "generate", "logprob", "train", "sync", "save")


@dataclass(frozen=True)
class StagePlan:
    """Bytes on the fullest rank of a pipeline stage. device: by phase (PHASES). host: of all ranks of the stage that share a node."""

    stage: int
    layers: int
    parameters: int
    device: dict[str, int]
    host: int

    @property
    def fullest(self) -> str:
        """The phase that takes the most of the device."""
        return max(self.device, key=lambda phase: self.device[phase])


def plan_stages(recipe: schema.Recipe, shape: ModelShape, device_bytes: int | None = None) -> list[StagePlan]:
    """Return the plan of each pipeline stage of the policy. device_bytes: of one device, None where it is not known."""
    setup = replace(setup_of(recipe, shape), optimizer=recipe.optimizer)
    generating = rollout_bytes(recipe, setup, device_bytes)
    return [_stage(recipe, setup, stage, generating) for stage in range(recipe.layout.pp)]


def _stage(recipe: schema.Recipe, setup: Setup, stage: int, generating: tuple[int, int]) -> StagePlan:
    engine, memory = recipe.engine, rank_memory(setup, Place(pp=stage))
    chunks = recipe.layout.layers_of(setup.shape.layers, stage)
    colocated = recipe.rollout.placement == "colocated"
    weights, cache = generating if colocated else (0, 0)
    resting = _resting(memory, engine)
    buckets = 2 * (recipe.rollout.bucket_mib << 20)
    device = {
        "load": memory.static,
        "generate": resting + weights + cache if colocated else memory.static,
        "logprob": memory.static + _scoring(setup, stage, [layer for chunk in chunks for layer in chunk]),
        "train": memory.peak,
        # Parameters travel before the rest comes back, beside a rollout without its cache.
        "sync": max(resting, memory.parameters) + weights + buckets,
        "save": memory.static,
    }
    away = memory.parameters * engine.offload_params + memory.optimizer * engine.offload_optimizer
    asleep = weights if colocated and placement_of(recipe).sleep_level == 1 else 0
    ranks = min(recipe.cluster.ranks_per_node or recipe.cluster.ranks, recipe.cluster.ranks)
    host = int(away) + memory.host_optimizer + asleep
    layers = sum(map(len, chunks))
    return StagePlan(stage, layers, memory.parameters // setup.width, device, host * ranks)


def _resting(memory: Memory, engine: schema.Engine) -> int:
    """What is left of the trainer on the device while it generates."""
    shares = (
        (memory.parameters, engine.offload_params),
        (memory.gradients, engine.offload_grads),
        (memory.optimizer, engine.offload_optimizer),
    )
    return sum(int(size * (1 - share)) for size, share in shares)


def _scoring(setup: Setup, stage: int, layers: Sequence[int]) -> int:
    """At most, of a forward pass without gradients: what its widest layer computes or, on the last stage, two chunks of logits."""
    widest = max((kept_in_layer(setup, layer, whole=True) for layer in layers), default=0)
    return max(widest, 2 * CHUNK_LOGITS_BYTES[setup.device] if stage == setup.last else 0)


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
    if vllm and device_bytes is not None:
        return weights, max(int(rollout.memory_fraction * device_bytes) - weights, 0)
    longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    slots = rollout.sequences_per_rank
    per_stage = -(-shape.layers // layout.pp)
    return weights, slots * longest * per_stage * token_bytes(shape, layout.tp, setup.width, latent=vllm)


def token_bytes(shape: ModelShape, tp: int, width: int, *, latent: bool) -> int:
    """Return the bytes that one token takes of the KV cache in one layer on one rank. latent: whether latent attention keeps latents,
    the same on every rank, as engines of their own do; the native rollout keeps keys and values."""
    if shape.mla is not None and latent:
        return (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * width
    return 2 * max(1, shape.kv_heads // tp) * shape.head_dim * width


def advice(recipe: schema.Recipe, phase: str) -> str:
    """Return what to change where the device's memory does not suffice for a phase."""
    engine = recipe.engine
    keep = [
        key
        for key in ("offload_params", "offload_grads", "offload_optimizer")
        if getattr(engine, key) < 1 and not (key == "offload_params" and placement_of(recipe).shares_weights)
    ]
    return {
        "load": "more ranks, a larger layout.tp, pp or ep, or optimizer.cpu_fraction=1",
        "generate": ", ".join(f"engine.{key}=1" for key in keep)
        or "a larger rollout.layout.tp, or a smaller rollout.memory_fraction",
        "logprob": "a smaller engine.tokens_per_microbatch_per_rank",
        "train": "fewer layers on that stage (layout.stage_layers), engine.recompute=full, a smaller "
        "engine.tokens_per_microbatch_per_rank, or optimizer.cpu_fraction=1",
        "sync": "a larger rollout.layout.tp, or a smaller rollout.bucket_mib",
        "save": "more ranks, a larger layout.tp, pp or ep, or optimizer.cpu_fraction=1",
    }[phase]
