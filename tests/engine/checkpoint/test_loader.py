"""What is read of a checkpoint for weights and masters of either type, and what names and shapes are refused, without ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.engine.checkpoint.format import TensorFile, publish
from quintet.engine.checkpoint.loader import Load
from quintet.engine.checkpoint.parts import Part, StatePart
from quintet.engine.checkpoint.reader import Reader
from quintet.engine.checkpoint.slots import Slot
from quintet.errors import UserError
from quintet.models.mcore import whole_box

MASTER, MOMENT = "optimizer.state.fp32_param.w", "optimizer.state.exp_avg.w"
STORED = {"w": torch.full((2, 3), 1.5), MASTER: torch.full((2, 3), 2.5), MOMENT: torch.full((2, 3), 3.5)}


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    with TensorFile(path / "__0_0.distcp") as file:
        for key, tensor in tensors.items():
            file.add(key, tuple(tensor.shape), whole_box(tensor.shape), tensor)
    publish(path, file.entries, {"steps": 1})
    return path


def loading(path: Path, weight: Tensor) -> tuple[Load, Any]:
    """What takes the weight `w` from there, and the holding that says so."""
    part = Part("w", tuple(weight.shape), whole_box(weight.shape), weight.view(-1), True)
    names = SimpleNamespace(tensors=lambda: [("w", None, None)])
    holding: Any = SimpleNamespace(weights=lambda: [part], map=names)
    return Load(Reader(path), holding), holding


@pytest.mark.parametrize(
    ("dtype", "from_masters", "masters", "value"),
    [
        (torch.float32, True, True, 2.5),
        (torch.float32, True, False, 1.5),
        (torch.float32, False, True, 1.5),
        (torch.bfloat16, True, True, 1.5),
    ],
)
def test_weights_in_fp32_are_the_masters_where_these_are_trained(
    tmp_path, dtype, from_masters, masters, value
):
    path = written(tmp_path / "saved", {k: t for k, t in STORED.items() if masters or k != MASTER})
    weight = torch.zeros(2, 3, dtype=dtype)
    load, holding = loading(path, weight)
    load.want_weights(holding, from_masters=from_masters)
    load.read()
    assert not weight.any()
    load.commit([], lambda _: None)
    assert torch.equal(weight, torch.full((2, 3), value, dtype=dtype))


@pytest.mark.parametrize(("masters", "value"), [(True, 2.5), (False, 1.5)])
def test_masters_are_the_weights_of_a_checkpoint_without_them(tmp_path, masters, value):
    path = written(tmp_path / "saved", {k: t for k, t in STORED.items() if masters or k != MASTER})
    weight, master, moment = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(4)
    inner = SimpleNamespace(state={master: {"exp_avg": moment}})
    slot = Slot(weight, 1, 5, master, inner, master)
    load, _ = loading(path, weight)
    load.want_states([StatePart(slot, "w", (2, 3), ((1, 2), (0, 2)), 2, True)], ["exp_avg"])
    load.read()
    begun: list[Slot] = []
    other = Slot(weight, 5, 6, None, inner, master)
    load.commit([other, slot], begun.append)
    assert [id(one) for one in begun] == [id(slot), id(other)]  # also what nothing is read of
    assert master.tolist() == [0, 0, value, value]
    assert moment.tolist() == [0, 0, 3.5, 3.5]


@pytest.mark.parametrize("left", ["v", "optimizer.state.exp_avg.v", "other.exp_avg.w"])
def test_tensors_of_another_model_are_refused(tmp_path, left):
    path = written(tmp_path / "saved", STORED | {left: torch.zeros(1)})
    with pytest.raises(UserError, match=f"holds tensors that this model does not have: {left}$"):
        loading(path, torch.zeros(2, 3))


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    load, holding = loading(written(tmp_path / "saved", STORED), torch.zeros(3, 2))
    with pytest.raises(UserError, match=r"w has shape \(2, 3\), this model's has \(3, 2\)"):
        load.want_weights(holding, from_masters=False)
