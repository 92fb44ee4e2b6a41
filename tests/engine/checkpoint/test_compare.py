"""Checkpoints of one state are the same in any layout, and of no other state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quintet.engine.checkpoint.compare import differences
from tests.engine.checkpoint.ranks import bare_engine, release, step
from tests.oracle.cases import Case
from tests.oracle.models import save


def saves(path: Path, where: Path) -> None:
    """On each rank: a save, one more of what was loaded in another layout, and one that lost moments on the way."""
    case = Case("qwen2", dp=2, distributed_optimizer=True)
    engine = bare_engine(case, path)
    engine.load_hf(path)
    step(engine, case)
    engine.save(where / "saved")
    release(engine)
    other = bare_engine(Case("qwen2", tp=2), path)
    other.load(where / "saved")
    other.save(where / "again")
    checkpoints = other._checkpoints
    lost = next(iter(checkpoints._states(checkpoints._holding())))
    with torch.no_grad():
        lost.slot.tensors(checkpoints._moments())["exp_avg"].zero_()
    other.save(where / "lost")
    release(other)


@pytest.mark.slow
def test_a_lost_moment_is_found_in_another_layout(pool, models, tmp_path):
    pool.run(saves, 2, save("qwen2", models / "qwen2"), tmp_path)
    assert differences(tmp_path / "saved", tmp_path / "again") == []
    found = differences(tmp_path / "saved", tmp_path / "lost")
    assert found
    assert all(
        one.startswith("optimizer.state.exp_avg.") and one.endswith(" is not the same") for one in found
    )
