"""The noise is Philox of (seed, position, token), exponential down to where rare tokens are drawn."""

import numpy as np
import pytest
import torch

from quintet.rollout import noise
from quintet.rollout.base import Sampling
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
    """Random123's known answers for Philox 4x32 of ten rounds: zeros, ones, and digits of pi."""
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), answer in known.items():
        found = philox(tuple(map(np.uint64, counter)), (np.uint64(key[0]), np.uint64(key[1])))
        assert tuple(map(int, found)) == answer


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """With Python's numbers, which do not overflow."""
    a, b, c, d = counter
    for n in range(10):
        first, second = (
            (k + n * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        one, other = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = other >> 32 ^ b ^ first, other % 2**32, one >> 32 ^ d ^ second, one % 2**32
    return a, b, c, d


@pytest.mark.parametrize("vocab", [1, 31, 1500, 20_000])
def test_a_position_has_a_key_and_a_token_two_words_of_it(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.20.2's second model runner computes them (vllm/v1/worker/gpu/sample/gumbel.py)."""
    seeds, positions = [0, 5, -(2**63), -1, 2**63 - 1], [0, 1, 7, 2**20, 2**33 + 3]
    bits = noise_bits(np.array(seeds), np.array(positions), vocab)
    for row, seed, position in zip(bits, seeds, positions, strict=True):
        seed %= 2**64
        key, *_ = philox_by_hand((position % 2**32, position >> 32, 0, 0), (seed % 2**32, seed >> 32))
        for token in (0, vocab // 2, vocab - 1):
            low, high, *_ = philox_by_hand((token, 0, 0, 0), (key, 0))
            assert int(row[token]) == high << 32 | low
    monkeypatch.setattr(noise, "CACHED", 64)
    np.testing.assert_array_equal(bits, noise_bits(np.array(seeds), np.array(positions), vocab))
    larger = noise_bits(np.array(seeds), np.array(positions), vocab + 9)
    np.testing.assert_array_equal(bits, larger[:, :vocab], "a padded vocabulary has other noise")


def test_it_is_the_logarithm_of_the_number_itself() -> None:
    seeds, positions = torch.arange(6), torch.arange(6)
    u = noise_bits(seeds.numpy(), positions.numpy(), 500).astype(np.float64) / 2.0**64
    drawn = exponential_noise(seeds, positions, 500).double()
    torch.testing.assert_close(drawn, torch.from_numpy(-np.log(u)), rtol=1e-4, atol=0)


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
