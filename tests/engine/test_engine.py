"""What the engine promises beside numbers: non-finite gradients stop the run, a restarted optimizer is fresh, and the old one gone."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quintet.packing.plan import RankCell
from tests.oracle.reference import PROMPT, save, token_ids


class Nll:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Any, fields: dict[str, Any]) -> Any:
        return -outputs.logprobs.sum() * self.scale, {}


def made(path: Path, dtype: str = "fp32") -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    optimizer = schema.CriticOptimizer(lr=1e-3)
    engine = Engine(
        read_shape(path), schema.Layout(), engine=schema.Engine(), optimizer=optimizer, dtype=dtype
    )
    engine.load_hf(path)
    return engine


def steps(path: Path, scales: list[float], restart: bool) -> list[Any]:
    from quintet.data.batch import make_batch

    engine = made(path)
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
    for scale, norm in ((float("nan"), "nan"), (1e30, "inf")):
        good, bad = pool.run(steps, 1, path, [1e-3, scale], False)[0]
        assert torch.isfinite(good).all()
        assert f"optimizer step 2: the gradient norm is {norm}. Lower critic.optimizer.lr" in bad


def test_a_restarted_optimizer_has_no_memory(pool, tmp_path):
    path = save("qwen3", tmp_path / "model")
    first, again = pool.run(steps, 1, path, [1e-3, 1e-3], True)[0]
    assert torch.equal(first, again)


def restarted(path: Path) -> tuple[int, int]:
    """On one rank: an optimizer's moments, and how many of them are there when the next one is built."""
    from quintet.engine import engine as room

    engine = made(path, "bf16")
    for shard in engine.shard_map("main_grad"):
        shard.view.fill_(1.0)
    engine.optimizer_step()
    told = [slot.tensors(("exp_avg",)) for slot in engine._checkpoints._slots()]
    held = [weakref.ref(one["exp_avg"]) for one in told]
    del told
    left = []

    def built(*args: Any) -> Any:
        left.append(sum(one() is not None for one in held))
        raise MemoryError

    with mock.patch.object(room, "build_optimizer", built), pytest.raises(MemoryError):
        engine.start_optimizer(engine._optimizer_recipe, 1)
    assert engine.steps == 0
    return len(held), left[0]


def test_the_old_optimizer_goes_before_the_new_one_comes(pool, tmp_path):
    """Or there would be twice as many moments. Masters go one by one, with their parameters' next ones."""
    ((held, left),) = pool.run(restarted, 1, save("qwen3", tmp_path / "model"))
    assert held > 0
    assert left == 0
