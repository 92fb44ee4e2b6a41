"""The samples that a finished run leaves for diagnosis: what goes wrong with them costs the run nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.errors import RolloutMismatch, SyncMismatch, WorkerFailure
from quintet.rollout.base import Sampling
from quintet.train import final_replay
from quintet.train.steps import Step, Update


def told_when(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    def fail(s: Any, step: int) -> None:
        raise error

    monkeypatch.setattr(final_replay, "closing_replay", fail)
    notes: list[str] = []
    final_replay.keep_final_replay(SimpleNamespace(observer=SimpleNamespace(note=notes.append)), 7)  # type: ignore[arg-type]
    return notes


def test_a_death_after_the_model_is_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = told_when(monkeypatch, WorkerFailure("rollout-0 rank 0 died in generate: killed\nits log ..."))
    assert note.startswith("warning: no samples of the trained model are kept")
    assert note.endswith("rollout-0 rank 0 died in generate: killed")


def test_weights_of_a_run_that_parted_are_written_whatever_becomes_of_its_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    def parted(*_: Any) -> None:
        raise RolloutMismatch("step 3: parted")

    def fail(*_: Any) -> None:
        done.append("samples")
        raise SyncMismatch("rollout-0 does not hold the trainer's weights")

    monkeypatch.setattr(final_replay, "check_mismatch", parted)
    monkeypatch.setattr(final_replay, "closing_replay", fail)
    s: Any = SimpleNamespace(
        recipe=SimpleNamespace(mismatch=None),
        observer=SimpleNamespace(directory=SimpleNamespace(path=tmp_path, hf=tmp_path / "hf")),
        controller=SimpleNamespace(save=lambda path: done.append(path.name)),
    )
    final_replay.stop_on_mismatch(s, Step(2))  # the critic alone has learnt
    assert done == []
    with pytest.raises(RolloutMismatch, match="step 3"):
        final_replay.stop_on_mismatch(s, Step(3, updates={"policy": Update()}))
    assert done == ["step-000003", "samples"]


@pytest.mark.parametrize(("asked", "generated"), [(16, 16), (4096, final_replay.CLOSING_TOKENS)])
def test_the_last_replay_is_short_and_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: int, generated: int
) -> None:
    """`quintet diagnose mismatch` generates again with the sampling that the file tells."""
    told: list[int] = []
    replayed: list[str | None] = []

    def forward(*_: Any, routes: str | None) -> dict[str, Any]:
        replayed.append(routes)
        return {}

    policy = SimpleNamespace(forward=forward)
    controller = SimpleNamespace(
        generating=nullcontext,
        generate=lambda prompts, sampling, *_, **__: told.append(sampling.max_response_tokens),
        scatter=lambda samples: {},
        policy=policy,
        replayed=lambda batch: {},
    )
    monkeypatch.setattr(
        final_replay, "replay_of", lambda step, sampling, *_: told.append(sampling.max_response_tokens)
    )
    monkeypatch.setattr(final_replay, "pack", lambda replay: b"")
    s: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            mismatch=SimpleNamespace(replay_samples_per_step=4),
            run=SimpleNamespace(seed=0),
            engine=SimpleNamespace(replay_routes=None),
        ),
        inputs=SimpleNamespace(train=[1, 2]),
        observer=SimpleNamespace(phase=lambda name: nullcontext(), replay=lambda *_: None),
        sampling=lambda: Sampling(max_response_tokens=asked),
        temperature=1.0,
        controller=controller,
    )
    final_replay.closing_replay(s, 3)
    assert told == [generated, generated]
    for replay in ("old", "rollout"):
        s.recipe.engine.replay_routes = replay
        final_replay.closing_replay(s, 3)
    assert replayed == [None, None, "rollout"]  # as old log-probs are computed


def test_wrong_weights_are_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SyncMismatch):
        told_when(monkeypatch, SyncMismatch("rollout-0 does not hold the trainer's weights"))
