"""The load of experts: what is counted, when the stored bias moves, and that it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.engine.balance import RowLoad, load_metrics, move_biases
from tests.oracle.cases import Case
from tests.oracle.data import TEMPERATURE, trained_tokens
from tests.oracle.lora import written
from tests.oracle.ranks import Objective, Piece, Training, pieces, share

CHOSEN = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()


def test_each_real_token_counts_once():
    row = RowLoad((2,), torch.tensor([True, True, False]))
    for _ in range(2):  # as in recomputation
        row.take(2, CHOSEN)
    row.take(4, CHOSEN)  # another's layer, such as one for multi-token prediction
    assert {layer: counts.tolist() for layer, counts in row.counts.items()} == {2: [1, 2, 1, 0]}


def test_the_bias_moves_towards_the_mean():
    router = SimpleNamespace(layer_number=2, expert_bias=torch.tensor([0.5, 0.5, 0.5, 0.5]))
    ahead = SimpleNamespace(layer_number=3, expert_bias=torch.tensor([0.5]))
    without = SimpleNamespace(layer_number=1, expert_bias=None)
    move_biases((router, ahead, without), torch.tensor([[9, 0, 0, 0], [1, 2, 5, 0]]), 0.25)
    assert router.expert_bias.tolist() == [0.75, 0.5, 0.25, 0.75]
    assert ahead.expert_bias.tolist() == [0.5]


def test_what_is_told_of_load():
    counts = torch.tensor([[0, 0, 0, 0], [1, 2, 5, 0], [2, 2, 2, 2]])
    assert load_metrics(counts, (1, 2)) == {
        "experts/load": 2.5,
        "experts/idle": 1.0,
        "experts/load_1": 2.5,
        "experts/idle_1": 1.0,
        "experts/load_2": 1.0,
        "experts/idle_2": 0.0,
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
    engine.forward_backward(mine, cells, Objective("lm", trained_tokens(0)), TEMPERATURE)
    assert engine._counts.sum() == 3 * 2 * sum(len(one) for one in mine["input_ids"].unbind())
    next(engine.model.parameters()).main_grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the gradient norm is nan"):
        engine.optimizer_step()
    assert all(torch.equal(before[name], one) for name, one in biases(pieces(engine, "param")).items())


def test_the_bias_moves_after_a_step(pool, tmp_path):
    pool.run(steps_not_taken, 1, BIASED, written(BIASED, tmp_path))
