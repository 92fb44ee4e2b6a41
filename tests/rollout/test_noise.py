"""The noise is Philox of (seed, position, token), exponential down to where rare tokens are drawn."""

import numpy as np
import pytest
import torch

from quintet.rollout import Sampling, noise
from quintet.rollout.native.sampler import draw
from quintet.rollout.noise import exponential_noise, noise_bits, philox

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel runs on GPUs")


def test_it_is_exponential_and_keyed() -> None:
    seeds, positions = torch.arange(300), torch.arange(300) % 17
    drawn = exponential_noise(seeds, positions, 2000)
    assert drawn.min() > 0
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.01)
    assert drawn.var().item() == pytest.approx(1.0, abs=0.02)
    assert (drawn[:, 0] > 1).float().mean().item() == pytest.approx(0.368, abs=0.1)
    torch.testing.assert_close(drawn[5:6], exponential_noise(seeds[5:6], positions[5:6], 2000))
    assert not torch.equal(drawn[0], exponential_noise(seeds[:1], positions[:1] + 1, 2000)[0])
    assert not torch.equal(drawn[0], exponential_noise(seeds[:1] + 1, positions[:1], 2000)[0])


def test_rare_tokens_are_drawn() -> None:
    """Of 2²⁶ numbers 16 are expected below 2⁻²², all different; and the token whose number is the smallest of all is drawn at a
    probability that 23 bits of noise never reach."""
    rows, vocab = 64, 1 << 17
    small, smallest = [], (1.0, 0, 0)
    for seed in range(8):
        drawn = exponential_noise(torch.full((rows,), seed), torch.arange(rows), vocab)
        small += drawn[drawn < 2.0**-22].tolist()
        value, at = drawn.view(-1).min(0)
        smallest = min(smallest, (value.item(), seed, at.item()))
    assert 6 <= len(small) <= 28
    assert len(set(small)) == len(small)
    value, seed, at = smallest
    assert value < 2.0**-24
    position, token = divmod(at, vocab)
    logits = torch.full((1, vocab), -100.0)
    logits[0, token - 1], logits[0, token] = 0.0, float(np.log(2.0**-24))
    tokens, logprobs, *_ = draw(logits, Sampling(), torch.tensor([seed]), torch.tensor([position]))
    assert tokens.tolist() == [token]
    assert logprobs[0].exp().item() == pytest.approx(2.0**-24, rel=1e-3)


def test_it_is_the_published_function() -> None:
    """Random123's known answers for Philox 4x64 of ten rounds: zeros, and digits of pi."""
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
        ): (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    }  # fmt: skip
    for (counter, key), answer in known.items():
        found = philox(
            tuple(np.array([x], np.uint64) for x in counter), tuple(np.array([x], np.uint64) for x in key)
        )
        assert tuple(int(x[0]) for x in found) == answer


@pytest.mark.parametrize("vocab", [1, 31, 1500])
def test_both_ways_on_a_cpu_are_one_function(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = np.array([0, 5, -(2**63), -1, 2**63 - 1]), np.array([0, 1, 7, 2**20, 3])
    found = []
    for streamed in (0, 1 << 30):
        monkeypatch.setattr(noise, "_STREAMED", streamed)
        found.append(noise_bits(seeds, positions, vocab))
    np.testing.assert_array_equal(*found)
    larger = noise_bits(seeds, positions, vocab + 9)
    np.testing.assert_array_equal(found[0], larger[:, :vocab], "a padded vocabulary has other noise")


def test_it_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(noise, "noise_bits", lambda *_, bits=bits: np.full((1, 6), bits, np.uint64))
        drawn = exponential_noise(torch.tensor([0]), torch.tensor([0]), 6)
        assert torch.isfinite(drawn).all()
        assert (drawn > 0).all()
        logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
        tokens, logprobs, *_ = draw(logits, Sampling(top_k=1), torch.tensor([0]), torch.tensor([0]))
        assert tokens.tolist() == [0]
        assert logprobs.tolist() == [0.0]


@NEEDS_GPU
@pytest.mark.parametrize("vocab", [1, 31, 1023, 152_064])
def test_the_kernel_is_the_same_function(vocab: int) -> None:
    seeds, positions = torch.tensor([0, 5, -(2**63), -1, 2**63 - 1]), torch.tensor([0, 1, 7, 2**20, 3])
    fused = exponential_noise(seeds.cuda(), positions.cuda(), vocab).cpu()
    torch.testing.assert_close(fused, exponential_noise(seeds, positions, vocab), rtol=1e-6, atol=0)
