"""Rotary embedding turns pairs by their angles, in one kernel on GPUs as in several elsewhere."""

from __future__ import annotations

import pytest
import torch

from quintet.engine.device import _HAS_TRITON
from quintet.engine.layers.attention import rotate

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels run on GPUs")


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """By complex numbers: x [T, 1, heads, d], angle [T, r / 2], in fp64."""
    half = angle.shape[1]
    first, second, rest = x.double().split((half, half, x.shape[-1] - 2 * half), -1)
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    return torch.cat((out.real, out.imag, rest), -1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "share"),
    [(5, 3, 8, 1), (17, 12, 128, 1), (4, 1, 6, 1), (0, 2, 4, 1), (17, 12, 128, 0.5), (5, 3, 12, 0.5)],
)
def test_pairs_turn_by_their_angles_and_gradients_back(device, dtype, tokens, heads, width, share) -> None:
    if device == "cuda":
        assert _HAS_TRITON
    generator = torch.Generator().manual_seed(0)
    # As the projection leaves it: a slice of a wider tensor, whose gradient is such a slice too.
    wide = torch.randn(tokens, 1, heads + 2, width, generator=generator).to(device, dtype)
    half = int(width * share) // 2
    angle = 10 * torch.randn(tokens, half, generator=generator, dtype=torch.float64).to(device)
    cos, sin = (f(angle).to(dtype)[:, None, None] for f in (torch.cos, torch.sin))
    x = wide[:, :, 1:-1].requires_grad_()
    out = rotate(x, cos, sin)
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.double(), turned(x.detach(), angle), rtol=tolerance, atol=tolerance)
    grad = torch.randn(tokens, 1, heads + 1, width, generator=generator).to(device, dtype)[:, :, 1:]
    (back,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(back.double(), turned(grad, -angle), rtol=tolerance, atol=tolerance)
