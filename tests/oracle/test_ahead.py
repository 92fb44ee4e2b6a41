"""Layers for multi-token prediction in training: they move nothing but themselves, and every rank of a cell enters them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet.recipe import schema
from tests.oracle.cases import Case
from tests.oracle.compare import assemble
from tests.oracle.data import AHEAD_WEIGHT, BATCHES, TEMPERATURE, ahead_counts
from tests.oracle.lora import written
from tests.oracle.pool import Pool, PoolError
from tests.oracle.ranks import Objective, Piece, engine_of, pieces, share

SPREAD = [
    Case("mimo", mtp=2, pp=2, dp=2, distributed_optimizer=True),
    Case("mimo", mtp=2, tp=2, sp=True, mtp_loss="self_distill"),
    Case("deepseek_v3", mtp=2, dp=2, ep=2),
]


class Nothing(Objective):
    """A policy loss of 0."""

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        share, quantities = super().__call__(outputs, fields)
        return 0 * share, quantities


def gradients(case: Case, path: Path) -> list[Piece]:
    """On one rank: gradients of a mini-batch whose policy loss is 0."""
    from quintet.engine.ahead import ahead_losses

    engine = engine_of(case, path)
    mine, cells, _ = share(engine, 0)
    counts = ahead_counts(0, engine.depths)
    ahead = ahead_losses(engine.mtp, counts)
    engine.forward_backward(mine, cells, Nothing("lm", counts[0]), TEMPERATURE, ahead)
    return pieces(engine, "main_grad")


def memory_for_logits(case: Case, path: Path) -> set[int]:
    """On one rank: how many bytes of logits a head may keep until the backward pass."""
    from quintet.engine import head

    given, parts = set(), head._parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_parts", lambda *of: (given.add(of[2]), parts(*of))[1])
        gradients(case, path)
    return given


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "heads"), [("cross_entropy", 3), ("self_distill", 1)])
def test_heads_that_keep_no_logits_leave_the_memory_to_the_models_own(
    pool: Pool, models: Path, loss: Any, heads: int
) -> None:
    from quintet.engine.head import KEPT_BYTES

    case = Case("mimo", mtp=2, mtp_loss=loss)
    (given,) = pool.run(memory_for_logits, 1, case, written(case, models))
    assert given == {KEPT_BYTES["cuda" if torch.cuda.is_available() else "cpu"] // heads}


def of_layers(name: str) -> bool:
    return "mtp_layers" in name or any(f".layers.{n}." in name for n in (4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_detached_layers_give_nothing_else_a_gradient(pool: Pool, models: Path, case: Case) -> None:
    found, _ = assemble(pool.run(gradients, case.ranks, case, written(case, models)))
    moved = {name for name, gradient in found.items() if gradient.any()}
    assert {name for name in found if of_layers(name)} - moved == set()
    assert {name for name in moved if not of_layers(name)} == set()


def scored(case: Case, path: Path) -> None:
    """On one rank: a pass that only scores, by an engine whose layers ahead may not be entered."""
    from quintet.engine.ahead import ahead_losses
    from quintet.engine.layers.mtp import MtpLayer

    engine = engine_of(case, path)
    mine, cells, _ = share(engine, 0)
    with mock.patch.object(MtpLayer, "forward", side_effect=AssertionError("entered")):
        engine.forward(mine, cells, TEMPERATURE)
        ahead = ahead_losses(engine.mtp, ahead_counts(0, engine.depths))
        with pytest.raises(AssertionError, match="entered"):
            engine.forward_backward(mine, cells, Objective("lm", 1), TEMPERATURE, ahead)


def test_scoring_leaves_the_layers_out(pool: Pool, models: Path) -> None:
    case = Case("mimo", mtp=2)
    pool.run(scored, 1, case, written(case, models))


def three_steps(case: Case, path: Path, settings: schema.Mtp) -> list[Piece]:
    """On one rank: weights after an Adam step on each batch."""
    from quintet.engine.ahead import ahead_losses

    engine = engine_of(case, path, mtp=settings)
    for batch in range(len(BATCHES)):
        mine, cells, _ = share(engine, batch)
        counts = ahead_counts(batch, case.mtp)
        objective = Objective("lm", counts[0])
        engine.forward_backward(mine, cells, objective, TEMPERATURE, ahead_losses(settings, counts))
        engine.optimizer_step()
    return pieces(engine, "param")


@pytest.mark.slow
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_the_policy_learns_the_same_with_and_without_them(pool: Pool, models: Path, case: Case) -> None:
    """Each step is clipped, the layers' gradients by their own norm; where they are not trained they stay as they were."""
    path = written(case, models)
    trained, frozen, other = (
        assemble(pool.run(three_steps, case.ranks, case, path, schema.Mtp(**settings)))
        for settings in (
            {"loss_weight": AHEAD_WEIGHT, "clip_grad_norm": 0.1, "loss": case.mtp_loss},
            {"train": False},
            {"loss_weight": 50.0, "clip_grad_norm": None},
        )
    )
    assert [copies.size for _, copies in (trained, frozen, other)] == [0.0] * 3
    before = load_file(path / "model.safetensors")
    for name, after in frozen[0].items():
        if of_layers(name):
            assert torch.equal(after, before[name])
            assert not torch.equal(after, trained[0][name]) or name.endswith("_bias")
        else:
            torch.testing.assert_close(trained[0][name], after, rtol=0, atol=1e-6)
            torch.testing.assert_close(other[0][name], after, rtol=0, atol=1e-6)


