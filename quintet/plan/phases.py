"""Memory of a rank in each phase of a step, from the recipe and a config.json alone.

What a rank holds of the trainer follows `quintet.plan.memory`. While it generates, the shares that engine.offload_* name are away, where
these are auto what has to leave such a device, or where its size is not known all that may; and a colocated vLLM or SGLang takes
rollout.memory_fraction of the device, or where that is not known its weights and the KV cache of rollout.sequences_per_rank of the longest
samples. Of other roles what stays on the device counts in each phase, on their fullest stage. Not counted are what a process has before any
tensor and fragmentation.

Host memory that is pinned stays: what has left the devices once, and what a save in the background has copied.
Not counted is the copy of a reference policy that is saved once, after a warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quintet.models import ModelShape
from quintet.plan.activations import kept_in_layer
from quintet.plan.fullest import memories, resting, setup_of
from quintet.plan.memory import CHUNK_LOGITS_BYTES, Memory, rank_memory
from quintet.plan.offload import leaves
from quintet.plan.rollout import bytes_under_way, rollout_bytes
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from quintet.recipe.derived import roles_of
from quintet.recipe.offload import KINDS, share_asked
from quintet.recipe.rollout import placement_of

PHASES = ("load", "generate", "logprob", "train", "sync", "save")
READ_AT_ONCE = 8 * (64 << 20)
"""As `quintet.engine.checkpoint.loader` has it: chunks of four threads, as they are read and as tensors."""
WRITTEN_AT_ONCE = 4 * (64 << 20)
"""As `quintet.engine.checkpoint.saver` has it where it waits: a piece of each of four threads."""


@dataclass(frozen=True)
class StagePlan:
    """Bytes on the fullest rank of a pipeline stage. device: by phase (PHASES). host: of all ranks of the stage that share a node, while a
    checkpoint is loaded (load; 0 where there is none), in steps, and from the first save on or, with checkpoint.async_save=false, while it is
    saved (save)."""

    stage: int
    layers: int
    parameters: int
    device: dict[str, int]
    host: dict[str, int]

    @property
    def fullest(self) -> str:
        """The phase that takes the most of the device."""
        return max(self.device, key=lambda phase: self.device[phase])


def plan_stages(recipe: schema.Recipe, shape: ModelShape, device_bytes: int | None = None) -> list[StagePlan]:
    """Return the plan of each pipeline stage of the policy. device_bytes: of one device, None where it is not known."""
    setup = replace(setup_of(recipe, shape), optimizer=recipe.optimizer)
    generating = rollout_bytes(recipe, setup, device_bytes)
    away, level = leaves(recipe, shape, device_bytes)
    held = memories(recipe, shape, "train") if roles_of(recipe) else {}
    others = [
        max(ranks, key=lambda one: one.static + one.host_optimizer)
        for role, ranks in held.items()
        if role != "policy"
    ]
    return [
        _stage(recipe, setup, stage, generating, others, away, level) for stage in range(recipe.layout.pp)
    ]


def _stage(
    recipe: schema.Recipe,
    setup: Setup,
    stage: int,
    generating: tuple[int, int],
    others: Sequence[Memory],
    shares: Mapping[str, float],
    level: int,
) -> StagePlan:
    memory = rank_memory(setup, Place(pp=stage))
    layers = [layer for chunk in recipe.layout.layers_of(setup.shape.layers, stage) for layer in chunk]
    colocated = recipe.rollout.placement == "colocated"
    weights, cache = generating if colocated else (0, 0)
    awake = 0 if level else weights + cache
    stays = resting(memory, shares)
    device = {
        "load": memory.static,
        "generate": stays + weights + cache if colocated else memory.static,
        # Without gradients no copy in 8 bits is transposed.
        "logprob": memory.static + memory.copies // 2 + _scoring(setup, stage, layers) + awake,
        "train": memory.peak + awake,
        # Parameters travel before the rest comes back, beside a rollout without its cache, if it sleeps.
        "sync": resting(memory, {**shares, "params": 0.0})
        + (weights if level else awake)
        + bytes_under_way(recipe, setup),
        "save": memory.static + awake,
    }
    stay = sum(resting(one, shares) for one in others)
    host = _on_host(recipe, [memory, *others], shares, weights if colocated and level == 1 else 0)
    return StagePlan(
        stage,
        len(layers),
        memory.parameters // setup.width,
        {phase: size + stay for phase, size in device.items()},
        {moment: size * ranks_of_node(recipe) for moment, size in host.items()},
    )


def ranks_of_node(recipe: schema.Recipe) -> int:
    """Return how many ranks share a node's memory."""
    return min(recipe.cluster.ranks_per_node or recipe.cluster.ranks, recipe.cluster.ranks)


