"""What of a recipe follows its length: warm-ups and decays that are longer than the run they are in are shortened, and that is told."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.derived import optimizers
from quintet.recipe.schema import Optimizer, Recipe


def fitted(optimizer: Optimizer, steps: int) -> Optimizer:
    """Return the optimizer with a schedule that ends within `steps` optimizer steps: warm-up and final decay keep their proportion."""
    warmup, tail = optimizer.warmup_steps, _tail(optimizer)
    if warmup + tail <= steps:
        return optimizer
    if tail == 0:
        return optimizer.model_copy(update={"warmup_steps": steps})
    rising = steps * warmup // (warmup + tail)
    return optimizer.model_copy(update={"warmup_steps": rising, "decay_steps": max(steps - rising, 1)})


def critic_warmup(recipe: Recipe) -> int:
    """Return the steps in which the critic learns alone: the policy has the last step at least."""
    return min(recipe.critic.warmup_steps, recipe.train.steps - 1)


def optimizer_steps(recipe: Recipe) -> dict[str, int]:
    """Return how many steps each optimizer of a recipe takes, by section."""
    minis = recipe.train.mini_batches_per_step
    alone = critic_warmup(recipe) if recipe.algorithm.name == "ppo" else 0
    found = {
        "optimizer": (recipe.train.steps - alone) * minis,
        "critic.optimizer": recipe.train.steps * minis,
    }
    return found | ({"sft.optimizer": recipe.sft.steps} if recipe.sft is not None else {})


def shortened(recipe: Recipe, command: str) -> Iterator[str]:
    """Yield a sentence for everything that is shortened to fit the run."""
    taken = optimizer_steps(recipe)
    for section, optimizer in optimizers(recipe).items() if command in ("train", "sft") else ():
        steps, warmup, tail = taken[section], optimizer.warmup_steps, _tail(optimizer)
        made = fitted(optimizer, steps)
        if made is optimizer or (command == "sft" and section != "sft.optimizer"):
            continue
        if tail:
            yield (
                f"{section}.warmup_steps={warmup} and decay_steps={tail} are more than the {steps} optimizer steps there are; "
                f"shortened to {made.warmup_steps} and {made.decay_steps}."
            )
        else:
            yield f"{section}.warmup_steps={warmup} is more than the {steps} optimizer steps there are; shortened to {steps}."
    if (
        command == "train"
        and recipe.algorithm.name == "ppo"
        and recipe.critic.warmup_steps >= recipe.train.steps
    ):
        yield (
            f"critic.warmup_steps={recipe.critic.warmup_steps} would leave the policy no step of train.steps={recipe.train.steps}; "
            f"shortened to {critic_warmup(recipe)}."
        )


def _tail(optimizer: Optimizer) -> int:
    return 0 if optimizer.schedule == "constant" else optimizer.decay_steps or 0
