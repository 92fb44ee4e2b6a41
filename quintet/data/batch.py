"""The Batch: what a step trains on, samples of any length with no padding.

A Batch is a TensorDict of batch size [samples]. Per-token fields are jagged (`torch.jagged`) nested tensors of
shape [samples, j, ...] over the whole sample (prompt and response); per-sample fields are dense. All
jagged fields of a batch are built on one `offsets` tensor, because nested tensors only combine when they share
it; make them here (`make_batch`, `set_tokens`) and that holds. Position t of a per-token field speaks of token t:
`old_logprobs` at t is the log-prob of token t given the tokens before it.

Every function here works on flat values and one gather index, whatever the number of samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from quintet.skip_dynamo_import import uncompiled

with uncompiled():
    from tensordict import TensorDict

Batch: TypeAlias = TensorDict

_FLOAT_FIELDS = {"loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "rewards"}
_KEPT_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16}
_ALL_BUT_LAST = {"routes"}
"""Per-token fields that may leave out each sample's last token, of which nothing is known: it is never computed on."""


def make_batch(input_ids: Sequence[Any], prompt_lengths: Sequence[int] | Tensor, **fields: Any) -> Batch:
    """Build a Batch from ragged Python data.

    Args:
        input_ids: one list or 1-d tensor of token ids a sample, prompt and response together.
        prompt_lengths: tokens of each sample that are prompt, between 0 and the sample's length.
        fields: further fields by name. A list of lists or tensors is a per-token field: one value a token of the
            whole sample, or one a token of the response (the prompt then gets zeros); `routes` may be one a token but
            the last. A value may have dims of its own. A flat list of numbers, or a tensor of shape [samples, ...], is a
            per-sample field. Tensors and arrays of bool and of 8 and 16 bit integers keep their type; other integers
            become int64, and floats fp32.

    `loss_mask` is 1 on response tokens and `sample_index` counts from 0, unless given.

    Raises:
        ValueError: a field's lengths fit neither the samples nor the responses, or a sample's first token is to be trained.
    """
    n = len(input_ids)
    sizes = torch.tensor([len(ids) for ids in input_ids], dtype=torch.int64)
    prompts = torch.as_tensor(prompt_lengths, dtype=torch.int64)
    if prompts.shape != (n,):
        raise ValueError(f"prompt_lengths has shape {tuple(prompts.shape)}, but there are {n} samples")
    if n and bool(((prompts < 0) | (prompts > sizes)).any()):
        bad = int(((prompts < 0) | (prompts > sizes)).nonzero()[0])
        raise ValueError(f"sample {bad} has {sizes[bad]} tokens but prompt_length {prompts[bad]}")
    offsets = _offsets(sizes)
    on_response = _position(offsets) >= prompts.repeat_interleave(sizes)

    made: dict[str, Tensor] = {"input_ids": _jagged(_flat("input_ids", input_ids), offsets)}
    made["prompt_length"] = prompts
    for name, value in fields.items():
        if value is None:
            raise ValueError(f"field {name} is None")
        made[name] = _field(name, value, offsets, on_response)
    made.setdefault("loss_mask", _jagged(on_response.float(), offsets))
    made.setdefault("sample_index", torch.arange(n))
    _refuse_trained_first_tokens(made["loss_mask"], offsets)
    return TensorDict(cast(Any, made), batch_size=[n])


def _refuse_trained_first_tokens(loss_mask: Tensor, offsets: Tensor) -> None:
    """Raise ValueError where a sample's first token has a loss: no token stands before it to predict it from."""
    mask, first = cast(Any, loss_mask).values(), offsets[:-1][offsets.diff() > 0]
    trained = mask[first] != 0
    if bool(trained.any()):
        sample = int((offsets[:-1] == first[trained][0]).nonzero()[-1])
        raise ValueError(
            f"sample {sample}: its first token has loss_mask {mask[first][trained][0].item():g}, but no token stands before it to "
            "predict it from: give it a prompt of at least one token (a beginning-of-sequence token, say), or a mask of 0 there"
        )


