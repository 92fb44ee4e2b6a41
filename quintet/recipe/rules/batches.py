"""Rules of tokens, batches and schedules."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.capacity import overflow
from quintet.recipe.derived import optimizers, roles_of
from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, multiples, rule


@rule
def samples_fit_a_microbatch(facts: Facts) -> Iterator[Problem]:
    """The longest sample fits in one micro-batch and in the model's positions: samples are never cut."""
    recipe = facts.recipe
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    text = (
        f"data.max_prompt_tokens + rollout.max_response_tokens = {recipe.data.max_prompt_tokens} + "
        f"{recipe.rollout.max_response_tokens} = {longest}"
    )
    if (over := overflow(recipe, longest, roles_of(recipe) if facts.command == "train" else ())) is not None:
        why, fits = over
        yield Problem(
            f"{text} is {why}: a whole sample must fit; set {fits}, or lower the lengths",
            "engine.tokens_per_microbatch_per_rank",
            "layout.cp",
        )
    if facts.shape is not None and longest > facts.shape.max_positions:
        yield Problem(
            f"{text} is more than the {facts.shape.max_positions} positions the model was made for; lower the lengths",
            "model.build.max_position_embeddings",
        )


@rule
def groups_have_a_contrast(facts: Facts) -> Iterator[Problem]:
    """GRPO and DAPO compare the samples of one prompt, so there are at least two and they differ; PPO's are not greedy."""
    rollout, name = facts.recipe.rollout, facts.recipe.algorithm.name
    if facts.command != "train":
        return
    if name == "ppo":
        if rollout.temperature == 0:
            yield Problem(
                "rollout.temperature=0: greedy samples are not drawn from the policy that ppo trains; use 1.0"
            )
        return
    if rollout.samples_per_prompt < 2:
        yield Problem(
            f"rollout.samples_per_prompt=1: {name} compares the samples of one prompt and needs at least 2"
        )
    if rollout.temperature == 0:
        yield Problem(
            f"rollout.temperature=0: greedy samples of one prompt are all the same, so {name} learns nothing; use 1.0"
        )
    for key, leaves_one in {"top_k": rollout.top_k == 1, "min_p": rollout.min_p == 1}.items():
        if leaves_one:
            yield Problem(
                f"rollout.{key}=1 leaves the likeliest token alone, so samples of one prompt are all the same, and {name} learns "
                f"nothing; use {'more' if key == 'top_k' else 'less'}, or remove it"
            )


@rule
def batches_divide(facts: Facts) -> Iterator[Problem]:
    """Mini-batches hold equally many prompts, and each has a sample for every data-parallel rank."""
    recipe, dp = facts.recipe, facts.dp
    if facts.command == "train":
        prompts = recipe.train.prompts_per_step
        samples = prompts * recipe.rollout.samples_per_prompt
        count = recipe.train.mini_batches_per_step
        if prompts % count:
            yield Problem(
                f"train.prompts_per_step={prompts} is not divisible by train.mini_batches_per_step={count}: a "
                f"mini-batch takes whole prompts; use {multiples(prompts, count)} prompts, or other mini-batches"
            )
        elif samples // count < dp:
            yield Problem(
                f"a mini-batch of {samples // count} samples is smaller than the {dp} data-parallel ranks; "
                "raise train.prompts_per_step or use fewer ranks",
                "train.prompts_per_step",
                "rollout.samples_per_prompt",
                "train.mini_batches_per_step",
            )
    sft = recipe.sft
    if facts.command in ("train", "sft") and sft is not None and sft.samples_per_step < dp:
        yield Problem(
            f"sft.samples_per_step={sft.samples_per_step} is smaller than the {dp} data-parallel ranks"
        )


@rule
def schedules_are_whole(facts: Facts) -> Iterator[Problem]:
    """A schedule has what it needs; what is longer than the run is shortened: see `quintet.recipe.length`."""
    for section, optimizer in optimizers(facts.recipe).items():
        if optimizer.schedule == "wsd" and optimizer.decay_steps is None:
            yield Problem(
                f"{section}.schedule=wsd needs {section}.decay_steps, the length of its final decay in steps"
            )
