"""The short way of linear layers on a CPU computes what torch's product does, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from quintet.cluster.environment import PRODUCTS_KEPT, rank_environment
from quintet.cluster.worker import Place
from quintet.engine.layers import linear
from quintet.engine.layers.linear import packed_weights
from quintet.engine.product import by_onednn, packed, product


def made(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rows", [(), (1,), (5, 1), (3, 7), (0,), (64,)])
@pytest.mark.parametrize("frozen", [False, True])
def test_product_and_its_gradients(rows: tuple[int, ...], frozen: bool) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        x = made(*rows, 24, dtype=dtype).requires_grad_()
        weight = made(40, 24, dtype=dtype).requires_grad_(not frozen)
        out = product(x, weight)
        out.backward(made(*rows, 40, dtype=dtype))
        found = [out.detach(), x.grad, weight.grad]
        return [one.double() for one in found if one is not None]

    found, expected = run(torch.float32), run(torch.float64)
    assert len(found) == 3 - frozen
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_packed_weights_give_the_same_numbers() -> None:
    weight = made(40, 24, dtype=torch.float32)
    for rows in (0, 1, 4, 33, 100):
        x = made(rows, 24, dtype=torch.float32)
        torch.testing.assert_close(product(x, packed(weight)), x @ weight.t(), rtol=1e-5, atol=1e-5)
    half = weight.bfloat16()
    assert packed(half).data_ptr() == half.data_ptr()


class Layer(linear._Direct):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(made(40, 24, dtype=dtype))
        self.bias, self.skip_bias_add = None, False
        self.tp_group = torch.nn.Module()
        self.tp_group.size = lambda: 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_after_a_call_counts_in_the_next(dtype: torch.dtype) -> None:
    layer, x = Layer(dtype), made(4, 24, dtype=dtype)
    state = list(layer.state_dict())
    for _ in range(2):
        with torch.no_grad(), packed_weights(layer):
            torch.testing.assert_close(layer(x)[0], x @ layer.weight.t())
        assert layer.packed is None
        assert list(layer.state_dict()) == state
        with torch.no_grad():
            layer.weight.mul_(2)


OTHER_LENGTHS = """
import psutil, torch
from quintet.engine.product import product
torch.set_num_threads(1)
weight, me = torch.randn(256, 128, requires_grad=True), psutil.Process()
for rows in range(1, 300):
    before = me.memory_info().rss if rows == 100 else before if rows > 100 else 0
    product(torch.randn(rows, 128, requires_grad=True), weight).sum().backward()
print((me.memory_info().rss - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not by_onednn(torch.ones(1)), reason="oneDNN multiplies on x86 alone")
def test_rows_of_other_lengths_take_no_more_memory() -> None:
    place = Place(0, 1, 0, 1, "cpu", "localhost", 1, 1.0)
    of_ranks = rank_environment(place, [], True)
    unset = {key: value for key, value in os.environ.items() if key not in PRODUCTS_KEPT}
    command = [sys.executable, "-c", OTHER_LENGTHS]
    kept, by_default = (
        int(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
        for env in (unset | of_ranks, unset)
    )
    assert kept < by_default / 2
