"""A packed micro-batch (THD) as tensors: the row of tokens, where each sequence lies, and what is trained.

`pack` is the only place where padding enters, and it follows `quintet.packing.align.Alignment`. Token t's log-prob is
read off the hidden state at t - 1 of the same sequence, so a row carries target sets: the tokens that are wanted, and
the row positions that predict them. Under context parallelism a rank's micro-batch holds its zigzag chunks of every
sequence, and predicts those of the targets whose predictors it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from quintet.engine.balance import RowLoad
from quintet.engine.device import upload
from quintet.engine.layers.attention_backends import Spans, spans
from quintet.engine.layers.context_parallel import AllGather, AllToAll, Exchange
from quintet.engine.routes import RowRoutes
from quintet.packing.align import Alignment
from quintet.packing.context import held_ranges, zigzag


@dataclass
class PackedRow(PackedSeqParams):
    """What every layer needs to know of a micro-batch.

    cos, sin: rotary tables [T, 1, 1, rotary_dim / 2] at each token's position in its own sequence.
    spans: which queries see which keys, as the attention kernel reads it.
    exchange: how ranks that share the row share keys and values; None where one rank holds the row.
    cache: the KV cache in generation, else None.
    routes: what routers are told, and what is heard of them; None where they choose by themselves and nobody listens.
    load: what is counted of routers' choices; None where nobody counts.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    spans: Spans | None = None
    exchange: Exchange | None = None
    cache: Any = None
    routes: RowRoutes | None = None
    load: RowLoad | None = None


@dataclass
class TargetSet:
    """What one head is trained on in a micro-batch: N tokens of the row, M of which are predicted here.

    predictors: [M] positions here from which they are predicted; ids: [M] those tokens; place: [M] which of the N they are.
    own: [M] which of the first set's tokens they are, which the model's own head predicts.
    token_index: [N] where the N lie in the flat values of the rank's batch; sample: [N] their samples.
    """

    predictors: Tensor
    ids: Tensor
    place: Tensor
    own: Tensor
    token_index: Tensor
    sample: Tensor


@dataclass
class MicroBatch:
    """One rank's part of a packed micro-batch.

    input_ids: [1, T / cp]. positions: [T / cp], in each token's own sequence; owner: [T / cp] that sequence's sample, a
    number in the rank's batch, or -1 for padding at the row's end; real: bool [T / cp], whether it is a token of that sample, and not
    padding after it.
    lengths: of the row's sequences, padding included, before they are cut.
    cp, cp_rank: in how many parts the row is cut, and which one this is.
    targets: of each head; the first set is that of the model's own, whose tokens are all that the others have.
    following: [1, T / cp] each, the first of each token's next one, the second of the one after it, as many as heads but the
    first need; 0 where the sequence has ended.
    """

    input_ids: Tensor
    positions: Tensor
    owner: Tensor
    real: Tensor
    lengths: list[int]
    cp: int
    cp_rank: int
    targets: list[TargetSet]
    following: list[Tensor]

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank."""
        return self.input_ids.shape[1]

    @property
    def first(self) -> bool:
        """Whether this is the first part of the row, whose rank counts what is counted once a micro-batch."""
        return self.cp_rank == 0

    def cut(self, field: Tensor, fill: Any, slices: int = 1, part: int = 0) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a per-token field of its batch (jagged, any type and trailing dims), and which of them
        the field has: [T / cp / slices, ...] and bool [T / cp / slices]. Padding, and the tokens that a shorter field
        leaves out at a sample's end, are `fill`.

        slices, part: the cut after that over cp, which sequence parallelism makes: tp slices and this rank's.
        """
        owner, positions = (t.chunk(slices)[part] for t in (self.owner, self.positions))
        at, known = _locate(owner, positions, cast(Any, field).offsets())
        return _take(field.values(), at, known, fill), known


