"""Gated activations are what their definitions say, in one kernel on GPUs as in several elsewhere."""

from __future__ import annotations

import pytest
import torch

from quintet.engine.layers.mlp import gated
from quintet.models.shape import SWIGLU, Glu

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on GPUs")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("glu", [SWIGLU, Glu(alpha=1.702, offset=1.0, limit=0.75)], ids=["swiglu", "clamped"])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (7, 96), (33, 2500), (0, 8)])
def test_value_and_gradients(device, dtype, weighted, glu, rows, width) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 2 * width, generator=generator).to(device, dtype).requires_grad_()
    weights = torch.rand(rows, 1, 1, generator=generator).to(device).requires_grad_() if weighted else None
    grad = torch.randn(rows, 1, width, generator=generator).to(device, dtype)
    out = gated(x, weights, glu)
    out.backward(grad)

    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    want = (up + glu.offset) * gate * (glu.alpha * gate).sigmoid()
    if weights is not None:
        scale = weights.detach().double().requires_grad_()
        want = want * scale
    want.backward(grad.double())
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    if weights is not None:
        tolerance *= max(width, 1) ** 0.5
        torch.testing.assert_close(weights.grad.double(), scale.grad, rtol=tolerance, atol=tolerance)
