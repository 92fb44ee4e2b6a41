"""Where a recipe's rollouts run: in the trainer's processes or in their own, how many copies, of which size."""

from __future__ import annotations

from quintet.recipe.schema import Recipe, RolloutLayout


def own_processes(recipe: Recipe) -> bool:
    """Whether rollouts have processes of their own; otherwise the trainer's ranks generate."""
    rollout = recipe.rollout
    return rollout.backend != "native" or rollout.placement == "separate" or rollout.own_processes


def shares_weights(recipe: Recipe) -> bool:
    """Whether the rollout reads the engine's own parameters: its layout is the training layout."""
    layout, rollout = recipe.layout, recipe.rollout.layout
    if own_processes(recipe):
        return False
    return rollout is None or type(layout)(tp=rollout.tp, pp=rollout.pp).model_dump() == layout.model_dump()


def layout_of_copy(recipe: Recipe) -> RolloutLayout:
    """The layout of one copy in processes of its own: rollout.layout, or one device."""
    return recipe.rollout.layout or RolloutLayout()


def devices_of_copy(recipe: Recipe) -> int:
    """Devices of one copy in processes of its own."""
    layout = layout_of_copy(recipe)
    return layout.tp * layout.pp


def processes_of_copy(recipe: Recipe) -> int:
    """Ranks of one copy: native has one a device, the others' engines make their own workers."""
    return devices_of_copy(recipe) if recipe.rollout.backend == "native" else 1


def copies(recipe: Recipe) -> int:
    """Copies in processes of their own; meaningful once their size divides the devices."""
    rollout = recipe.rollout
    devices = rollout.ranks if rollout.placement == "separate" else recipe.cluster.ranks
    return (devices or 0) // devices_of_copy(recipe)


def adapters_separate(recipe: Recipe) -> bool:
    """Whether adapters alone travel to the rollout, which has the frozen weights already; others get them merged."""
    rollout = recipe.rollout
    return recipe.lora is not None and (rollout.backend == "native" or rollout.adapter_sync == "separate")


def adapters_scaled(recipe: Recipe) -> bool:
    """Whether adapters travel with their scale multiplied into B: to vLLM, which would multiply it in itself, so that B could not
    be compared with what was sent."""
    return adapters_separate(recipe) and recipe.rollout.backend == "vllm"


def sleep_level(recipe: Recipe) -> int:
    """What a colocated rollout does with its weights while training: frozen ones, which do not come again, are kept."""
    return 1 if adapters_separate(recipe) else recipe.rollout.sleep_level
