"""Losses against naive per-sample implementations and closed forms, and independence of how a batch is split."""

from __future__ import annotations

import math
import pickle
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quintet.algorithms.advantages import grpo_advantages
from quintet.algorithms.aggregation import Tally, token_weights
from quintet.algorithms.kl import kl, mismatch
from quintet.algorithms.policy_loss import clipped_loss, policy_loss, sft_loss

AGGREGATIONS = ["token_mean", "sequence_mean"]
# (prompt tokens, response tokens) of each sample
shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=8)


def example(shape: list[tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """Flat tensors of a batch; under the mask's zeros stand values that would poison anything that reads them."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([p + r for p, r in shape])
    ids = torch.arange(len(shape)).repeat_interleave(sizes)
    mask = torch.cat([torch.tensor([0.0] * p + [1.0] * r) for p, r in shape])

    def noise(scale: float) -> Tensor:
        return torch.where(mask > 0, torch.randn(len(ids), generator=g) * scale, float("nan")).double()

    logprobs = noise(1.0) - 2
    return {
        "sample_ids": ids,
        "loss_mask": mask,
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": logprobs.detach() + noise(0.4),
        "ref_logprobs": logprobs.detach() + noise(0.4),
        "advantages": torch.where(mask > 0, torch.randn(len(shape), generator=g).double()[ids], float("nan")),
    }


def naive_loss(e: dict[str, Tensor], how: str, low: float, high: float, coef: float) -> Tensor:
    """GRPO's loss written out one sample and one token at a time."""
    per_sample = []
    for i in e["sample_ids"].unique():
        terms = []
        for t in ((e["sample_ids"] == i) & (e["loss_mask"] > 0)).nonzero().flatten():
            ratio = torch.exp(e["logprobs"][t] - e["old_logprobs"][t])
            held = ratio.item()
            a = e["advantages"][t]
            clipped = min(max(held, 1 - low), 1 + high)
            gain = ratio * a if held * float(a) <= clipped * float(a) else torch.tensor(clipped).double() * a
            d = e["ref_logprobs"][t] - e["logprobs"][t]
            terms.append(-gain + coef * (torch.exp(d) - 1 - d))
        per_sample.append(terms)
    if how == "token_mean":
        flat = [term for terms in per_sample for term in terms]
        return sum(flat, torch.tensor(0.0)) / max(len(flat), 1)
    means = [sum(terms, torch.tensor(0.0)) / len(terms) for terms in per_sample if terms]
    return sum(means, torch.tensor(0.0)) / len(per_sample)


def aggregate(per_token: Tensor, sample_ids: Tensor, mask: Tensor, how: str | int, *counts: Any) -> Tensor:
    """A part's share of the mini-batch's loss: shares sum to the whole over any split."""
    return (per_token * token_weights(mask, sample_ids, how, *counts)).sum()


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_loss_and_gradient_match_naive(how: str, shape: list[tuple[int, int]], seed: int) -> None:
    e = example(shape, seed)
    loss = partial(clipped_loss, clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3")
    per_token = loss(e["logprobs"], e).per_token
    got = aggregate(per_token, e["sample_ids"], e["loss_mask"], how, int(e["loss_mask"].sum()), len(shape))
    (got_gradient,) = torch.autograd.grad(got, e["logprobs"])
    want = naive_loss(e, how, 0.2, 0.28, 0.1)
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-5, atol=1e-6)
    assert torch.all(got_gradient[e["loss_mask"] == 0] == 0)
    if want.requires_grad:
        (want_gradient,) = torch.autograd.grad(want, e["logprobs"])
        torch.testing.assert_close(got_gradient, want_gradient.nan_to_num(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(shape=shapes, seed=st.integers(0, 1000), data=st.data())
def test_any_split_sums_to_the_whole(
    how: str, shape: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    """Whole samples over micro-batches."""
    e = example(shape, seed)
    counts = (int(e["loss_mask"].sum()), len(shape))
    values = torch.randn(len(e["sample_ids"]), generator=torch.Generator().manual_seed(seed)).double()
    whole = aggregate(values, e["sample_ids"], e["loss_mask"], how, *counts)

    part_of = torch.tensor([data.draw(st.integers(0, 3)) for _ in shape])
    total = torch.tensor(0.0)
    for part in range(4):
        here = part_of[e["sample_ids"]] == part
        local_ids = e["sample_ids"][here].unique(return_inverse=True)[1]
        total = total + aggregate(values[here], local_ids, e["loss_mask"][here], how, *counts)
    torch.testing.assert_close(total.double(), whole.double(), rtol=1e-6, atol=1e-7)


def test_a_fixed_length_weighs_every_token_alike() -> None:
    """Dr. GRPO, by its formula: the sum over a sample's tokens over one constant, then the mean over samples."""
    mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 1])
    ids, values, longest = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.arange(7.0), 16
    sums = [sum(float(v) for v, m, i in zip(values, mask, ids, strict=True) if m and i == k) for k in (0, 1)]
    expected = sum(one / longest for one in sums) / 2
    assert float(aggregate(values, ids, mask, longest, 5, 2)) == pytest.approx(expected)
    assert float(aggregate(values, ids, mask, longest, 50, 2)) == pytest.approx(
        expected
    )  # whatever was sampled


def test_weights_sum_to_one() -> None:
    mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 1])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for how in AGGREGATIONS:
        assert float(token_weights(mask, ids, how, 5, 2).sum()) == pytest.approx(1)
    assert token_weights(mask, ids, "sequence_mean", 5, 2)[1] == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match="token_mean, sequence_mean or a number"):
        token_weights(mask, ids, "mean", 5, 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [  # closed form; the gradient by log-prob is -ratio·A, or 0 where the clip holds
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.25, 1.0, -1.25, -1.25, ""),  # clip-higher leaves room above 1.2
        (1.5, 1.0, -1.28, 0.0, "clip_high"),
        (1.5, -1.0, 1.5, 1.5, ""),
        (0.5, 1.0, -0.5, -0.5, ""),
        (0.5, -1.0, 0.8, 0.0, "clip_low"),
    ],
)
def test_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: str) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    one = torch.ones(1)
    out = policy_loss(logprobs, torch.zeros(1), one * advantage, one, clip_low=0.2, clip_high=0.28)
    out.per_token.sum().backward()
    assert out.per_token.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert {name for name in ("clip_low", "clip_high") if out.stats[name].item()} == ({clipped} - {""})
    assert out.stats["ratio"].item() == pytest.approx(ratio)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_the_recipes_and_is_told_where_it_weighs_nothing(estimator: str) -> None:
    e = example([(2, 3), (1, 4)], 0)
    plain, told, weighed = (
        partial(clipped_loss, clip_low=0.2, clip_high=0.28, kl_coef=coef, kl_estimator=estimator)(
            e["logprobs"], {name: e[name] for name in e if name != "ref_logprobs" or with_reference}
        )
        for coef, with_reference in ((0.0, False), (0.0, True), (0.5, True))
    )
    on = e["loss_mask"] > 0
    expected = kl(e["logprobs"][on], e["ref_logprobs"][on], estimator)
    assert "ref_kl" not in plain.stats
    assert torch.equal(told.per_token, plain.per_token)
    for one in (told, weighed):
        torch.testing.assert_close(one.stats["ref_kl"][on], expected.detach())
    torch.testing.assert_close(weighed.per_token[on], plain.per_token[on] + 0.5 * expected)


