"""Rollouts in processes of their own, whole: trained ranks and copies of the rollout, of which one is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintet.algorithms.advantages import grpo_advantages
from quintet.cli import main
from quintet.errors import WorkerFailure
from quintet.recipe import load_recipe
from quintet.rollout import Piece
from quintet.sync.source import ChannelSource
from quintet.train.objective import policy_objective
from quintet.train.samples import Samples
from quintet.train.session import Session, session

ROOT = Path(__file__).parents[2]
TINY = [
    *("model.build.layers=2", "model.build.hidden_size=64", "sft=null", "train.eval_prompts=0"),
    *("rollout.samples_per_prompt=2", "data.task_options={digits: 2, min_digits: 2}", "cluster.device=cpu"),
    # Weights that no step changes: what is generated and trained twice must come to the same.
    *("optimizer.lr=1.0e-30", "optimizer.warmup_steps=0"),
]
OWN = [
    "rollout.own_processes=true",
    "engine.offload_grads=1",
    "engine.offload_optimizer=1",
    "engine.offload_params=1",
]
SEPARATE = ["rollout.placement=separate", "rollout.ranks=2"]

pytestmark = pytest.mark.slow


@contextmanager
def run(tmp_path: Path, *overrides: str) -> Iterator[Session]:
    recipe = load_recipe(ROOT / "recipes" / "laptop_demo.yaml", [*TINY, f"run.dir={tmp_path}", *overrides])
    with session(recipe, "train") as s:
        s.fleet.start_optimizer(recipe.optimizer, 100)
        yield s


def generate(s: Session) -> Samples:
    assert s.inputs.train is not None
    prompts = list(s.inputs.train)[:6]
    with s.fleet.generating():
        return s.fleet.generate(prompts, s.sampling(), 2, "seed")


def train(s: Session, samples: Samples) -> tuple[float, float]:
    """Loss and gradient norm of a step on all samples, with advantages of their own."""
    worth = torch.arange(len(samples.generated)).float()
    s.fleet.deal(samples, grpo_advantages(worth, torch.tensor(samples.groups), True))
    result = s.fleet.update(policy_objective(s.recipe.algorithm, s.recipe.agreement), s.temperature)
    s.fleet.sync()
    return result.loss, result.grad_norm


def process_of(s: Session, name: str, rank: int = 0) -> int:
    """Its process, by the group's own record."""
    group = next(g for g in s.fleet.rollouts.groups if g is not None and g.name == name)  # type: ignore[attr-defined]
    return int(group.locations[rank].pid)


def kill_soon(pid: int) -> None:
    """End a process in the middle of what it is about to be asked: it is stopped first."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def when_it_syncs(s: Session, act: Callable[[], None]) -> None:
    """Act once, at the beginning of the next sync."""
    phase = s.fleet.hybrid._phase

    def watched(name: str) -> AbstractContextManager[None]:
        s.fleet.hybrid._phase = phase
        act()
        return phase(name)

    s.fleet.hybrid._phase = watched


def log_of(s: Session) -> str:
    return (s.observer.directory.path / "logs" / "hybrid.log").read_text()


@pytest.mark.parametrize(
    "placement", [[*OWN, "rollout.layout.tp=1"], SEPARATE], ids=["colocated", "separate"]
)
def test_what_a_killed_rollout_owed_is_generated_again(tmp_path: Path, placement: list[str]) -> None:
    with run(tmp_path, "rollout.restart=true", "layout.tp=2", *placement) as s:
        samples = generate(s)
        assert [g.response_tokens > 0 for g in samples.generated] == [True] * 12
        came_to = train(s, samples)

        kill_soon(process_of(s, "rollout-1"))
        again = generate(s)
        assert (again.generated, again.place) == (samples.generated, samples.place)
        assert train(s, again) == came_to

        os.kill(process_of(s, "rollout-0"), signal.SIGKILL)
        assert train(s, again) == came_to  # from the copy that it left
        assert generate(s).generated == samples.generated

        s.fleet.hybrid._due = True
        when_it_syncs(s, lambda: kill_soon(process_of(s, "rollout-1")))
        again = generate(s)
        assert again.generated == samples.generated
        assert train(s, again) == came_to


@pytest.mark.parametrize("when", ["generate", "sync", "sleep"])
def test_without_restart_the_run_ends_and_names_the_process(tmp_path: Path, when: str) -> None:
    said = {
        "generate": "rollout-0 rank 0 died in generate: (killed|ended)",
        "sync": "rollout-0 rank 0 died in sync: (killed|ended)",
        "sleep": "rollout-0 rank 0 died in wake: ",
    }
    with pytest.raises(WorkerFailure, match=said[when]), run(tmp_path, *OWN) as s:
        lose(s, when)


def lose(s: Session, when: str) -> None:
    """Generate, and once more while the only rollout dies."""
    generate(s)
    if when == "generate":
        with s.fleet.generating():
            kill_soon(process_of(s, "rollout-0"))
            assert s.inputs.train is not None
            s.fleet.generate(list(s.inputs.train)[:2], s.sampling(), 2, "seed")
    elif when == "sync":
        when_it_syncs(s, lambda: kill_soon(process_of(s, "rollout-0")))
    else:
        os.kill(process_of(s, "rollout-0"), signal.SIGKILL)
    generate(s)


class Flipping(ChannelSource):
    """One element of one tensor is another when it arrives."""

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        for batch in super().batches(receiver):
            yield [self._flipped(piece) for piece in batch]

    def _flipped(self, piece: Piece) -> Piece:
        if piece.name != "model.layers.1.mlp.down_proj.weight":
            return piece
        tensor = piece.tensor.clone()
        tensor.view(torch.int32).view(-1)[7] += 1
        return replace(piece, tensor=tensor)


def test_a_tensor_that_arrives_otherwise_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quintet.train.weights.ChannelSource", Flipping)
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *TINY, *OWN, "layout.tp=2", f"run.dir={tmp_path}"]) == 5
    said = capsys.readouterr().err
    assert "error: rollout-0 does not hold the trainer's weights after the sync: 1 tensor differs" in said
    assert "model.layers.1.mlp.down_proj.weight (dense)" in said
    assert "Traceback" not in said
