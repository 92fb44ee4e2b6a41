"""Rules of algorithms and roles: no key is set that the algorithm does not read, and every role has a layout that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quintet.errors import UserError
from quintet.models import trained_shape
from quintet.recipe.derived import data_parallel, layout_of, optimizer_of, roles_of
from quintet.recipe.problem import Problem
from quintet.recipe.rules.batches import samples_fit_a_microbatch as _FITS
from quintet.recipe.rules.engine import recompute_modules_are_there as _AGAIN
from quintet.recipe.rules.facts import RULES, Facts, rule
from quintet.recipe.rules.fp8 import eight_bits_fit_the_matrices as _DIVIDE
from quintet.recipe.schema import Critic, Reference

_LAYOUT = re.compile(r"(?<![.\w])layout\.")
_ALONE = {"sft": None, "reference": Reference(), "critic": Critic()}


@rule
def roles_are_there(facts: Facts) -> Iterator[Problem]:
    """The section of a role is given only where the algorithm has that role."""
    recipe, name = facts.recipe, facts.recipe.algorithm.name
    if name != "ppo" and recipe.critic != Critic():
        yield Problem(
            f"algorithm.name={name} has no critic: the section critic is read by ppo; remove it, or use ppo",
            "critic",
        )
    if recipe.reference.layout is not None and recipe.algorithm.kl_coef == 0:
        yield Problem(
            "reference.layout is not read while algorithm.kl_coef=0, which has no reference policy; remove it, or set "
            "algorithm.kl_coef"
        )


@rule
def roles_layouts_are_layouts(facts: Facts) -> Iterator[Problem]:
    """A role's own layout is held to every rule of layout.*, a critic's stages to those of what they train, and adapters' reference policy
    is the policy's own model."""
    recipe = facts.recipe
    for role in roles_of(recipe) if facts.command == "train" else ():
        layout, optimizer = layout_of(recipe, role), optimizer_of(recipe, role)
        key, shape = f"{role}.layout", facts.shape
        if role == "critic" and recipe.critic.path is not None:
            try:
                shape = trained_shape(recipe.critic.path)
            except UserError as error:
                yield Problem(f"critic.path: {error}")
                continue
        elif layout is recipe.layout and optimizer is recipe.optimizer:
            continue
        if role == "reference" and recipe.lora is not None:
            yield Problem(
                "reference.layout does not go with lora: the reference policy is the policy's own model without its adapters; "
                "remove reference.layout",
                "lora",
            )
        own = recipe.model_copy(update=_ALONE | {"layout": layout, "optimizer": optimizer})
        learned = shape and role == "critic" and shape.as_value_model()
        # As if it were all there is: what the rollout needs of a layout is not asked of this one.
        alone = Facts(own, "sft", learned or shape)
        for one in RULES:
            of_layout = one.__module__.rpartition(".")[2] in ("layout", "experts")
            of_model = one in (_FITS, _AGAIN, _DIVIDE)
            if not (of_layout or of_model or (learned and one.__name__ == "every_stage_trains")):
                continue
            for problem in one(alone):
                said = _LAYOUT.sub(f"{key}.", problem.message)
                if of_model and shape is not facts.shape:
                    yield Problem(f"of critic.path: {said}")
                elif any(name.startswith("layout.") for name in problem.keys):
                    yield Problem(said)
        dp = data_parallel(own)
        samples = recipe.train.prompts_per_step * recipe.rollout.samples_per_prompt
        mini = samples // recipe.train.mini_batches_per_step
        if mini < dp:
            yield Problem(
                f"a mini-batch of {mini} samples is smaller than the {dp} data-parallel ranks of {key}; raise "
                "train.prompts_per_step",
                "train.prompts_per_step",
            )


@rule
def overlong_fits(facts: Facts) -> Iterator[Problem]:
    """What is taken off long responses lies within what a response may have."""
    reward, longest = facts.recipe.reward, facts.recipe.rollout.max_response_tokens
    if reward.overlong_tokens is not None and reward.overlong_tokens > longest:
        yield Problem(
            f"reward.overlong_tokens={reward.overlong_tokens} is more than rollout.max_response_tokens={longest}; use fewer"
        )


@rule
def kl_holds_the_policy(facts: Facts) -> Iterator[Problem]:
    """The KL to the reference policy has an estimator whose gradient, where it counts, is towards the reference."""
    wanted = facts.recipe.algorithm
    if wanted.kl_coef == 0 or (wanted.kl_in == "reward") == (wanted.kl_estimator == "k1"):
        return
    if wanted.kl_in == "reward":
        yield Problem(
            f"algorithm.kl_estimator={wanted.kl_estimator} with algorithm.kl_in=reward: taken off a reward its gradient is another than the "
            "KL's, and with k3 none near the reference and away from it farther off; use k1"
        )
    else:
        yield Problem(
            "algorithm.kl_estimator=k1 with algorithm.kl_in=loss: its gradient comes to nothing in expectation; use k2 or k3, or with ppo "
            "algorithm.kl_in=reward"
        )