def offsets(batch: Batch) -> Tensor:
    """Return where samples start in the flat values: int64 [samples + 1], the last is the number of tokens."""
    return cast(Any, batch["input_ids"]).offsets()


def lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each sample, prompt and response."""
    return cast(list[int], offsets(batch).diff().tolist())


def token_count(batch: Batch) -> int:
    """Return the number of tokens of all samples together."""
    return int(offsets(batch)[-1])


def tokens(batch: Batch, name: str) -> Tensor:
    """Return flat values of a per-token field: [tokens, ...], samples one after another."""
    return cast(Tensor, batch[name]).values()


def set_tokens(batch: Batch, name: str, values: Tensor) -> None:
    """Set a per-token field in place from flat values [tokens, ...], or of `routes` from those of all tokens but each
    sample's last."""
    ends = offsets(batch)
    if name in _ALL_BUT_LAST and len(values) != token_count(batch):
        ends = _without_last(ends)
    if len(values) != int(ends[-1]):
        raise ValueError(f"{name} has {len(values)} values, but the batch has {token_count(batch)} tokens")
    batch[name] = _jagged(values, ends)


def sample_ids(batch: Batch) -> Tensor:
    """Return the sample (0 .. samples - 1) of each token: int64 [tokens]."""
    sizes = offsets(batch).diff()
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def select(batch: Batch, indices: Sequence[int] | Tensor) -> Batch:
    """Return the samples at `indices` (any order, repeats allowed) as a new Batch that shares no memory with this one.

    Raises:
        IndexError: an index is not in 0 .. samples - 1.
    """
    old = offsets(batch)
    index = torch.as_tensor(indices, dtype=torch.int64, device=old.device)
    n = batch.batch_size[0]
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < n):
        raise IndexError(
            f"sample indices must be within 0 .. {n - 1}, got {int(index.min())} .. {int(index.max())}"
        )
    # By values of a field: as many as tokens, or as all but the last.
    gathers: dict[int, tuple[Tensor, Tensor]] = {}

    def taken(value: Tensor) -> Tensor:
        flat = value.values()
        if len(flat) not in gathers:
            gathers[len(flat)] = _gather(cast(Any, value).offsets(), index)
        gather, new = gathers[len(flat)]
        return _jagged(flat.index_select(0, gather), new)

    with _plain_dispatch():
        out = {
            name: taken(value) if value.is_nested else value.index_select(0, index)
            for name, value in _items(batch)
        }
    return TensorDict(cast(Any, out), batch_size=[len(index)])


def _gather(old: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where the samples at `index` have their flat values, and their offsets."""
    sizes = old.diff()[index]
    new = _offsets(sizes)
    # The position in the new values, moved by how far its sample moved.
    moved = (old[:-1][index] - new[:-1]).repeat_interleave(sizes)
    return moved + torch.arange(len(moved), device=moved.device), new


def concat(batches: Sequence[Batch]) -> Batch:
    """Return all samples of `batches` in order, as a new Batch.

    Raises:
        ValueError: there are no batches, or their fields differ.
    """
    if not batches:
        raise ValueError("concat needs at least one batch")
    names = set(batches[0].keys())
    for i, batch in enumerate(batches):
        if set(batch.keys()) != names:
            odd = ", ".join(sorted(map(str, names ^ set(batch.keys()))))
            raise ValueError(f"batches 0 and {i} do not have the same fields; only one of them has: {odd}")
    new = _offsets(torch.cat([offsets(batch).diff() for batch in batches]))
    out = {}
    with _plain_dispatch():
        for name, first in _items(batches[0]):
            parts = [cast(Tensor, batch[name]) for batch in batches]
            if any(part.is_nested != first.is_nested for part in parts):
                raise ValueError(f"field {name} is per token in some batches and per sample in others")
            if first.is_nested:
                flat = torch.cat([part.values() for part in parts])
                ends = new if len(flat) == int(new[-1]) else _without_last(new)
                if len(flat) != int(ends[-1]):
                    raise ValueError(
                        f"field {name} has all tokens in some batches and all but the last in others"
                    )
                out[name] = _jagged(flat, ends)
            else:
                out[name] = torch.cat(parts)
    return TensorDict(cast(Any, out), batch_size=[len(new) - 1])


def _plain_dispatch() -> Any:
    """Nested tensors' Python-level interception off: it costs several times the work itself on small batches."""
    return torch._C.DisableTorchFunctionSubclass()


def _items(batch: Batch) -> Iterable[tuple[str, Tensor]]:
    return cast(Iterable[tuple[str, Tensor]], batch.items())


def _offsets(sizes: Tensor) -> Tensor:
    out = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes, 0, out=out[1:])
    return out


