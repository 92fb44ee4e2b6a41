"""Percentiles from counts, against torch.quantile on the values themselves."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.algorithms.histogram import LEAST, MOST, PRECISION, Histogram

SHARES = (0.0, 0.01, 0.5, 0.99, 0.999, 1.0)


def numbers(scale: float, count: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=made, dtype=torch.float64) * scale


@given(
    scale=st.sampled_from([1e-9, 1e-7, 1e-3, 0.1, 1.0, 6.0, 30.0]),
    count=st.integers(1, 3000),
    parts=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_quantiles_are_those_of_the_values(scale: float, count: int, parts: int, seed: int) -> None:
    values = numbers(scale, count, seed)
    on = numbers(1.0, count, seed + 1) > -1
    pieces = [Histogram(v, o) for v, o in zip(values.chunk(parts), on.chunk(parts), strict=True) if v.numel()]
    merged = sum(pickle.loads(pickle.dumps(pieces)), Histogram())
    counted = values[on].clamp(-MOST, MOST)
    if not len(counted):
        assert merged.quantiles(SHARES) == [0.0] * len(SHARES)
        return
    shares = torch.tensor(SHARES, dtype=torch.float64)
    wanted = torch.quantile(counted, shares, interpolation="lower").tolist()
    for found, value in zip(merged.quantiles(SHARES), wanted, strict=True):
        assert found == pytest.approx(value, rel=PRECISION * 1.0001, abs=LEAST)


def test_what_is_no_number_is_told_and_infinities_are_the_largest() -> None:
    on = torch.ones(3, dtype=torch.bool)
    values = torch.tensor([0.5, -math.inf, math.inf])
    low, middle, high = Histogram(values, on).quantiles((0.0, 0.5, 1.0))
    assert (low, middle, high) == pytest.approx((-MOST, 0.5, MOST), rel=PRECISION * 1.0001)
    values = torch.tensor([0.5, math.nan, 1.0])
    assert all(map(math.isnan, Histogram(values, on).quantiles((0.0, 1.0))))
    on[1] = False
    assert Histogram(values, on).quantiles((0.0,)) == pytest.approx([0.5], rel=PRECISION)
    assert Histogram(torch.empty(0), torch.empty(0, dtype=torch.bool)).quantiles((0.5,)) == [0.0]
