"""Objectives as the engine calls them."""

from __future__ import annotations

import pickle

import pytest
import torch

from quintet.algorithms.aggregation import token_weights
from quintet.engine.engine import ValueOutputs
from quintet.train.objective import value_objective


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
