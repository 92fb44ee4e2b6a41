"""Reinforcement learning: the outer loop of the PPO family.

prompts → samples → rewards → advantages → mini-batches → optimizer steps → new rollout weights, and again
"""

from __future__ import annotations

from pathlib import Path

import torch

from quintet.algorithms.advantages import grpo_advantages
from quintet.controller.objective import policy_objective
from quintet.data.stream import PromptStream
from quintet.recipe.schema import Recipe
from quintet.runs.resume import past_damage
from quintet.train.evaluate import evaluate
from quintet.train.final_replay import keep_final_replay, stop_on_mismatch
from quintet.train.session import Session, session
from quintet.train.sft import run_sft
from quintet.train.step_metrics import record


def train(recipe: Recipe, stop_after: int | None = None, again: Path | None = None) -> Path:
    """Train by reinforcement learning, after a warm-up by SFT if the recipe has one; returns the run directory.

    stop_after: save after this step and raise Stopped, as SIGTERM would have it. again: save what is loaded once more, to there.
    """

    def run(damaged: dict[Path, str]) -> Path:
        with session(recipe, "train", stop_after, again, damaged=damaged) as s:
            if recipe.sft is not None and not s.saver.skips("sft"):
                run_sft(s, recipe.sft, recipe.sft.optimizer)
            reinforce(s)
            directory = s.finish()
            keep_final_replay(s, recipe.train.steps)  # only now: the model is written
            return directory

    return past_damage(run)


def reinforce(s: Session) -> None:
    """The loop."""
    recipe, controller, phase = s.recipe, s.controller, s.observer.phase
    assert s.inputs.train is not None
    assert s.inputs.reward is not None
    stream = PromptStream(s.inputs.train, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    objective = policy_objective(recipe.algorithm, recipe.mismatch)
    controller.start_optimizer(recipe.optimizer, recipe.train.steps * recipe.train.mini_batches_per_step)
    done, _ = s.saver.begin("rl", stream)
    if done == 0:
        evaluate(s, 0)

    s.observer.begin_steps()
    for step in range(done + 1, recipe.train.steps + 1):
        with phase("generate"), controller.generating():
            prompts = stream.take(recipe.train.prompts_per_step)
            seed = f"{recipe.run.seed}/train/{step}"
            samples = controller.generate(prompts, s.sampling(), recipe.rollout.samples_per_prompt, seed)
        with phase("reward"):
            rewards = torch.tensor(controller.reward(samples, s.inputs.reward))
            groups = torch.tensor(samples.groups)
            advantages = grpo_advantages(rewards, groups, recipe.algorithm.normalize_by_std)
        with phase("scatter"):
            controller.scatter(samples, advantages)
        with phase("logprob"):
            controller.score_samples(s.temperature)
        with phase("train"):
            result = controller.update(objective, s.temperature)
        with phase("sync"):
            controller.mark_weights_updated()
        record(s, step, samples, result)
        stop_on_mismatch(s, step, result)
        every, last = recipe.train.eval_every_steps, step == recipe.train.steps
        if last or (every and step % every == 0):
            evaluate(s, step)
        s.saver.after_step(step, last=last)
