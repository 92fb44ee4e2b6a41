"""Cross-entropy to a distribution over the whole vocabulary, without full-vocabulary fp32 logits.

With z the logits of the student and y those of the teacher, both by the same head and divided by the temperature, and
q = softmax(y): loss = lse(z) - Σ q z. Its gradient is d loss / dz = softmax(z) - q. Logits exist a chunk at a time and are computed
again in backward; what is fp32 is a few numbers a token (see `quintet.engine.head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quintet.engine.head import CHUNK_BYTES, VocabSlice, of_all_ranks
from quintet.engine.product import product

_FP32_ELEMENTS = 1 << 24
"""Logits of each of the two that are fp32 at once."""


def distilled(
    hidden: Tensor, weight: Tensor, teacher: Tensor, targets: Tensor, vocab: VocabSlice, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy to the teacher's distribution, and whether the target is the student's likeliest token, 1 or 0:
    fp32 [N] each (fp64 for fp64), the first differentiable.

    hidden, teacher: [N, H], the same on every rank of the tp group; weight, targets, vocab: as in `log_probs_and_entropy`. The
    teacher gets no gradient, neither by its states nor by the weight.
    """
    return _Distilled.apply(hidden, weight, teacher.detach(), targets, vocab, temperature)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: Tensor,
        targets: Tensor,
        vocab: VocabSlice,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        statistics = hidden.new_empty((6, len(hidden)), dtype=exact)
        for part in _chunks(hidden, weight):
            z, y = (_logits(x[part], weight, vocab, temperature, exact) for x in (hidden, teacher))
            _statistics(z, y, targets[part] - vocab.start, statistics[:, part])
        tops, totals, teacher_tops, teacher_totals, moments, at_target = of_all_ranks(
            statistics, vocab.group
        ).unbind(1)
        top, teacher_top = tops.amax(0), teacher_tops.amax(0)
        lse = top + ((tops - top).exp() * totals).sum(0).log()
        scale = (teacher_tops - teacher_top).exp()
        teacher_total = (scale * teacher_totals).sum(0)
        expected = (scale * (moments + (tops - top) * teacher_totals)).sum(0) / teacher_total + top
        likeliest = (at_target.amax(0) == top).to(exact)
        ctx.save_for_backward(hidden, weight, teacher, lse, teacher_top + teacher_total.log())
        ctx.vocab, ctx.temperature = vocab, temperature
        ctx.mark_non_differentiable(likeliest)
        return lse - expected, likeliest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_top: Any) -> Any:
        hidden, weight, teacher, lse, teacher_lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        valid = ctx.vocab.valid
        for part in _chunks(hidden, weight):
            z, y = (
                _logits(x[part], weight, ctx.vocab, ctx.temperature, lse.dtype) for x in (hidden, teacher)
            )
            z.sub_(lse[part, None]).exp_().sub_(y.sub_(teacher_lse[part, None]).exp_())
            outer = z.mul_(grad[part, None] / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = product(outer, weight[:valid].t())
            if grad_weight is not None:
                grad_weight[:valid].add_(product(outer.t(), hidden[part].t()))
        to_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, to_weight, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    fp32 = _FP32_ELEMENTS // max(len(weight), 1)
    step = max(1, min(CHUNK_BYTES[weight.device.type] // (max(len(weight), 1) * weight.element_size()), fp32))
    return (slice(at, min(at + step, len(hidden))) for at in range(0, len(hidden), step))


def _logits(x: Tensor, weight: Tensor, vocab: VocabSlice, temperature: float, exact: torch.dtype) -> Tensor:
    """[n, the rank's rows of the vocabulary that are no padding]."""
    return product(x, weight[: vocab.valid]).to(exact).div_(temperature)


def _statistics(z: Tensor, y: Tensor, targets: Tensor, out: Tensor) -> None:
    """Write to out [6, n]: m = max z, Σ e^(z - m), M = max y, Σ e^(y - M), Σ e^(y - M) (z - m), and the target's z (lowest
    where it is not among these)."""
    if not z.shape[1]:  # a rank with nothing but padding
        out.zero_()
        out[0], out[2], out[5] = _LOWEST, _LOWEST, _LOWEST
        return
    inside = (targets >= 0) & (targets < z.shape[1])
    here = targets.clamp(0, z.shape[1] - 1)
    out[5] = torch.where(inside, z.gather(1, here[:, None])[:, 0], _LOWEST)
    out[0], out[2] = z.amax(1), y.amax(1)
    shifted = z.sub_(out[0, :, None])
    weights = y.sub_(out[2, :, None]).exp_()
    out[3] = weights.sum(1)
    out[4] = torch.linalg.vecdot(weights, shifted)
    out[1] = shifted.exp_().sum(1)


_LOWEST = -1e30  # below every logit, and still finite
