"""Objectives as the engine calls them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.gae import final_rewards, gae
from quintet.algorithms.value_loss import value_loss
from quintet.controller.objective import value_objective
from quintet.engine.outputs import ValueOutputs
from tests.oracle.reference import LENGTHS, PROMPT, save, token_ids


def test_objective_of_a_value_model():
    """As the engine calls it: outputs of a value model, fields at its trained tokens, weights that make it a mean."""
    values, fields = torch.tensor([0.0, 1, 2], requires_grad=True), {}
    fields["loss_mask"] = torch.ones(3)
    fields["old_values"] = values.detach()
    fields["returns"] = torch.tensor([1.0, 1, 4])
    fields["weights"] = token_weights(torch.ones(3), torch.tensor([0, 0, 1]), "token_mean", 3, 2)
    objective = pickle.loads(pickle.dumps(value_objective(clip=0.2)))
    share, quantities = objective(ValueOutputs(values), fields)
    assert share.item() == pytest.approx((1 + 0 + 4) / 2 / 3)
    share.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1 / 3, 0, -2 / 3])
    assert quantities["value_error"].tolist() == [1, 0, 2]


def critic_step(path: Path) -> tuple[float, float, float]:
    """One rank: values, GAE, forward_backward. The loss, what it should be, and the loss after an optimizer step."""
    from quintet.data.batch import make_batch, sample_ids, set_tokens, tokens
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.packing.plan import plan_microbatches, rank_cells
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path).as_value_model(),
        schema.Layout(),
        engine=schema.Engine(tokens_per_microbatch_per_rank=32),
        optimizer=schema.Optimizer(lr=1e-3),
        dtype="fp32",
    )
    engine.load_hf(path)
    batch = make_batch(token_ids(), [PROMPT] * len(LENGTHS))
    plan = rank_cells(plan_microbatches(LENGTHS, dp=1, budget=32).rounds, 0)
    found = engine.forward(batch, plan)
    assert found is not None
    mask, ids = tokens(batch, "loss_mask"), sample_ids(batch)
    rewards = final_rewards(torch.arange(len(LENGTHS)) / len(LENGTHS), mask, ids)
    _, returns = gae(rewards, found.values, mask, ids, 1.0, 0.95)
    trained, old = int(mask.sum()), found.values + 0.1
    weights = token_weights(mask, ids, "token_mean", trained, len(LENGTHS))
    for name, value in {"old_values": old, "returns": returns, "weights": weights}.items():
        set_tokens(batch, name, value)
    first = engine.forward_backward(batch, plan, value_objective(clip=0.05))
    engine.optimizer_step()
    second = engine.forward_backward(batch, plan, value_objective(clip=0.05))
    assert first is not None
    assert second is not None
    expected = value_loss(found.values, old, returns, mask, 0.05).per_token.sum() / trained
    return first.loss, float(expected), second.loss


def test_a_value_model_is_trained_by_it(pool, tmp_path):
    (loss, expected, after), *_ = pool.run(critic_step, 1, save("qwen3", tmp_path / "qwen3"))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert after < loss
