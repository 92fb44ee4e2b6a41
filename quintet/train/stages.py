"""The steps of reinforcement learning, and what is done after each: metrics, evaluation, saves."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.train.evaluate import evaluate
from quintet.train.final_replay import stop_on_mismatch
from quintet.train.session import Session
from quintet.train.step_metrics import record
from quintet.train.steps import Step


def rl_steps(s: Session, done: int) -> Iterator[Step]:
    """Yield the steps that are left. After each: its metrics, a look at rollout and trainer, the evaluation and the save that are
    due."""
    recipe = s.recipe
    if done == 0:
        evaluate(s, 0)
    s.begin_steps(done)
    for number in range(done + 1, recipe.train.steps + 1):
        step = Step(number)
        yield step
        record(s, step)
        stop_on_mismatch(s, step)
        every, last = recipe.train.eval_every_steps, number == recipe.train.steps
        if last or (every and number % every == 0):
            evaluate(s, number)
        s.saver.after_step(number, last=last)