def with_adapters(case: Case, path: Path) -> list[Piece]:
    """On one rank: weights after a step that trains adapters alone."""
    from quintet.models.lora import LoraShape

    settings = schema.Mtp(train=False)
    engine = engine_of(case, path, mtp=settings, lora=LoraShape(rank=4, alpha=8.0))
    mine, cells, _ = share(engine, 0)
    for _ in range(2):  # in the first one, B is zero and A gets no gradient
        engine.forward_backward(mine, cells, Objective("lm", ahead_counts(0, 0)[0]), TEMPERATURE)
        engine.optimizer_step()
    return [(s.name, s.box, s.read().clone()) for s in engine.exported()]


def test_layers_stay_as_they_are_beside_adapters(pool: Pool, models: Path) -> None:
    case = Case("mimo", mtp=2, pp=2)
    path = written(case, models)
    after, copies = assemble(pool.run(with_adapters, case.ranks, case, path))
    assert copies.size == 0.0
    before = load_file(path / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert after.keys() == before.keys()
    assert moved
    assert all(".layers." in name and not of_layers(name) for name in moved)


def one_short_sample(case: Case, path: Path, skips: bool) -> dict[str, float]:
    """On one rank: a mini-batch of one target at the first depth and none at the second, on one rank of a cell."""
    from quintet.algorithms.aggregation import Tally
    from quintet.data.batch import make_batch, select
    from quintet.engine import pipeline
    from quintet.engine.ahead import ahead_losses, scores_ahead
    from quintet.packing.plan import RankCell

    def only_where_something_is_predicted(model: Any, states: Any, micro: Any, row: Any, losses: Any) -> Any:
        if any(len(one.predictors) for one in micro.targets[1:]):
            yield from scores_ahead(model, states, micro, row, losses)
            return
        nothing = states.normed.flatten()[:0]
        yield from ((nothing, nothing) for _ in losses)

    engine = engine_of(case, path)
    whole = make_batch([[5, 6, 7, 8]], [1], loss_mask=[[0.0, 1.0, 1.0, 0.0]])
    first = engine.mesh.at("dp") == 0
    cell = RankCell([0] if first else [], case.cp, engine.mesh.at("cp"))
    instead = only_where_something_is_predicted if skips else scores_ahead
    with mock.patch.object(pipeline, "scores_ahead", instead):
        result = engine.forward_backward(
            select(whole, [0] if first else []),
            [cell],
            Objective("lm", 2),
            TEMPERATURE,
            ahead_losses(engine.mtp, [2, 1, 0]),
        )
        engine.optimizer_step()
    return (Tally() if result is None else result.tally).means()


APART = [Case("mimo", mtp=2, pp=2, cp=2), Case("deepseek_v3", mtp=2, dp=2, ep=2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_ranks_that_predict_nothing_compute_their_layers(pool: Pool, models: Path, case: Case) -> None:
    """And where they do not, the run hangs in the layer, by name."""
    path = written(case, models)
    pool.run(int, case.ranks)  # its processes are there: what is timed is the run
    began = time.monotonic()
    found = pool.run(one_short_sample, case.ranks, case, path, False)
    took = time.monotonic() - began
    losses = [means["mtp/loss_1"] for means in found if means.get("mtp/loss_1")]
    assert len(losses) == 1
    assert not any(means.get("mtp/loss_2") for means in found)
    with pytest.raises(PoolError) as caught:
        pool.run(one_short_sample, case.ranks, case, path, True, timeout_s=2 + 2 * took)
    assert "layers/mtp.py" in str(caught.value)
