"""Learning rates at the corners of each schedule."""

import pytest

from quintet.engine.schedule import learning_rate
from quintet.recipe.schema import Optimizer


def rates(total: int, **keys) -> list[float]:
    recipe = Optimizer(lr=1.0, **keys)
    return [learning_rate(step, total, recipe) for step in range(1, total + 1)]


def test_warmup_rises_from_above_zero():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_cosine_ends_at_the_minimum():
    got = rates(10, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    assert got[1] == 1.0
    assert got[5] == pytest.approx(0.55)
    assert got[-1] == pytest.approx(0.1)
    assert got[2:] == sorted(got[2:], reverse=True)


def test_cosine_stays_at_the_minimum_after_decay_steps():
    assert rates(6, schedule="cosine", decay_steps=3)[2:] == pytest.approx([0.0] * 4, abs=1e-12)


def test_wsd_is_flat_then_falls():
    got = rates(10, schedule="wsd", decay_steps=4, min_lr_ratio=0.2)
    assert got[:6] == [1.0] * 6
    assert got[6:] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(10, schedule="wsd")[7:] == pytest.approx([1.0, 0.5, 0.0])  # a fifth of the steps
