"""Ranks that share a row all compute its loss: the controller hears of each sample, and counts it, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages import Advantages, Scored
from quintet.cluster.cluster import Cluster
from quintet.controller.batch_ref import BatchRef
from quintet.controller.controller import Controller
from quintet.controller.objective import Objective, policy_objective, sft_objective
from quintet.data.prompts import Prompt
from quintet.data.tokenizer import build_char_tokenizer
from quintet.engine.weights.random_model import write_fresh_model
from quintet.models import trained_shape
from quintet.recipe import schema
from quintet.rewards.result import RewardResult
from quintet.rollout.base import Sampling
from quintet.train.steps import Update


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer("0123456789", path)
    sizes = schema.BuildModel(layers=2, hidden_size=32, ffn_hidden_size=32, heads=2, kv_heads=2, head_dim=16)
    ids = {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    write_fresh_model(sizes, path, vocab_size=len(tokenizer), seed=1, **ids)
    return path


def prompt(number: int, response: list[int]) -> Prompt:
    ids = [3 + number, 4, 5]
    return Prompt(number, "", ids, "", "", "", response, "")


def the_reward_itself(
    fields: Any, sample_ids: Any, numbers: torch.Tensor, scored: Scored, total: Any
) -> dict[str, torch.Tensor]:
    return {"advantages": scored.rewards[numbers].float()}


@pytest.mark.parametrize(
    "aggregation",
    [
        pytest.param("token_mean", marks=pytest.mark.slow),
        pytest.param("sequence_mean", marks=pytest.mark.nightly),
        pytest.param("fixed_length", marks=pytest.mark.nightly),
    ],
)
def test_what_ranks_tell_adds_up_and_is_the_same_of_cells_of_one_rank(
    ray_cluster: Cluster, model_dir: Path, aggregation: str
) -> None:
    """From the same weights on the same samples, static and dynamic, every metric of a step."""
    static, dynamic = (steps(ray_cluster, model_dir, dynamic, aggregation) for dynamic in (False, True))
    for one, other in zip(static, dynamic, strict=True):
        counts = [{name: int(n) for name, (_, _, n) in step.tally._found.items()} for step in (one, other)]
        assert counts[0] == counts[1]
        assert other.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        means = one.tally.means()
        assert other.tally.means() == pytest.approx(means, rel=1e-5, abs=1e-6)


def steps(ray_cluster: Cluster, model_dir: Path, dynamic: bool, aggregation: Any) -> list[Update]:
    """A step of each kind, of which each rank's part is checked on the way."""
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=2, device="cpu"),
        model=schema.Model(path=model_dir),
        layout=schema.Layout(cp=2, dynamic_cp=dynamic),
        rollout=schema.Rollout(layout=schema.RolloutLayout(tp=1)),
        engine=schema.Engine(tokens_per_microbatch_per_rank=16),
        algorithm=schema.Algorithm(aggregation=aggregation),
        mismatch=schema.Mismatch(replay_samples_per_step=3),
    )
    controller = Controller(ray_cluster, recipe, model_dir, trained_shape(model_dir))
    with controller.workers:
        controller.start_optimizer(recipe.optimizer, 2)
        with controller.generating():
            sampling = Sampling(max_response_tokens=6)
            samples = controller.generate([prompt(n, []) for n in range(3)], sampling, 2, "seed")
        advantages = torch.arange(6) - 2.0
        samples.rewards = [RewardResult(float(one), {}) for one in advantages]
        policy = controller.policy
        batch = controller.scatter(samples)
        assert bool(batch.metrics) == dynamic
        batch = batch | policy.forward(batch, "old_logprobs")
        told = controller.replayed(batch)
        assert set(told) == {0, 1, 2}
        ids = [one.ids for one in told.values()]
        again = controller.logprobs(ids, [one.prompt_tokens for one in told.values()], 1.0)
        for one, logprobs in zip(told.values(), again, strict=True):
            torch.testing.assert_close(torch.tensor(one.old_logprobs), logprobs)
            torch.testing.assert_close(torch.tensor(one.rollout_logprobs), logprobs, rtol=1e-3, atol=1e-3)
        batch = batch | policy.advantages(batch, Advantages(the_reward_itself))
        result = trained(controller, batch, policy_objective(recipe.algorithm, recipe.mismatch))
        assert set(result.replayed) == {0, 1, 2}
        lengths = torch.tensor([one.response_tokens for one in samples.generated])
        # The first step's ratios are 1: the loss is the mean advantage.
        sums = {
            "token_mean": (advantages * lengths).sum() / lengths.sum(),
            "sequence_mean": advantages.mean(),
            "fixed_length": (advantages * lengths).sum() / (6 * recipe.rollout.max_response_tokens),
        }
        assert result.loss == pytest.approx(-float(sums[aggregation]), rel=1e-4)

        imitated = [prompt(n, [6, 7, 8, 9][: n + 1]) for n in range(4)]
        batch = controller.scatter_responses(imitated)
        texts = [one.token_ids + one.response_ids for one in imitated]
        expected = -torch.cat(controller.logprobs(texts, [3] * 4, 1.0)).mean()
        imitation = trained(controller, batch, sft_objective())
        assert imitation.loss == pytest.approx(float(expected), rel=1e-4)
        return [result, imitation]


def trained(controller: Controller, batch: BatchRef, objective: Objective) -> Update:
    result = Update()
    for mini in batch.minibatches:
        told = controller.policy.forward_backward(mini, objective)
        result.add(told, controller.policy.optimizer_step())
    return result
