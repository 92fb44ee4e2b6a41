"""Requests are dealt by what the run has seen, and a run that goes on deals them as one that was let be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quintet.controller import controller
from quintet.controller.dealing import deal
from quintet.errors import Stopped
from quintet.recipe.loader import load_recipe
from quintet.train.ppo import train
from tests.train.runs import ROOT, TINY

FEW = [
    *("data.task_options={digits: 1, min_digits: 1}", "train.prompts_per_step=64", "train.steps=3"),
    *("train.eval_prompts=4", "train.eval_every_steps=1", "checkpoint.every_steps=1"),
]
"""A hundred prompts at most: some come again in the second step, all in the third."""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_goes_on_deals_requests_as_one_that_was_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt: list[list[list[int]]] = []
    known: list[bool] = []

    def listening(count: int, rollouts: int, expected: Sequence[float] | None) -> list[list[int]]:
        dealt.append(deal(count, rollouts, expected))
        known.append(expected is not None)
        return dealt[-1]

    monkeypatch.setattr(controller, "deal", listening)
    recipe = ROOT / "recipes" / "laptop_demo.yaml"
    train(load_recipe(recipe, [*TINY, *FEW, f"run.dir={tmp_path / 'straight'}"]))
    straight, seen = dealt.copy(), known.copy()
    # Sampled and greedy evaluations before and after each step; what is kept for replay in the end.
    assert seen == [False, True, False, True, True, True, True, True, True, True, True, False]

    dealt.clear()
    split = [*TINY, *FEW, f"run.dir={tmp_path / 'split'}"]
    with pytest.raises(Stopped):
        train(load_recipe(recipe, split), stop_after=2)
    train(load_recipe(recipe, [*split, "resume=auto"]))
    assert dealt == straight
