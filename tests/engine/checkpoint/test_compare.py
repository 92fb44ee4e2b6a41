"""Checkpoints of one state are the same in any layout, and of no other state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.engine.checkpoint.compare import differences
from quintet.engine.checkpoint.format import TensorFile, publish
from quintet.models.mcore import whole_box
from tests.engine.checkpoint.ranks import bare_engine, release, step
from tests.oracle.cases import Case
from tests.oracle.models import save


def saves(path: Path, where: Path) -> None:
    """On each rank: a save, one without a copy, one of what was loaded in another layout, and one that lost moments on the way."""
    case = Case("qwen2", dp=2, distributed_optimizer=True)
    engine = bare_engine(case, path)
    engine.load_hf(path)
    step(engine, case)
    engine.save(where / "saved")
    engine.save(where / "in place", aside=False)
    release(engine)
    other = bare_engine(Case("qwen2", tp=2), path)
    other.load(where / "saved")
    other.save(where / "again")
    checkpoints = other._checkpoints
    lost = next(iter(checkpoints._states(checkpoints._holding(), checkpoints._slots())))
    with torch.no_grad():
        lost.slot.tensors(checkpoints._moments())["exp_avg"].zero_()
    other.save(where / "lost")
    release(other)


@pytest.mark.slow
def test_a_lost_moment_is_found_in_another_layout(pool, models, tmp_path):
    pool.run(saves, 2, save("qwen2", models / "qwen2"), tmp_path)
    for same in ("again", "in place"):
        assert differences(tmp_path / "saved", tmp_path / same) == []
    found = differences(tmp_path / "saved", tmp_path / "lost")
    assert found
    assert all(
        one.startswith("optimizer.state.exp_avg.") and one.endswith(" is not the same") for one in found
    )


TENSORS = {"w": torch.tensor([0.0, 1.0, float("nan")]), "v": torch.ones(2, 2)}
STATE: dict[str, Any] = {
    "steps": 3, "optimizer": "adamw", "moments": ["exp_avg"], "dtype": "fp32", "adapters": None, "layout": {"tp": 1}
}  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "state", "found"),
    [
        ({}, {}, []),
        ({}, {"layout": {"tp": 2}}, []),
        ({}, {"steps": 4}, ["steps is 3 and 4"]),
        ({}, {"optimizer": None}, ["optimizer is adamw and None"]),
        ({}, {"moments": []}, ["moments is ['exp_avg'] and []"]),
        ({}, {"dtype": "bf16"}, ["dtype is fp32 and bf16"]),
        ({}, {"adapters": {"rank": 2}}, ["adapters is None and {'rank': 2}"]),
        ({"w": torch.tensor([-0.0, 1.0, float("nan")])}, {}, ["w is not the same"]),
        (
            {"v": torch.ones(2, 2).double()},
            {},
            ["v is torch.float32 (2, 2) and torch.float64 (2, 2)"],
        ),
        ({"v": torch.ones(4)}, {}, ["v is torch.float32 (2, 2) and torch.float32 (4,)"]),
        ({"v": None, "u": torch.ones(1)}, {}, ["v is missing", "u is new"]),
    ],
)
def test_what_differs_is_named(tmp_path, tensors, state, found):
    for name, held, said in (("one", TENSORS, STATE), ("other", TENSORS | tensors, STATE | state)):
        (tmp_path / name).mkdir()
        with TensorFile(tmp_path / name / "__0_0.distcp") as file:
            for key, tensor in held.items():
                if tensor is not None:
                    file.add(key, tuple(tensor.shape), whole_box(tensor.shape), tensor)
        publish(tmp_path / name, file.entries, said)
    assert differences(tmp_path / "one", tmp_path / "other") == found