def _without_last(offsets: Tensor) -> Tensor:
    """Offsets of the same samples, each without its last token."""
    return _offsets((offsets.diff() - 1).clamp(min=0))


def _position(offsets: Tensor) -> Tensor:
    """Position of each token in its sample: int64 [tokens]."""
    starts = offsets[:-1].repeat_interleave(offsets.diff())
    return torch.arange(len(starts), device=starts.device) - starts


@cache
def _find_distributed_tensors() -> None:
    """torch looks for its distributed tensors when the first jagged one is made: so they come without sympy."""
    with uncompiled():
        importlib.import_module("torch.distributed.tensor")


def _jagged(values: Tensor, offsets: Tensor) -> Tensor:
    _find_distributed_tensors()
    return torch.nested.nested_tensor_from_jagged(values.contiguous(), offsets)


def _typed(name: str, values: Tensor) -> Tensor:
    if values.is_floating_point() or name in _FLOAT_FIELDS:
        return values.float()
    return values if values.dtype in _KEPT_TYPES and name != "input_ids" else values.long()


def _flat(name: str, rows: Sequence[Any]) -> Tensor:
    """Rows of per-token values, one after another: [tokens, ...]."""
    # The first has type and dims all the same.
    empty = [row for row in rows[:1] if isinstance(row, (Tensor, np.ndarray))]
    filled: list[Any] = [row for row in rows if len(row)] or empty
    if not filled:
        return _typed(name, torch.zeros(0, dtype=torch.int64))
    if isinstance(filled[0], Tensor):
        flat = torch.cat(filled)
    elif isinstance(filled[0], np.ndarray):
        flat = torch.from_numpy(np.concatenate(filled))
    else:
        flat = torch.from_numpy(np.array(list(chain.from_iterable(filled))))
    return _typed(name, flat)


def _field(name: str, value: Any, offsets: Tensor, on_response: Tensor) -> Tensor:
    n = len(offsets) - 1
    if isinstance(value, Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, Tensor) or not len(value) or np.isscalar(value[0]):
        dense = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if dense.shape[:1] != (n,):
            raise ValueError(f"field {name} has shape {tuple(dense.shape)}, but there are {n} samples")
        return _typed(name, dense)
    sizes = torch.tensor([len(row) for row in value], dtype=torch.int64)
    flat = _flat(name, value)
    for ends in (offsets, *([_without_last(offsets)] if name in _ALL_BUT_LAST else [])):
        if torch.equal(sizes, ends.diff()):
            return _jagged(flat, ends)
    if len(sizes) == n:
        responses = _offsets(on_response.long())[offsets].diff()
        if torch.equal(sizes, responses):
            whole = flat.new_zeros(len(on_response), *flat.shape[1:])
            whole[on_response] = flat
            return _jagged(whole, offsets)
    raise ValueError(
        f"field {name} has rows of lengths {sizes.tolist()[:8]}…, which are neither the samples' lengths "
        f"{offsets.diff().tolist()[:8]}… nor the responses'"
    )
