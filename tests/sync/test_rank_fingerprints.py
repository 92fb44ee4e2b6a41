"""Vectors of fingerprints, told of parts that are told once, prove what comparing every element would: no more and no less."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.engine.weights.fingerprint import Fingerprints, fingerprint
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, box_sizes, slices, whole_box
from quintet.sync.proof import Comparison
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer, ShardIndex

SHAPES = {"model.norm.weight": (4,), "model.embed_tokens.weight": (6, 4), "a.experts.1.up": (2, 2, 4)}
CUTS = ((0, 1), (0, 2), (-1, 2), (0, 2), (-1, 4))
"""Ways to cut a tensor: along a dim, in how many parts."""

Rank = dict[tuple[str, Box], torch.Tensor]
"""What one holds: bit patterns."""


def cut(shape: tuple[int, ...], dim: int, parts: int) -> list[Box]:
    box, dim = list(whole_box(shape)), dim % len(shape)
    step = shape[dim] // parts
    return [(*box[:dim], (i * step, (i + 1) * step), *box[dim + 1 :]) for i in range(parts)]


def dealt(weights: dict[str, torch.Tensor], draw: random.Random) -> list[Rank]:
    """Weights cut at random, dealt to ranks, and these copied up to three times."""
    ranks: list[Rank] = [{} for _ in range(draw.randint(1, 3))]
    for name, tensor in weights.items():
        for box in cut(tuple(tensor.shape), *draw.choice(CUTS)):
            for rank in draw.sample(ranks, draw.randint(1, len(ranks))):
                rank[name, box] = tensor[slices(whole_box(tensor.shape), box)].clone()
    return [dict(rank) for _ in range(draw.randint(1, 3)) for rank in ranks]


def harm(ranks: list[Rank], draw: random.Random) -> None:
    """Something is wrong with one rank's part, or nothing is."""
    rank = draw.choice(ranks)
    what = draw.choice(["nothing", "nothing", "flip", "flip", "drop", "move", "new", "shuffle"])
    if what == "new":
        rank["lm_head.weight", ((0, 1), (0, 1))] = torch.ones(1, 1, dtype=torch.int32)
    if not rank or what in ("nothing", "new"):
        return
    key = draw.choice(list(rank))
    if what == "flip":
        rank[key] = rank[key].clone()
        rank[key].view(-1)[draw.randrange(rank[key].numel())] ^= 1 << draw.randrange(31)
    elif what == "drop":
        del rank[key]
    elif what == "move":
        (start, stop), *rest = key[1]
        rank[key[0], ((start + 1, stop + 1), *rest)] = rank.pop(key)
    else:
        order = draw.sample(list(rank), len(rank))
        held = dict(rank)
        rank.clear()
        rank.update((one, held[one]) for one in order)


def prints(rank: Rank) -> Fingerprints:
    return {key: fingerprint_of(*key, tuple(part.flatten().tolist())) for key, part in rank.items()}


@cache
def fingerprint_of(name: str, box: Box, values: tuple[int, ...]) -> int:
    shape = SHAPES.get(name, (1, 1))
    return int(fingerprint(torch.tensor(values, dtype=torch.int32).view(box_sizes(box)), shape, box))


def whole(ranks: list[Rank], name: str) -> torch.Tensor | None:
    """A tensor put together; None unless it is there exactly once, in copies that are the same."""
    built, count = torch.zeros(SHAPES[name], dtype=torch.int32), torch.zeros(SHAPES[name], dtype=torch.int32)
    parts: dict[Box, torch.Tensor] = {}
    for rank in ranks:
        for (other, box), part in rank.items():
            if other == name and not torch.equal(parts.setdefault(box, part), part):
                return None
    for box, part in parts.items():
        if any(stop > size for (_, stop), size in zip(box, SHAPES[name], strict=True)):
            return None
        built[tuple(slice(*side) for side in box)] = part
        count[tuple(slice(*side) for side in box)] += 1
    return built if bool((count == 1).all()) else None


def differing(engine: list[Rank], copy: list[Rank], unreadable: Iterable[str]) -> list[str]:
    """Names, element by element, without a fingerprint."""
    there = {name for rank in copy for name, _ in rank}
    found = []
    for name in SHAPES:
        if name in unreadable and name not in there:
            continue
        sides = whole(engine, name), whole(copy, name)
        if sides[0] is None or sides[1] is None or not torch.equal(*sides):
            found.append(name)
    return found + sorted(there - SHAPES.keys())


