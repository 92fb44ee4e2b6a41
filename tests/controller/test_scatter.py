"""What leaves the controller for a step's samples: each is cut once for the ranks that share it, however many those are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quintet.controller import scatter
from quintet.controller.batch_ref import Placement
from quintet.controller.messages import SampleInfo
from quintet.controller.samples import Kept, Samples
from quintet.controller.scatter import Scatterer
from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.packing.plan import Plan, PlanTime
from quintet.packing.time_model import CellCosts
from quintet.recipe import schema
from quintet.rewards.result import RewardResult
from tests.engine.test_shards import SHAPE


class Told:
    """Workers and rollouts that note what they are asked for."""

    count = 2

    def __init__(self) -> None:
        self.cuts: list[list[list[list[Any]]]] = []
        self.parts: list[Any] = []

    def slice_samples(self, chosen: list[list[list[Any]]], layers: list[Any]) -> list[list[Any]]:
        self.cuts.append(chosen)
        return [[f"rollout {r}, part {n}" for n in range(len(parts))] for r, parts in enumerate(chosen)]

    def each(self, verb: Any, protocol: Any, phase: str, coords: Any) -> Any:
        return lambda parts, **how: self.parts.append(protocol.split(coords, parts))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("dp", "cp", "tp", "pp"), [(1, 4, 1, 1), (2, 4, 2, 1), (2, 2, 1, 2)])
def test_samples_are_cut_once_a_block(dynamic: bool, dp: int, cp: int, tp: int, pp: int) -> None:
    layout = schema.Layout(tp=tp, cp=cp, pp=pp, dynamic_cp=dynamic)
    coords = [
        {"tp": t, "cp": c, "dp": d, "pp": p}
        for p in range(pp)
        for d in range(dp)
        for c in range(cp)
        for t in range(tp)
    ]
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=len(coords)),
        layout=layout,
        engine=schema.Engine(tokens_per_microbatch_per_rank=128),
    )
    lengths = [9, 60, 200, 33, 17, 5]
    infos = [SampleInfo(n, n - 3, "stop", "", None, None) for n in lengths]
    samples = Samples(
        [SimpleNamespace()] * 3,  # type: ignore[list-item]
        [0, 0, 1, 1, 2, 2],
        infos,
        [Kept(n % 2, "call", n) for n in range(6)],
        [RewardResult(float(n % 2)) for n in range(6)],
    )
    told, shape = Told(), SHAPE
    assert isinstance(shape, ModelShape)
    scatterer = Scatterer(told, recipe, shape, [Placement("policy", layout, coords)])  # type: ignore[arg-type]
    scatterer.samples(samples, told)  # type: ignore[arg-type]
    (cut,), (of_ranks,) = told.cuts, told.parts
    assert [len(of_rollout) for of_rollout in cut] == [dp, dp]
    assert sorted(at for of_rollout in cut for part in of_rollout for _, at in part) == list(range(6))
    # Ranks of a block get the same references, and those of different blocks others.
    blocks: dict[int, set[str]] = {}
    for where, [(references, assignment)] in zip(coords, of_ranks, strict=True):
        blocks.setdefault(where["dp"], set()).add(f"{references} {assignment}")
    assert [len(found) for found in blocks.values()] == [1] * dp
    assert len(set.union(*blocks.values())) == dp


@pytest.mark.parametrize(
    ("layout", "coupled", "fill", "multiple"),
    [
        ({"cp": 4}, 1, 0.0, 1),
        ({"cp": 2, "ep": 4}, 4, 0.0, 1),
        ({"cp": 2, "tp": 2, "sp": True, "ep": 4, "etp": 1}, 2, 0.0, 1),
        ({"cp": 2, "tp": 2, "sp": True, "ep": 2}, 2, 0.0, 1),
        ({"cp": 2, "pp": 2}, 1, 1.0, 1),
        ({"cp": 2, "pp": 4, "vpp": 2}, 1, 1.5, 4),
    ],
)
def test_cells_are_planned_for_who_waits_for_whom(
    layout: dict[str, Any], coupled: int, fill: float, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts' ranks for each other in every micro-batch, a pipeline for its costliest; interleaved stages take rounds by the pp."""
    made, measured, asked = schema.Layout(**layout, dynamic_cp=True), CellCosts(fixed=7.0), []
    monkeypatch.setattr(scatter, "costs_of", lambda *of: asked.append(of) or (measured, ""))
    monkeypatch.setattr(scatter, "plan_cells", lambda lengths, **how: how)
    ranks = 2 * made.tp * made.cp * made.pp
    coords = [
        {"tp": n % made.tp, "dp": n // made.tp // made.cp % 2, "pp": n // (ranks // made.pp)}
        for n in range(ranks)
    ]
    recipe = schema.Recipe(cluster=schema.Cluster(ranks=ranks), layout=made)
    placement = Placement("critic", made, coords)
    scatterer = Scatterer(Told(), recipe, SHAPE, [placement], "a device")  # type: ignore[arg-type]
    how: Any = scatterer.plan([3, 4], placement, [5, 6])
    assert (how["coupled"], how["fill"], how["multiple"]) == (coupled, fill, multiple)
    assert (how["dp"], how["cp"], how["key"], how["names"]) == (2, made.cp, "critic.layout", [5, 6])
    assert how["costs"] is measured
    assert asked == [(SHAPE, made.tp, "a device")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sample_that_fits_nowhere_is_named_by_its_number_in_the_batch(dynamic: bool) -> None:
    layout = schema.Layout(cp=2, dynamic_cp=dynamic)
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=2),
        layout=layout,
        engine=schema.Engine(tokens_per_microbatch_per_rank=128),
    )
    placement = Placement("policy", layout, [{"tp": 0, "dp": 0, "pp": 0}] * 2)
    scatterer = Scatterer(Told(), recipe, SHAPE, [placement])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="sample 3 has 999 tokens") as told:
        scatterer.plan([30, 999], placement, [2, 3])
    assert "cp=" not in str(told.value)  # there are two ranks


