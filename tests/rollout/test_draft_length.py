"""The choice of a draft's length: by what was measured, and never one that was slower than none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rollout.draft_length import TABLE, Measured, choose, read_table

GPU = "NVIDIA H200"


def row(sequences: int, context: int, length: int, speedup: float, accepted: float = 0.6) -> Measured:
    return Measured(GPU, sequences, context, length, accepted, speedup)


def grid(speeds: dict[tuple[int, int], float]) -> list[Measured]:
    """By sequences and length, at two context lengths; drafts of 2 are accepted as those of 1, token by token."""
    return [
        row(n, context, k, speed, 0.6 if k == 1 else 0.6 + 0.36)
        for (n, k), speed in speeds.items()
        for context in (512, 4096)
    ]


GRID = grid(
    {
        (1, 1): 1.5,
        (1, 2): 1.8,
        (8, 1): 1.4,
        (8, 2): 1.3,
        (64, 1): 1.1,
        (64, 2): 0.9,
        (256, 1): 0.95,
        (256, 2): 0.6,
    }
)


@pytest.mark.parametrize(
    ("sequences", "context", "length"),
    [
        (1, 512, 2),
        (1, 2000, 2),
        (4, 2000, 1),  # 1.4 at 8, against 1.3
        (8, 4096, 1),
        (64, 512, 1),
        (65, 512, 0),  # slower at 256
        (300, 512, 0),  # beyond
        (8, 5000, 0),
        (1, 100, 2),  # shorter than any: as the shortest
    ],
)
def test_the_fastest_of_what_was_measured(sequences: int, context: int, length: int) -> None:
    assert choose(GRID, GPU, sequences, context, (1, 2)).draft_tokens == length


def test_only_lengths_that_the_model_can_draft() -> None:
    assert choose(GRID, GPU, 1, 512, (1,)).draft_tokens == 1
    assert choose(GRID, GPU, 1, 512, (3,)).draft_tokens == 0


def test_acceptance_moves_the_choice() -> None:
    """Twice the tokens of a draft, at the same cost of a step."""
    assert row(1, 512, 1, 1.2, accepted=0.6).speedup_at(0.6) == pytest.approx(1.2)
    assert row(1, 512, 1, 1.2, accepted=0.6).speedup_at(1.0) == pytest.approx(1.5)
    assert row(1, 512, 2, 1.2, accepted=0.5).speedup_at(0.5) == pytest.approx(1.4)
    assert choose(GRID, GPU, 64, 512, (1, 2), acceptance=0.6).draft_tokens == 1
    assert choose(GRID, GPU, 64, 512, (1, 2), acceptance=0.4).draft_tokens == 0
    assert choose(GRID, GPU, 8, 512, (1, 2), acceptance=0.95).draft_tokens == 2
    # Faster by arithmetic, and measured slower.
    assert choose([row(1, 512, 1, 0.99, accepted=0.1)], GPU, 1, 512, (1,), acceptance=0.9).draft_tokens == 0


def test_a_missing_corner_counts_as_not_measured() -> None:
    table = [one for one in GRID if (one.sequences, one.context_tokens) != (8, 4096)]
    assert choose(table, GPU, 4, 512, (1, 2)).draft_tokens == 1
    assert choose(table, GPU, 4, 1000, (1, 2)).draft_tokens == 0


def test_it_says_why() -> None:
    assert choose(GRID, GPU, 1, 512, (1, 2)).why == (
        "2 drafted tokens: for 1 sequences of 512 tokens on NVIDIA H200 that was measured 1.80 times as fast as none, at an "
        "acceptance of 60%"
    )
    assert choose(GRID, GPU, 256, 512, (1, 2)).why == (
        "no drafts: for 256 sequences of 512 tokens on NVIDIA H200 none was measured faster, at an acceptance of 60%"
    )
    for sequences, context in ((300, 512), (8, 12288)):
        assert choose(GRID, GPU, sequences, context, (1, 2)).why == (
            f"no drafts: for {sequences} sequences of {context} tokens on NVIDIA H200 nothing was measured, the table ends "
            "at 256 sequences and 4096 tokens"
        )
    assert choose(GRID, "NVIDIA T4", 1, 512, (1, 2)).why.endswith("on NVIDIA T4 nothing was measured")


@given(
    speeds=st.lists(st.floats(0.5, 2.5), min_size=18, max_size=18),
    sequences=st.integers(1, 300),
    context=st.integers(1, 5000),
    acceptance=st.floats(0, 1),
)
def test_never_one_that_was_slower_nearby(
    speeds: list[float], sequences: int, context: int, acceptance: float
) -> None:
    places = itertools.product((1, 16, 256), (256, 4096), (1, 2, 3))
    table = [row(n, c, k, speed) for (n, c, k), speed in zip(places, speeds, strict=True)]
    chosen = choose(table, GPU, sequences, context, (1, 2, 3), acceptance).draft_tokens
    if not chosen:
        return
    below = max([n for n in (1, 16, 256) if n <= sequences], default=1)
    above = min(n for n in (1, 16, 256) if n >= sequences)
    near = [one for one in table if one.sequences in (below, above) and one.draft_tokens == chosen]
    if context <= 256:
        near = [one for one in near if one.context_tokens == 256]
    elif context == 4096:
        near = [one for one in near if one.context_tokens == 4096]
    assert all(one.speedup > 1 and one.speedup_at(acceptance) > 1 for one in near)


def test_the_table_that_is_shipped() -> None:
    table = read_table()
    assert len({(r.device, r.sequences, r.context_tokens, r.draft_tokens) for r in table}) == len(table)
    assert all(r.draft_tokens > 0 and 0 <= r.accepted <= r.draft_tokens and r.speedup > 0 for r in table)
    assert TABLE.is_file()
