"""What verify-resume makes of two runs: the verdict, and the first difference named."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.cli.verify_resume import _check_layout
from quintet.diagnose.verify import Outcome, Step, _run, first_difference, judge
from quintet.errors import UserError
from quintet.recipe.schema import Recipe


def run(*losses: float, samples: str = "ab", grad: float = 1.0) -> list[Step]:
    """One step of SFT and then steps of RL with these losses."""
    warm_up = Step("sft", 1, {"loss": 2.0, "grad_norm": 1.0}, "")
    steps = [
        Step("rl", n, {"loss": loss, "reward/mean": 0.5, "grad_norm": grad}, samples)
        for n, loss in enumerate(losses, start=1)
    ]
    return [warm_up, *steps]


def outcome(
    straight: list[Step], resumed: list[Step], weights: tuple[tuple[str, float], ...] = ()
) -> Outcome:
    return Outcome(straight, resumed, list(weights), ("f", "g" if weights else "f"), "rl", 2)


class Killed:
    """A process that ends before it does anything."""

    exitcode = -9

    def __init__(self, **how: Any) -> None:
        pass

    def start(self) -> None:
        pass

    join = start


def test_a_run_that_is_killed_before_it_says_anything_is_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: SimpleNamespace(Process=Killed))
    with pytest.raises(UserError, match=r"(?s)a run of verify-resume failed:.*exit code is -9.*run\.log"):
        _run(Recipe(), "train", None, tmp_path / "run.log")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("same_layout", [False, True])
def test_what_is_lost_on_the_way_differs_whatever_the_steps_say(gpu, same_layout):
    found = outcome(STRAIGHT, STRAIGHT)
    found.state.append("optimizer.state.exp_avg.decoder.weight is not the same")
    sound, words = judge(found, same_layout=same_layout, gpu=gpu, bf16=gpu)
    assert not sound
    assert words.startswith(
        "differs: right after loading, against what was saved: optimizer.state.exp_avg.decoder"
    )


@pytest.mark.parametrize(
    "key", ["train.steps=5", "checkpoint.every_steps=1", "run.dir=x", "engine.megatron.x=1"]
)
def test_a_layout_is_where_and_how_it_is_computed_and_no_more(key):
    _check_layout(["layout.tp=2", "rollout.layout.tp=1", "cluster.ranks=4", "engine={}"])
    with pytest.raises(UserError, match=f"--layout {key}: "):
        _check_layout([key])


STRAIGHT = run(1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("same_layout", [False, True])
def test_the_same_is_identical_everywhere(gpu, same_layout):
    sound, words = judge(
        outcome(STRAIGHT, run(1.0, 2.0, 3.0, 4.0)), same_layout=same_layout, gpu=gpu, bf16=False
    )
    assert sound
    assert words.startswith("identical: ")


@pytest.mark.parametrize(
    ("resumed", "weights", "said"),
    [
        (run(1.0, 2.0, 3.0 + 1e-12, 4.0), (), "loss of rl step 3 is 3.0 straight through and 3.000000000001 resumed"),
        (run(1.0, 2.0, 3.0, 4.0, samples="cd"), (), "the samples of rl step 1"),
        (run(1.0, 2.0, 3.0), (), "5 steps straight through and 4"),
        (STRAIGHT, (("a.weight", 1e-9), ("b", 1.0)), "at first a.weight (by up to 1.0e-09), of 2 tensors"),
        (run(1.0, 2.0, float("nan"), 4.0), (), "loss of rl step 3"),
    ],
)  # fmt: skip
def test_on_a_cpu_any_difference_is_one_and_the_first_is_named(resumed, weights, said):
    sound, words = judge(outcome(STRAIGHT, resumed, weights), same_layout=True, gpu=False, bf16=False)
    assert not sound
    assert said in words
    assert said in first_difference(outcome(STRAIGHT, resumed, weights))


@pytest.mark.parametrize(
    ("resumed", "bf16", "sound"),
    [
        (run(1.0, 2.0, 3.0 + 2e-6, 4.0 + 2e-4), False, True),  # relative to losses above 1
        (run(1.0, 2.0, 3.0 + 9e-6, 4.0), False, False),
        (run(1.0, 2.0, 3.0, 4.0 + 9e-4), False, False),
        (run(1.0, 2.0, 3.0, float("nan")), False, False),
        ([*STRAIGHT[:3], Step("rl", 3, {"loss": 3.0, "grad_norm": 99.0}, "ab"), STRAIGHT[4]], False, False),
        ([*STRAIGHT[:3], Step("rl", 3, {"loss": 3.0, "grad_norm": 1.0001}, "ab"), STRAIGHT[4]], False, True),
        (run(1.0, 2.0, 3.01, 4.01), True, True),
        (run(1.0, 2.0, 3.5, 4.0), True, False),
        ([*STRAIGHT[:4], Step("rl", 4, {"loss": 9.0, "grad_norm": 1.0}, "other")], False, True),
        ([*STRAIGHT[:3], Step("rl", 3, {"loss": 3.0, "grad_norm": 1.0}, "other"), STRAIGHT[4]], False, False),
    ],
)
def test_another_layout_may_round_as_long_as_the_samples_are_the_same(resumed, bf16, sound):
    found, words = judge(outcome(STRAIGHT, resumed, (("w", 1e-8),)), same_layout=False, gpu=False, bf16=bf16)
    assert (found, words.startswith("differs")) == (sound, not sound)


@pytest.mark.parametrize(
    ("resumed", "sound"),
    [
        (run(1.0, 2.0, 3.0 + 1e-3, 9.0), True),  # later steps have learnt from other samples
        (run(1.0, 2.0, 3.1, 4.0), False),
        (run(1.0, 2.0, float("nan"), 4.0), False),
        (run(1.02, 2.0, 3.1, 4.0), True),  # what is computed twice parts as much before the save
    ],
)
def test_gpus_may_part_by_a_stated_bound(resumed, sound):
    found, words = judge(outcome(STRAIGHT, resumed, (("w", 1e-3),)), same_layout=True, gpu=True, bf16=True)
    assert found == sound
    assert "allowed: " in words
