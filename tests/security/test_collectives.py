"""What ranks tell each other while they train and save is no pickle, megatron-core's part of it included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.engine.checkpoint.ranks import bare_engine, release, step
from tests.oracle.cases import Case
from tests.oracle.models import save
from tests.security.test_no_code_from_outside import PICKLE_IN

CASE = Case("qwen2", dp=2, distributed_optimizer=True)


def without_pickles(path: Path, where: Path) -> int:
    """On each of two ranks: all that an engine does, where what pickles is out of order."""

    def out_of_order(*args: Any, **how: Any) -> None:
        raise AssertionError("it pickles")

    modules = (dist, dist.distributed_c10d)
    kept = [(module, name, getattr(module, name)) for module in modules for name in PICKLE_IN]
    for module, name, _ in kept:
        setattr(module, name, out_of_order)
    try:
        engine = bare_engine(CASE, path)
        engine.load_hf(path)
        step(engine, CASE)
        engine.save(where / "saved")
        engine.load(where / "saved")
        engine.save_hf(where / "hf", path)
        release(engine)
        return engine.steps
    finally:
        for module, name, original in kept:
            setattr(module, name, original)


def test_an_engine_pickles_nothing(pool, tmp_path):
    path = save("qwen2", tmp_path / "qwen2")
    assert pool.run(without_pickles, 2, path, tmp_path) == [1, 1]
