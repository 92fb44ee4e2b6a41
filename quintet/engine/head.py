"""Log-probs and entropy from hidden states, without full-vocabulary fp32 logits.

The LM head's weight is cut over tp by vocabulary. Logits exist in the parameters' type only. Those of a micro-batch's
first tokens, as many as `KEPT_BYTES` hold, stay until the backward pass, where they turn into their own gradient in
place; the others exist `CHUNK_BYTES` at a time and are computed again. What is fp32 is a few numbers a token: on GPU
the logits are read by one fused kernel forward and one backward (`quintet.engine.triton.head`), elsewhere a few rows
at a time are fp32.

With z = logits / temperature, over the whole vocabulary: log p(y) = z_y - lse(z), and
H = lse(z) - sum p z. Their gradients: d log p(y) / dz_j = [j = y] - p_j;  dH / dz_j = -p_j (z_j - lse(z) + H).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.engine.product import product

KEPT_BYTES = {"cuda": 5 << 30, "cpu": 1 << 30}
"""Most bytes of logits a rank keeps from the forward to the backward pass, of all heads: 17,600 tokens of 152k bf16 logits on a
GPU."""

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
"""Most bytes of logits alive at once besides the kept ones. A smaller chunk makes slower matrix products."""

_FP32_ELEMENTS = 1 << 24
"""Logits that are fp32 at once where no fused kernel runs."""


class TokenScores(NamedTuple):
    """What the head says of N tokens. Another statistic of the same logits would be a further field."""

    logprobs: Tensor
    entropy: Tensor
    top: Tensor
    """Whether the target is the likeliest token, 1 or 0."""


class VocabSlice:
    """The vocabulary rows one rank holds: from `start` on, of which `valid` are real and not padding."""

    def __init__(self, weight_rows: int, vocab_size: int, group: dist.ProcessGroup) -> None:
        self.start = group.rank() * weight_rows
        self.valid = max(0, min(vocab_size - self.start, weight_rows))
        self.group = group


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: VocabSlice,
    temperature: float = 1.0,
    heads: int = 1,
) -> TokenScores:
    """Return the log-prob of each target and entropy of each distribution, fp32 [N] each (fp64 for fp64) and differentiable, and
    whether the target is the likeliest.

    hidden: [N, H], the same on every rank of the tp group. weight: [vocabulary rows of this rank, H].
    targets: [N] token ids. The gradient of `hidden` is this rank's share; `PolicyModel.for_head` sums it over tp. heads: how many
    of a micro-batch's are alive until its backward pass, which share the memory for logits.
    """
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = KEPT_BYTES[weight.device.type] // heads if trained else 0
    return TokenScores(*_Scores.apply(hidden, weight, targets, vocab, temperature, keep))


def logits(hidden: Tensor, weight: Tensor, vocab: VocabSlice) -> Tensor:
    """Return all logits in fp32, [N, at least the vocabulary], gathered over tp. For sampling, not for training.

    Columns from vocab_size on are padding.
    """
    local = product(hidden, weight).float()
    if vocab.group.size() == 1:
        return local
    ranks = vocab.group.size()
    out = local.new_empty((ranks * len(local), local.shape[1]))
    dist.all_gather_into_tensor(out, local.contiguous(), group=vocab.group)
    return out.view(ranks, *local.shape).transpose(0, 1).reshape(len(local), -1)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab: VocabSlice,
        temperature: float,
        keep: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # No entropy in the loss shows as no gradient of it: nothing on the GPU has to be looked at to know.
        ctx.set_materialize_grads(False)
        ctx.vocab, ctx.temperature, ctx.keep, ctx.kept_logits = vocab, temperature, keep, None
        exact = torch.promote_types(hidden.dtype, torch.float32)
        statistics = hidden.new_empty((4, len(hidden)), dtype=exact)
        for part, kept in _parts(hidden, weight, keep):
            z = product(hidden[part], weight)
            _statistics(z, targets[part] - vocab.start, vocab.valid, temperature, statistics[:, part])
            if kept:
                ctx.kept_logits = z
            del z  # before the next chunk comes
        lse, log_prob, entropy, top = _over_vocabulary(statistics, vocab.group)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.mark_non_differentiable(top)
        return log_prob, entropy, top

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_top: None) -> Any:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        vocab: VocabSlice = ctx.vocab
        kept_logits, ctx.kept_logits = ctx.kept_logits, None  # gone after one use: they are overwritten
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(lse)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        for part, kept in _parts(hidden, weight, 0 if kept_logits is None else ctx.keep):
            z = kept_logits if kept else product(hidden[part], weight)
            row = (lse[part], entropy[part], grad_log_prob[part])
            of_entropy = None if grad_entropy is None else grad_entropy[part]
            _to_gradient_(z, targets[part] - vocab.start, vocab.valid, ctx.temperature, *row, of_entropy)
            if grad_hidden is not None:
                grad_hidden[part] = product(z, weight.t())
            if ctx.needs_input_grad[1]:
                grad_weight = _plus(grad_weight, product(z.t(), hidden[part].t()))
            del z
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _plus(total: Tensor | None, share: Tensor) -> Tensor:
    """A sum, at least fp32 once there are two; a share has no name, so that it is gone before the next comes."""
    return share if total is None else total.to(torch.promote_types(share.dtype, torch.float32)).add_(share)


def _parts(hidden: Tensor, weight: Tensor, keep: int) -> Iterator[tuple[slice, bool]]:
    """Slices of the N tokens whose logits are computed together, and whether they are kept: the first may be, of `keep` bytes."""
    tokens, per_token = len(hidden), max(len(weight), 1) * weight.element_size()
    kept = min(tokens, keep // per_token)
    if kept:
        yield slice(0, kept), True
    step = max(1, CHUNK_BYTES[weight.device.type] // per_token)
    for start in range(kept, tokens, step):
        yield slice(start, min(start + step, tokens)), False


def of_all_ranks(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's statistics of its part of the vocabulary: [tp, kinds, N] from [kinds, N] each."""
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty((group.size() * len(statistics), statistics.shape[1]))
    dist.all_gather_into_tensor(gathered, statistics, group=group)
    return gathered.view(group.size(), *statistics.shape)