def pack(
    values: Tensor,
    offsets: Tensor,
    trained: Tensor,
    samples: Sequence[int],
    alignment: Alignment,
    cp: int = 1,
    cp_rank: int = 0,
    ahead: Sequence[int] = (1,),
) -> MicroBatch:
    """Pack samples of a batch into one row, and take a context-parallel rank's part of it.

    values: [tokens] int64, flat token ids of the batch. offsets: [samples + 1]. trained: [tokens] bool, tokens whose
    log-prob is wanted; a sample's first token has no predecessor and is never trained. samples: which ones, in row
    order; none gives a row of padding alone. ahead: of each head, how far its targets lie from what predicts them.
    """
    sizes = [int(offsets[i + 1] - offsets[i]) for i in samples]
    padded = [alignment.padded(n) for n in sizes]
    total = alignment.row(sizes)
    lengths = padded + ([total - sum(padded)] if total > sum(padded) else [])

    numbers = torch.tensor([*samples, -1][: len(lengths)])
    owner = numbers.repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(k) for k in lengths])
    source, real = _locate(owner, positions, offsets)
    input_ids = _take(values, source, real, 0)

    def following(distance: int) -> Tensor:
        return _take(values, *_locate(owner, positions + distance, offsets), 0)[held][None]

    wanted = _take(trained, source, real, False)
    held = _index(held_ranges(lengths, cp, cp_rank))
    here = torch.full((total,), -1)
    here[held] = torch.arange(len(held))
    own = (wanted & (positions >= 1)).cumsum(0) - 1

    def target_set(distance: int) -> TargetSet:
        at = (wanted & (positions >= distance)).nonzero()[:, 0]
        predictors = here[at - distance]
        place = (predictors >= 0).nonzero()[:, 0]
        return TargetSet(
            predictors[place], input_ids[at[place]], place, own[at[place]], source[at], owner[at]
        )

    return MicroBatch(
        input_ids=input_ids[held][None],
        positions=positions[held],
        owner=owner[held],
        real=real[held],
        lengths=lengths,
        cp=cp,
        cp_rank=cp_rank,
        targets=[target_set(distance) for distance in ahead],
        following=[following(distance) for distance in range(1, max(ahead))],
    )


def _locate(owner: Tensor, positions: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Where the value of each row token lies in a field's flat values, and whether the field has one there."""
    at = offsets[owner] + positions
    return at, (owner >= 0) & (at < offsets[owner + 1])


def _take(flat: Tensor, at: Tensor, known: Tensor, fill: Any) -> Tensor:
    """Flat values at the row's tokens, and `fill` where there are none."""
    if not len(flat):
        return flat.new_full((len(at), *flat.shape[1:]), fill)
    # Faster than what a mask selects: all rows, then the few that are none.
    out = flat.index_select(0, at.where(known, 0))
    out[~known] = fill
    return out


def attention_metadata(
    micro: MicroBatch,
    device: torch.device,
    *,
    rectangles: bool,
    group: dist.ProcessGroup | None = None,
    comm: str = "all_gather",
) -> PackedRow:
    """Return the `PackedRow` of a micro-batch, without rotary tables (the model adds them).

    rectangles: whether the attention kernel wants them; the varlen kernels read offsets instead.
    group: the ranks that share the row. comm: how they share attention, `engine.cp_comm`.
    """
    exchange: Exchange | None = None
    lengths = micro.lengths
    keys: Sequence[int] = lengths
    if micro.cp > 1:
        assert group is not None
        if comm == "all_to_all":
            exchange = AllToAll(group, upload(_in_row_order(micro), device))
        else:
            chunks = zigzag(micro.cp, micro.cp_rank)
            pieces = [(n // (2 * micro.cp), c) for n in lengths for c in chunks]
            lengths, keys = [n for n, _ in pieces], [n * (c + 1) for n, c in pieces]
            exchange = AllGather(group, *_prefixes(micro, chunks, device))
    return PackedRow(
        qkv_format="thd",
        spans=spans(lengths, keys, device, rectangles=rectangles),
        exchange=exchange,
        cp_group=group if micro.cp > 1 else None,
        local_cp_size=micro.cp,
    )


def _in_row_order(micro: MicroBatch) -> Tensor:
    """[T] for each row position, where it lies once the ranks' parts stand one after another."""
    held = torch.cat([_index(held_ranges(micro.lengths, micro.cp, r)) for r in range(micro.cp)])
    order = torch.empty_like(held)
    order[held] = torch.arange(len(held))
    return order


def _prefixes(micro: MicroBatch, chunks: tuple[int, int], device: torch.device) -> list[Tensor]:
    """What each held chunk sees of its sequence: all up to the chunk's end.

    Returns the keys [K] in gathered order, sequence by sequence and chunk by chunk, and which of them belong to the
    earlier and to the later chunks.
    """
    begins = [0, *accumulate(micro.lengths)]
    ranges, late = [], []
    for begin, n in zip(begins, micro.lengths, strict=False):
        chunk = n // (2 * micro.cp)
        for number, c in enumerate(chunks):
            ranges.append(range(begin, begin + (c + 1) * chunk))
            late.append(torch.full(((c + 1) * chunk,), bool(number)))
    keys, is_late = _in_row_order(micro)[_index(ranges)], torch.cat(late)
    return [upload(t, device) for t in (keys, (~is_late).nonzero()[:, 0], is_late.nonzero()[:, 0])]


def _index(ranges: Iterable[range]) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges])
