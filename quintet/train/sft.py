"""Supervised fine-tuning: imitate the responses of a dataset. A command of its own, and the warm-up before RL."""

from __future__ import annotations

from pathlib import Path

from quintet.data.stream import PromptStream
from quintet.recipe.schema import Optimizer, Recipe, Sft
from quintet.train.objective import sft_objective
from quintet.train.session import Session, session

MEMORY_EVERY_STEPS = 10
"""Peaks grow slowly and steps are short: the ranks are asked this often, and lines between repeat the answer."""


def sft(recipe: Recipe) -> Path:
    """Fine-tune on responses, save the model, return the run directory."""
    assert recipe.sft is not None
    with session(recipe, "sft") as s:
        imitate(s, recipe.sft, recipe.sft.optimizer)
        with s.observer.phase("save"), s.observer.progress.task("saving the model"):
            s.fleet.save(s.observer.directory.checkpoint)
        return s.observer.directory.path


def imitate(s: Session, recipe: Sft, optimizer: Optimizer) -> None:
    """Take SFT steps, until `stop_at_loss` if it is set, and hand the weights to the rollout."""
    assert s.inputs.train is not None
    s.fleet.start_optimizer(optimizer, recipe.steps)
    stream = PromptStream(s.inputs.train, seed=s.recipe.run.seed, shuffle=s.recipe.data.shuffle)
    objective, smooth = sft_objective(), None
    memory: dict[str, float | None] = {}
    with s.observer.progress.task("warm-up (SFT)", recipe.steps, "steps") as task:
        for step in range(1, recipe.steps + 1):
            prompts = stream.take(recipe.samples_per_step)
            with s.observer.phase("sft"):
                s.fleet.imitate(prompts)
                result = s.fleet.update(objective)
            if step % MEMORY_EVERY_STEPS == 1 or step == recipe.steps:
                memory = s.fleet.memory()
            trained = sum(len(p.response_ids) for p in prompts)
            metrics = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": trained + sum(len(p.token_ids) for p in prompts),
                "tokens_trained": trained,
                **memory,
            }
            s.observer.step(step, metrics, stage="sft", total=recipe.steps, show=False)
            smooth = result.loss if smooth is None else 0.9 * smooth + 0.1 * result.loss
            task.advance()
            task.note(f"loss {smooth:.3f}")
            if recipe.stop_at_loss is not None and smooth < recipe.stop_at_loss:
                break
    s.fleet.sync()