def test_runaway_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    out = policy_loss(
        logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 0.0]), torch.ones(2), 0.2, 0.28
    )
    out.per_token.sum().backward()
    assert torch.isfinite(out.per_token).all()
    assert torch.isfinite(logprobs.grad).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32)), min_size=1, max_size=20))
def test_grpo_advantages_match_naive(samples: list[tuple[int, float]]) -> None:
    groups: dict[int, list[float]] = {}
    for g, r in samples:
        groups.setdefault(g, []).append(r)
    ids = torch.tensor([7 * g for g, _ in samples])
    rewards = torch.tensor([r for _, r in samples])
    for normalize in (True, False):
        got = grpo_advantages(rewards, ids, normalize)
        for (g, r), a in zip(samples, got.tolist(), strict=True):
            group = groups[g]
            if len(set(group)) == 1:
                assert a == 0.0
            else:
                scale = statistics.stdev(group) + 1e-6 if normalize else 1.0
                assert a == pytest.approx((r - statistics.fmean(group)) / scale, rel=1e-4, abs=1e-4)


def test_grpo_advantages_of_equal_rewards_are_exactly_zero() -> None:
    rewards = torch.tensor([0.1] * 7 + [0.3] + [1.0, 0.0])
    ids = torch.tensor([0] * 7 + [1] + [2, 2])
    assert grpo_advantages(rewards, ids)[:8].tolist() == [0.0] * 8
    assert grpo_advantages(rewards, ids)[8:].tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_kl_estimators_against_exact_kl() -> None:
    """On a known pair of distributions: k1 and k3 average to the KL; k2's gradient is the KL's gradient."""
    logits = torch.tensor([0.3, -0.2, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.tensor([0.1, 0.2, 0.5, -0.4], dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    exact = (p.exp() * (p - q)).sum()
    weights = p.exp().detach()  # the expectation over sampled tokens, without sampling
    for estimator in ("k1", "k3"):
        assert (weights * kl(p, q, estimator)).sum().item() == pytest.approx(exact.item(), rel=1e-9)
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (got,) = torch.autograd.grad((weights * kl(p, q, "k2")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(got, want)
    assert torch.all(kl(p, q, "k3") >= 0)
    assert kl(p, p, "k3").abs().max() == 0
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl(p, q, "k4")


def test_only_the_estimator_with_an_exponential_is_bounded() -> None:
    """k1 and k2 say what a token that has run away costs, and pull it back; k3's exponential stops at e^20."""
    run_away = torch.tensor([-50.0], requires_grad=True)
    reference = torch.tensor([-1.0])
    assert kl(run_away, reference, "k1").item() == -49
    assert kl(run_away, reference, "k2").item() == 49**2 / 2
    (pull,) = torch.autograd.grad(kl(run_away, reference, "k2"), run_away)
    assert pull.item() == -49
    assert kl(run_away, reference, "k3").item() < 1e9


@given(shape=shapes, seed=st.integers(0, 1000))
def test_tally_of_agreement(shape: list[tuple[int, int]], seed: int) -> None:
    e = example(shape, seed)
    mask = e["loss_mask"]
    quantities = mismatch(e["old_logprobs"], e["logprobs"], mask, 0.5)
    assert not any(value[mask == 0].any() for value in quantities.values())
    whole = Tally()
    whole.add(quantities, mask)
    half = len(mask) // 2
    parts = [Tally(), Tally()]
    for part, cut in zip(parts, (slice(0, half), slice(half, None)), strict=True):
        part.add({name: value[cut] for name, value in quantities.items()}, mask[cut])
    merged = Tally().merge(pickle.loads(pickle.dumps(parts)))
    assert merged.means() == pytest.approx(whole.means())
    assert merged.maxima() == whole.maxima()
    gap = (e["old_logprobs"] - e["logprobs"]).detach()[mask > 0].abs()
    if len(gap):
        assert whole.maxima()["rollout_logprob_gap"] == pytest.approx(float(gap.max()))
        assert whole.means()["rollout_logprob_gap"] == pytest.approx(float(gap.mean()))
        assert whole.means()["rollout_over_threshold"] == pytest.approx(float((gap > 0.5).double().mean()))
    shares = (0.01, 0.5, 0.999)
    assert merged.quantiles("rollout_log_ratio", shares) == whole.quantiles("rollout_log_ratio", shares)


def test_a_tally_is_of_trained_tokens() -> None:
    tally = Tally()
    tally.add({"x": torch.tensor([-9.0, 9.0])}, torch.zeros(2))
    assert (tally.means(), tally.maxima()) == ({"x": 0.0}, {"x": 0.0})
    tally.add({"x": torch.tensor([9.0, -2.0, -4.0])}, torch.tensor([0.0, 1, 1]))
    assert (tally.means(), tally.maxima()) == ({"x": -3.0}, {"x": -2.0})


def test_a_log_prob_that_is_no_number_counts_as_parted() -> None:
    tally, mask = Tally(), torch.tensor([0.0, 1, 1])
    quantities = mismatch(torch.tensor([0.0, math.nan, -1]), torch.tensor([9.0, -1, -1]), mask, 0.5)
    tally.add(quantities, mask)
    assert tally.means()["rollout_over_threshold"] == 0.5
    assert math.isnan(tally.means()["rollout_kl_k3"])
    assert math.isnan(tally.quantiles("rollout_log_ratio", [0.5])[0])


def test_imitation() -> None:
    e = example([(1, 2)], 0)
    assert sft_loss(e["logprobs"], e).per_token.tolist() == [0.0, *(-e["logprobs"][1:]).tolist()]