def _over_vocabulary(statistics: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From every rank's `_statistics` [4, N]: lse, log-prob, entropy, and whether the target is the likeliest [N], over the whole
    vocabulary."""
    tops, totals, moments, targets = of_all_ranks(statistics, group).unbind(1)
    top = tops.amax(0)
    shift = tops - top
    scale = shift.exp()
    total = (scale * totals).sum(0)
    moment = (scale * (moments + shift * totals)).sum(0)
    log_total = total.log()
    target = targets.sum(0)
    likeliest = (target == top).to(top.dtype)  # both are read off the same logits by the same arithmetic
    return top + log_total, target - top - log_total, log_total - moment / total, likeliest


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-prob of a token in each row, fp32 [n]. logits: [n, vocabulary], of which none is missing; tokens: int64 [n]."""
    if runs_fused(logits):
        from quintet.engine.triton import head as head_kernels

        return head_kernels.log_probs(logits, tokens)
    logits = logits.float()
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)


# One pass over logits z [n, vocabulary rows] forward, one backward. `targets` are relative to the slice and may lie
# outside it; columns from `valid` on are padding.

_LOWEST = -1e30  # below every logit, and still finite: a rank whose rows are all padding has this maximum


def _statistics(z: Tensor, targets: Tensor, valid: int, temperature: float, out: Tensor) -> None:
    """Write to out [4, n]: m = max z, Σ e^(z - m), Σ e^(z - m) (z - m), and the target's z (0 where it is outside)."""
    if runs_fused(z):
        from quintet.engine.triton import head as head_kernels

        head_kernels.statistics(z, targets, valid, temperature, out)
        return
    if not valid:
        out.zero_()
        out[0] = _LOWEST
        return
    for rows in _rows(z):
        scaled = z[rows, :valid].to(out.dtype) / temperature
        here, inside = targets[rows].clamp(0, valid - 1), _inside(targets[rows], valid)
        out[3, rows] = torch.where(inside, scaled.gather(1, here[:, None])[:, 0], 0.0)
        top = scaled.amax(1)
        shifted = scaled.sub_(top[:, None])
        weights = shifted.exp()
        out[0, rows] = top
        out[1, rows] = weights.sum(1)
        out[2, rows] = torch.linalg.vecdot(weights, shifted)


def _to_gradient_(
    z: Tensor,
    targets: Tensor,
    valid: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Turn logits into the gradient of the loss by them, in place."""
    if runs_fused(z):
        from quintet.engine.triton import head as head_kernels

        head_kernels.to_gradient_(z, targets, valid, temperature, lse, entropy, grad_log_prob, grad_entropy)
        return
    z[:, valid:] = 0
    if not valid:
        return
    for rows in _rows(z):
        log_p = (z[rows, :valid].to(lse.dtype) / temperature).sub_(lse[rows, None])
        p = log_p.exp()
        outer = grad_log_prob[rows, None]
        if grad_entropy is None:
            grad = p.mul_(-outer)
        else:
            spread = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(outer)
            grad = p.mul_(spread).neg_()
        here, inside = targets[rows].clamp(0, valid - 1), _inside(targets[rows], valid)
        grad.scatter_add_(1, here[:, None], outer * inside[:, None])
        z[rows, :valid] = grad.div_(temperature)


def _inside(targets: Tensor, valid: int) -> Tensor:
    return (targets >= 0) & (targets < valid)


def _rows(z: Tensor) -> Iterator[slice]:
    step = max(1, _FP32_ELEMENTS // max(z.shape[1], 1))
    for start in range(0, len(z), step):
        yield slice(start, start + step)
