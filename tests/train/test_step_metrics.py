"""What a step tells the observer: whatever a reward function returns, the run's own numbers stay its own."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.expert_load import ExpertLoad
from quintet.algorithms.kl import mismatch
from quintet.controller.messages import MiniBatchTold, OptimizerTold, SampleInfo
from quintet.controller.progress_bar import watched
from quintet.controller.samples import Samples
from quintet.observe.progress import Progress
from quintet.rewards.result import RewardResult, means
from quintet.train.step_metrics import record
from quintet.train.steps import Step, Update


@pytest.fixture
def samples() -> Samples:
    """Two samples of one prompt, scored by a function that returns numbers under names of ours."""
    prompt = SimpleNamespace(text="1+1=", answer="2")
    made = [SampleInfo(7, 3, "stop", "2", -0.5, -0.75), SampleInfo(9, 5, "length", "3", -1.5, -2.5)]
    said = {"loss": 99.0, "tokens": 99.0, "lr": 99.0, "mean": 99.0, "prompt": 99.0, "well_formed": 1.0}
    rewards = [RewardResult(float(right), dict(said)) for right in (1, 0)]
    return Samples([prompt], [0, 0], made, [(0, 0), (0, 1)], rewards)  # type: ignore[list-item]


def test_a_rewards_numbers_replace_none_of_the_runs(samples: Samples) -> None:
    tally = Tally()
    tally.add({name: torch.zeros(4) for name in ("entropy", "clip_low", "clip_high")}, torch.ones(4))
    tally.add(mismatch(torch.zeros(4), torch.zeros(4), torch.ones(4), 0.5), torch.ones(4))
    told: dict[str, Any] = {}
    session = SimpleNamespace(
        controller=SimpleNamespace(
            memory=lambda: {"memory/host_gib": 2.0, "memory/device_gib": 30.0},
            handover=SimpleNamespace(metrics={}),
            counted=lambda: {"rollout/accepted_fraction": 0.5},
        ),
        observer=SimpleNamespace(
            step=lambda step, metrics, total: told.update(metrics),
            samples=lambda step, rows: told.update(rows=rows),
        ),
        recipe=SimpleNamespace(
            train=SimpleNamespace(steps=1),
            run=SimpleNamespace(samples_logged_per_step=1),
            reward=SimpleNamespace(function="math"),
        ),
    )
    step = Step(1, samples, samples.rewards)
    step.add("policy", [MiniBatchTold(0.2, tally), MiniBatchTold(0.05, Tally())], OptimizerTold(1.5, 1e-3))
    record(session, step)  # type: ignore[arg-type]
    wanted = {
        "loss": 0.25,
        "lr": 1e-3,
        "tokens": 16,
        "tokens_trained": 8,
        "reward/mean": 0.5,
        "reward/timed_out": 0,
        "reward/failed": 0,
        "well_formed": 1.0,
    }
    wanted |= {"reward/loss": 99.0, "reward/tokens": 99.0, "memory/device_gib": 30.0}
    assert {key: told[key] for key in wanted} == wanted
    (row,) = told["rows"]
    assert (row["prompt"], row["response"], row["reward"]) == ("1+1=", "2", 1.0)
    assert row["metrics"]["prompt"] == 99.0
    assert "accuracy" not in told


def test_the_load_of_experts_is_of_all_mini_batches() -> None:
    """One sends all to the first expert, the other all to the second: each alone looks collapsed, the step is even."""
    update = Update()
    for sent in ([8.0, 0.0], [0.0, 8.0]):
        tally = Tally()
        tally.add({"entropy": torch.zeros(4)}, torch.ones(4))
        load = ExpertLoad((3,), torch.tensor([sent], dtype=torch.float64), {"experts/z_loss": sent[0]})
        update.add([MiniBatchTold(0.2, tally)], OptimizerTold(1.5, 1e-3, load=load))
    even = {"experts/load": 1.0, "experts/idle": 0.0, "experts/load_3": 1.0, "experts/idle_3": 0.0}
    assert update.metrics == even | {"experts/z_loss": 4.0}


def test_loss_and_gradient_norm_are_means_over_mini_batches() -> None:
    """A norm that only the first had is seen."""
    update = Update()
    for loss, norm, lr in ((1.0, 9.0, 2e-3), (3.0, 1.0, 1e-3)):
        update.add([MiniBatchTold(loss, Tally())], OptimizerTold(norm, lr))
    assert (update.loss, update.grad_norm, update.lr) == (2.0, 5.0, 1e-3)


def test_accuracy_is_of_what_the_reward_calls_correct(samples: Samples) -> None:
    """Partial credit, penalties and large rewards are rewards; a sample of which nothing is said is not correct."""
    said = [(5.0, True), (5.0, False), (-1.0, None), (0.25, None)]
    samples.rewards = [RewardResult(reward, {"words": 2.0}, correct) for reward, correct in said]
    samples.prompts, samples.groups = [samples.prompts[0]] * 2, [0, 1, 1, 1]
    assert means(samples.rewards) == {"accuracy": 0.25, "reward/words": 2.0}
    assert (samples.mean(), samples.any_correct()) == (2.3125, 0.5)
    assert "accuracy" not in means([RewardResult(1.0)])


def test_what_could_not_be_scored_in_time_is_counted_and_named(samples: Samples) -> None:
    assert not list(samples.unscored("math"))
    samples.prompts[0] = SimpleNamespace(source="prompts.jsonl:17")  # type: ignore[call-overload]
    samples.rewards[1] = RewardResult(0.0, {}, timed_out=True)
    (said,) = samples.unscored("math")
    assert said == (
        "reward math: 1 of 2 responses took too long to score and got 0; the first is sample 1, '3', to prompts.jsonl:17"
    )


def test_what_could_not_be_scored_at_all_is_counted_and_named(samples: Samples) -> None:
    assert not list(samples.unscored("mine.py:reward"))
    samples.prompts[0] = SimpleNamespace(source="prompts.jsonl:17")  # type: ignore[call-overload]
    samples.rewards[0] = RewardResult(
        0.0, {}, failure="reward mine.py:reward raised ValueError: no\n  prompt: …"
    )
    (said,) = samples.unscored("mine.py:reward")
    assert said == (
        "reward mine.py:reward: 1 of 2 responses could not be scored and got 0; the first is sample 0, '2', to "
        "prompts.jsonl:17: reward mine.py:reward raised ValueError: no"
    )


def test_only_work_that_takes_a_while_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.observe.progress.PLAIN_EVERY_S", 0.0)
    printed = io.StringIO()
    progress = Progress(Console(file=printed, width=200))
    counts = iter([3, 8])
    with watched(progress, "rollout", 10, "sequences", lambda: next(counts)):
        time.sleep(0.01)
    assert printed.getvalue() == ""
    with watched(progress, "rollout", 10, "sequences", lambda: next(counts)) as watch:
        watch()
        watch()
    assert [line.split(",")[0] for line in printed.getvalue().splitlines()] == [
        "rollout: 3/10 sequences",
        "rollout: 8/10 sequences",
    ]
