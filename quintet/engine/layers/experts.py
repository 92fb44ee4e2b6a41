"""The experts of a layer as two grouped matrix products, on torch alone.

Tokens arrive sorted by expert. `torch.nn.functional.grouped_mm` multiplies each expert's rows with its own weight
in one kernel: on CUDA in bf16, on a CPU in any type, with rows that are multiples of 16 bytes. Elsewhere each expert
is a product of its own.

    y_t = p_t · W2_e (silu(G_e x_t) ⊙ U_e x_t),  W1_e = [G_e; U_e]

Where a model has biases they are added within: b1_e to W1_e x_t, and p_t · b2_e to y_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.layers.mlp import forgotten, gated, recomputes
from quintet.models.shape import SWIGLU, Glu


class GroupedExperts(MegatronModule):
    """The experts one rank holds, with megatron-core's constructor.

    weight1: [experts here, 2 · width / etp, hidden], gate over up. weight2: [experts here, hidden, width / etp].
    bias1: [experts here, 2 · width / etp], and bias2: [experts here, hidden], whole on every etp rank; None without.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: Any,
        *,
        glu: Glu = SWIGLU,
        biases: bool = False,
    ) -> None:
        super().__init__(config=config)
        etp = pg_collection.expt_tp
        width, hidden = divide(config.moe_ffn_hidden_size, etp.size()), config.hidden_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(*sizes: int) -> torch.nn.Parameter:
            # Weights are always loaded: drawing them would only take time.
            zeros = torch.zeros(num_local_experts, *sizes, dtype=config.params_dtype, device=device)
            return torch.nn.Parameter(zeros)

        self.weight1, self.weight2 = parameter(2 * width, hidden), parameter(hidden, width)
        mark_expert(self.weight1, pg_collection, dim=1)
        mark_expert(self.weight2, pg_collection, dim=2)
        self.bias1 = parameter(2 * width) if biases else None
        self.bias2 = parameter(hidden) if biases else None
        if self.bias1 is not None and self.bias2 is not None:
            mark_expert(self.bias1, pg_collection, dim=1, vectors=True)
            mark_expert(self.bias2, pg_collection, dim=0, vectors=True)
            self.bias2.shared = etp.rank() > 0  # type: ignore[attr-defined]
        self._glu, self._etp = glu, etp.size()
        self.after: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        """What is done to the products linear_fc1 and linear_fc2: (input, output, tokens of each expert) → output."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute the experts' outputs. tokens: [T, hidden] sorted by expert; tokens_per_expert: [experts here], on the CPU;
        probs: [T].

        Returns [T, hidden], under etp this rank's share of the sum. T and any of the counts may be 0.
        """
        groups = group_rows(tokens_per_expert, tokens.device, self.weight1, self.weight2)
        hidden = grouped_linear(tokens, self.weight1, groups)
        if self.bias1 is not None:
            groups = groups.numbered(hidden.device)
            hidden = add_bias(hidden, self.bias1, groups)
        hidden = self._after("linear_fc1", tokens, hidden, tokens_per_expert)
        weights = probs.unsqueeze(-1)
        active, forget = forgotten(recomputes(self.config, "moe_act"), self._activate, hidden, weights)
        out = grouped_linear(active, self.weight2, groups)
        out = self._after("linear_fc2", active, out, tokens_per_expert)
        forget(out)
        if self.bias2 is not None:
            out = add_bias(out, self.bias2, groups, weights, self._etp)
        return out, None

    def _after(self, name: str, x: Tensor, out: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return self.after[name](x, out, tokens_per_expert) if name in self.after else out

    def _activate(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """The gated product times a weight: [T, 2w], [T, 1] → [T, w] in the type of `hidden`."""
        return gated(hidden, weights, self._glu)


def mark_expert(weight: torch.nn.Parameter, groups: Any, *, dim: int, vectors: bool = False) -> None:
    """Tell megatron-core how a weight of experts is spread. vectors: it holds one vector an expert (biases), which, as
    other vectors, has no weight decay.

    `allreduce`: whether its gradient is summed over dp and cp, like other weights', or over the ranks that hold the
    same experts. Core asks only whether ep > 1, which is wrong at ep = 1 with etp other than tp.
    `tensor_model_parallel`: that no other rank of a tp group holds the same elements, so that every rank's count in
    the gradient norm; of what all ranks of an etp group hold, `shared` tells it those that do not count.
    """
    weight.allreduce = groups.ep.size() == 1 and groups.expt_tp.size() == groups.tp.size()  # type: ignore[attr-defined]
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.partition_dim, weight.partition_stride = dim, 1  # type: ignore[attr-defined]
    weight.holds_vectors = vectors  # type: ignore[attr-defined]


def can_group(weight: Tensor) -> bool:
    """Return whether grouped_mm takes this weight [E, out, in] in both passes."""
    if weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
        return False
    return all(n * weight.element_size() % 16 == 0 for n in weight.shape[1:])


@dataclass(frozen=True)
class _Groups:
    """Consecutive groups of rows. ends: where each ends, int32 on the device, for grouped_mm; None where each group is a
    product of its own. numbers: [T] which group each row is of, where that is asked for."""

    counts: list[int]
    ends: Tensor | None
    numbers: Tensor | None = None

    def numbered(self, device: torch.device) -> _Groups:
        """With `numbers`."""
        counts = torch.tensor(self.counts)
        return replace(self, numbers=upload(torch.arange(len(counts)).repeat_interleave(counts), device))


def group_rows(counts: Tensor | list[int], device: torch.device, *weights: Tensor) -> _Groups:
    """Return the rows sorted by expert, for products with these weights [E, out, in]."""
    counts, ends = torch.as_tensor(counts), None
    if all(map(can_group, weights)):
        ends = upload(counts.cumsum(0, dtype=torch.int32), device)
    return _Groups(counts.tolist(), ends)


def grouped_linear(x: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
    """Return the rows x [T, in] of group e times weight[e]ᵀ: [T, out]. weight: [E, out, in]."""
    return _GroupedLinear.apply(x, weight, groups)


class _GroupedLinear(torch.autograd.Function):
    """With its own backward, so that experts without tokens, and ranks without any, get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return _product(x, weight.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad, x, ctx.groups) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def add_bias(
    x: Tensor, bias: Tensor, groups: _Groups, weights: Tensor | None = None, ranks: int = 1
) -> Tensor:
    """Return the rows x [T, n] of group e plus bias[e], times a weight a row [T, 1] where given. bias: [E, n].

    ranks: how many ranks add it to their shares of one sum: each adds as large a part, and learns its whole gradient.
    """
    return _AddBias.apply(x, bias, weights, groups, ranks)


class _AddBias(torch.autograd.Function):
    """With its own backward: sums over a group's rows in one order, so that copies of a bias stay equal."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, weights: Tensor | None, groups: _Groups, ranks: int
    ) -> Tensor:
        assert groups.numbers is not None
        ctx.save_for_backward(bias, weights, groups.numbers)
        ctx.groups, ctx.ranks = replace(groups, numbers=None), ranks
        added = bias.index_select(0, groups.numbers)
        if weights is not None:
            added = added * (weights / ranks)
        return (x + added).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        bias, weights, numbers = ctx.saved_tensors
        grad_weights = None
        if weights is not None:
            shares = (grad * bias.index_select(0, numbers)).sum(-1, keepdim=True, dtype=weights.dtype)
            grad_weights = shares / ctx.ranks
        return grad, _sums(grad.contiguous(), weights, ctx.groups), grad_weights, None, None


def _sums(grad: Tensor, weights: Tensor | None, groups: _Groups) -> Tensor:
    """The sum over each group's rows [T, n], times weights [T, 1] where given: [E, n]."""
    wide = 16 // grad.element_size()  # columns of the narrowest product that grouped_mm takes
    columns = grad.new_ones(len(grad), wide) if weights is None else weights.to(grad.dtype).expand(-1, wide)
    return _outer(grad, columns.contiguous(), groups)[..., 0].contiguous()


def _product(x: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
    """x [T, in], weight [E, in, out] → [T, out]."""
    if not len(x):
        return x.new_zeros(0, weight.shape[2])
    if groups.ends is not None:
        return F.grouped_mm(x, weight, offs=groups.ends)
    out = x.new_empty(len(x), weight.shape[2])
    for e, (rows, part) in enumerate(zip(x.split(groups.counts), out.split(groups.counts), strict=True)):
        torch.mm(rows, weight[e], out=part)
    return out


def _outer(grad: Tensor, x: Tensor, groups: _Groups) -> Tensor:
    """grad [T, out], x [T, in] → gradᵀ x in each group: [E, out, in]."""
    counts = groups.counts
    if not len(x):
        return x.new_zeros(len(counts), grad.shape[1], x.shape[1])
    if groups.ends is not None:
        out = F.grouped_mm(grad.t(), x, offs=groups.ends)
        for e, n in enumerate(counts):
            if n == 0:  # kernels need not write what they have no rows for
                out[e].zero_()
        return out
    out = x.new_zeros(len(counts), grad.shape[1], x.shape[1])
    for e, (g, rows) in enumerate(zip(grad.split(counts), x.split(counts), strict=True)):
        torch.mm(g.t(), rows, out=out[e])
    return out
