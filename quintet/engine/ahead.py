"""What the heads of layers for multi-token prediction say of their targets, and the loss that each is trained by.

Depth d predicts token t from the state of token t - 1 - d, by the model's own LM head. Its targets are the trained tokens that
have a token so far before them: a target set of its own, with its own global count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.distill import distilled
from quintet.engine.head import log_probs_and_entropy
from quintet.engine.layers.context_parallel import gather_places
from quintet.engine.model import PolicyModel, States
from quintet.engine.row import MicroBatch, PackedRow
from quintet.recipe import schema


@dataclass
class AheadOutputs:
    """What a layer's head says of its N targets of a micro-batch, both fp32 [N]: the loss of each, and whether it is the likeliest
    token, 1 or 0. The same on every tp and cp rank, as `Outputs`."""

    losses: Tensor
    top: Tensor


@dataclass(frozen=True)
class AheadLoss:
    """The loss of the layer of one depth (from 1): its weight times the mean over `count` targets, those of the whole mini-batch.

    temperature: of the distribution that is trained, which is the model's own and not the rollout's.
    """

    settings: schema.Mtp
    depth: int
    count: int
    temperature: float = 1.0

    def __call__(self, outputs: AheadOutputs, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the mini-batch's loss, and per-token quantities."""
        share = self.settings.loss_weight * outputs.losses.sum() / max(self.count, 1)
        return share, {f"mtp/loss_{self.depth}": outputs.losses, f"mtp/accuracy_{self.depth}": outputs.top}


def ahead_losses(settings: schema.Mtp | None, counts: Sequence[int]) -> list[AheadLoss]:
    """Return the losses of a mini-batch whose target sets have so many tokens, the model's own first: one for each of the others."""
    if settings is None or not settings.train:
        return []
    return [AheadLoss(settings, depth, count) for depth, count in enumerate(counts[1:], start=1)]


def heads_keeping_logits(losses: Sequence[AheadLoss]) -> int:
    """Return how many heads of a micro-batch keep logits until its backward pass, and share the memory for them: the model's own, and
    those that are not distilled. losses: of each depth."""
    return 1 + sum(one.settings.loss != "self_distill" for one in losses)


def scores_ahead(
    model: PolicyModel, states: States, micro: MicroBatch, row: PackedRow, losses: Sequence[AheadLoss]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each layer's `AheadOutputs` at the M targets that it predicts here, as [M] each. Last stage only; all ranks of a
    cell, whatever they predict: each layer, each head and the row of a teacher is entered by all of them."""
    settings = losses[0].settings
    weight, vocab = head_of(model, settings.detach), model.vocab_slice()
    teacher = _own_rows(model, states.normed, micro, row) if settings.loss == "self_distill" else None
    looked = model.look_ahead(states, micro, row, settings.detach)
    for hidden, targets, loss in zip(looked, micro.targets[1:], losses, strict=True):
        at, ids, own = (upload(t, hidden.device) for t in (targets.predictors, targets.ids, targets.own))
        rows = model.for_head(hidden).index_select(0, at)
        if teacher is None:
            how = (vocab, loss.temperature, heads_keeping_logits(losses))
            scores = log_probs_and_entropy(rows, weight, ids, *how)
            yield -scores.logprobs, scores.top
        else:
            yield distilled(rows, weight, teacher.index_select(0, own), ids, vocab, loss.temperature)


def head_of(model: PolicyModel, detach: bool) -> Tensor:
    """Return the weight of the head that all depths share with the model: a constant where gradients stop before it."""
    weight = model.head_weight()
    return weight.detach() if detach else weight


@torch.no_grad()
def _own_rows(model: PolicyModel, normed: Tensor, micro: MicroBatch, row: PackedRow) -> Tensor:
    """The hidden states [N, H] from which the model's own head predicts the N tokens of the first target set. A depth's target may
    be predicted by the one head on this rank and by the other on the next: all ranks of the row get all."""
    targets = micro.targets[0]
    rows = model.for_head(normed).index_select(0, upload(targets.predictors, normed.device))
    if micro.cp == 1:
        return rows
    place = upload(targets.place, normed.device)
    assert row.cp_group is not None
    return gather_places(rows.t(), place, len(targets.token_index), row.cp_group).t().contiguous()
