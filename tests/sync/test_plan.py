"""Planning of a weight sync by each rank for itself: together the plans are what one who looks at all ranks would plan."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine_work import MODELS
from benchmarks.sync_plan import in_threads, plan, shards
from quintet.engine.mesh import Sizes
from quintet.engine.weights import reshard
from quintet.engine.weights.hf import planned_tensors
from quintet.engine.weights.reshard import Owners, plan_transfers
from quintet.engine.weights.rounds import Holding, Round, Transfer, Turns, agreed_rounds
from quintet.errors import UserError
from quintet.models import ModelShape, family_of
from quintet.models.mcore import meet, volume
from quintet.rollout.base import Wanted
from quintet.sync.server import STAGED_SHARE, ReceiverSpec, WeightServer
from tests.engine.moe_models import config as moe_config


def planned_for_all(
    sources: Sequence[Sequence[Holding]], targets: Sequence[Sequence[Holding]]
) -> list[Transfer]:
    """The oracle: everything that must travel, planned at once from what all ranks hold and want, box by box."""
    owners: dict[str, dict[Any, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, holdings in enumerate(sources):
        for index, (name, box) in enumerate(holdings):
            owners[name][box].append((rank, index))
    transfers = []
    for target, holdings in enumerate(targets):
        for target_index, (name, box) in enumerate(holdings):
            for source_box, holders in owners[name].items():
                part = meet(box, source_box)
                if part is None:
                    continue
                local = [h for h in holders if h[0] == target]
                source, source_index = local[0] if local else holders[target % len(holders)]
                transfers.append(Transfer(name, part, source, source_index, target, target_index))
    return transfers


@cache
def shape_of(family: str) -> ModelShape:
    config = MODELS["tiny"].config
    if family != "dense":
        config = moe_config(family).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    return family_of(config).shape_of(config)


def layouts(experts: bool) -> st.SearchStrategy[Sizes]:
    """Of 1 to 16 ranks, every axis there is."""
    one = st.sampled_from([1, 2])
    return st.builds(
        lambda tp, pp, dp, ep, etp: Sizes(tp=tp, pp=pp, dp=dp * ep * etp, ep=ep, etp=etp),
        tp=one, pp=one, dp=one, ep=st.sampled_from([1, 2, 4]) if experts else st.just(1), etp=one if experts else st.just(1),
    ).filter(lambda sizes: sizes.ranks <= 16)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.data())
def test_ranks_plan_together_what_one_who_knows_all_would(experts, data):
    shape = shape_of("qwen3_moe" if experts else "dense")
    train, rollout = data.draw(layouts(experts)), data.draw(layouts(experts))
    held = [[(one.name, one.box) for one in shards(shape, train, rank)] for rank in range(train.ranks)]
    receivers = [
        [(one.name, one.box) for one in shards(shape, rollout, rank)] for rank in range(rollout.ranks)
    ]
    wanted = [receivers[rank % rollout.ranks] for rank in range(train.ranks)]
    owners = Owners(same_as_one(held))
    planned = [t for rank, boxes in enumerate(wanted) for t in plan_transfers(owners, rank, boxes)]
    assert planned == planned_for_all(held, wanted)
    assert {name: owners.shape(name) for name in owners.names()} == full_shapes(shape)


def same_as_one(held: list[list[Holding]]) -> list[list[Holding]]:
    """As they arrive: those that are equal are one object."""
    return [held[held.index(one)] for one in held]


def full_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {one.name: one.shape for one in planned_tensors(shape, torch.float32)}


TRAFFIC = st.tuples(st.integers(2, 5), st.integers(1, 200), st.integers(256, 2000), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(TRAFFIC, st.data())
def test_rounds_bring_everything_once_and_bound_what_a_rank_sends_and_gets(traffic, data):
    world, rows, limit, turns = traffic
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=12))})
    sources: list[list[Holding]] = [[] for _ in range(world)]
    for start, stop in itertools.pairwise(cuts):
        sources[data.draw(st.integers(0, world - 1))].append(("w", ((start, stop), (0, 3))))
    # Of each rank another number of turns, all of it in each, or a part.
    wanted = [
        [data.draw(st.integers(0, rows - 1)) for _ in range(data.draw(st.integers(0, turns)))]
        for _ in range(world)
    ]
    boxes = [[[("w", ((first, rows), (0, 3)))] for first in firsts] for firsts in wanted]
    planned = rounds_of(world, sources, boxes, limit)
    assert {len(one) for one in planned} == {max(map(len, wanted))}
    for turn in range(max(map(len, wanted))):
        rounds = [one[turn] for one in planned]
        assert len({sum(r.crosses for r in one) for one in rounds}) == 1  # all ranks meet as often
        for rank, firsts in enumerate(wanted):
            counted = torch.zeros(rows, 3, dtype=torch.int64)
            for number, one in enumerate(rounds[rank]):
                for t in [*one.own, *(t for t, _ in one.receiving)]:
                    assert (t.target, number if t in one.own else 0) == (rank, 0)
                    counted[tuple(slice(*ends) for ends in t.box)] += 1
                for side in (one.sending, one.receiving):
                    assert sum(4 * volume(t.box) for t, _ in side) <= limit
                for other, received in enumerate(one.sizes_in if one.crosses else ()):
                    sender = rounds[other][number]
                    assert received == sender.sizes_out[rank]
                    ours = [t for t, _ in one.receiving if t.source == other]
                    assert ours == [t for t, _ in sender.sending if t.target == rank]
            expected = torch.zeros_like(counted)
            if turn < len(firsts):
                expected[firsts[turn] :] = 1
            assert torch.equal(counted, expected)


def test_a_rank_that_only_gets_or_sends_is_bounded_too():
    """What is got begins evenly in the rounds, and three parts of four in the first of two would be too much."""
    cuts = list(
        itertools.pairwise((0, 0, 21, 46, 63, 80))
    )  # rank 0 has nothing; 17 of rank 4, which comes first, 17, 25 and 21
    sources: list[list[Holding]] = [[("w", (ends, (0, 3)))] for ends in cuts]
    gets = rounds_of(5, sources, [[[("w", ((0, 80), (0, 3)))]], [], [], [], []], 600)[0][0]
    sends = rounds_of(5, sources, [[[("w", ((21, 46), (0, 3)))]] for _ in cuts], 600)[2][0]
    for total, sides in ((960, [one.receiving for one in gets]), (1200, [one.sending for one in sends])):
        moved = [sum(4 * volume(t.box) for t, _ in side) for side in sides]
        assert sum(moved) == total
        assert max(moved) <= 600


def test_ranks_do_not_meet_where_nothing_crosses():
    held: list[list[Holding]] = [[("w", ((0, 2),))], [("w", ((2, 4),))]]
    for (first,) in rounds_of(2, held, [[one] for one in held], 600):
        assert [(len(one.own), one.crosses) for one in first] == [(1, False)]


def rounds_of(
    world: int, sources: list[list[Holding]], wanted: list[list[list[Holding]]], limit: int
) -> list[list[list[Round]]]:
    """The rounds of each rank, by turn."""

    def work(rank: int) -> list[list[Round]]:
        getting = [plan_transfers(Owners(sources), rank, boxes) for boxes in wanted[rank]]
        return agreed_rounds(
            Turns(rank, world, getting, lambda name: torch.float32, {}, limit), sources[rank]
        )

    return in_threads(world, work)


def test_a_plan_of_real_size_is_in_few_rounds_of_bounded_size():
    """As many as the bytes need, and a quarter."""
    shape = replace(MODELS["qwen3-30b-a3b"].shape, layers=6)
    limit = 256 * (1 << 20) // STAGED_SHARE
    exports = [one for _, one in plan(shape, Sizes(dp=8, ep=8), Sizes(tp=4, etp=4))]
    for turns in zip(*(one._rounds for one in exports), strict=True):  # of every rank the same one
        moved = [[sum(one.sizes_in) for one in rounds] for rounds in turns]
        moved += [[sum(one.sizes_out) for one in rounds] for rounds in turns]
        assert max(map(max, moved)) <= limit
        assert len(turns[0]) <= -(-max(map(sum, moved)) // limit) * 1.5 + 1


def test_a_rank_s_work_does_not_grow_with_ranks(monkeypatch):
    """Counted, not timed: the parts that a rank looks at."""
    looked: Counter[int] = Counter()
    met = reshard.meet

    def counting(a: Any, b: Any) -> Any:
        looked[threading.get_ident()] += 1
        return met(a, b)

    monkeypatch.setattr(reshard, "meet", counting)
    shape = shape_of("qwen3_moe")
    most = []
    for ranks in (4, 16):
        looked.clear()
        plan(shape, Sizes(dp=ranks, ep=4), Sizes(tp=2, etp=2), bucket_mib=1 / 16)
        assert len(looked) == ranks
        most.append(max(looked.values()))
    assert most[1] == most[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_what_nobody_holds_is_an_error_on_every_rank(rank):
    shape = shape_of("dense")
    failed = []

    def work(mine: int) -> None:
        held = shards(shape, Sizes(tp=2, dp=2), mine)
        server = WeightServer(lambda: held, shape, torch.float32, torch.device("cpu"), 1.0, timeout_s=20.0)
        wanted = [Wanted("lost", ((0, 1),))] if mine == rank else []
        try:
            server.plan([ReceiverSpec(f"r{mine}", wanted, True)])
        except UserError as error:
            failed.append(str(error))
        finally:
            server.close()

    in_threads(4, work)
    assert failed == [f"receiver r{rank} wants lost, which the engine does not hand out"] * 4
