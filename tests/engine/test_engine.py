"""What the engine promises beside numbers: non-finite gradients stop the run, a restarted optimizer is fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quintet.packing.plan import RankCell
from tests.oracle.reference import PROMPT, save, token_ids


class Nll:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Any, fields: dict[str, Any]) -> Any:
        return -outputs.logprobs.sum() * self.scale, {}


def steps(path: Path, scales: list[float], restart: bool) -> list[Any]:
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    optimizer = schema.CriticOptimizer(lr=1e-3)
    engine = Engine(
        read_shape(path), schema.Layout(), engine=schema.Engine(), optimizer=optimizer, dtype="fp32"
    )
    engine.load_hf(path)
    batch = make_batch(token_ids(), [PROMPT] * len(token_ids()))
    found: list[Any] = []
    for scale in scales:
        if restart:
            engine.load_hf(path)
        engine.forward_backward(batch, [RankCell(list(range(len(token_ids()))))], Nll(scale))
        try:
            engine.optimizer_step()
        except FloatingPointError as error:
            found.append(str(error))
        else:
            found.append(torch.cat([s.read().flatten() for s in engine.shard_map()]).clone())
    return found


def test_non_finite_gradients_stop_the_run(pool, tmp_path):
    path = save("qwen3", tmp_path / "model")
    good, bad = pool.run(steps, 1, path, [1e-3, float("nan")], False)[0]
    assert torch.isfinite(good).all()
    assert "optimizer step 2: the gradient norm is nan. Lower critic.optimizer.lr" in bad


def test_a_restarted_optimizer_has_no_memory(pool, tmp_path):
    path = save("qwen3", tmp_path / "model")
    first, again = pool.run(steps, 1, path, [1e-3, 1e-3], True)[0]
    assert torch.equal(first, again)
