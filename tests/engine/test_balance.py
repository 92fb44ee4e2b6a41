"""The load of experts: what is counted, when the stored bias moves, and that it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from quintet.algorithms.expert_load import ExpertLoad
from quintet.engine.balance import Load, RouterLosses, RowLoad, move_biases
from quintet.engine.checkpoint.slots import slots
from quintet.engine.engine import Engine
from quintet.engine.layers.router import Router
from quintet.engine.routes import Routers
from quintet.errors import UserError
from quintet.models import MoeShape
from tests.oracle.balance_mistakes import moved_first
from tests.oracle.cases import Case
from tests.oracle.data import TEMPERATURE, trained_tokens
from tests.oracle.lora import written
from tests.oracle.ranks import Objective, Piece, Training, engine_of, pieces, share

CHOSEN = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()


def test_each_real_token_counts_once():
    load = Load(6, MoeShape(experts=4, top_k=2, ffn_hidden_size=8), torch.device("cpu"))
    row = RowLoad(load, (2,), torch.tensor([True, True, False]), torch.zeros(3).long(), torch.ones(1), [])
    weights = torch.rand(3, 4)
    for _ in range(2):  # as in recomputation
        assert row.count(2, "softmax", torch.zeros(3, 4), weights, CHOSEN) is weights
    row.count(4, "softmax", torch.zeros(3, 4), weights, CHOSEN)  # another's, as of multi-token prediction
    assert load.total.tolist() == [[0] * 6] * 2 + [[1, 2, 1, 0, 0, 0]] + [[0] * 6] * 3


def added(owner: list[int]) -> Tensor:
    """What the tokens of a row, of these samples and -1 of padding, add to counts and losses; asserts that no other has a gradient."""
    losses = RouterLosses(1.0, 1.0, torch.tensor([3, 7, 2]), 8, 2)
    load = Load(3, MoeShape(experts=4, top_k=2, ffn_hidden_size=8), torch.device("cpu"), losses)
    real = torch.tensor(owner) >= 0
    micro: Any = SimpleNamespace(owner=torch.tensor(owner), real=real)
    row = load.next(micro, Routers((2,), 1, 0, torch.device("cpu")), None)
    weights, logits = torch.ones(5, 4, requires_grad=True), torch.arange(20.0).view(5, 4).requires_grad_()
    weights, used = weights[: len(owner)], logits[: len(owner)]
    row.count(2, "softmax", used, weights, (used % 3 > 0).detach()).sum().backward()
    assert torch.equal(logits.grad.any(1)[: len(owner)], real)
    return load.total


def test_padding_adds_nothing_to_a_row():
    assert not added([-1, -1]).any()
    assert torch.equal(added([0, 0, 2, -1, -1]), added([0, 0, 2]))
    assert added([0, 0, 2])[2].all()


def test_the_bias_moves_towards_the_mean():
    router = SimpleNamespace(layer_number=2, expert_bias=torch.tensor([0.5, 0.5, 0.5, 0.5]))
    ahead = SimpleNamespace(layer_number=3, expert_bias=torch.tensor([0.5]))
    without = SimpleNamespace(layer_number=1, expert_bias=None)
    move_biases((router, ahead, without), torch.tensor([[9, 0, 0, 0], [1, 2, 5, 0]]), 0.25)
    assert router.expert_bias.tolist() == [0.75, 0.5, 0.25, 0.75]
    assert ahead.expert_bias.tolist() == [0.5]
    move_biases((router,), torch.tensor([[0] * 4, [1, 1, 2, 2]]), 0.25)  # the mean is no whole number
    assert router.expert_bias.tolist() == [1.0, 0.75, 0.0, 0.5]


def test_what_is_told_of_load():
    total = torch.tensor(
        [[0, 0, 0, 0, 0, 0], [1, 2, 5, 0, 0.5, 7], [2, 2, 2, 2, 1.5, 1]], dtype=torch.float64
    )
    told = ExpertLoad.of(total, (1, 2), ["experts/aux_loss"])
    assert told.metrics() == {
        "experts/load": 2.5,
        "experts/idle": 1.0,
        "experts/load_1": 2.5,
        "experts/idle_1": 1.0,
        "experts/load_2": 1.0,
        "experts/idle_2": 0.0,
        "experts/aux_loss": 2.0,
    }
    other = torch.tensor(
        [[0, 0, 0, 0, 0, 0], [7, 0, 0, 0, 1.5, 7], [0, 2, 2, 4, 0.5, 1]], dtype=torch.float64
    )
    assert (told + ExpertLoad.of(other, (1, 2), ["experts/aux_loss"])).metrics() == {
        "experts/load": 8 / 3.75,
        "experts/idle": 1.0,
        "experts/load_1": 8 / 3.75,
        "experts/idle_1": 1.0,
        "experts/load_2": 1.5,
        "experts/idle_2": 0.0,
        "experts/aux_loss": 2.0,
    }


BIASED = Case("deepseek_v3", expert_bias=True)


def biases(found: list[Piece]) -> dict[str, Tensor]:
    return {name: piece for name, _, piece in found if name.endswith("correction_bias")}


def trained_and_saved(case: Case, path: Path, directory: Path) -> dict[str, Tensor]:
    """On one rank: its biases after two steps, which are saved."""
    training = Training(case, path)
    for batch in (0, 1):
        training.step(batch)
    training.engine.save(directory)
    return biases(pieces(training.engine, "param"))


def resumed(case: Case, path: Path, directory: Path) -> dict[str, Tensor]:
    training = Training(case, path)
    training.engine.load(directory)
    return biases(pieces(training.engine, "param"))


def test_the_bias_is_saved(pool, tmp_path):
    """Of two stages, for another layout to load."""
    path = written(BIASED, tmp_path)
    first = pool.run(trained_and_saved, 2, replace(BIASED, pp=2), path, tmp_path / "saved")
    again = pool.run(resumed, 2, replace(BIASED, dp=2, ep=2), path, tmp_path / "saved")
    want = first[0] | first[1]
    assert len(want) == 3
    for found in again:
        assert all(torch.equal(found[name], one) for name, one in want.items())
    (before,) = pool.run(start, 1, BIASED, path)
    assert all((before[name] != one).sum() >= 6 for name, one in want.items())


def start(case: Case, path: Path) -> dict[str, Tensor]:
    return biases(pieces(Training(case, path).engine, "param"))


def steps_not_taken(case: Case, path: Path) -> None:
    """On one rank: neither a pass without gradients nor a step that cannot be taken moves the bias."""
    engine: Any = Training(case, path).engine
    mine, cells, _ = share(engine, 0)
    before = biases(pieces(engine, "param"))
    engine.forward(mine, cells, TEMPERATURE)
    assert engine._counts is None
    graphs: list[bool] = []
    for module in engine.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    engine.forward_backward(mine, cells, Objective("lm", trained_tokens(0)), TEMPERATURE)
    assert graphs.count(True) == graphs.count(False) == 3 * len(cells)  # the pass before has no gradients
    assert engine.expert_load().losses.keys() == {"experts/aux_loss"}
    assert engine._counts[:, :-2].sum() == 3 * 2 * sum(len(one) for one in mine["input_ids"].unbind())
    next(engine.model.parameters()).main_grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the gradient norm is nan"):
        engine.optimizer_step()
    after = biases(pieces(engine, "param"))
    assert all(torch.equal(before[name], one) for name, one in after.items()), "the bias has moved"


def moved_before_a_step(case: Case, path: Path) -> None:
    step = Engine.optimizer_step
    with (
        mock.patch.object(Engine, "optimizer_step", lambda engine: moved_first(step, engine)),
        pytest.raises(AssertionError, match="the bias has moved"),
    ):
        steps_not_taken(case, path)


@pytest.mark.parametrize("run", [steps_not_taken, moved_before_a_step])
def test_the_bias_moves_after_a_step(pool, tmp_path, run):
    """And where it would move before, that is seen."""
    case = replace(BIASED, aux_loss="batch")
    pool.run(run, 1, case, written(case, tmp_path))


def collapsed(case: Case, path: Path) -> dict[str, list[float]]:
    """On one rank: the busiest expert over the mean, and the z-loss where there is one, at each step of a model whose routers send
    everything to two of eight experts."""
    steps, engine = 60, Training(case, path).engine
    with torch.no_grad():
        # What all tokens have in common, and two experts answer to.
        common = torch.linspace(-1, 1, engine.shape.hidden_size).sign()
        embedding = engine.model.embedding.word_embeddings.weight
        embedding.add_(2 * embedding.std() * common)
        for module in engine.model.modules():
            if isinstance(module, Router):
                module.weight[:2] += 6 * common / len(common)
    engine.start_optimizer(case.optimizer_recipe.model_copy(update={"clip_grad_norm": None}), steps)
    mine, cells, _ = share(engine, 0)
    told: list[dict[str, float]] = []
    for _ in range(steps):
        engine.forward_backward(mine, cells, Objective("lm", trained_tokens(0)), TEMPERATURE)
        engine.optimizer_step()
        told.append(engine.expert_load().metrics())
    return {name: [one[name] for one in told if name in one] for name in ("experts/load", "experts/z_loss")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3_moe", [{"aux_loss": "sequence"}, {"aux_loss": "batch"}]),
        ("glm4_moe", [{"expert_bias": True}]),
    ],
)
def test_collapsed_routers_recover(pool, tmp_path, family, ways):
    """With each way to balance them, and not without, nor by the z-loss, which brings their logits down."""
    path = written(Case(family), tmp_path)

    def loads(**how: Any) -> list[float]:
        (told,) = pool.run(collapsed, 1, Case(family, **how), path)
        if "z_loss" in how:
            assert told["experts/z_loss"][-1] < told["experts/z_loss"][0] / 200
        return told["experts/load"]

    stays = loads()
    assert min(stays) > 3.3
    for how in ways:
        recovers = loads(**how)
        assert recovers[0] == stays[0] > 3.9
        assert max(recovers[-5:]) < 1.7
    assert min(loads(z_loss=True)) > 1.9


FROZEN = Case("qwen3_moe", frozen=".mlp.gate", distributed_optimizer=True)


def frozen_state(case: Case, path: Path, directory: Path) -> tuple[int, int]:
    """On one rank: elements of gradient buffers and of the optimizer's state, after a step that is saved."""
    training = Training(case, path)
    training.step(0)
    engine: Any = training.engine
    routers = [m for m in engine.model.modules() if isinstance(m, Router)]
    assert all((not hasattr(m.weight, "main_grad")) == bool(case.frozen) for m in routers)
    with pytest.raises(UserError, match=r"the engine was made with optimizer\.frozen"):
        engine.start_optimizer(case.optimizer_recipe.model_copy(update={"frozen": ["*norm.weight"]}), 1)
    engine.save(directory)
    held = list(slots(engine._optimizer, [p for c in engine.chunks for p in c.parameters()]))
    parameters = {id(p) for chunk in engine._wrapped for b in chunk.buffers for p in b.params}
    return len(parameters), len({id(one.parameter) for one in held})


