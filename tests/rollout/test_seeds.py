"""Seeds of samples are what they always were: who generates with one version can repeat it with the next."""

import pytest

from quintet.rollout.seeds import sample_seeds

KNOWN = {
    0: [8841707400507832957, 5974825227474435752, -2886753501206757670],
    1: [-4616330145664149646, 4689417271487893854, -3405980900428447358],
    17: [1524400294609339415, -6930141891661533360, 6539386560888336565],
    2**62 + 5: [-7771621968903189449, -7437186702643477139, -1956206756373158036],
    -3: [8689222557888816184, -5952103806423864267, 2284398374472859266],
}


@pytest.mark.parametrize("seed", KNOWN)
def test_seeds_are_known_numbers(seed):
    assert sample_seeds(seed, 3) == [(number % 2**64) >> 1 for number in KNOWN[seed]]


def test_samples_have_seeds_of_their_own():
    assert len({*sample_seeds(5, 1000), *sample_seeds(6, 1000)}) == 2000
