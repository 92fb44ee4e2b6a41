"""Reinforcement learning: the outer loop of the PPO family, GRPO and DAPO among it.

prompts → samples → rewards → scores → advantages → mini-batches → optimizer steps → new rollout weights, and again
"""

from __future__ import annotations

from pathlib import Path

from quintet.controller.batch_ref import BatchRef
from quintet.data.stream import PromptStream
from quintet.recipe.schema import Recipe
from quintet.train.algorithms import Algorithm, algorithm_of
from quintet.train.evaluate import look
from quintet.train.final_replay import keep_final_replay
from quintet.train.session import Session, in_session
from quintet.train.sft import run_sft
from quintet.train.source import Source
from quintet.train.stages import rl_steps
from quintet.train.steps import Step


def train(recipe: Recipe, stop_after: int | None = None) -> Path:
    """Train by reinforcement learning, after a warm-up by SFT if the recipe has one; returns the run directory.

    stop_after: save after this step and raise Stopped, as a signal would have it.
    """
    return in_session(recipe, "train", stop_after, run_training)


def run_training(s: Session) -> Path:
    """Run both stages, and write the trained model and samples of it; returns the run directory."""
    if s.recipe.sft is not None and not s.saver.skips("sft"):
        if not s.saver.goes_on:
            look(s, "before training")
        run_sft(s, s.recipe.sft, s.recipe.sft.optimizer)
    reinforce(s)
    directory = s.finish()
    keep_final_replay(s, s.recipe.train.steps)  # only now: the model is written
    return directory


def reinforce(s: Session) -> None:
    """Run the loop of RL over the steps that are left."""
    assert s.inputs.train is not None
    algorithm = algorithm_of(s.recipe, s.controller.roles)
    seed, shuffle = s.recipe.run.seed, s.recipe.data.shuffle
    source = Source(s, PromptStream(s.inputs.train, seed=seed, shuffle=shuffle, lengths=s.lengths))
    for one in algorithm.trained:
        steps = one.steps * s.recipe.train.mini_batches_per_step
        s.controller.start_optimizer(one.optimizer, steps, one.role.name)
    done, _ = s.saver.begin("rl", source.stream)
    first = next(one.first_step for one in algorithm.trained if one.role is s.controller.policy)
    s.controller.version = max(done - first + 1, 0)
    for step in rl_steps(s, done):
        take_step(s, algorithm, source, step)


def take_step(s: Session, algorithm: Algorithm, source: Source, step: Step) -> None:
    """Take one step: everything between two verbs is a value."""
    with source.awake(step):
        groups = algorithm.select(source.take(), source)
    batch = s.scatter(source.rewarded(groups))
    step.metrics.update(batch.metrics)
    learn(algorithm, batch, step)
    s.controller.policy.publish()
    step.samples = groups


def learn(algorithm: Algorithm, batch: BatchRef, step: Step) -> None:
    """Score a step's batch, and update on it mini-batch after mini-batch; `step` is told what came of each."""
    for score in algorithm.scores:
        batch = batch | score(batch)
    batch = batch | algorithm.advantages(batch)
    for mini in batch.minibatches:
        for role, objective in algorithm.updates(step.number):
            step.add(role.name, role.forward_backward(mini, objective), role.optimizer_step())
