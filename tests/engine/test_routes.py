"""Routes that are told and heard: what the token dispatcher gets, token by token, and what is refused."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from quintet.engine.routes import LayerRoutes, RecordedRoutes, ReplayedRoutes, Routers, RowRoutes, expert_type
from quintet.errors import QuintetError
from quintet.recipe.derived import moe_layers_of
from tests.oracle.cases import Case
from tests.oracle.data import TEMPERATURE, routes, trained_tokens
from tests.oracle.lora import written
from tests.oracle.ranks import Objective, engine_of, share


def top(scores: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
    values, indices = scores.topk(topk)
    return values, indices


SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.7, 0.1, 0.6, 0.3], [0.2, 0.4, 0.1, 0.8]])


def test_what_is_prescribed_is_chosen_with_the_scores_of_now():
    told = torch.tensor([[2, 0], [2, 0], [2, 0]], dtype=torch.uint8)
    there = torch.tensor([True, True, False])
    row = RowRoutes((1, 3), torch.stack((torch.zeros_like(told), told), 1), there, keep=True)
    scores = SCORES.clone().requires_grad_()
    values, chosen = LayerRoutes(row, 3).get_replay_topk(scores, 2, None, None, top)
    assert chosen.tolist() == [[2, 0], [2, 0], [3, 1]]
    assert torch.equal(values, SCORES.gather(1, chosen))
    values.sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(SCORES).scatter(1, chosen, 1.0))
    assert row.parted[3] == 1  # the second chooses these two by itself, the third is told nothing
    assert row.heard[3].dtype == torch.uint8
    LayerRoutes(row, 3).get_replay_topk(1 - SCORES, 2, None, None, top)  # as in recomputation
    assert row.parted[3] == 1
    assert torch.equal(row.heard[3].long(), chosen)
    assert row.of(2) is None


def test_routes_of_other_tokens_are_refused():
    row = RowRoutes((0,), torch.zeros(1, 1, 2), torch.ones(1).bool())
    with pytest.raises(ValueError, match=r"layer 0: routes \[1, 2\] for choices \[3, 2\]"):
        LayerRoutes(row, 0).get_replay_topk(SCORES, 2, None, None, top)


def test_records_are_replayed_by_micro_batch_and_slice():
    """The second of two slices of a row, of which the last token is padding."""
    routers, micro = Routers((1, 3), 2, 1, torch.device("cpu")), SimpleNamespace(real=torch.arange(6) < 5)
    record = RecordedRoutes()
    for number, row in enumerate([record.next(micro, routers) for _ in range(2)]):
        for layer in routers.layers:
            row.of(layer).get_replay_topk(SCORES.roll(number + layer, 0), 2, None, None, top)
    record.finish(routers)
    replayed = ReplayedRoutes(record)
    for number, row in enumerate([replayed.next(micro, routers) for _ in range(2)]):
        expected = [SCORES.roll(number + layer, 0).topk(2).indices for layer in routers.layers]
        assert torch.equal(row.prescribed.long(), torch.stack(expected, 1))
        assert row.prescribed_to.tolist() == [True, True, False]
        row.of(1).get_replay_topk(SCORES, 2, None, None, top)
    with pytest.raises(QuintetError, match=r"routers of 1 of 2 layers .* those of the layers \[3\] were not"):
        replayed.finish(routers)


def test_types_are_the_smallest():
    assert (expert_type(256), expert_type(257)) == (torch.uint8, torch.int16)


@contextlib.contextmanager
def dispatcher(engine: Any) -> Iterator[list[tuple[int, int, Any, Tensor]]]:
    """What the token dispatcher is asked for inside: layer, number and `MicroBatch` of a row, and its map [T, experts]."""
    from quintet.engine.layers.dispatch import Dispatcher
    from quintet.engine.layers.layer import PackedMoELayer

    rows, heard, now = engine._pipeline.rows, [], []
    real_compute, real_dispatch = PackedMoELayer._compute, Dispatcher.__call__

    def numbered(*args: Any) -> Any:
        for number, (micro, row) in enumerate(rows(*args)):
            row.number, row.micro = number, micro
            yield micro, row

    def compute(layer: Any, hidden: Tensor, row: Any) -> Any:
        now[:] = [layer.layer_number - 1, row.number, row.micro]
        return real_compute(layer, hidden, row)

    def dispatch(self: Any, experts: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Any:
        heard.append((*now, chosen.clone()))
        return real_dispatch(self, experts, tokens, weights, chosen)

    with (
        mock.patch.object(engine._pipeline, "rows", numbered),
        mock.patch.object(PackedMoELayer, "_compute", compute),
        mock.patch.object(Dispatcher, "__call__", dispatch),
    ):
        yield heard


def dispatched(case: Case, path: Path, everywhere: bool = False) -> tuple[int, int, Counter[tuple[int, int]]]:
    """On one rank, in a log-prob pass and an update: how many choices of (token, layer) the dispatcher got that a rollout told of,
    how many of all were wrong, and how often it was asked by layer and micro-batch. everywhere: a mistake, tokens that no route is
    told of take what stands in its place."""
    from quintet.engine.routes import BatchRoutes

    class Told(BatchRoutes):
        def _row(self, *args: Any) -> RowRoutes:
            row = super()._row(*args)
            assert row.prescribed_to is not None
            return replace(row, prescribed_to=torch.ones_like(row.prescribed_to)) if everywhere else row

    engine = engine_of(case, path)
    mine, cells, samples = share(engine, 0, case.mixed)
    shape, mesh = engine.shape, engine.mesh
    told = routes(0, len(shape.moe_layers), shape.moe.experts, shape.moe.top_k)
    with dispatcher(engine) as heard:
        engine.forward(mine, cells, TEMPERATURE, Told(mine["routes"]))
        once = len(heard)
        told_again = Told(mine["routes"])
        engine.forward_backward(mine, cells, Objective("lm", trained_tokens(0)), TEMPERATURE, (), told_again)
    seen = wrong = 0
    for layer, _, micro, map in heard:
        slices, part = (mesh.sizes.tp, mesh.at("tp")) if case.sp else (1, 0)
        owners, positions = (t.chunk(slices)[part].tolist() for t in (micro.owner, micro.positions))
        for chosen, owner, position in zip(map, owners, positions, strict=True):
            if owner >= 0 and position < len(told[samples[owner]]):
                want = told[samples[owner]][position][shape.moe_layers.index(layer)]
                seen += 1
                wrong += sorted(want.tolist()) != chosen.nonzero()[:, 0].tolist()
            else:
                wrong += int(chosen.sum()) != shape.moe.top_k
    asked = Counter((layer, number) for layer, number, *_ in heard)
    assert len(asked) == once
    mine_layers = moe_layers_of(engine.layout, shape, mesh.at("pp"))
    assert {layer for layer, _ in asked} == set(mine_layers)
    return seen, wrong, asked


def dispatched_anew(case: Case, path: Path, near_ties: bool = False) -> tuple[int, int, int]:
    """On one rank, in an update by other routers than those of the log-prob pass before: how often the dispatcher was asked by layer
    and micro-batch, in how many tokens of a sample it got other experts than in that pass, and in how many it would have. near_ties: of
    routers whose experts all have almost one score, before and after."""
    from quintet.engine.routes import RecordedRoutes, ReplayedRoutes

    engine, record = engine_of(case, path), RecordedRoutes()
    mine, cells, _ = share(engine, 0, case.mixed)
    objective = Objective("lm", trained_tokens(0))
    routers = [p.data for name, p in engine.model.named_parameters() if name.endswith("router.weight")]
    for router in routers:
        router.copy_(router[:1] + NEAR_TIE * router if near_ties else router)
    with dispatcher(engine) as before:
        engine.forward(mine, cells, TEMPERATURE, record)
    for router in routers:
        router.copy_(router.roll(1, 0))
    with dispatcher(engine) as natural:
        engine.forward(mine, cells, TEMPERATURE)
    with dispatcher(engine) as after:
        engine.forward_backward(mine, cells, objective, TEMPERATURE, (), ReplayedRoutes(record))
    slices, part = (engine.mesh.sizes.tp, engine.mesh.at("tp")) if case.sp else (1, 0)
    recorded = {(layer, number): map for layer, number, _, map in before}

    def other(heard: list[tuple[int, int, Any, Tensor]]) -> int:
        found = 0
        for layer, number, micro, map in heard:
            of_samples = micro.real.chunk(slices)[part]
            found += int((map != recorded[layer, number])[of_samples].any(-1).sum())
        return found

    (asked,) = set(Counter((layer, number) for layer, number, *_ in after).values()) or {0}
    return asked, other(after), other(natural)


NEAR_TIE = 1e-6
"""The part of its weights by which a router tells experts apart."""
LAYOUTS = [
    Case("deepseek_v3", pp=2, vpp=2, recompute="full"),
    Case("mixtral", pp=2, vpp=2, recompute="selective"),
    Case("qwen3_moe", tp=2, sp=True, cp=2, etp=2, mixed=True, recompute="full"),
    Case("qwen3_moe", tp=2, sp=True, ep=2, etp=1),
    Case("deepseek_v3", dp=2, ep=2),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_the_dispatcher_gets_what_was_told(pool, tmp_path, case):
    """Every token of every sample in every layer: in the log-prob pass, in the update, and where that is computed again."""
    path = written(case, tmp_path)
    found = pool.run(dispatched, case.ranks, case, path)
    assert [wrong for _, wrong, _ in found] == [0] * case.ranks
    again = case.recompute != "none"
    for _, _, asked in found:
        assert set(asked.values()) == {3 if again else 2}
    shape_layers = 3 if case.family == "deepseek_v3" else 4
    tokens = sum(len(one) for one in routes(0, 1, 8, 2))
    assert sum(seen for seen, _, _ in found) == tokens * shape_layers * (3 if again else 2)


RECORDED = [
    *LAYOUTS,
    Case("deepseek_v3", cp=2, cp_comm="all_to_all"),
    Case("qwen3_moe", tp=2, sp=True, dp=2, ep=2, etp=2, recompute="full"),
]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_the_dispatcher_gets_what_was_recorded(pool, tmp_path, case):
    """And would get other experts: the routers have changed since."""
    found = pool.run(dispatched_anew, case.ranks, case, written(case, tmp_path))
    assert [(asked, other) for asked, other, _ in found] == [(1 + (case.recompute != "none"), 0)] * case.ranks
    assert all(natural > 0 for *_, natural in found)


@pytest.mark.parametrize("case", LAYOUTS[1:4], ids=lambda case: case.name)
def test_near_ties_are_decided_once(pool, tmp_path, case):
    found = pool.run(dispatched_anew, case.ranks, case, written(case, tmp_path), near_ties=True)
    assert [other for _, other, _ in found] == [0] * case.ranks
    assert all(natural > 0 for *_, natural in found)


def test_tokens_without_routes_choose_by_themselves(pool, tmp_path):
    """No number shows it if they do not: what is computed of a sample's last token and of padding is not read."""
    case = Case("qwen3_moe")
    path = written(case, tmp_path)
    ((_, wrong, _),) = pool.run(dispatched, 1, case, path)
    assert wrong == 0
    ((_, wrong, _),) = pool.run(dispatched, 1, case, path, everywhere=True)
    assert wrong >= 2 * 4 * 8  # two passes, four layers, eight samples


