"""How evenly the experts of each layer are used, and what evens it out.

Counted are the tokens of a mini-batch that its routers send to each expert: those of samples, prompts included, once each, over
all ranks. Padding, micro-batches of padding alone and what is computed again in backward never count. What counts is where a token
went, also where its route was prescribed. Layers for multi-token prediction are left as they are. Numbers so defined depend on no
packing, and on no layout.

The losses of routers, each a sum over layers with experts, of E experts of which a token takes K: with p_te the probabilities that
layer gives token t, a softmax of its logits z_te or their sigmoids over the sum of these, and n_e the tokens sent to expert e,

    per sequence   L = 1/S Σ_s Σ_e (E / (K T_s) n_se) (1/T_s Σ_{t in s} p_te)    over S samples of T_s tokens
    per batch      L = Σ_e (E / (K T) n_e) (1/T Σ_t p_te)                        over all T tokens of the mini-batch
    z              L = 1/T Σ_t (log Σ_e exp z_te)²

The first is DeepSeek-V3's (https://arxiv.org/abs/2412.19437, equations 17 to 20), the second Switch's with the global count
(https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2501.11873), the third ST-MoE's (https://arxiv.org/abs/2202.08906). Counts
have no gradient, so each loss is a sum over tokens, of which a rank adds its own. The counts of a sample are summed over the ranks that
share its row; those of the whole mini-batch are of a pass before, without gradients.

The part of a micro-batch belongs to the row (`PackedRow.load`), as its routes do: backward may come to an older micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.routes import Routers
from quintet.models import MoeShape

if TYPE_CHECKING:  # it has a field for what is here
    from quintet.engine.row import MicroBatch


@dataclass(frozen=True)
class RouterLosses:
    """What is added to the loss of a mini-batch. z, aux: weights. lengths: tokens of each sample of this rank's batch. tokens, samples:
    of the whole mini-batch. counts: of the pass before, [layers, experts], for the loss per batch; None takes that per sequence."""

    z: float
    aux: float
    lengths: Tensor
    tokens: int
    samples: int
    counts: Tensor | None = None


@dataclass
class RowLoad:
    """What routers of these layers do with one micro-batch on this rank.

    T of the row's tokens pass a router here, of which `real`, bool [T], are of samples. sample: [T] which of the row's, and `lengths`
    [S], fp32, their tokens. groups: the ranks that share the row.
    """

    load: Load
    layers: Sequence[int]
    real: Tensor
    sample: Tensor
    lengths: Tensor
    groups: Sequence[dist.ProcessGroup]
    shares: dict[int, Tensor] = field(default_factory=dict)
    """By layer that was counted, what a token's probabilities [S, experts] are multiplied with in the loss of load."""

    def count(self, layer: int, score: str, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Count what a router chose, bool [T, experts], and return its weights [T, experts] with the gradient of its losses.
        score: what makes probabilities of its logits [T, experts], softmax or sigmoid."""
        if layer not in self.layers:
            return weights
        first = layer not in self.shares  # the second time is recomputation
        chosen = chosen & self.real[:, None]
        if first:
            self.shares[layer] = self._shares(layer, chosen)
            self.load.total[layer, :-2] += chosen.sum(0)
        losses = self.load.losses
        if losses is None:
            return weights
        aux, z = torch.zeros_like(logits[0, 0]), torch.zeros_like(logits[0, 0])
        if losses.aux:
            told = _probabilities(logits, score) * self.shares[layer][self.sample]
            aux = (told * self.real[:, None]).sum()
        if losses.z:
            z = ((logits.logsumexp(-1) * self.real) ** 2).sum() / losses.tokens
        if first:
            self.load.total[layer, -2:] += torch.stack((aux, z)).detach()
        return _Attached.apply(weights, losses.aux * aux + losses.z * z)

    def _shares(self, layer: int, chosen: Tensor) -> Tensor:
        losses, experts = self.load.losses, chosen.shape[1]
        if losses is None or not losses.aux:
            return chosen.new_empty(0)
        even = experts / self.load.top_k
        if losses.counts is not None:
            share = losses.counts[layer].float() * (even / losses.tokens**2)
            return share.expand(len(self.lengths), -1)
        sent = torch.zeros(len(self.lengths), experts, device=chosen.device)
        sent.index_add_(0, self.sample, chosen.float())
        for group in self.groups:
            dist.all_reduce(sent, group=group)
        return sent * (even / losses.samples) / self.lengths[:, None] ** 2


class _Attached(torch.autograd.Function):
    """Weights of experts, on whose backward a loss of their router is one's too."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=ctx.loss, device=grad.device)


def _probabilities(logits: Tensor, score: str) -> Tensor:
    """Of all experts, [T, experts], which sum to one."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


class Load:
    """The load of experts in one pass over a mini-batch. losses: those of routers; None where nothing is added.

    total: fp64 [layers, experts + 2], by layer the tokens that this rank sent to each expert, its share of the loss of load and of that
    of logits; dense layers 0.
    """

    def __init__(
        self, layers: int, moe: MoeShape, device: torch.device, losses: RouterLosses | None = None
    ) -> None:
        self.total = torch.zeros(layers, moe.experts + 2, dtype=torch.float64, device=device)
        self.top_k, self.losses = moe.top_k, losses

    def next(self, micro: MicroBatch, routers: Routers, group: dist.ProcessGroup | None) -> RowLoad:
        """Return the next micro-batch's. group: the ranks that its row is cut over, by context parallelism."""
        samples = micro.owner[micro.owner >= 0].unique()  # the same on all ranks that share the row
        where = torch.searchsorted(samples, micro.owner)  # 0 for padding
        real, where = (t.chunk(routers.slices)[routers.part] for t in (micro.real, where))
        lengths = torch.ones(max(len(samples), 1))
        if self.losses is not None and len(samples):
            lengths = self.losses.lengths[samples].float()
        groups = [one for one in (routers.group, group) if one is not None]
        real, where, lengths = (upload(t, routers.device) for t in (real, where, lengths))
        return RowLoad(self, routers.layers, real, where, lengths, groups)


def move_biases(routers: Iterable[Any], counts: Tensor, rate: float) -> None:
    """Add `rate` to the stored bias of each expert that got fewer tokens than the mean of its layer, and take it off where it got
    more (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). counts: [layers, experts] over all ranks, so that copies
    stay equal; routers of other layers keep theirs."""
    for router in routers:
        layer = router.layer_number - 1
        if router.expert_bias is not None and layer < len(counts):
            here = counts[layer].long()
            lacking = here.sum() - len(here) * here  # in whole numbers: a tie is one on every machine
            router.expert_bias += rate * lacking.sign()
