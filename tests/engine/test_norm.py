"""The CPU norm is torch's, forward and backward."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("shape", [(7, 1, 64), (5, 1, 4, 32), (0, 1, 16)])
def test_equals_torch(shape):
    from quintet.engine import megatron_compat

    megatron_compat.install()
    from quintet.engine.layers.norm import RMSNorm

    torch.manual_seed(0)
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), shape[-1], eps=1e-6)
    norm.weight.data.normal_()
    x = torch.randn(shape, requires_grad=True)
    out = norm(x)
    grad = torch.randn(shape)
    found = torch.autograd.grad(out, (x, norm.weight), grad)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], norm.weight, 1e-6)
    wanted = torch.autograd.grad(expected, (x, norm.weight), grad)
    torch.testing.assert_close(out, expected)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
