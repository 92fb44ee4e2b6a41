"""Runs held in hand: what tests of rollouts that die ask of one, step by step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from quintet.controller.samples import Samples
from quintet.recipe.loader import load_recipe
from quintet.rewards.result import RewardResult
from quintet.train.algorithms import algorithm_of
from quintet.train.session import Session, session
from quintet.train.steps import Update

ROOT = Path(__file__).parents[2]
TINY = [
    *("model.build.layers=2", "model.build.hidden_size=64", "sft=null", "train.eval_prompts=0"),
    *("rollout.samples_per_prompt=2", "data.task_options={digits: 2, min_digits: 2}", "cluster.device=cpu"),
    # Weights that no step changes: what is generated and trained twice must come to the same.
    *("optimizer.lr=1.0e-30", "optimizer.warmup_steps=0"),
]


@contextmanager
def run(tmp_path: Path, *overrides: str) -> Iterator[Session]:
    recipe = load_recipe(ROOT / "recipes" / "laptop_demo.yaml", [*TINY, f"run.dir={tmp_path}", *overrides])
    with session(recipe, "train") as s:
        s.controller.start_optimizer(recipe.optimizer, 100)
        yield s


def generate(s: Session) -> Samples:
    assert s.inputs.train is not None
    prompts = list(s.inputs.train)[:6]
    with s.controller.generating():
        return s.controller.generate(prompts, s.sampling(), 2, "seed")


def where(samples: Samples) -> list[tuple[int, int]]:
    """Which rollout keeps each sample, and where among those of its call."""
    return [(kept.rollout, kept.at) for kept in samples.place]


def train(s: Session, samples: Samples) -> tuple[float, float]:
    """Loss and gradient norm of a step on all samples, with advantages of their own."""
    samples.rewards = [RewardResult(float(n), {}) for n in range(len(samples.generated))]
    algorithm, policy = algorithm_of(s.recipe, s.controller.roles), s.controller.policy
    batch = s.scatter(samples)
    batch = batch | algorithm.advantages(batch)
    result = Update()
    for mini in batch.minibatches:
        result.add(policy.forward_backward(mini, algorithm.trained[0].objective), policy.optimizer_step())
    policy.publish()
    return result.loss, result.grad_norm


def process_of(s: Session, name: str, rank: int = 0) -> int:
    """Its process, by the group's own record."""
    group = next(g for g in s.controller.rollouts.groups if g is not None and g.name == name)  # type: ignore[attr-defined]
    return int(group.locations[rank].pid)


def kill_soon(pid: int) -> None:
    """End a process in the middle of what it is about to be asked: it is stopped first."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def when_it_syncs(s: Session, act: Callable[[], None]) -> None:
    """Act once, at the beginning of the next sync."""
    phase = s.controller.handover._phase

    def watched(name: str) -> AbstractContextManager[None]:
        s.controller.handover._phase = phase
        act()
        return phase(name)

    s.controller.handover._phase = watched
