"""Reinforcement learning: the outer loop of the PPO family.

prompts → samples → rewards → advantages → mini-batches → optimizer steps → new rollout weights, and again
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from quintet.algorithms.advantages import grpo_advantages
from quintet.data.stream import PromptStream
from quintet.recipe.schema import Recipe
from quintet.train.agreement import agreement_metrics
from quintet.train.closing import closing_replay, stop_if_parted
from quintet.train.evaluate import evaluate
from quintet.train.fleet import StepResult
from quintet.train.objective import policy_objective
from quintet.train.replay import pack, replay_of
from quintet.train.samples import Samples
from quintet.train.session import Session, session
from quintet.train.sft import imitate


def train(recipe: Recipe, stop_after: int | None = None, again: Path | None = None) -> Path:
    """Train by reinforcement learning, after a warm-up by SFT if the recipe has one; returns the run directory.

    stop_after: save after this step and raise Stopped, as SIGTERM would have it. again: save what is loaded once more, to there.
    """
    with session(recipe, "train", stop_after, again) as s:
        if recipe.sft is not None and not s.saver.skips("sft"):
            imitate(s, recipe.sft, recipe.sft.optimizer)
        reinforce(s)
        run = s.finish()
        closing_replay(s, recipe.train.steps)  # only now: the model is written
        return run


def reinforce(s: Session) -> None:
    """The loop."""
    recipe, fleet, phase = s.recipe, s.fleet, s.observer.phase
    assert s.inputs.train is not None
    assert s.inputs.reward is not None
    stream = PromptStream(s.inputs.train, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    objective = policy_objective(recipe.algorithm, recipe.agreement)
    fleet.start_optimizer(recipe.optimizer, recipe.train.steps * recipe.train.mini_batches_per_step)
    done, _ = s.saver.begin("rl", stream)
    if done == 0:
        evaluate(s, 0)

    for step in range(done + 1, recipe.train.steps + 1):
        with phase("generate"), fleet.generating():
            prompts = stream.take(recipe.train.prompts_per_step)
            seed = f"{recipe.run.seed}/train/{step}"
            samples = fleet.generate(prompts, s.sampling(), recipe.rollout.samples_per_prompt, seed)
        with phase("reward"):
            rewards = torch.tensor(fleet.reward(samples, s.inputs.reward))
            groups = torch.tensor(samples.groups)
            advantages = grpo_advantages(rewards, groups, recipe.algorithm.normalize_by_std)
        with phase("deal"):
            fleet.deal(samples, advantages)
        with phase("logprob"):
            fleet.score_samples(s.temperature)
        with phase("train"):
            result = fleet.update(objective, s.temperature)
        with phase("sync"):
            fleet.sync()
        record(s, step, samples, result)
        stop_if_parted(s, step, result)
        every, last = recipe.train.eval_every_steps, step == recipe.train.steps
        if last or (every and step % every == 0):
            evaluate(s, step)
        s.saver.after_step(step, last=last)


def record(s: Session, step: int, samples: Samples, result: StepResult) -> None:
    """Tell the observer what a step came to."""
    rewards = [r.reward for r in samples.rewards]
    responses = [g.response_tokens for g in samples.generated]
    means = result.tally.means()
    # First what the reward function told beside the reward: no name of its own can replace one of ours.
    metrics: dict[str, float | None] = {
        _metric(name): samples.mean(name) for name in sorted({n for r in samples.rewards for n in r.metrics})
    }
    metrics |= {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response_tokens/mean": statistics.fmean(responses),
        "response_tokens/max": max(responses),
        "loss": result.loss,
        **agreement_metrics(result.tally),
        "kl/reference": means.get("ref_kl"),
        "entropy": means["entropy"],
        "clip/low_fraction": means["clip_low"],
        "clip/high_fraction": means["clip_high"],
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "groups_without_signal": _alike(samples),
        "truncated": statistics.fmean(g.finish == "length" for g in samples.generated),
        "tokens": sum(g.tokens for g in samples.generated),
        "tokens_trained": sum(responses),
        **s.fleet.counted(),
        **s.fleet.hybrid.metrics,
        **s.fleet.memory(),
    }
    s.observer.step(step, metrics, total=s.recipe.train.steps)
    if result.replayed:
        s.observer.replay(step, pack(replay_of(step, s.sampling(), samples, result.replayed)))
    s.observer.samples(step, samples.shown(s.recipe.run.samples_logged_per_step))


def _metric(name: str) -> str:
    """The metric of a number that the reward function returned; `well_formed` is a word of the house."""
    return name if name == "well_formed" else f"reward/{name}"


def _alike(samples: Samples) -> float:
    """Share of groups whose samples all got the same reward, and so teach nothing."""
    seen: dict[int, set[float]] = {}
    for group, scored in zip(samples.groups, samples.rewards, strict=True):
        seen.setdefault(group, set()).add(scored.reward)
    return statistics.fmean(len(rewards) == 1 for rewards in seen.values())
