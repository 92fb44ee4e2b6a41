"""Memory of a recipe's fullest rank while it trains, by `quintet.plan.memory`, and which settings need less of it, or of a rollout's."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quintet.models import ModelShape
from quintet.plan.memory import Memory, rank_memory
from quintet.plan.rollout import rollout_bytes, without_room
from quintet.plan.setup import Place, Setup
from quintet.recipe.derived import critic_shape, layout_of, optimizer_of, optimizers, roles_of
from quintet.recipe.hub import are_shapes_alone
from quintet.recipe.lora import lora_shape
from quintet.recipe.offload import most_shares
from quintet.recipe.recompute import without_products
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules import Command, broken_rules
from quintet.recipe.rules.facts import written
from quintet.recipe.schema import Optimizer, Recipe

WORTH = 0.05
"""Of the fullest rank's memory: what a setting has to save to be named."""


def setup_of(recipe: Recipe, shape: ModelShape) -> Setup:
    """Return what the memory of the policy's ranks depends on, but for its optimizer."""
    return Setup(
        shape,
        recipe.layout,
        recipe.cluster.ranks,
        engine=recipe.engine,
        dtype=recipe.model.dtype_on(recipe.cluster.device),
        device="cpu" if recipe.cluster.device == "cpu" else "cuda",
        backend="transformer_engine" if layers_of(recipe).startswith("transformer_engine") else "portable",
        lora=lora_shape(recipe, shape),
        mtp=recipe.mtp,
    )


def layers_of(recipe: Recipe) -> str:
    """Return the back end of layers, as far as it can be told without torch. What is planned from shapes alone may run elsewhere: what
    is installed here does not count then."""
    backend, device = recipe.engine.backend, recipe.cluster.device
    if backend != "auto":
        return f"{backend} layers"
    if device == "cpu":
        return "portable layers"
    if recipe.engine.fp8 is not None:
        return "transformer_engine layers"  # the only ones that have it
    if recipe.cluster.address is None and not are_shapes_alone():
        if importlib.util.find_spec("transformer_engine") is None:
            return "portable layers (TransformerEngine is not installed here)"
        if device == "cuda":
            return "transformer_engine layers"
    return "transformer_engine layers (portable on ranks without it or without a GPU)"


def memories(recipe: Recipe, shape: ModelShape, command: Command) -> dict[str, list[Memory]]:
    """Return, by role, the memory of the first rank of each stage with each optimizer that the command starts. With LoRA the reference
    policy is the model under its adapters."""
    setup = setup_of(recipe, shape)
    sections = optimizers(recipe)
    sections.pop("critic.optimizer", None)
    started: list[Optimizer | None] = [None]
    if command in ("train", "sft"):
        started = [one for key, one in sections.items() if command == "train" or key != "optimizer"]
    roles = {"policy": (setup, started)}
    for role in roles_of(recipe) if command == "train" else ():
        own = replace(setup, layout=layout_of(recipe, role))
        if role == "critic":
            roles[role] = replace(own, shape=critic_shape(recipe, shape)), [optimizer_of(recipe, role)]
        elif recipe.lora is None:
            roles[role] = replace(own, shape=shape.without_mtp()), [None]
    return {
        role: [
            rank_memory(replace(own, optimizer=one), Place(pp=stage))
            for one in optimizers_of
            for stage in range(own.layout.pp)
        ]
        for role, (own, optimizers_of) in roles.items()
    }


def fullest_rank(recipe: Recipe, shape: ModelShape, command: Command) -> dict[str, int]:
    """Return the bytes of the fullest rank with the most demanding optimizer that the command starts, by what they are for: parameters,
    gradients, optimizer, activations, other, and each other role's that rests meanwhile; what is on auto leaves then."""
    found = memories(recipe, shape, command)
    most = max(found.pop("policy"), key=lambda one: one.peak)
    parts = {name: getattr(most, name) for name in ("parameters", "gradients", "optimizer", "activations")}
    parts["other"] = most.peak - sum(parts.values())
    shares = most_shares(recipe, command)
    for role, ranks in found.items():
        stays = max(resting(one, shares) for one in ranks)
        parts["reference policy" if role == "reference" else role] = stays
    return parts


def kinds_of(memory: Memory) -> dict[str, int]:
    """Return the bytes of each kind of training state."""
    return {"grads": memory.gradients, "optimizer": memory.optimizer, "params": memory.parameters}


