"""The clipped value loss against closed forms and autograd's finite differences; explained variance over any split."""

from __future__ import annotations

import pickle
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.value_loss import explained_variance, value_loss, value_loss_of_fields


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [  # clip 0.5; the gradient by the value is V - R, or 0 where the clip holds
        (1.0, 1.0, 3.0, 2.0, -2.0, False),
        (1.4, 1.0, 3.0, 1.28, -1.6, False),
        (2.0, 1.0, 3.0, 1.125, 0.0, True),  # it went towards the return, too far: as if it stood at 1.5
        (0.0, 1.0, 3.0, 4.5, -3.0, False),  # it went away from the return: it is called back in full
        (2.0, 1.0, -1.0, 4.5, 3.0, False),
        (0.0, 1.0, -1.0, 1.125, 0.0, True),
        (3.0, 1.0, 1.0, 2.0, 2.0, False),
    ],
)
def test_clip(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    out = value_loss(values, torch.tensor([old]), torch.tensor([target]), torch.ones(1), clip=0.5)
    out.per_token.sum().backward()
    assert out.per_token.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert bool(out.stats["value_clip"].item()) == clipped
    assert out.stats["value_error"].item() == pytest.approx(target - value)


def example(tokens: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """values and fields; nan under the mask's zeros."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(tokens, generator=generator) < 0.7).double()
    values, old, returns = (
        torch.where(mask > 0, torch.randn(tokens, generator=generator).double(), float("nan"))
        for _ in range(3)
    )
    return values.requires_grad_(), {"old_values": old, "returns": returns, "loss_mask": mask}


@given(st.integers(1, 12), st.integers(0, 500), st.sampled_from([None, 0.2, 1.0]))
def test_gradient_and_mask(tokens, seed, clip):
    values, fields = example(tokens, seed)
    loss = partial(value_loss_of_fields, clip=clip)
    out = loss(values, fields)
    on = fields["loss_mask"] > 0
    (gradient,) = torch.autograd.grad(out.per_token.sum(), values)
    for tensor in (out.per_token, gradient, *out.stats.values()):
        assert (tensor[~on] == 0).all()
        assert not tensor[on].isnan().any()
    if clip is None:
        torch.testing.assert_close(gradient[on], (values - fields["returns"])[on].detach())
        assert not out.stats["value_clip"].any()
    inside = {name: field[on] for name, field in fields.items()}
    point = values.detach()[on].requires_grad_()
    assert torch.autograd.gradcheck(lambda v: loss(v, inside).per_token, (point,)) if on.any() else True
    # A token is held back exactly where it gets no gradient though it is off its return.
    torch.testing.assert_close(out.stats["value_clip"].bool()[on], (gradient == 0)[on])


@given(st.integers(2, 30), st.integers(0, 500))
def test_explained_variance_over_any_split(tokens, seed):
    values, fields = example(tokens, seed)
    mask = fields["loss_mask"]
    parts = [Tally(), Tally()]
    for part, cut in zip(parts, (slice(0, tokens // 3), slice(tokens // 3, None)), strict=True):
        out = value_loss(values[cut], fields["old_values"][cut], fields["returns"][cut], mask[cut], clip=None)
        part.add(out.stats, mask[cut])
    means = Tally().merge(pickle.loads(pickle.dumps(parts))).means()
    on = mask > 0
    r, v = fields["returns"][on].tolist(), values[on].tolist()
    if len(r) > 1:
        errors = [a - b for a, b in zip(r, v, strict=True)]
        want = 1 - statistics.pvariance(errors) / statistics.pvariance(r)
        assert explained_variance(means) == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_explained_variance_of_perfect_and_of_constant_values_and_returns():
    def of(values: list[float], returns: list[float]) -> float:
        tally, mask = Tally(), torch.ones(len(values))
        tally.add(value_loss(torch.tensor(values), mask, torch.tensor(returns), mask, None).stats, mask)
        return explained_variance(tally.means())

    assert of([1.0, 2, 3], [1.0, 2, 3]) == 1
    assert of([5.0, 5, 5], [1.0, 2, 3]) == pytest.approx(0)
    assert of([3.0, 2, 1], [1.0, 2, 3]) == pytest.approx(-3)
    assert of([0.3, 0.2, 0.1], [0.1, 0.1, 0.1]) == 0