def perturbed(case: Case, path: Path) -> dict[str, tuple[float, float]]:
    """On one rank, a rollout in bf16 and a trainer in fp32: the mean and the largest difference of a log-prob."""
    from quintet.data.batch import make_batch, tokens
    from quintet.engine.routes import RecordedRoutes, ReplayedRoutes
    from quintet.packing.plan import RankCell

    rollout, trainer = (
        engine_of(replace(case, dtype=dtype), path, trained=False) for dtype in ("bf16", "fp32")
    )
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(torch.randint(0, 61, (40, 100), generator=generator).unbind(), [1] * 40)
    cells = [RankCell([n]) for n in range(40)]
    on = tokens(batch, "loss_mask") > 0

    def logprobs(engine: Any, routes: Any = None) -> Tensor:
        return engine.forward(batch, cells, TEMPERATURE, routes).logprobs[on]

    chosen, own = RecordedRoutes(), RecordedRoutes()
    told, natural = logprobs(rollout, chosen), logprobs(trainer, own)
    pairs = {
        "off": (told, natural),
        "on": (told, logprobs(trainer, ReplayedRoutes(chosen))),
        "one and the same": (logprobs(rollout, ReplayedRoutes(own)), natural),
    }
    return {name: ((a - b).abs().mean().item(), (a - b).abs().max().item()) for name, (a, b) in pairs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "glm4_moe"])
