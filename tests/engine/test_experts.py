"""Grouped experts equal one product an expert, forwards and backwards, also where experts or ranks have no tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

COUNTS = [[3, 0, 7, 2], [0, 0, 0, 5], [4, 1, 1, 0], [0, 0, 0, 0]]
HIDDEN, WIDTH = 16, 24


@pytest.fixture(scope="module", autouse=True)
def _megatron():
    from quintet.engine import megatron_compat

    megatron_compat.install()


def group(size: int = 1) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def groups(tp: int = 1, ep: int = 1, etp: int = 1) -> Any:
    return SimpleNamespace(tp=group(tp), ep=group(ep), expt_tp=group(etp))


def experts(dtype: torch.dtype, width: int = WIDTH, modules: tuple[str, ...] = (), **sizes: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    from quintet.engine.experts import GroupedExperts

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_ffn_hidden_size=width,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        params_dtype=dtype,
        use_cpu_initialization=True,
        recompute_granularity="selective" if modules else None,
        recompute_modules=list(modules),
    )
    made = GroupedExperts(4, config, groups(**sizes))
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return made


def plain(x: torch.Tensor, module: Any, counts: list[int], probs: torch.Tensor) -> torch.Tensor:
    out = []
    for e, (rows, p) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        gate, up = (rows @ module.weight1[e].t()).chunk(2, -1)
        out.append((F.silu(gate) * up * p[:, None]).to(x.dtype) @ module.weight2[e].t())
    return torch.cat(out)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 24), (torch.float32, 6), (torch.bfloat16, 24)])
@pytest.mark.parametrize("modules", [(), ("moe_act",)], ids=["keep", "recompute"])
def test_equals_one_product_an_expert(counts, dtype, width, modules):
    module = experts(dtype, width, modules)
    tokens = sum(counts)
    x = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    probs = torch.rand(tokens).requires_grad_()
    inputs = (x, probs, *module.parameters())
    out, bias = module(x, torch.tensor(counts), probs)
    assert bias is None
    assert module._grouped == (width == 24)  # rows of 6 numbers are not multiples of 16 bytes
    grad = torch.randn_like(out)
    out.backward(grad)
    found = [t.grad for t in inputs]
    assert all(g is not None for g in found)
    want_out = plain(x, module, counts, probs)
    want = torch.autograd.grad(want_out, inputs, grad)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, want_out, **close)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize(
    ("sizes", "with_others"),
    [
        ({}, True),
        ({"tp": 2, "etp": 2}, True),
        ({"ep": 2}, False),
        ({"tp": 2, "etp": 1}, False),  # what megatron-core's own experts get wrong
        ({"tp": 2, "ep": 2, "etp": 2}, False),
    ],
)
def test_gradients_are_summed_with_other_weights_only_where_experts_lie_as_they_do(sizes, with_others):
    for weight in experts(torch.float32, **sizes).parameters():
        assert weight.allreduce is with_others
        assert weight.tensor_model_parallel
