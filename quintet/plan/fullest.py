"""Memory of a recipe's fullest rank while it trains, by `quintet.plan.memory`, and which settings need less of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from quintet.models import ModelShape
from quintet.plan.memory import rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe.derived import optimizers
from quintet.recipe.lora import lora_shape
from quintet.recipe.roles import layout_of, optimizer_of, roles_of
from quintet.recipe.rules import Command, broken_rules
from quintet.recipe.schema import Recipe

WORTH = 0.05
"""Of the fullest rank's memory: what a setting has to save to be named."""


def setup_of(recipe: Recipe, shape: ModelShape) -> Setup:
    """Return what the memory of the policy's ranks depends on, but for its optimizer."""
    on_cpu = recipe.cluster.device == "cpu"
    return Setup(
        shape,
        recipe.layout,
        recipe.cluster.ranks,
        engine=recipe.engine,
        dtype=recipe.model.dtype or ("fp32" if on_cpu else "bf16"),
        device="cpu" if on_cpu else "cuda",
        backend="transformer_engine" if layers_of(recipe).startswith("transformer_engine") else "portable",
        lora=lora_shape(recipe, shape),
        mtp=recipe.mtp,
    )


def layers_of(recipe: Recipe) -> str:
    """Return the back end of layers, as far as it can be told without torch."""
    backend, device = recipe.engine.backend, recipe.cluster.device
    if backend != "auto":
        return f"{backend} layers"
    if device == "cpu":
        return "portable layers"
    if recipe.cluster.address is None:
        if importlib.util.find_spec("transformer_engine") is None:
            return "portable layers (TransformerEngine is not installed here)"
        if device == "cuda":
            return "transformer_engine layers"
    return "transformer_engine layers (portable on ranks without it or without a GPU)"


def fullest_rank(recipe: Recipe, shape: ModelShape, command: Command) -> dict[str, int]:
    """Return the bytes of the fullest rank with the most demanding optimizer that the command starts, by what they are for: parameters,
    gradients, optimizer, activations, other, and each other role's that rests meanwhile."""
    setup = setup_of(recipe, shape)
    sections = optimizers(recipe)
    sections.pop("critic.optimizer", None)
    asked = [one for section, one in sections.items() if command == "train" or section != "optimizer"]
    most = max(
        (
            rank_memory(replace(setup, optimizer=one), Place(pp=stage))
            for one in asked
            for stage in range(recipe.layout.pp)
        ),
        key=lambda found: found.peak,
    )
    parts = {name: getattr(most, name) for name in ("parameters", "gradients", "optimizer", "activations")}
    parts["other"] = most.peak - sum(parts.values())
    return parts | (_beside(setup, recipe) if command == "train" else {})


def _beside(setup: Setup, recipe: Recipe) -> dict[str, int]:
    """What other roles keep on the fullest rank while the policy trains. With LoRA the reference policy is the model under its
    adapters; a critic's trunk is taken to be as large as the policy's."""
    engine, found = recipe.engine, {}
    for role in roles_of(recipe):
        if role == "reference" and recipe.lora is not None:
            continue
        own = replace(setup, shape=setup.shape.without_mtp(), layout=layout_of(recipe, role), optimizer=None)
        if role == "critic":
            own = replace(own, shape=setup.shape.as_value_model(), optimizer=optimizer_of(recipe, role))
        resting = []
        for stage in range(own.layout.pp):
            one = rank_memory(own, Place(pp=stage))
            kept = one.parameters * (1 - engine.offload_params) + one.gradients * (1 - engine.offload_grads)
            resting.append(int(kept + one.optimizer * (1 - engine.offload_optimizer)))
        found["reference policy" if role == "reference" else role] = max(resting)
    return found


def cheaper(recipe: Recipe, shape: ModelShape, command: Command) -> list[tuple[str, int]]:
    """Return settings with which the recipe is still sound and its fullest rank needs less, and the bytes of that, least first."""
    now, known = sum(fullest_rank(recipe, shape, command).values()), broken_rules(recipe, command)
    found = []
    for key, value in _settings(recipe):
        section, name = key.split(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        other = recipe.model_copy(update={section: part})
        if any(one not in known for one in broken_rules(other, command)):
            continue
        needs = sum(fullest_rank(other, shape, command).values())
        if needs < (1 - WORTH) * now:
            found.append((f"{key}={value}", needs))
    return sorted(found, key=lambda one: one[1])


def _settings(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """What may help, by key."""
    engine, layout = recipe.engine, recipe.layout
    yield "engine.tokens_per_microbatch_per_rank", engine.tokens_per_microbatch_per_rank // 2
    yield from (("engine.recompute", how) for how in ("selective", "full") if engine.recompute != how)
    yield "engine.distributed_optimizer", True
    yield "optimizer.cpu_fraction", 1.0
    yield from ((f"layout.{axis}", 2 * getattr(layout, axis)) for axis in ("tp", "pp", "ep"))