def test_with_replay_rounding_is_all_that_parts_trainer_and_rollout(pool, tmp_path, family):
    """3960 tokens of weights of any size, near ties among them."""
    case = Case(family)
    (found,) = pool.run(perturbed, 1, case, written(case, tmp_path))
    assert found["on"][0] <= 1.3 * found["one and the same"][0]
    assert found["off"][0] > 1.3 * found["on"][0]


def calls(case: Case, path: Path) -> None:
    """On one rank: the switch is the call's, a record stays as it is, and what goes by unanswered is told."""
    from quintet.engine.layers.router import Router
    from quintet.engine.routes import BatchRoutes, RecordedRoutes, ReplayedRoutes

    engine = engine_of(case, path)
    mine, cells, _ = share(engine, 0)
    natural = engine.forward(mine, cells).logprobs
    told = BatchRoutes(mine["routes"])
    forced = engine.forward(mine, cells, routes=told).logprobs
    assert (forced - natural).abs().max() > 0.1
    parted = told.parted()
    assert list(parted) == [1, 2, 3]
    assert {total for _, total in parted.values()} == {len(mine["routes"].values())}
    assert all(other > 0.5 * total for other, total in parted.values())
    # The next call is told nothing: the reference, a critic, another phase.
    assert torch.equal(engine.forward(mine, cells).logprobs, natural)
    assert all(m.router_replay is None for m in engine.model.modules() if isinstance(m, Router))

    record = RecordedRoutes()
    assert torch.equal(engine.forward(mine, cells, routes=record).logprobs, natural)
    kept = [one.clone() for one in record.kept]
    # What passes the first layer with experts has met none before: its own choices are those of a pass that is told nothing.
    other = 0
    for (micro, _), one in zip(engine._pipeline.rows(mine, cells), kept, strict=True):
        want, there = micro.cut(mine["routes"], 0)
        other += int((one[there, 0].sort(-1)[0] != want[there, 0].sort(-1)[0]).any(-1).sum())
    assert parted[1][0] == other
    again = ReplayedRoutes(record)
    assert torch.equal(engine.forward(mine, cells, routes=again).logprobs, natural)
    assert all(other == 0 for other, _ in again.parted().values())
    engine.forward(mine, cells, routes=told.__class__(mine["routes"]))
    engine.forward_backward(mine, cells, Objective("lm", 1), routes=ReplayedRoutes(record))
    assert all(torch.equal(a, b) for a, b in zip(kept, record.kept, strict=True))
    assert {one.dtype for one in kept} == {torch.uint8}

    class Deaf(BatchRoutes):
        """The second layer's router is not answered."""

        def _row(self, *args: Any) -> RowRoutes:
            row = super()._row(*args)
            return replace(row, layers=(1, -1, 3))

    with pytest.raises(QuintetError, match=r"routers of 2 of 3 layers .* those of the layers \[2\] were not"):
        engine.forward(mine, cells, routes=Deaf(mine["routes"]))
    cut = torch.nested.nested_tensor_from_jagged(
        mine["routes"].values()[:, :2].contiguous(), mine["routes"].offsets()
    )
    with pytest.raises(ValueError, match=r"routes of 2 layers .* in the layers \[1, 2, 3\]"):
        engine.forward(mine, cells, routes=BatchRoutes(cut))


def test_the_switch_is_the_calls(pool, tmp_path):
    case = Case("deepseek_v3")
    pool.run(calls, 1, case, written(case, tmp_path))
