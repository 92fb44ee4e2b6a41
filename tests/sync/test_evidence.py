"""Digests, with what they stand for asked of few ranks, prove what comparing everything would: no more and no less."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.engine.weights.fingerprint import Fingerprints, fingerprint
from quintet.models.mcore import Box, box_sizes, slices, whole_box
from quintet.sync.evidence import Evidence
from quintet.sync.proof import compare
from quintet.sync.witness import Digest, Witness

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
    """Witnesses of some ranks, which go on from sync to sync."""

    def __init__(self, count: int) -> None:
        self.witnesses = [Witness() for _ in range(count)]

    def digests(self, ranks: list[Rank], shapes: bool, unreadable: list[str]) -> list[Digest]:
        return [
            witness.digest(prints(rank), SHAPES if shapes else None, unreadable)
            for witness, rank in zip(self.witnesses, ranks, strict=True)
        ]


def told(evidence: Evidence, sides: list[tuple[Ranks, list[Digest]]]) -> None:
    """Have exactly what is lacking told, by the last rank that can."""
    (_, engine), *copies = sides
    lacking = evidence.lacking(engine, [digests for _, digests in copies])
    holders = {
        digest: witness
        for ranks, all_ in sides
        for digest, witness in zip(all_, ranks.witnesses, strict=True)
    }
    for digest in lacking:
        evidence.take({digest: holders[digest].statement(evidence.known)})


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_digests_name_what_comparing_everything_names(draw: random.Random) -> None:
    """Over several syncs, with weights that change or stay, ranks that copy one another, and one fault or another."""
    evidence = Evidence()
    weights = {name: torch.randint(1 << 30, shape, dtype=torch.int32) for name, shape in SHAPES.items()}
    layouts = [dealt(weights, draw) for _ in range(3)]
    voices = [Ranks(len(ranks)) for ranks in layouts]
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
            voice.digests(ranks, not at, unreadable if at else [])
            for at, (voice, ranks) in enumerate(zip(voices, sides, strict=True))
        )
        evidence.begin([*engine, *(one for copy in copies for one in copy)])
        told(evidence, list(zip(voices, [engine, *copies], strict=True)))
        for digests, ranks in zip(copies, sides[1:], strict=True):
            found = evidence.differences(engine, digests)
            assert found == compare(
                [prints(one) for one in sides[0]], [prints(one) for one in ranks], SHAPES, unreadable
            )
            assert [one.name for one in found] == differing(sides[0], ranks, unreadable)
            assert evidence.unreadable(digests) == set(unreadable)


def test_what_was_proved_equal_needs_nothing_and_one_flip_does() -> None:
    rank: Rank = {
        (name, whole_box(shape)): torch.ones(shape, dtype=torch.int32) for name, shape in SHAPES.items()
    }
    evidence, (trainer, rollout) = Evidence(), (Ranks(8), Ranks(4))
    sides = [
        (trainer, trainer.digests([rank] * 8, True, [])),
        (rollout, rollout.digests([rank] * 4, False, [])),
    ]
    engine, copy = (digests for _, digests in sides)
    assert len({*engine}) == len({*copy}) == 1
    assert evidence.lacking(engine, [copy]) == {engine[0], copy[0]}
    told(evidence, sides)
    assert evidence.differences(engine, copy) == []
    evidence.begin([*engine, *copy])
    assert evidence.lacking(engine, [copy, copy[:1]]) == set()
    wrong = dict(rank)
    harmed = wrong["model.norm.weight", ((0, 4),)] = torch.ones(4, dtype=torch.int32)
    harmed[3] = 0
    copy = rollout.digests([rank, rank, wrong, rank], False, [])
    evidence.begin([*engine, *copy])
    assert evidence.lacking(engine, [copy]) == {copy[2]}
    told(evidence, [sides[0], (rollout, copy)])
    assert [one.name for one in evidence.differences(engine, copy)] == ["model.norm.weight"]
    evidence.begin([*engine, *copy])
    assert evidence.differences(engine, copy) != []  # what differed once is not taken for proved


def test_an_inventory_is_told_once() -> None:
    rank: Rank = {
        (name, whole_box(shape)): torch.ones(shape, dtype=torch.int32) for name, shape in SHAPES.items()
    }
    witness = Witness()
    first = witness.digest(prints(rank), SHAPES)
    assert witness.statement([]).inventory is not None
    assert witness.statement([first.inventory]).inventory is None
    more = {**prints(rank), ("b.bias", ((0, 3),)): 5}
    assert witness.digest(more, SHAPES).inventory != first.inventory
    nothing = {**prints(rank), ("b.bias", ((3, 3),)): 0}  # an empty part
    assert witness.digest(nothing, SHAPES) == first
    assert witness.digest(prints(rank), SHAPES, ["b.bias"]).inventory != first.inventory
    assert witness.digest(dict(reversed(prints(rank).items())), SHAPES) == first
    assert list(witness.statement([]).values) == [value for _, value in sorted(prints(rank).items())]


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_equal_ranks_do_not_hide_one_that_is_not(side: str) -> None:
    """Neither where most agree with the other side, nor where those that agree are few."""
    rank: Rank = {
        (name, whole_box(shape)): torch.ones(shape, dtype=torch.int32) for name, shape in SHAPES.items()
    }
    key = ("a.experts.1.up", whole_box(SHAPES["a.experts.1.up"]))
    wrong = {**rank, key: rank[key].clone()}
    wrong[key].view(-1)[5] = 3
    for ranks in ([rank] * 30 + [wrong], [rank] + [wrong] * 30):
        evidence, both = Evidence(), (Ranks(31), Ranks(31))
        held = [ranks, [rank] * 31] if side == "trainer" else [[rank] * 31, ranks]
        sides = [
            (one, one.digests(h, not at, [])) for at, (one, h) in enumerate(zip(both, held, strict=True))
        ]
        told(evidence, sides)
        (found,) = evidence.differences(*(digests for _, digests in sides))
        few = 30 if ranks[1] is rank else 0
        others = (
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 22 more" if few else "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 22 more"
        )
        assert found.name == key[0]
        assert found.what == (
            f"the {side}'s ranks hold different copies of [0:2, 0:2, 0:4]: rank {few} other than {others}"
        )
