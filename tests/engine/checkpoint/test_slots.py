"""What optimizers hold of a parameter, whole or in slices: what needs no ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from quintet.engine.checkpoint.slots import DistributedOptimizer, Slot, moment_names, slots
from quintet.recipe.schema import Optimizer


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        (torch.optim.AdamW, Optimizer()),
        (torch.optim.Adam, Optimizer(name="adam")),
        (partial(torch.optim.SGD, lr=1.0, momentum=0.9), Optimizer(name="sgd")),
        (partial(torch.optim.SGD, lr=1.0), Optimizer(name="sgd", momentum=0.0)),
    ],
)
def test_state_begins_as_after_so_many_steps(kind, recipe):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer, names = kind([parameter]), moment_names(recipe)
    slot = Slot(parameter, 0, 3, None, optimizer, parameter)
    optimizer.step()
    assert all(one.all() for one in slot.tensors(names).values())
    slot.begin(names, 5)
    assert not any(one.any() for one in slot.tensors(names).values())
    optimizer.step()
    assert optimizer.state[parameter].get("step", 6) == 6
    slot.begin(names, 0)
    assert parameter not in optimizer.state


def test_a_parameter_that_is_its_own_master_has_none():
    own, other = (torch.nn.Parameter(torch.ones(size)) for size in (3, 4))
    other.main_param = torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.AdamW([own, other.main_param])
    stub = DistributedOptimizer.__new__(DistributedOptimizer)  # of a stage without experts
    stub.is_stub_optimizer = True
    chain = SimpleNamespace(chained_optimizers=[stub, SimpleNamespace(optimizer=inner)])
    first, second = slots(chain, [own, other])
    assert (first.parameter, first.master, first.start, first.stop) == (own, None, 0, 3)
    assert second.parameter is other
    assert second.master is second.index is other.main_param
