"""What a recipe's algorithm comes to: scores, advantages and updates, and the settings that each of them takes from it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from quintet.algorithms.advantages import group_advantages, value_advantages
from quintet.algorithms.policy_loss import clipped_loss
from quintet.controller.objective import policy_objective
from quintet.engine.outputs import Outputs
from quintet.recipe import schema
from quintet.train.algorithms import Algorithm, Refill, algorithm_of, as_they_came


def of(*roles: str, temperature: float = 0.8, minis: int = 1, **sections: BaseModel) -> tuple[Algorithm, Any]:
    """The algorithm of a recipe of ten steps, and its roles by name."""
    recipe = schema.Recipe(
        rollout=schema.Rollout(temperature=temperature),
        train=schema.Train(steps=10, mini_batches_per_step=minis),
        **sections,  # type: ignore[arg-type]
    )
    made: Any = {name: object() for name in ("policy", *roles)}
    return algorithm_of(recipe, made), made


@pytest.mark.parametrize(
    ("minis", "kl", "scored"),
    [
        (1, {}, ["ref_logprobs"]),
        (2, {}, ["old_logprobs", "ref_logprobs"]),
        (1, {"name": "ppo", "kl_in": "reward"}, ["old_logprobs", "ref_logprobs", "old_values"]),
    ],
)
def test_scores_are_of_the_policy_that_sampled(minis: int, kl: dict[str, Any], scored: list[str]) -> None:
    """Old log-probs are scored where a step has several updates, or its reward reads them; else the update's own are the old ones."""
    roles = ["reference", *(["critic"] if kl else [])]
    algorithm, made = of(*roles, minis=minis, algorithm=schema.Algorithm(kl_coef=0.1, **kl))
    by_field = {one.field: one for one in algorithm.scores}
    assert list(by_field) == scored
    for field in by_field.keys() & {"old_logprobs", "ref_logprobs"}:
        assert by_field[field].temperature == 0.8
    assert by_field["ref_logprobs"].to == (made["policy"],)
    assert [one.objective.temperature for one in algorithm.trained][-1] == 0.8


def test_grpo_and_dapo_compare_groups() -> None:
    for name, normalize in (("grpo", True), ("dr_grpo", False), ("dapo", True)):
        wanted = schema.Algorithm(name=name, max_refills=5)  # type: ignore[arg-type]
        algorithm, made = of(minis=2, algorithm=wanted)
        assert algorithm.select == (Refill(5, 2) if name == "dapo" else as_they_came)
        (advantages, (trained,)) = algorithm.advantages, algorithm.trained
        make: Any = advantages.way.make
        assert (advantages.role, make.func) == (made["policy"], group_advantages)
        assert make.keywords == {"normalize_by_std": normalize}
        assert (trained.role, trained.steps, trained.first_step) == (made["policy"], 10, 1)
        assert [role for role, _ in algorithm.updates(1)] == [made["policy"]]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_loss_or_the_reward_holds_the_kl(kl_in: Any) -> None:
    wanted = schema.Algorithm(
        name="ppo", clip_low=0.1, clip_high=0.3, kl_coef=0.05, kl_in=kl_in, gamma=0.9, gae_lambda=0.8
    )
    critic = schema.Critic(warmup_steps=3, value_clip=0.7, optimizer=schema.CriticOptimizer(lr=7e-6))
    algorithm, made = of("reference", "critic", algorithm=wanted, critic=critic)
    values, policy = algorithm.trained
    loss: Any = policy.objective.loss
    in_loss = kl_in == "loss"
    assert loss.func is clipped_loss
    assert loss.keywords == {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "kl_coef": 0.05 if in_loss else 0.0,
        "kl_estimator": "k3" if in_loss else "k1",
    }
    gae = algorithm.advantages.way
    make: Any = gae.make
    assert make.func is value_advantages
    assert make.keywords == {
        "gamma": 0.9,
        "lam": 0.8,
        "kl_coef": 0.0 if in_loss else 0.05,
        "kl_estimator": "k3" if in_loss else "k1",
    }
    assert gae.reads == ("old_values", *(() if in_loss else ("old_logprobs", "ref_logprobs")))
    assert algorithm.advantages.to == {"returns": made["critic"]}
    assert algorithm.scores[-1].to == (made["policy"],)
    # The critic learns alone at first, by its own optimizer.
    assert (values.role, values.optimizer.lr, values.steps) == (made["critic"], 7e-6, 10)
    assert (policy.role, policy.steps) == (made["policy"], 7)
    assert [[role is made["policy"] for role, _ in algorithm.updates(step)] for step in (3, 4)] == [
        [False],
        [False, True],
    ]
    value_loss: Any = values.objective.loss
    assert value_loss.keywords == {"clip": 0.7}


def test_what_the_policys_objective_looks_at() -> None:
    """The first update's own log-probs are the old ones, as constants; the rollout's are compared with these."""
    wanted = schema.Algorithm(kl_coef=0.1)
    objective = pickle.loads(pickle.dumps(policy_objective(wanted, schema.Mismatch(token_threshold=0.2))))
    assert objective.reads == ("advantages", "ref_logprobs")
    assert policy_objective(schema.Algorithm(), schema.Mismatch()).reads == ("advantages",)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    fields = {
        "loss_mask": torch.ones(3),
        "advantages": torch.tensor([1.0, -1.0, 2.0]),
        "weights": torch.tensor([0.5, 0.25, 0.25]),
        "ref_logprobs": logprobs.detach(),
        "rollout_logprobs": torch.tensor([-1.0, -2.1, -2.7]),
    }
    share, told = objective(Outputs(logprobs, torch.tensor([0.1, 0.2, 0.3])), fields)
    share.backward()
    assert share.item() == pytest.approx(-0.75)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.25, -0.5])
    assert told["rollout_log_ratio"].tolist() == pytest.approx([0.0, 0.1, -0.3])
    assert told["rollout_over_threshold"].tolist() == [0, 0, 1]
    assert told["entropy"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    fields["old_logprobs"] = logprobs.detach() - 0.1
    _, told = objective(Outputs(logprobs, torch.zeros(3)), fields)
    assert told["rollout_log_ratio"].tolist() == pytest.approx([-0.1, 0.0, -0.4])
    assert told["ratio"].tolist() == pytest.approx([math.exp(0.1)] * 3)
