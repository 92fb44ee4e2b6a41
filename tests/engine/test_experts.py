"""Grouped experts equal one product an expert, forwards and backwards, also where experts or ranks have no tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quintet.models.shape import Glu

COUNTS = [[3, 0, 7, 2], [0, 0, 0, 5], [4, 1, 1, 0], [0, 0, 0, 0]]
HIDDEN, WIDTH = 16, 24


@pytest.fixture(scope="module", autouse=True)
def _megatron():
    from quintet.engine import megatron_compat

    megatron_compat.install()


CLAMPED = Glu(alpha=1.702, offset=1.0, limit=0.5)


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def groups(tp: int = 1, ep: int = 1, etp: int = 1, etp_rank: int = 0) -> Any:
    return SimpleNamespace(tp=group(tp), ep=group(ep), expt_tp=group(etp, etp_rank))


def experts(
    dtype: torch.dtype, width: int = WIDTH, modules: tuple[str, ...] = (), biased: bool = False, **sizes: int
) -> Any:
    from megatron.core.transformer import TransformerConfig

    from quintet.engine.layers.experts import GroupedExperts

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
    kind: dict[str, Any] = {"glu": CLAMPED, "biases": True} if biased else {}
    made = GroupedExperts(4, config, groups(**sizes), **kind)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return made


def plain(x: torch.Tensor, module: Any, counts: list[int], probs: torch.Tensor) -> torch.Tensor:
    out = []
    for e, (rows, p) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        p = p[:, None]
        if module.bias1 is None:
            gate, up = (rows @ module.weight1[e].t()).chunk(2, -1)
            out.append((F.silu(gate) * up * p).to(x.dtype) @ module.weight2[e].t())
        else:
            gate, up = (rows @ module.weight1[e].t() + module.bias1[e]).chunk(2, -1)
            gate, up = gate.clamp(max=CLAMPED.limit), up.clamp(-CLAMPED.limit, CLAMPED.limit)
            active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            out.append(((active @ module.weight2[e].t() + module.bias2[e]) * p).to(x.dtype))
    return torch.cat(out)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 24), (torch.float32, 6), (torch.bfloat16, 24)])
@pytest.mark.parametrize("modules", [(), ("moe_act",)], ids=["keep", "recompute"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_equals_one_product_an_expert(counts, dtype, width, modules, biased):
    module = experts(dtype, width, modules, biased)
    tokens = sum(counts)
    x = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    probs = torch.rand(tokens).requires_grad_()
    inputs = (x, probs, *module.parameters())
    out, bias = module(x, torch.tensor(counts), probs)
    assert bias is None
    from quintet.engine.layers.experts import group_rows

    groups = group_rows(counts, x.device, module.weight1, module.weight2)
    assert (groups.ends is not None) == (width == 24)  # rows of 6 numbers are not multiples of 16 bytes
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


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_ranks_that_cut_experts_add_a_bias_once(counts):
    """Two etp ranks' shares are one rank's sum; each learns all of the second bias, and one of them counts it."""
    whole = experts(torch.float32, biased=True)
    parts = [experts(torch.float32, biased=True, tp=2, etp=2, etp_rank=rank) for rank in range(2)]
    for rank, part in enumerate(parts):
        for name in ("weight1", "bias1"):
            halves = [half.chunk(2, 1)[rank] for half in getattr(whole, name).data.chunk(2, 1)]
            getattr(part, name).data.copy_(torch.cat(halves, 1))
        part.weight2.data.copy_(whole.weight2.data.chunk(2, 2)[rank])
        part.bias2.data.copy_(whole.bias2.data)
    x, tokens = torch.randn(sum(counts), HIDDEN), torch.tensor(counts)
    probs = [torch.rand(sum(counts), generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    grad = torch.randn(sum(counts), HIDDEN)
    outs = [
        [m(x, tokens, p.requires_grad_())[0] for m in ms]
        for ms, p in zip(([whole], parts), probs, strict=True)
    ]
    for out in (o for row in outs for o in row):
        out.backward(grad)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(sum(outs[1]), outs[0][0], **close)
    torch.testing.assert_close(probs[1].grad, probs[0].grad, **close)
    torch.testing.assert_close(parts[0].bias2.grad, whole.bias2.grad, **close)
    assert torch.equal(parts[0].bias2.grad, parts[1].bias2.grad)
    assert [getattr(part.bias2, "shared", False) for part in parts] == [False, True]


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
    for weight in experts(torch.float32, biased=True, **sizes).parameters():
        assert weight.allreduce is with_others
        assert weight.tensor_model_parallel