def resting(memory: Memory, shares: Mapping[str, float]) -> int:
    """Return the bytes of training state that stay on a device while these shares are away."""
    return sum(int(size * (1 - shares[kind])) for kind, size in kinds_of(memory).items())


def cheaper(
    recipe: Recipe, shape: ModelShape, command: Command, asked: Recipe | None = None
) -> list[tuple[str, int]]:
    """Return settings with which the recipe is still sound and its fullest rank needs less, and the bytes of that; what costs least first.

    asked: the recipe as it was written, where something of it is decided since: rules are about that.
    """

    def needs(one: Recipe) -> int:
        return sum(fullest_rank(one, shape, command).values())

    return _cheaper(recipe, asked or recipe, shape, command, _settings(recipe, shape), needs)


def cheaper_rollout(recipe: Recipe, shape: ModelShape, device_bytes: int | None) -> list[tuple[str, int]]:
    """Return settings with which a rollout in processes of its own is still sound, holds the longest sample, and needs less, and the bytes
    of that. device_bytes: of one device, None for a CPU."""
    resolved = _with(recipe, {"rollout.layout": placement_of(recipe).layout})

    def needs(one: Recipe) -> int:
        setup = setup_of(one, shape)
        if device_bytes is not None and without_room(one, setup, device_bytes):
            return sys.maxsize
        return sum(rollout_bytes(one, setup, device_bytes))

    return _cheaper(resolved, resolved, shape, "train", _rollout_settings(resolved), needs)


def _cheaper(
    recipe: Recipe,
    asked: Recipe,
    shape: ModelShape,
    command: Command,
    settings: Iterator[dict[str, object]],
    needs: Callable[[Recipe], int],
) -> list[tuple[str, int]]:
    now, known = needs(recipe), _broken(asked, command, shape)
    found = []
    for changes in settings:
        if _broken(_with(asked, changes), command, shape) - known:
            continue
        needed = needs(_with(recipe, changes))
        if needed < (1 - WORTH) * now:
            found.append((" ".join(f"{key}={written(to)}" for key, to in changes.items()), needed))
    return found


def _with(section: Any, changes: Mapping[str, object]) -> Any:
    """A section with other values of keys, which are dotted where they are of sections in it."""
    for key, to in changes.items():
        name, _, rest = key.partition(".")
        value = _with(getattr(section, name), {rest: to}) if rest else to
        section = section.model_copy(update={name: value})
    return section


def _broken(recipe: Recipe, command: Command, shape: ModelShape) -> set[str]:
    return {one.message for one in broken_rules(recipe, command, shape)}


def _settings(recipe: Recipe, shape: ModelShape) -> Iterator[dict[str, object]]:
    """What may help: keys and their values, and what costs least first."""
    engine, layout = recipe.engine, recipe.layout
    yield {"engine.distributed_optimizer": True}
    if engine.recompute == "none":
        yield {"engine.recompute": "selective", "engine.recompute_modules": without_products(shape)}
    named: dict[str, object] = {} if engine.recompute_modules is None else {"engine.recompute_modules": None}
    if engine.recompute == "none" or (engine.recompute == "selective" and named):
        yield {"engine.recompute": "selective", **named}
    yield {"engine.tokens_per_microbatch_per_rank": engine.tokens_per_microbatch_per_rank // 2}
    if engine.recompute != "full":
        yield {"engine.recompute": "full", **named}
    yield from ({f"layout.{axis}": 2 * getattr(layout, axis)} for axis in ("ep", "tp", "pp"))
    yield {"optimizer.cpu_fraction": 1.0}


def _rollout_settings(recipe: Recipe) -> Iterator[dict[str, object]]:
    """An engine of its own fills its share of a device with KV cache, however few sequences and however small weights are: then a smaller
    share needs less, and more ranks where the weights do not fit it. A native rollout knows no share."""
    rollout, layout = recipe.rollout, placement_of(recipe).layout
    yield {"rollout.sequences_per_rank": max(1, rollout.sequences_per_rank // 2)}
    more: dict[str, object] = {"rollout.layout.tp": 2 * layout.tp}
    if layout.ep > 1:
        more["rollout.layout.ep"] = 2 * layout.ep
    for changes in ({}, more):
        yield changes
        if rollout.backend != "native":
            for part in (0.75, 0.5):
                share = math.floor(100 * part * rollout.memory_fraction) / 100
                yield {**changes, "rollout.memory_fraction": share}
