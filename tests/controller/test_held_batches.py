"""What a rank holds of a batch: weights by global counts, advantages over all its mini-batches, and which samples it tells of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from quintet.algorithms.advantages import Advantages, Scored, group_advantages, value_advantages
from quintet.controller.held_batches import HeldBatch, HeldBatches
from quintet.controller.messages import Assignment
from quintet.data.batch import Batch, concat, make_batch, sample_ids, set_tokens, tokens
from quintet.packing.plan import Cell

GAE = Advantages(
    partial(value_advantages, gamma=0.9, lam=0.8),
    reads=("old_values",),
    writes=("advantages", "returns"),
    per_token=("advantages", "returns"),
)
REWARDS = Scored(torch.tensor([0.0, 1, 2, 0, 5, 1, 1, 4]), torch.arange(8) // 2)


def batch(lengths: Sequence[int], seed: int) -> Batch:
    made = make_batch([list(range(n)) for n in lengths], [1] * len(lengths))
    set_tokens(made, "old_values", torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed)))
    return made


def held(parts: Sequence[tuple[Batch, list[int]]], cells: list[list[Cell]], place: int = 0) -> HeldBatch:
    """The mini-batches of one rank: of each its samples, with their numbers; 100 tokens of 10 samples are in each over all ranks."""
    batches = HeldBatches()
    given = [([one], Assignment(cells, numbers, [100], 10, {})) for one, numbers in parts]
    batches.put(("batch", "policy"), given, place, REWARDS, "token_mean")
    return batches["batch", "policy"]


ALONE = [[Cell([0, 1], range(1))]]
ONE, OTHER = batch([3, 5], 0), batch([4, 2], 1)


def test_weights_are_of_the_whole_mini_batch() -> None:
    for aggregation, weight in (
        ("token_mean", [0.01] * 3),
        ("sequence_mean", [0.05, 0.05, 0.1]),
        (4, [0.025] * 3),
    ):
        batches, part = HeldBatches(), batch([3, 2], 0)
        assignment = Assignment(ALONE, [4, 7], [100], 10, {})
        batches.put(("batch", "policy"), [([part], assignment)], 0, None, aggregation)
        (mini,) = batches["batch", "policy"]
        on = tokens(mini.batch, "loss_mask") > 0
        assert tokens(mini.batch, "weights")[on].tolist() == pytest.approx(weight)
        assert not tokens(mini.batch, "weights")[~on].any()


def test_advantages_are_of_all_mini_batches_together() -> None:
    """As of one batch: each sample has its own reward, and whitening is over both."""
    apart = held([(ONE, [6, 1]), (OTHER, [4, 3])], ALONE)
    whole = concat([ONE, OTHER])
    seen: list[Tensor] = []

    def total(values: Tensor) -> Tensor:
        seen.append(values)
        return values

    apart.advantages(GAE, total)
    fields = {name: tokens(whole, name) for name in ("loss_mask", "old_values")}
    expected = GAE.make(fields, sample_ids(whole), torch.tensor([6, 1, 4, 3]), REWARDS, lambda values: values)
    for name in ("advantages", "returns"):
        found = torch.cat([tokens(mini.batch, name) for mini in apart])
        torch.testing.assert_close(found, expected[name])
    assert len(seen) == 1
    apart.advantages(Advantages(partial(group_advantages, normalize_by_std=False)), total)
    assert [mini.batch["advantages"].tolist() for mini in apart] == [[-1.5, 0.5], [2.0, -1.0]]


def test_a_rank_tells_of_the_samples_of_cells_it_is_first_in_and_takes_all() -> None:
    cells = [[Cell([0], range(1)), Cell([1], range(1, 2))], [Cell([2], range(2))]]
    part = batch([3, 5, 2], 2)
    first, second = (held([(part, [6, 1, 4])], cells, place) for place in (0, 1))
    assert [sorted(one.minis[0].counted()) for one in (first, second)] == [[0, 2], [1]]
    assert second.minis[0].counted_tokens().tolist() == [False] * 3 + [True] * 5 + [False] * 2
    told = [one.told(["old_values"]) for one in (first, second)]
    assert [sorted(one) for one in told] == [[4, 6], [1]]
    taker = held([(batch([3, 2], 3), [6, 4])], ALONE)
    taker.take(told, ["old_values"])
    values = tokens(part, "old_values")
    assert torch.equal(tokens(taker.minis[0].batch, "old_values"), torch.cat((values[:3], values[8:])))
    with pytest.raises(ValueError, match=r"no rank told old_values of the samples \[6\]"):
        taker.take([{4: told[0][4]}], ["old_values"])


def test_batches_are_forgotten_by_name_on_all_placements() -> None:
    batches = HeldBatches()
    for key in (("one", "policy"), ("one", "critic"), ("two", "policy")):
        batches.put(
            key, [([batch([2], 0)], Assignment([[Cell([0], range(1))]], [0], [1], 1, {}))], 0, None, 4
        )
    batches.forget(["three", "one"])
    assert batches["two", "policy"].minis[0].assignment.numbers == [0]
    for placement in ("policy", "critic"):
        with pytest.raises(KeyError, match=f"the ranks of {placement} hold no batch one"):
            batches["one", placement]
