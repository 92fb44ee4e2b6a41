"""Rules of the optimizers: every key given is read by the optimizer it is given to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from quintet.errors import UserError
from quintet.models import ModelShape, Weight, table_of
from quintet.models.lora import adapter_weights
from quintet.recipe.derived import critic_shape, optimizer_of, optimizers
from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.schema import Optimizer
from quintet.recipe.weight_patterns import check_frozen, check_lr_multipliers, is_frozen


@rule
def patterns_match(facts: Facts) -> Iterator[Problem]:
    """Each pattern of optimizer.frozen and lr_multipliers decides on some weight, and on whole parameters."""
    recipe = facts.recipe
    sections = {name: one for name, one in optimizers(recipe).items() if one.lr_multipliers or one.frozen}
    if facts.shape is None:
        return
    sections.pop("critic.optimizer", None)
    yield from _unmatched(facts, facts.shape, sections)
    if facts.command == "train" and recipe.algorithm.name == "ppo":
        of_critic, shape = optimizer_of(recipe, "critic"), None
        with suppress(UserError):  # another rule tells of a directory that cannot be read
            shape = critic_shape(recipe, facts.shape)
        if (of_critic.lr_multipliers or of_critic.frozen) and shape is not None:
            whose = (
                "" if recipe.critic.optimizer else " (null takes those of optimizer; give the critic its own)"
            )
            for one in _unmatched(facts, shape, {"critic.optimizer": of_critic}):
                yield Problem(one.message + whose)


def _unmatched(facts: Facts, shape: ModelShape, sections: dict[str, Optimizer]) -> Iterator[Problem]:
    if not sections:
        return
    tensors: defaultdict[str, list[str]] = defaultdict(list)
    weights: Sequence[Weight] = table_of(shape)
    if facts.recipe.lora is not None:
        if facts.lora is None:
            return
        weights = list(adapter_weights(weights, facts.lora))
    for weight in weights:
        if _trains(facts, weight):  # the experts of a layer are one tensor, of which each rank holds a part
            tensors[_EXPERT.sub(".experts.", weight.name)] += weight.hf
    for section, optimizer in sections.items():
        try:
            if facts.recipe.lora is None:  # refused otherwise
                check_frozen(tensors.values(), optimizer.frozen, section)
            left = [names for names in tensors.values() if not is_frozen(names[0], optimizer.frozen)]
            check_lr_multipliers(left, optimizer.lr_multipliers, section)
        except UserError as error:
            yield Problem(str(error))


def _trains(facts: Facts, weight: Weight) -> bool:
    """Whether a weight is trained where no pattern names it: of layers for multi-token prediction with mtp.train alone."""
    mtp = facts.recipe.mtp
    return weight.trained and (not weight.name.startswith("mtp.") or (mtp is not None and mtp.train))


@rule
def every_stage_trains(facts: Facts) -> Iterator[Problem]:
    """Each pipeline stage of the policy, or of the role looked at alone, holds a weight that optimizer.frozen leaves to be trained."""
    shape, layout = facts.shape, facts.recipe.layout
    if shape is None or layout.pp == 1 or not layout.holds(shape.layers) or facts.recipe.lora is not None:
        return
    stages = range(layout.pp)
    stage_of = {layer: at for at in stages for chunk in layout.layers_of(shape.layers, at) for layer in chunk}
    for section, optimizer in optimizers(facts.recipe).items():
        if not optimizer.frozen or optimizer is facts.recipe.critic.optimizer:
            continue
        training: set[int] = set()
        for weight in table_of(shape):
            if not _trains(facts, weight) or is_frozen(weight.hf[0], optimizer.frozen):
                continue
            if layer := _LAYER.match(weight.name):
                training.add(stage_of[int(layer[1])])
            else:
                embedding = weight.name.startswith("embedding.")
                training |= {0} if embedding else {layout.pp - 1}
                twice = embedding and (shape.tied_embeddings or shape.mtp_layers)
                training |= {layout.pp - 1} if twice else set()
        idle = sorted({*stages} - training)
        if training and idle:
            yield Problem(
                f"{section}.frozen leaves pipeline stage {idle[0]} (of 0 to {layout.pp - 1}) no weight to be trained; freeze fewer, "
                f"or use fewer stages than layout.pp={layout.pp}",
                "layout.pp",
            )


@rule
def warm_up_freezes_the_same(facts: Facts) -> Iterator[Problem]:
    """SFT before RL has gradients of the same weights: their buffers are made once."""
    recipe = facts.recipe
    if facts.command == "train" and recipe.sft and recipe.sft.optimizer.frozen != recipe.optimizer.frozen:
        yield Problem(
            f"sft.optimizer.frozen=[{', '.join(recipe.sft.optimizer.frozen)}] with optimizer.frozen="
            f"[{', '.join(recipe.optimizer.frozen)}]: a run makes gradient buffers once; give both the same, or run quintet sft by itself"
        )


@rule
def tied_copies_are_updated_alike(facts: Facts) -> Iterator[Problem]:
    """Tied embeddings, and the one that layers for multi-token prediction read, lie on the first and on the last pipeline stage: both
    copies are updated in one place's arithmetic."""
    shape, pp = facts.shape, facts.recipe.layout.pp
    if shape is None or not (shape.tied_embeddings or shape.mtp_layers) or pp == 1:
        return
    why = "ties its embeddings" if shape.tied_embeddings else "has layers for multi-token prediction (mtp)"
    for section, optimizer in optimizers(facts.recipe).items():
        if 0 < optimizer.cpu_fraction < 1:
            yield Problem(
                f"{section}.cpu_fraction={optimizer.cpu_fraction:g} with layout.pp={pp}: the model {why}: its embedding is on "
                "two stages, one copy may be updated on the CPU and the other on a GPU, and rounding would part them; use 0 or 1, or layout.pp=1"
            )


_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