def _on_host(
    recipe: schema.Recipe, held: Sequence[Memory], shares: Mapping[str, float], asleep: int
) -> dict[str, int]:
    """By moment, of one rank of each role. asleep: of a rollout. Gradients leave without a copy; roles are loaded one after another. Before
    that the rest has left for rollouts in processes of their own to start, or for another role; moments only of roles loaded before."""
    optimizer, loaded = sum(one.host_optimizer for one in held), max(held, key=lambda one: one.read)
    away = sum(int(one.parameters * shares["params"] + one.optimizer * shares["optimizer"]) for one in held)
    leaves_first = len(held) > 1 or placement_of(recipe).own_processes
    before = away - int((loaded.optimizer - loaded.masters) * shares["optimizer"]) if leaves_first else 0
    steps, saves = optimizer + away + asleep, recipe.checkpoint.every_steps > 0
    loads = saves or recipe.resume is not None
    written = sum(one.saved for one in held) if recipe.checkpoint.async_save else WRITTEN_AT_ONCE
    return {
        "load": loads * (optimizer + before + asleep + loaded.read + READ_AT_ONCE),
        "steps": steps,
        "save": steps + saves * written,
    }


def _scoring(setup: Setup, stage: int, layers: Sequence[int]) -> int:
    """At most, of a forward pass without gradients: what its widest layer computes or, on the last stage, two chunks of logits."""
    widest = max((kept_in_layer(setup, layer, whole=True) for layer in layers), default=0)
    logits = setup.tokens * -(-setup.shape.vocab_size // setup.layout.tp) * setup.width
    return max(widest, 2 * min(logits, CHUNK_LOGITS_BYTES[setup.device]) if stage == setup.last else 0)


def advice(recipe: schema.Recipe, shape: ModelShape, phase: str, *, rests: bool = False) -> str:
    """Return what to change where the device's memory does not suffice for a phase. rests: nor for what is there in each of the
    trainer's phases, whatever it computes."""
    engine, layout = recipe.engine, recipe.layout
    axes = ["layout.tp", "pp", *["ep"] * (shape.moe is not None)]
    ways = {
        "load": ["more ranks", f"a larger {', '.join(axes[:-1])} or {axes[-1]}"],
        "generate": _of_generate(recipe),
        "logprob": ["a smaller engine.tokens_per_microbatch_per_rank"],
        "train": ["fewer layers on that stage (layout.stage_layers)"] * (layout.pp > 1),
        "sync": ["a larger rollout.layout.tp", "a smaller rollout.bucket_mib"],
    }
    if engine.recompute != "full":
        modules = " with engine.recompute_modules=null" * (engine.recompute_modules is not None)
        ways["train"].append(f"engine.recompute=full{modules}")
    ways["train"] += ways["logprob"]
    if recipe.optimizer.cpu_fraction < 1:
        ways["load"].append("optimizer.cpu_fraction=1")
        ways["train"].append("optimizer.cpu_fraction=1")
    ways["save"] = ways["load"]
    if rests:
        ways["logprob"] = ways["train"] = ways["load"]
    if recipe.rollout.placement == "separate":  # no rollout is on the device
        ways["generate"] = ways["sync"] = ways["load"]
    chosen = ways[phase]
    if recipe.rollout.sleep_level == 0 and phase not in {"load", "generate"}:
        chosen = ["rollout.sleep_level=auto", *chosen]
    return ", or ".join([", ".join(chosen[:-1]), chosen[-1]] if chosen[1:] else chosen)


def _of_generate(recipe: schema.Recipe) -> list[str]:
    """Shares that could leave while rollouts generate, and do not; where there are none, what makes these smaller."""
    shared = placement_of(recipe).shares_weights
    asked = {kind: share_asked(recipe, kind) for kind in KINDS if kind != "params" or not shared}
    if found := [f"engine.offload_{kind}=auto" for kind, one in asked.items() if one is not None and one < 1]:
        return found
    if recipe.rollout.backend == "native":
        return ["a larger rollout.layout.tp", "fewer rollout.sequences_per_rank", "shorter responses"]
    return ["a larger rollout.layout.tp", "a smaller rollout.memory_fraction"]