class Ranks:
    """Some ranks, which go on from sync to sync; and what the controller has been told of their parts."""

    def __init__(self, count: int) -> None:
        self.indexers = [RankIndexer() for _ in range(count)]

    def tell(self, ranks: list[Rank], shapes: bool, unreadable: list[str]) -> list[RankFingerprints]:
        return [
            indexer.tell(prints(rank), SHAPES if shapes else None, unreadable)
            for indexer, rank in zip(self.indexers, ranks, strict=True)
        ]

    @property
    def indexes(self) -> list[ShardIndex]:
        return [one.index for one in self.indexers]


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_vectors_name_what_comparing_every_element_names(draw: random.Random) -> None:
    """Over several syncs, with weights that change or stay, ranks that copy one another, and one fault or another. A comparison is
    made anew exactly where some rank's parts have changed, as the controller makes it."""
    weights = {name: torch.randint(1 << 30, shape, dtype=torch.int32) for name, shape in SHAPES.items()}
    layouts = [dealt(weights, draw) for _ in range(3)]
    voices = [Ranks(len(ranks)) for ranks in layouts]
    made: dict[tuple[bytes, ...], Comparison] = {}
    for _ in range(4):
        if draw.random() < 0.5:
            weights = {name: tensor + 1 for name, tensor in weights.items()}
        sides: list[list[Rank]] = [
            [
                {
                    (name, box): weights[name][slices(whole_box(SHAPES[name]), box)].clone()
                    for name, box in rank
                }
                for rank in ranks
            ]
            for ranks in layouts
        ]
        for _ in range(draw.randint(0, 2)):
            harm(draw.choice(sides), draw)
        unreadable = draw.sample(list(SHAPES), draw.choice([0, 0, 1]))
        engine, *copies = (
            voice.tell(ranks, not at, unreadable if at else [])
            for at, (voice, ranks) in enumerate(zip(voices, sides, strict=True))
        )
        for voice, told, ranks in zip(voices[1:], copies, sides[1:], strict=True):
            key = (*(one.index for one in engine), b"", *(one.index for one in told))
            comparison = made.setdefault(key, Comparison(voices[0].indexes, voice.indexes))
            found = comparison.differences(engine, told)
            assert [one.name for one in found] == differing(sides[0], ranks, unreadable)


WHOLE: Rank = {
    (name, whole_box(shape)): torch.ones(shape, dtype=torch.int32) for name, shape in SHAPES.items()
}


def test_an_index_is_the_same_until_parts_or_names_change() -> None:
    rank, one = prints(WHOLE), RankIndexer()
    first = one.tell(rank, SHAPES)
    index = one.index
    assert one.tell(prints(WHOLE), SHAPES) == first
    assert one.index is index
    backwards = dict(reversed(rank.items()))
    nothing = {**rank, ("b.bias", ((3, 3),)): 0}  # an empty part
    for same in (backwards, nothing):
        assert RankIndexer().tell(same, SHAPES) == one.tell(same, SHAPES) == first
        assert one.index == index
    moved = {(name, ((1, 5), *box[1:]) if name == "model.norm.weight" else box): 1 for name, box in rank}
    others = [
        one.tell({**rank, ("b.bias", ((0, 3),)): 5}, SHAPES),
        one.tell(dict(list(rank.items())[1:]), SHAPES),
        one.tell(moved, SHAPES),
        one.tell(rank, {**SHAPES, "model.norm.weight": (3,)}),
        one.tell(rank, SHAPES, ["b.bias"]),
    ]
    assert len({index.digest, *(told.index for told in others)}) == 6
    values = torch.frombuffer(bytearray(first.values), dtype=torch.int64).tolist()
    assert values == [value for _, value in sorted(rank.items())]


@pytest.mark.parametrize("side", ["trainer", "rollout"])
@pytest.mark.parametrize("what", ["shorter", "longer", "of another index"])
def test_values_are_never_taken_for_those_of_other_parts(side: str, what: str) -> None:
    one = RankIndexer()
    right, index = one.tell(prints(WHOLE), SHAPES), one.index
    wrong = {
        "shorter": RankFingerprints(index.digest, right.values[:-8]),
        "longer": RankFingerprints(index.digest, right.values + right.values[:8]),
        "of another index": one.tell(prints(WHOLE), SHAPES, ["b.bias"]),
    }[what]
    comparison, both = Comparison([index] * 2, [index] * 2), [right, right]
    assert comparison.differences(both, both) == []
    told = ([right, wrong], both) if side == "trainer" else (both, [right, wrong])
    with pytest.raises(
        SyncMismatch, match=rf"rank 1 of the {side} told \d fingerprints of other parts than the 3"
    ):
        comparison.differences(*told)


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_equal_ranks_do_not_hide_one_that_is_not(side: str) -> None:
    """Neither where most agree with the other side, nor where those that agree are few."""
    key = ("a.experts.1.up", whole_box(SHAPES["a.experts.1.up"]))
    wrong = {**WHOLE, key: WHOLE[key].clone()}
    wrong[key].view(-1)[5] = 3
    for ranks in ([WHOLE] * 30 + [wrong], [WHOLE] + [wrong] * 30):
        both = (Ranks(31), Ranks(31))
        held = [ranks, [WHOLE] * 31] if side == "trainer" else [[WHOLE] * 31, ranks]
        told = [one.tell(h, not at, []) for at, (one, h) in enumerate(zip(both, held, strict=True))]
        (found,) = Comparison(both[0].indexes, both[1].indexes).differences(*told)
        few = 30 if ranks[1] is WHOLE else 0
        others = (
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 22 more" if few else "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 22 more"
        )
        assert found.name == key[0]
        assert found.what == (
            f"the {side}'s ranks hold different copies of [0:2, 0:2, 0:4]: rank {few} other than {others}"
        )
