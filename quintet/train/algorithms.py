"""The algorithms of reinforcement learning, as data: what tells GRPO, DAPO and PPO apart, and nothing of the loop they share.

GRPO: Shao et al. 2024, https://arxiv.org/abs/2402.03300. DAPO: Yu et al. 2025, https://arxiv.org/abs/2503.14476. PPO: Schulman et al.
2017, https://arxiv.org/abs/1707.06347, with generalized advantage estimation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from quintet.algorithms.advantages import Advantages, group_advantages, value_advantages
from quintet.controller.batch_ref import BatchRef, Fields
from quintet.controller.messages import RouteUse
from quintet.controller.objective import Objective, ValueObjective, policy_objective, value_objective
from quintet.controller.roles import Role
from quintet.controller.samples import Samples
from quintet.recipe.derived import optimizer_of
from quintet.recipe.length import critic_warmup
from quintet.recipe.schema import Optimizer, Recipe
from quintet.train.source import Source

Update = tuple[Role, Objective | ValueObjective]


@dataclass(frozen=True)
class Score:
    """A field that a role makes of a batch: log-probs, or values. to: roles whose ranks need it besides. routes: what it does with
    routes."""

    field: str
    role: Role
    temperature: float = 1.0
    to: tuple[Role, ...] = ()
    routes: RouteUse | None = None

    def __call__(self, batch: BatchRef) -> Fields:
        """Score the batch."""
        return self.role.forward(batch, self.field, self.temperature, self.to, self.routes)


@dataclass(frozen=True)
class MakeAdvantages:
    """Advantages, made on a role's ranks. to: by field, a role whose ranks need it besides."""

    role: Role
    way: Advantages
    to: Mapping[str, Role] = field(default_factory=dict)

    def __call__(self, batch: BatchRef) -> Fields:
        """Make them."""
        return self.role.advantages(batch, self.way, dict(self.to))


@dataclass(frozen=True)
class TrainedRole:
    """A role that learns: its objective, its optimizer, and from which step on. steps: of the run in which it learns."""

    role: Role
    objective: Objective | ValueObjective
    optimizer: Optimizer
    steps: int
    first_step: int = 1


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of RL: how groups are selected, which scores are needed, which advantage, which updates, in this order."""

    select: Callable[[Samples, Source], Samples]
    scores: tuple[Score, ...]
    advantages: MakeAdvantages
    trained: tuple[TrainedRole, ...]

    def updates(self, step: int) -> list[Update]:
        """Return the roles that take an optimizer step on each mini-batch of this step."""
        return [(one.role, one.objective) for one in self.trained if step >= one.first_step]


def as_they_came(samples: Samples, source: Source) -> Samples:
    """Return all groups of samples, whatever they teach."""
    return samples


@dataclass(frozen=True)
class Refill:
    """Groups with a signal alone, and others generated in place of those without, so many times at most (DAPO's dynamic
    sampling). Where too few are found a step is filled up with groups without signal: its size is the same every time, and its mini-batches, which
    are consecutive groups, have as many of them."""

    most: int
    minibatches: int = 1

    def __call__(self, samples: Samples, source: Source) -> Samples:
        """Generate more until there are enough."""
        wanted, samples = len(samples.prompts), source.rewarded(samples)
        found = samples.groups_with_signal()
        for _ in range(self.most):
            if len(found) >= wanted:
                break
            samples = samples + source.rewarded(source.more(wanted - len(found)))
            found = samples.groups_with_signal()
        idle = [group for group in range(len(samples.prompts)) if group not in set(found)]
        source.tell("dapo/generated_groups", float(len(samples.prompts)))
        source.tell("dapo/groups_with_signal", float(min(len(found), wanted)))
        chosen = (found + idle)[:wanted]
        return samples.select(
            [one for first in range(self.minibatches) for one in chosen[first :: self.minibatches]]
        )


_ROUTES: dict[str | None, tuple[RouteUse | None, RouteUse | None]] = {
    None: (None, None),
    "old": ("record", "recorded"),
    "rollout": ("rollout", "rollout"),
}
"""By `engine.replay_routes` what the policy does with routes when old log-probs are computed, and in updates."""


def algorithm_of(recipe: Recipe, roles: Mapping[str, Role]) -> Algorithm:
    """Return the algorithm that a recipe asks for, with the roles that take part."""
    wanted, policy = recipe.algorithm, roles["policy"]
    temperature, steps = recipe.rollout.temperature or 1.0, recipe.train.steps
    critic = roles.get("critic")
    in_reward = wanted.kl_coef > 0 and wanted.kl_in == "reward"
    in_scoring, in_updates = _ROUTES[recipe.engine.replay_routes]
    scores = []
    if recipe.train.mini_batches_per_step > 1 or in_reward:
        scores.append(Score("old_logprobs", policy, temperature, routes=in_scoring))
    if "reference" in roles:
        scores.append(Score("ref_logprobs", roles["reference"], temperature, (policy,)))
    objective = policy_objective(wanted, recipe.mismatch, temperature, in_updates)
    if critic is None:
        compare = partial(group_advantages, normalize_by_std=wanted.normalize_by_std)
        return Algorithm(
            Refill(wanted.max_refills, recipe.train.mini_batches_per_step)
            if wanted.name == "dapo"
            else as_they_came,
            tuple(scores),
            MakeAdvantages(policy, Advantages(compare)),
            (TrainedRole(policy, objective, recipe.optimizer, steps),),
        )
    scores.append(Score("old_values", critic, to=(policy,)))
    gae = Advantages(
        partial(
            value_advantages,
            gamma=wanted.gamma,
            lam=wanted.gae_lambda,
            kl_coef=wanted.kl_coef if in_reward else 0.0,
            kl_estimator=wanted.kl_estimator,
        ),
        reads=("old_values", *(("old_logprobs", "ref_logprobs") if in_reward else ())),
        writes=("advantages", "returns"),
        per_token=("advantages", "returns"),
    )
    warmup = critic_warmup(recipe)
    values = value_objective(recipe.critic.value_clip)
    return Algorithm(
        as_they_came,
        tuple(scores),
        MakeAdvantages(policy, gae, {"returns": critic}),
        (
            TrainedRole(critic, values, optimizer_of(recipe, "critic"), steps),
            TrainedRole(policy, objective, recipe.optimizer, steps - warmup, warmup + 1),
        ),
    )
