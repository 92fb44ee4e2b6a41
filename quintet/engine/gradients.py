"""Sums of gradients beyond those over dp and cp, each with its mark on the parameters that it is of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads


def mark_etp_sum(parameter: Any, groups: Any) -> None:
    """Mark a parameter that every etp rank holds whole and of whose gradient each has a share."""
    parameter.summed_over_etp = True
    parameter.shared = groups.expt_tp.rank() > 0  # counts once in the gradient norm


def mark_embedding_copy(parameter: Any, *, copy: bool) -> None:
    """Mark the embedding of the first stage, or its copy on the last stage, which layers for multi-token prediction read: what
    either lacks of the gradient the other has. Of tied embeddings core takes care itself."""
    parameter.summed_over_ends = True
    # A bucket of its own on both stages: only equal buckets are cut alike over dp, and the sum comes after that cut.
    parameter.shared_embedding = True
    if copy:
        parameter.shared = True  # counts once in the gradient norm


def finalize(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum up the gradients of a mini-batch: megatron-core's reduction without its division by token counts, which the loss did,
    then the sums of this module. Collective: every rank enters each sum that its stage has a part in."""
    groups = kwargs["pg_collection"]
    finalize_model_grads(model, None, **kwargs)
    sum_over_etp(model, groups.expt_tp)
    sum_over_ends(model, groups.embd)


def sum_over_etp(chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Add up the gradients of parameters that every etp rank holds whole. Collective over etp."""
    marked = list(_marked(chunks, "summed_over_etp"))
    if not marked:
        return
    flat = torch.cat([p.main_grad.flatten() for p in marked])
    dist.all_reduce(flat, group=group)
    for parameter, part in zip(marked, flat.split([p.numel() for p in marked]), strict=True):
        parameter.main_grad.copy_(part.view(parameter.shape))


def sum_over_ends(chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Add up the gradients of an embedding and of its copy on the last stage. Collective over the two."""
    for parameter in _marked(chunks, "summed_over_ends"):
        dist.all_reduce(parameter.main_grad, group=group)


def _marked(chunks: Sequence[torch.nn.Module], mark: str) -> Iterator[Any]:
    """Parameters in training with a mark: frozen ones have no gradient."""
    return (p for c in chunks for p in c.parameters() if getattr(p, mark, False) and p.requires_grad)
