"""Supervised fine-tuning: imitate the responses of a dataset. A command of its own, and the warm-up before RL."""

from __future__ import annotations

import math
from pathlib import Path

from quintet.controller.objective import sft_objective
from quintet.data.stream import PromptStream
from quintet.recipe.schema import Optimizer, Recipe, Sft
from quintet.train.session import Session, in_session
from quintet.train.steps import Update

MEMORY_EVERY_STEPS = 10
"""Peaks grow slowly and steps are short: the ranks are asked this often, and lines between repeat the answer."""


def sft(recipe: Recipe, stop_after: int | None = None) -> Path:
    """Fine-tune on responses, save the model, return the run directory.

    stop_after: save after this step and raise Stopped, as a signal would have it.
    """
    return in_session(recipe, "sft", stop_after, run_tuning)


def run_tuning(s: Session) -> Path:
    """Run SFT alone, and write the trained model; returns the run directory."""
    assert s.recipe.sft is not None
    run_sft(s, s.recipe.sft, s.recipe.sft.optimizer)
    return s.finish()


def run_sft(s: Session, recipe: Sft, optimizer: Optimizer) -> None:
    """Take SFT steps, until `stop_at_loss` if it is set, and hand the weights to the rollout."""
    assert s.inputs.sft is not None
    s.controller.start_optimizer(optimizer, recipe.steps)
    stream = PromptStream(s.inputs.sft, seed=s.recipe.run.seed, shuffle=s.recipe.data.shuffle)
    done, loop = s.saver.begin("sft", stream)
    objective, policy, smooth = sft_objective(), s.controller.policy, loop.get("smooth", math.inf)
    memory: dict[str, float | None] = {}
    with s.observer.progress.task("warm-up (SFT)", recipe.steps, "steps") as task:
        task.advance(done)
        s.begin_steps(done)
        for step in range(done + 1, recipe.steps + 1):
            if smooth < (recipe.stop_at_loss or 0.0):
                break
            prompts = stream.take(recipe.samples_per_step)
            with s.observer.phase("sft"):
                batch = s.controller.scatter_responses(prompts)
                result = Update()
                for mini in batch.minibatches:
                    told = policy.forward_backward(mini, objective)
                    result.add(told, policy.optimizer_step())
            if step % MEMORY_EVERY_STEPS == 1 or step == recipe.steps or not memory:
                memory = s.controller.memory()
            trained = sum(len(p.response_ids) for p in prompts)
            metrics = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                **result.metrics,
                **batch.metrics,
                "tokens": trained + sum(len(p.token_ids) for p in prompts),
                "tokens_trained": trained,
                **memory,
            }
            s.observer.step(step, metrics, stage="sft", total=recipe.steps, show=False)
            smooth = 0.9 * smooth + 0.1 * result.loss if step > 1 else result.loss
            task.advance()
            task.note(f"loss {smooth:.3f}")
            last = step == recipe.steps or smooth < (recipe.stop_at_loss or 0.0)
            s.saver.after_step(step, last=last, smooth=smooth)
    policy.publish()
