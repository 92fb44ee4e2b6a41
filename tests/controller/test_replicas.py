"""Rollouts in processes of their own, whole: trained ranks and copies of the rollout, of which one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintet.cli import main
from quintet.errors import WorkerFailure
from quintet.rollout.base import Piece
from quintet.sync.source import ChannelSource
from quintet.train.session import Session
from tests.patience import BUSY
from tests.train.runs import ROOT, TINY, generate, kill_soon, process_of, run, train, when_it_syncs, where

OWN = [
    "rollout.own_processes=true",
    "engine.offload_grads=1",
    "engine.offload_optimizer=1",
    "engine.offload_params=1",
]
SEPARATE = ["rollout.placement=separate", "rollout.ranks=2"]

# Ray is started once for all runs here.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(
    "placement",
    [pytest.param([*OWN, "rollout.layout.tp=1"], marks=pytest.mark.nightly), SEPARATE],
    ids=["colocated", "separate"],
)
def test_what_a_killed_rollout_owed_is_generated_again(tmp_path: Path, placement: list[str]) -> None:
    with run(tmp_path, "rollout.restart=true", "layout.tp=2", *placement) as s:
        samples = generate(s)
        assert [g.response_tokens > 0 for g in samples.generated] == [True] * 12
        came_to = train(s, samples)

        kill_soon(process_of(s, "rollout-1"))
        again = generate(s)
        assert (again.generated, where(again)) == (samples.generated, where(samples))
        assert train(s, again) == came_to

        os.kill(process_of(s, "rollout-0"), signal.SIGKILL)
        assert train(s, again) == came_to  # from the copy that it left
        assert generate(s).generated == samples.generated

        s.controller.handover._weights_stale = True
        other, killed = process_of(s, "rollout-0"), process_of(s, "rollout-1")
        when_it_syncs(s, lambda: kill_soon(process_of(s, "rollout-1")))
        before = syncing(s)
        again = generate(s)
        assert syncing(s) - before < 5 * BUSY  # the trainer would wait for a minute, were it not told
        assert process_of(s, "rollout-1") != killed
        assert process_of(s, "rollout-0") == other  # though separate ones share a channel, which broke
        assert again.generated == samples.generated
        assert train(s, again) == came_to


@pytest.mark.parametrize("layout", ["tp", pytest.param("pp", marks=pytest.mark.nightly)])
def test_samples_of_a_copy_of_two_ranks_are_trained_on(tmp_path: Path, layout: str) -> None:
    """One of them keeps the samples, and is asked for them."""
    with run(tmp_path, *SEPARATE, f"rollout.layout.{layout}=2", "cluster.ranks=1") as s:
        assert train(s, generate(s))[1] > 0


@pytest.mark.parametrize(
    ("when", "ranks"),
    [
        ("generate", 1),
        pytest.param("sync", 2, marks=pytest.mark.nightly),
        pytest.param("sleep", 1, marks=pytest.mark.nightly),
    ],
)
def test_without_restart_the_run_ends_and_names_the_process(tmp_path: Path, when: str, ranks: int) -> None:
    said = {
        "generate": "rollout-0 rank 0 died in generate: (killed|ended)",
        "sync": "rollout-0 rank 0 died in sync: (killed|ended)",
        "sleep": "rollout-0 rank 0 died in wake: ",
    }
    with (
        pytest.raises(WorkerFailure, match=said[when]),
        run(tmp_path, *OWN, f"cluster.ranks={ranks}") as s,
    ):
        lose(s, when)


def syncing(s: Session) -> float:
    """Seconds of the run in which weights were on their way, so far."""
    return s.observer.phases.totals["sync"]


def lose(s: Session, when: str) -> None:
    """Generate, and once more while the only rollout dies."""
    generate(s)
    if when == "generate":
        with s.controller.generating():
            kill_soon(process_of(s, "rollout-0"))
            assert s.inputs.train is not None
            s.controller.generate(list(s.inputs.train)[:2], s.sampling(), 2, "seed")
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
    monkeypatch.setattr("quintet.controller.weight_sync.ChannelSource", Flipping)
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *TINY, *OWN, "cluster.ranks=1", f"run.dir={tmp_path}"]) == 5
    said = capsys.readouterr().err
    assert "error: rollout-0 does not hold the trainer's weights after the sync: 1 tensor differs" in said
    assert "model.layers.1.mlp.down_proj.weight (dense)" in said
    assert "Traceback" not in said