class Noted(Told):
    """The same, with what else each call of `receive` was told."""

    def __init__(self) -> None:
        super().__init__()
        self.how: list[dict[str, Any]] = []

    def each(self, verb: Any, protocol: Any, phase: str, coords: Any) -> Any:
        def receive(parts: Any, **how: Any) -> None:
            self.parts.append(protocol.split(coords, parts))
            self.how.append(how)

        return receive


def test_what_ranks_are_told_of_their_mini_batches() -> None:
    """Two mini-batches on two dp ranks of two stages: global counts are of the mini-batch, numbers of the batch, positions of what
    arrives, which is in the order in which rollouts kept it."""
    layout = schema.Layout(pp=2)
    coords = [{"tp": 0, "cp": 0, "dp": d, "pp": p} for p in range(2) for d in range(2)]
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=4),
        layout=layout,
        engine=schema.Engine(tokens_per_microbatch_per_rank=64),
        algorithm=schema.Algorithm(aggregation="fixed_length"),
        rollout=schema.Rollout(max_response_tokens=61),
        mismatch=schema.Mismatch(replay_samples_per_step=3),
        train=schema.Train(mini_batches_per_step=2),
    )
    lengths = [40, 60, 50, 33, 57, 35, 40, 28]
    samples = Samples(
        [SimpleNamespace()] * 4,  # type: ignore[list-item]
        [0, 0, 1, 1, 2, 2, 3, 3],
        [
            SampleInfo(n, n - 3, "stop", "", None, None, kept=None if at in (2, 3) else object())  # type: ignore[arg-type]
            for at, n in enumerate(lengths)
        ],
        [Kept(n % 2, "call", 7 - n) for n in range(8)],
        [RewardResult(float(n), {}, penalty=n / 4) for n in range(8)],
    )
    told = Noted()
    scatterer = Scatterer(told, recipe, SHAPE, [placement := Placement("policy", layout, coords)])  # type: ignore[arg-type]
    batch = scatterer.samples(samples, told)  # type: ignore[arg-type]
    (of_ranks,), (how,) = told.parts, told.how
    assert how["aggregation"] == 61
    assert how["scored"].rewards.tolist() == [n * 0.75 for n in range(8)]
    assert how["scored"].groups.tolist() == samples.groups
    assert [one.number for one in batch.minibatches] == [0, 1]
    for number, mini in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        plan = scatterer.plan([lengths[i] for i in mini], placement)
        assert batch.minibatches[number].rounds == {"policy": len(plan.rounds)}
        here = [parts[number] for parts in of_ranks]
        assert here[:2] == here[2:]  # both stages
        assert sorted(n for _, one in here[:2] for n in one.numbers) == mini
        for dp, (_, one) in enumerate(here[:2]):
            assert one.numbers == sorted(one.numbers, key=samples.place.__getitem__)
            assert [batch.holders["policy"][n] for n in one.numbers] == [dp] * len(one.numbers)
            assert (one.targets, one.samples) == ([sum(lengths[i] - 3 for i in mini)], 4)
            assert one.replayed == {n: k for k, n in enumerate(one.numbers) if n in (0, 1, 4)}
            cells = [{one.numbers[at] for at in cell.samples} for row in one.rounds for cell in row]
            planned = [row[dp].samples for row in plan.rounds]
            assert cells == [{mini[i] for i in some} for some in planned]

    first = batch.name
    del batch, here, one
    scatterer.samples(samples, told)  # type: ignore[arg-type]
    scatterer.samples(samples, told)  # type: ignore[arg-type]
    forgotten = [how["forget"] for how in told.how]
    assert forgotten[:2] == [[], [first]]
    assert first not in forgotten[2]


def test_modelled_times_are_of_all_mini_batches() -> None:
    plans = [Plan([], 1, PlanTime(*times)) for times in ((4.0, 3.0, 5.0), (6.0, 2.0, 10.0))]
    assert scatter._modelled(plans) == {"plan/time_over_bound": 2.0, "plan/static_over_time": 1.5}
    assert scatter._modelled([*plans, Plan([], 1, PlanTime(1.0, 0.5, None))]) == {"plan/time_over_bound": 2.0}
    assert scatter._modelled([Plan([])]) == {}
