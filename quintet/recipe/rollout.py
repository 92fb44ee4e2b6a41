"""Where a recipe's rollouts run, resolved once: in the trainer's processes or in their own, how many copies, of which size, and what
travels to them."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.recipe.schema import Layout, Recipe, RolloutLayout


@dataclass(frozen=True)
class RolloutPlacement:
    """The place where rollouts run. `copies` is meaningful once `devices_per_copy` divides the devices."""

    own_processes: bool
    """Whether they have processes of their own; otherwise the trainer's ranks generate."""
    separate: bool
    """Whether they have devices of their own; otherwise those that train change hands."""
    shares_weights: bool
    """Whether they read the engine's own parameters: their layout is the training layout."""
    layout: RolloutLayout
    """Of one copy."""
    copies: int
    devices_per_copy: int
    ranks_per_copy: int
    """Native has one a device; the others' engines make their own workers."""
    sleep_level: int
    """Of colocated ones that sleep while training: frozen weights, which do not come again, are kept. 0 where they never do."""
    adapters_separate: bool
    """Whether adapters alone travel, to a rollout that has the frozen weights already; others get them merged."""
    adapters_scaled: bool
    """Whether they travel with their scale multiplied into B: vLLM would multiply it in itself, and B could not be compared."""


def placement_of(recipe: Recipe) -> RolloutPlacement:
    """Resolve where a recipe's rollouts run."""
    rollout, training = recipe.rollout, recipe.layout
    native, separate = rollout.backend == "native", rollout.placement == "separate"
    own_processes = not native or separate or rollout.own_processes
    of_trainer = RolloutLayout(tp=training.tp, pp=training.pp)
    layout = rollout.layout or (RolloutLayout() if own_processes else of_trainer)
    plain = Layout(tp=layout.tp, pp=layout.pp, stage_layers=training.stage_layers) == training
    size = layout.tp * layout.pp
    adapters = recipe.lora is not None and (native or rollout.adapter_sync == "separate")
    return RolloutPlacement(
        own_processes=own_processes,
        separate=separate,
        shares_weights=not own_processes and (rollout.layout is None or plain),
        layout=layout,
        copies=((rollout.ranks if separate else recipe.cluster.ranks) or 0) // size,
        devices_per_copy=size,
        ranks_per_copy=size if native else 1,
        sleep_level=_sleep_level(rollout.sleep_level, kept=adapters),
        adapters_separate=adapters,
        adapters_scaled=adapters and rollout.backend == "vllm",
    )


def _sleep_level(asked: int | str, *, kept: bool) -> int:
    """The level where the recipe asks for this one: auto is without the size of the device. kept: whether the weights do not come again."""
    if asked == 0:
        return 0
    return 1 if kept or asked == 1 else 2
