"""What one rank does in the tests of checkpoints: train, save, load, go on, and say what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.engine.checkpoint.parts import Part
from tests.oracle.cases import Case
from tests.oracle.data import BATCHES, TEMPERATURE, ahead_counts, trained_tokens
from tests.oracle.ranks import Objective, share

BEFORE, AFTER = 2, 3
"""Optimizer steps before the save and after it."""
Held = list[tuple[str, Any, Tensor]]
"""(key in the checkpoint, box, what is in it)."""


@dataclass
class Told:
    """What one rank tells: what it held at the save or after the load, and of each step after that its share of the loss,
    and the gradient norm; then what it held at the end."""

    held: Held
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    at_end: Held = field(default_factory=list)


def bare_engine(case: Case, path: Path, *, trained: bool = True) -> Any:
    """An engine of the case whose weights are nothing yet."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape

    recipe = case.recipe(path)
    torch.manual_seed(7)
    return Engine(
        read_shape(path),
        recipe.layout,
        engine=recipe.engine,
        optimizer=recipe.optimizer if trained else None,
        dtype=case.dtype,
        total_steps=BEFORE + AFTER,
        mtp=recipe.mtp,
    )


def step(engine: Any, case: Case) -> tuple[float, float]:
    """One optimizer step: this rank's share of the loss, and the gradient norm."""
    from quintet.engine.ahead import ahead_losses

    batch = engine.steps % len(BATCHES)
    mine, cells, _ = share(engine, batch)
    counts = ahead_counts(batch, case.mtp) if case.mtp else [trained_tokens(batch)]
    objective, ahead = Objective(case.head, counts[0]), ahead_losses(engine.mtp, counts)
    result = engine.forward_backward(mine, cells, objective, TEMPERATURE, ahead)
    loss = result.loss if result is not None and engine.mesh.at("tp") == 0 else 0.0
    return loss, engine.optimizer_step()["grad_norm"]


def parts_of(engine: Any) -> list[Part]:
    """Weights, masters and moments, also those that another rank saves."""
    checkpoints = engine._checkpoints
    holding = checkpoints._holding()
    parts = list(holding.weights())
    for one in checkpoints._states(holding, checkpoints._slots()):
        parts += [one.part(kind, tensor) for kind, tensor in one.slot.tensors(checkpoints._moments()).items()]
    return parts


def held(engine: Any) -> Held:
    """What is in them."""
    return [(p.key, p.box, p.flat.cpu().clone().view([b - a for a, b in p.box])) for p in parts_of(engine)]


def go_on(engine: Any, case: Case) -> Told:
    told = Told(held(engine))
    for _ in range(AFTER):
        loss, norm = step(engine, case)
        told.losses.append(loss)
        told.norms.append(norm)
    told.at_end = held(engine)
    release(engine)
    return told


def train_and_save(case: Case, path: Path, where: Path) -> Told:
    """Some steps, a save in the background, and some more."""
    engine = bare_engine(case, path)
    engine.load_hf(path)
    for _ in range(BEFORE):
        step(engine, case)
    engine.save(where, wait=False)
    told = go_on(engine, case)
    assert engine.save_finished(wait=True)
    return told


def load_and_train(case: Case, path: Path, where: Path) -> Told:
    """The steps after the save, by an engine that has read nothing but it."""
    engine = bare_engine(case, path)
    engine.load(where)
    return go_on(engine, case)


def release(engine: Any) -> None:
    """See `tests.oracle.ranks.Training.finish`."""
    for chunk in engine._wrapped:
        vars(chunk).clear()


def gathered(told: list[Told], which: str = "held") -> dict[str, Tensor]:
    """Full tensors by key. Asserts that ranks that hold the same say the same, and that nothing is missing."""
    sizes: dict[str, list[int]] = {}
    pieces = [one for rank in told for one in getattr(rank, which)]
    for key, box, _ in pieces:
        ends = [stop for _, stop in box]
        sizes[key] = [max(a, b) for a, b in zip(sizes.get(key, ends), ends, strict=True)]
    out = {key: torch.full(size, torch.nan, dtype=torch.float32) for key, size in sizes.items()}
    for key, box, piece in pieces:
        target = out[key][tuple(slice(a, b) for a, b in box)]
        fresh = target.isnan()
        assert torch.equal(target[~fresh], piece.float()[~fresh]), f"{key}: ranks disagree"
        target.copy_(piece)
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out