def loaded(case: Case, path: Path, directory: Path) -> list[Piece]:
    training = Training(case, path)
    training.engine.load(directory)
    training.step(1)
    return pieces(training.engine, "param")


def test_frozen_weights_have_no_state(pool, tmp_path):
    """No gradient, no optimizer state; saved by one layout, another goes on."""
    path = written(FROZEN, tmp_path)
    (frozen,) = pool.run(frozen_state, 1, FROZEN, path, tmp_path / "saved")
    (whole,) = pool.run(frozen_state, 1, replace(FROZEN, frozen=""), path, tmp_path / "whole")
    assert [a - b for a, b in zip(whole, frozen, strict=True)] == [4, 4]
    (one,) = pool.run(loaded, 1, FROZEN, path, tmp_path / "saved")
    two = pool.run(loaded, 2, replace(FROZEN, pp=2), path, tmp_path / "saved")
    after = {name: piece for rank in two for name, _, piece in rank}
    for name, _, piece in one:
        torch.testing.assert_close(after[name], piece, rtol=1e-4, atol=1e-5)


def unmatched(case: Case, path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no weight in training matches '\*mlp.router.weight'.*mlp.gate.weight"
    ):
        Training(replace(case, frozen="mlp.router"), path)
    stage = ["model.layers.[23].*", "model.norm.weight", "lm_head.weight"]
    settings = case.optimizer_recipe.model_copy(update={"frozen": stage})
    with pytest.raises(UserError, match=r"leaves rank [01] of this layout no weight"):
        engine_of(case, path, optimizer=settings)


def test_patterns_that_freeze_nothing_or_all_are_refused(pool, tmp_path):
    pool.run(unmatched, 2, replace(FROZEN, pp=2), written(FROZEN, tmp_path))
