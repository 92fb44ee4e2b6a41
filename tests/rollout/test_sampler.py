"""The sampler draws from the distribution it reports."""

import pytest
import torch

from quintet.rollout.base import Sampling
from quintet.rollout.native.sampler import draw, keep_mask
from quintet.rollout.seeds import sample_seeds

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=2.0, top_k=5, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_match_the_reported_probabilities(sampling):
    n = 40_000
    seeds = torch.tensor(sample_seeds(0, n))
    tokens, logprobs, _, raw = draw(LOGITS.expand(n, -1), sampling, seeds, torch.full((n,), 7))
    total = 0.0
    for token in tokens.unique().tolist():
        p = logprobs[tokens == token][0].exp().item()
        total += p
        share = (tokens == token).float().mean().item()
        assert share == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5 + 1e-4)
    assert total == pytest.approx(1.0, abs=2e-2)
    torch.testing.assert_close(raw, LOGITS.log_softmax(0)[tokens])


def test_filters_keep_what_they_should():
    log_p = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert keep_mask(log_p, Sampling()) is None
    assert keep_mask(log_p, Sampling(top_k=2)).tolist() == [[True, True, False, False]]
    assert keep_mask(log_p, Sampling(top_p=0.6)).tolist() == [[True, True, False, False]]
    assert keep_mask(log_p, Sampling(top_p=0.01)).tolist() == [[True, False, False, False]]
    assert keep_mask(log_p, Sampling(min_p=0.4)).tolist() == [[True, True, False, False]]


def test_greedy_takes_the_largest():
    tokens, logprobs, _, raw = draw(
        LOGITS[None], Sampling(temperature=0), torch.tensor([1]), torch.tensor([1])
    )
    assert tokens.tolist() == [0]
    assert logprobs.tolist() == [0.0]
    assert raw[0] == pytest.approx(LOGITS.log_softmax(0)[0])


def test_policy_logprobs_keep_the_temperature_and_lose_the_cuts():
    sampling = Sampling(temperature=0.5, top_k=2)
    seeds = torch.arange(50)
    tokens, logprobs, policy, raw = draw(LOGITS.expand(50, -1), sampling, seeds, seeds)
    torch.testing.assert_close(policy, (LOGITS / 0.5).log_softmax(0)[tokens])
    torch.testing.assert_close(raw, LOGITS.log_softmax(0)[tokens])
    assert (logprobs > policy).all()
