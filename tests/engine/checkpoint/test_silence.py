"""What needs no engine: a rank that never answers, and an optimizer without state of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from quintet.engine.checkpoint import saver
from quintet.engine.checkpoint.checkpoints import Checkpoints
from quintet.errors import UserError
from quintet.recipe.schema import Optimizer


def concluded(path: Path, store: Any) -> Exception | None:
    path.mkdir()
    return saver._conclude(job_of(path), store, [], None)


def job_of(path: Path, rank: int = 0) -> saver._Job:
    return saver._Job(path, "token", "ab" * 32, rank, 3, [], [], {}, {"steps": 1})


def tell(store: Any, rank: int) -> None:
    saver._tell(job_of(Path(), rank), store, saver._Report([], None))


def test_a_rank_that_never_answers_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "SILENCE_S", 0.2)
    store = HashStore()
    tell(store, 1)
    error = concluded(tmp_path / "saved", store)
    assert isinstance(error, UserError)
    assert "nothing came from rank 2" in str(error)
    assert not (tmp_path / "saved").exists()
    for rank in (1, 2):
        tell(store, rank)
    assert concluded(tmp_path / "again", store) is None


def test_steps_of_an_optimizer_without_state_are_compared_too():
    saved = {"optimizer": "sgd", "moments": [], "steps": 4}

    def check(recipe: Optimizer, state: dict[str, Any]) -> None:
        engine: Any = SimpleNamespace(_optimizer_recipe=recipe)
        Checkpoints(engine)._check_optimizer(Path("saved"), state)

    check(Optimizer(name="sgd", momentum=0.0), saved)
    check(Optimizer(), saved | {"steps": 0})
    with pytest.raises(
        UserError, match=r"whose state is none; optimizer\.name=adamw needs exp_avg, exp_avg_sq"
    ):
        check(Optimizer(), saved)
