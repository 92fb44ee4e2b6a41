"""Log-probs and entropy from hidden states, without full-vocabulary fp32 logits.

The LM head's weight is cut over tp by vocabulary. Logits exist a chunk of tokens at a time, in the forward
pass and again in the backward, so memory holds `CHUNK_ELEMENTS` logits and not tokens x vocabulary.

With z = logits / temperature, over the whole vocabulary: log p(y) = z_y - lse(z), and
H = lse(z) - sum p z. Their gradients: d log p(y) / dz_j = [j = y] - p_j;  dH / dz_j = -p_j (z_j - lse(z) + H).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26
"""Most logits alive at once on a rank: 256 MiB in fp32."""


class VocabSlice:
    """The vocabulary rows one rank holds: [start, start + size), of which `valid` are real and not padding."""

    def __init__(self, weight_rows: int, vocab_size: int, group: dist.ProcessGroup) -> None:
        self.size = weight_rows
        self.start = group.rank() * weight_rows
        self.valid = max(0, min(vocab_size - self.start, weight_rows))
        self.group = group


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab: VocabSlice, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, both fp32 [N] and differentiable.

    hidden: [N, H], the same on every rank of the tp group. weight: [vocabulary rows of this rank, H].
    targets: [N] token ids. The gradient of `hidden` is this rank's share; `PolicyModel.for_head` sums it over tp.
    """
    return _LogProbs.apply(hidden, weight, targets, vocab, temperature)


def logits(hidden: Tensor, weight: Tensor, vocab: VocabSlice) -> Tensor:
    """All logits in fp32, [N, at least the vocabulary], gathered over tp. For sampling, not for training.

    Columns from vocab_size on are padding.
    """
    local = (hidden @ weight.t()).float()
    if vocab.group.size() == 1:
        return local
    ranks = vocab.group.size()
    out = local.new_empty((ranks * len(local), local.shape[1]))
    dist.all_gather_into_tensor(out, local.contiguous(), group=vocab.group)
    return out.view(ranks, *local.shape).transpose(0, 1).reshape(len(local), -1)


def _chunks(tokens: int, vocab_rows: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(vocab_rows, 1))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab: VocabSlice, temperature: float
    ) -> tuple[Tensor, Tensor]:
        n = len(hidden)
        lse, log_prob, mean = (hidden.new_empty(n, dtype=torch.float32) for _ in range(3))
        for part in _chunks(n, vocab.size):
            z = _scaled_logits(hidden[part], weight, vocab, temperature)
            lse[part], log_prob[part], mean[part] = _statistics(z, targets[part], vocab)
        log_prob -= lse
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.vocab, ctx.temperature = vocab, temperature
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> Any:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        vocab: VocabSlice = ctx.vocab
        with_entropy = bool(grad_entropy.any())  # no entropy in the loss: skip its share of the work
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(hidden), vocab.size):
            z = _scaled_logits(hidden[part], weight, vocab, ctx.temperature)
            log_p = z - lse[part, None]
            p = log_p.exp()
            outer = grad_log_prob[part, None]
            grad = -outer * p
            if with_entropy:
                spread = torch.where(p > 0, log_p + entropy[part, None], 0.0)
                grad -= grad_entropy[part, None] * p * spread
            here, inside = _local(targets[part], vocab)
            grad.scatter_add_(1, here[:, None], (outer * inside[:, None]).to(grad.dtype))
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += (grad.t() @ hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, vocab: VocabSlice, temperature: float) -> Tensor:
    z = (hidden @ weight.t()).float() / temperature
    if vocab.valid < vocab.size:
        z[:, vocab.valid :] = float("-inf")
    return z


def _local(targets: Tensor, vocab: VocabSlice) -> tuple[Tensor, Tensor]:
    """Targets as row numbers of this rank's slice, clamped, and whether they are inside it."""
    shifted = targets - vocab.start
    return shifted.clamp(0, vocab.size - 1), (shifted >= 0) & (shifted < vocab.size)


def _statistics(z: Tensor, targets: Tensor, vocab: VocabSlice) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, the target's z, and sum p z over the whole vocabulary: two collectives a chunk."""
    top = z.amax(dim=1) if vocab.size else z.new_full((len(z),), float("-inf"))
    if vocab.group.size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=vocab.group)
    weights = (z - top[:, None]).exp()
    here, inside = _local(targets, vocab)
    target = torch.where(inside, z.gather(1, here[:, None])[:, 0], 0.0)
    weighted = torch.where(weights > 0, weights * z, 0.0).sum(1)
    sums = torch.stack((weights.sum(1), weighted, target))
    if vocab.group.size() > 1:
        dist.all_reduce(sums, group=vocab.group)
    total, weighted, target = sums
    return top + total.log(), target, weighted / total
