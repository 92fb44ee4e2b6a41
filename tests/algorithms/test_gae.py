"""GAE against a loop over time in float64, hand-computed numbers, and its limits; whitening against the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quintet.algorithms.gae import final_rewards, gae, moments, whiten
from tests.patience import processor_s

# The loss mask of each sample; a run of zeros within is a tool's answer.
MASKS = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=6)


def flat(masks: list[list[bool]], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, mask, sample_ids; under the mask's zeros stand values that would poison anything that reads them."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([float(on) for row in masks for on in row])
    ids = torch.arange(len(masks)).repeat_interleave(torch.tensor([len(row) for row in masks]))
    rewards, values = (
        torch.where(mask > 0, torch.randn(len(mask), generator=generator), float("nan")) for _ in range(2)
    )
    return rewards, values, mask, ids


def naive(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    ids: Tensor,
    gamma: float,
    lam: float,
) -> list[float]:
    """Backwards through each sample's trained tokens."""
    tokens = list(zip(rewards.tolist(), values.tolist(), mask.tolist(), ids.tolist(), strict=True))
    out = [0.0] * len(tokens)
    for sample in sorted(set(ids.tolist())):
        after, advantage = 0.0, 0.0
        for t, (reward, value, on, owner) in reversed(list(enumerate(tokens))):
            if owner == sample and on:
                advantage = reward + gamma * after - value + gamma * lam * advantage
                after, out[t] = value, advantage
    return out


@given(MASKS, st.floats(0, 1), st.floats(0, 1), st.integers(0, 100))
def test_gae_matches_a_loop(masks, gamma, lam, seed):
    rewards, values, mask, ids = flat(masks, seed)
    advantages, returns = gae(rewards, values, mask, ids, gamma, lam)
    want = torch.tensor(naive(rewards, values, mask, ids, gamma, lam))
    torch.testing.assert_close(advantages, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask > 0, want + values, 0.0), rtol=1e-4, atol=1e-5)


def test_by_hand():
    """gamma = 1/2, lam = 1/2: δ = 1 + 2/2 - 4 = -2, 0 + 6/2 - 2 = 1, 8 - 6 = 2; A = 2, 1 + 2/4, -2 + 1.5/4."""
    rewards, values = torch.tensor([9.0, 1, 0, 8]), torch.tensor([9.0, 4, 2, 6])
    mask, ids = torch.tensor([0.0, 1, 1, 1]), torch.zeros(4, dtype=torch.int64)
    advantages, returns = gae(rewards, values, mask, ids, 0.5, 0.5)
    assert advantages.tolist() == [0.0, -1.625, 1.5, 2.0]
    assert returns.tolist() == [0.0, 2.375, 3.5, 8.0]


@given(MASKS, st.integers(0, 100))
def test_limits(masks, seed):
    """lam = 1, gamma = 1: what is still to come, less the value. Where values are perfect: nothing."""
    _, values, mask, ids = flat(masks, seed)
    scores = torch.arange(1.0, len(masks) + 1)
    rewards = final_rewards(scores, mask, ids)
    advantages, returns = gae(rewards, values, mask, ids)
    torch.testing.assert_close(returns, scores[ids] * mask, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        advantages, torch.where(mask > 0, scores[ids] - values, 0.0), rtol=1e-5, atol=1e-4
    )
    perfect, _ = gae(rewards, scores[ids], mask, ids, 1.0, 0.5)
    assert (perfect == 0).all()


def test_final_rewards():
    mask = torch.tensor([0.0, 1, 1, 0, 0, 0, 1])
    ids = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    rewards = final_rewards(torch.tensor([5, 6, 7]), mask, ids)
    assert rewards.tolist() == [0, 0, 5, 0, 0, 0, 7]  # sample 1 has nothing to be rewarded
    assert final_rewards(torch.ones(2), torch.zeros(3), torch.tensor([0, 1, 1])).tolist() == [0, 0, 0]


def test_samples_that_are_apart_are_refused():
    ones, ids = torch.ones(3), torch.tensor([1, 0, 1])
    with pytest.raises(ValueError, match="must not descend"):
        gae(ones, ones, ones, ids)
    with pytest.raises(ValueError, match="must not descend"):
        final_rewards(ones, ones, ids)


def test_no_gradient_flows_through_targets():
    rewards, values = torch.ones(3), torch.ones(3, requires_grad=True)
    assert not any(t.requires_grad for t in gae(rewards, values, torch.ones(3), torch.zeros(3).long()))


def test_long_samples_are_fast_and_exact():
    """256 samples of 4096 tokens: a quarter of the largest batch there is to be expected, in a quarter of the time."""
    samples, tokens = 256, 4096
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(samples * tokens, generator=generator) for _ in range(2))
    ids, mask = torch.arange(samples).repeat_interleave(tokens), torch.ones(samples * tokens)
    advantages, _ = gae(rewards, values, mask, ids, 1.0, 0.99)
    assert processor_s(lambda: gae(rewards, values, mask, ids, 1.0, 0.99)) < 1.5  # 0.2 s measured

    r, v = rewards.view(samples, tokens).double(), values.view(samples, tokens).double()
    want, carried = torch.empty_like(r), torch.zeros(samples).double()
    for t in reversed(range(tokens)):
        after = v[:, t + 1] if t + 1 < tokens else 0.0
        carried = r[:, t] + after - v[:, t] + 0.99 * carried
        want[:, t] = carried
    torch.testing.assert_close(advantages.view(samples, tokens).double(), want, rtol=1e-5, atol=1e-4)


@given(MASKS, st.integers(0, 100), st.data())
def test_whitening_is_the_global_batchs(masks, seed, data):
    """Split anyhow, moments add up to the whole's; mean 0 and variance 1 over the trained tokens, whatever lies elsewhere."""
    _, values, mask, _ = flat(masks, seed)
    part = torch.tensor([data.draw(st.integers(0, 2)) for _ in mask], dtype=torch.int64)
    total = sum((moments(values[part == p], mask[part == p]) for p in range(3)), torch.zeros(3).double())
    got = torch.cat([whiten(values[part == p], mask[part == p], total) for p in range(3)])
    order = torch.cat([(part == p).nonzero()[:, 0] for p in range(3)])
    on = mask[order] > 0
    assert (got[~on] == 0).all()
    x = values[order][on].double()
    if len(x) > 1:
        want = (x - x.mean()) / (x.var() + 1e-8).sqrt()
        torch.testing.assert_close(got[on].double(), want, rtol=1e-4, atol=1e-4)


def test_whitening_where_there_is_nothing_to_whiten():
    one, none = torch.tensor([3.0]), torch.zeros(0)
    assert whiten(one, torch.ones(1), moments(one, torch.ones(1))).tolist() == [0.0]
    assert whiten(one, torch.zeros(1), moments(one, torch.zeros(1))).tolist() == [0.0]
    assert whiten(none, none, moments(none, none)).shape == (0,)
    same = torch.full((1000,), 0.1)
    assert whiten(same, torch.ones(1000), moments(same, torch.ones(1000))).abs().max() < 1e-3
    large = torch.full((278,), 34889.34765625)  # of which rounding makes a variance below zero
    assert whiten(large, torch.ones(278), moments(large, torch.ones(278))).abs().max() < 1e-3
