"""What needs no engine: a rank that never answers, an optimizer without state, other adapters and layouts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from quintet.engine.checkpoint import saver
from quintet.engine.checkpoint.checkpoints import Checkpoints
from quintet.engine.mesh import Sizes
from quintet.errors import UserError
from quintet.models.lora import LoraShape
from quintet.recipe.schema import Layout, Optimizer


def concluded(path: Path, store: Any) -> Exception | None:
    path.mkdir()
    return saver._conclude(job_of(path), store, [], None)


def job_of(path: Path, rank: int = 0) -> saver._Job:
    return saver._Job(path, "token", "ab" * 32, rank, 3, [], [], True, {}, {"steps": 1})


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


LORA, BASE = LoraShape(rank=4, alpha=8.0, targets=("q_proj",)), ("models/one", "12ab")
SAVED = {"rank": 4, "scale": 2.0, "targets": ["q_proj"], "base_path": "models/one", "base": "12ab"}


@pytest.mark.parametrize(
    ("lora", "base", "saved", "words"),
    [
        (LORA, BASE, SAVED, ""),
        (None, None, None, ""),
        (LORA, ("models/moved", "12ab"), SAVED, ""),
        (LORA, BASE, SAVED | {"base": None}, ""),
        (LORA, BASE, None, "holds a whole model; remove the recipe's section lora"),
        (None, None, SAVED, "holds adapters alone; give the recipe's section lora"),
        (LORA, BASE, SAVED | {"rank": 8}, "adapters of rank 8, this engine's have 4"),
        (LORA, BASE, SAVED | {"scale": 1.0}, r"adapters of scale 1\.0, this engine's have 2\.0"),
        (LORA, BASE, SAVED | {"targets": []}, r"adapters of targets \[\], this engine's have \['q_proj'\]"),
        (LORA, ("models/other", "34cd"), SAVED, "weights of models/one; those of models/other are others"),
    ],
)
def test_adapters_are_held_to_those_that_were_saved(lora, base, saved, words):
    engine: Any = SimpleNamespace(lora=lora, base=base)
    raises = pytest.raises(UserError, match=words) if words else contextlib.nullcontext()
    with raises:
        Checkpoints(engine)._check_adapters(Path("saved"), {"adapters": saved})
    if not words:
        assert (Checkpoints(engine)._adapters() is None) == (saved is None)


def test_random_states_are_of_one_layout():
    layouts = [
        Layout(pp=2),
        Layout(pp=2, vpp=2),
        Layout(pp=2, stage_layers=[1, 3]),
        Layout(pp=2, stage_layers=[3, 1]),
    ]
    mesh = SimpleNamespace(sizes=Sizes(pp=2))
    engines: list[Any] = [SimpleNamespace(layout=one, mesh=mesh) for one in layouts]
    said = [Checkpoints(engine)._layout() for engine in engines]
    assert all(said.count(one) == 1 for one in said)
