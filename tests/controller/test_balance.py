"""The expert bias that training moves reaches the rollout."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cluster.cluster import Cluster
from quintet.controller.controller import Controller
from quintet.data.tokenizer import build_char_tokenizer
from quintet.models import trained_shape
from quintet.recipe import schema
from quintet.rewards.result import RewardResult
from quintet.rollout.base import Sampling
from quintet.train.algorithms import algorithm_of
from quintet.train.mismatch import mismatch_metrics
from quintet.train.ppo import learn
from quintet.train.steps import Step
from tests.controller.test_cells import prompt
from tests.oracle.models import save


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [schema.RolloutLayout(tp=1), None], ids=["own", "shared"])
def test_rollouts_have_the_moved_bias(ray_cluster: Cluster, tmp_path: Path, rollout) -> None:
    """A rate at which routes change with each step: rollout and trainer agree, and the weight check of the sync passes."""
    path = save("deepseek_v3", tmp_path)
    build_char_tokenizer("0123456789", path)
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=2, device="cpu"),
        model=schema.Model(path=path),
        layout=schema.Layout(pp=2),
        rollout=schema.Rollout(layout=rollout, samples_per_prompt=2),
        engine=schema.Engine(
            tokens_per_microbatch_per_rank=32, distributed_optimizer=False, expert_bias_rate=0.3
        ),
        optimizer=schema.Optimizer(lr=1e-3),
        train=schema.Train(prompts_per_step=5, steps=2, mini_batches_per_step=2),
    )
    controller = Controller(ray_cluster, recipe, path, trained_shape(path))
    with controller.workers:
        algorithm = algorithm_of(recipe, controller.roles)
        controller.start_optimizer(recipe.optimizer, 4)
        loads = []
        for number in (1, 2, 3):
            with controller.generating():
                samples = controller.generate(
                    [prompt(n, []) for n in range(5)], Sampling(max_response_tokens=6), 2, f"{number}"
                )
            samples.rewards = [RewardResult(float(n % 3), {}) for n in range(10)]
            batch = controller.scatter(samples)
            step = Step(number)
            learn(algorithm, batch, step)
            update = step.updates["policy"]
            assert mismatch_metrics(update.tally)["mismatch/logprob_gap_max"] < 1e-4
            loads.append(update.metrics["experts/load"])
            # Of both mini-batches.
            assert update.load is not None
            sent = 2 * sum(g.tokens for g in samples.generated)
            assert update.load.sent.sum(1).tolist() == [sent] * 3
            controller.policy.publish()
    assert all(1 <= load <= 4 for load in loads)
