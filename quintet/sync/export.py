"""Fill buckets from the shards of all trainer ranks, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.copies import Place
from quintet.engine.weights import fp8
from quintet.engine.weights.reshard import Holdings, Owners, all_units, plan_transfers
from quintet.engine.weights.rounds import Parts, Transfer, Turns, agreed_rounds
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models.mcore import whole_box
from quintet.sync.buckets import Bucket, Entry, aligned, laid_out


@dataclass(frozen=True)
class PackedBucket:
    """A bucket as it is sent, and how it is made: what is quantized is first gathered beside it, in `raw`."""

    sent: Bucket
    raw: Bucket

    @cached_property
    def _plain(self) -> list[int]:
        """Entries of what is sent that are gathered in their place."""
        other = {name for one in self.raw.entries for name in (one.name, one.name + fp8.SCALE)}
        return [i for i, one in enumerate(self.sent.entries) if one.name not in other]

    @cached_property
    def gathered(self) -> list[Entry]:
        """The entries that come from the ranks' shards."""
        return [*(self.sent.entries[i] for i in self._plain), *self.raw.entries]

    @cached_property
    def places(self) -> list[Place]:
        """Where those go: in the memory of what is sent, or in a second one, beside it."""
        beside = (one._replace(memory=1) for one in self.raw.places)
        return [*(self.sent.places[i] for i in self._plain), *beside]

    def finish(self, memory: Tensor, beside: Tensor) -> None:
        """Quantize what has been gathered beside the bucket."""
        views = {one.name: view for one, view in zip(self.sent.entries, self.sent.views(memory), strict=True)}
        for one, matrix in zip(self.raw.entries, self.raw.views(beside), strict=True):
            fp8.quantize(matrix, views[one.name], views[one.name + fp8.SCALE])


def made(bucket: Bucket, quantized: Collection[str] = ()) -> PackedBucket:
    """Return the way a bucket of the engine's tensors is sent, those of the names given in 8 bits."""
    raw = [one for one in bucket.entries if one.name in quantized]
    if not raw:
        return PackedBucket(bucket, Bucket((), 0))
    sent: list[Entry] = []
    for one in bucket.entries:
        if one.name not in quantized:
            sent.append(one)
            continue
        scales = fp8.scales_shape(one.shape)
        sent.append(replace(one, dtype=fp8.DTYPE))
        sent.append(Entry(one.name + fp8.SCALE, scales, whole_box(scales), torch.float32))
    return PackedBucket(laid_out(sent), laid_out(raw))


class Export:
    """The standing plan by which every rank's buckets are filled. Collective to build; so is `fill`.

    sources: this rank's shards. held: every rank's; owners: of the same. sequence: this rank's buckets in their order.
    types: what each tensor is gathered as. staging_bytes: of what crosses ranks, a rank sends at most this much at a time, and
    gets as much.
    """

    def __init__(
        self,
        sources: list[Shard],
        held: Sequence[Holdings],
        owners: Owners,
        sequence: Sequence[PackedBucket],
        types: Callable[[str], torch.dtype],
        *,
        staging_bytes: int,
        device: torch.device,
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._device, self._parts = device, Parts(sources)
        self._mine = list(sequence)

        def plan() -> Turns:
            wanted = [[(e.name, e.box) for e in one.gathered] for one in sequence]
            getting = [plan_transfers(owners, rank, boxes) for boxes in wanted]
            return Turns(rank, world, getting, types, all_units(held), staging_bytes)

        self._rounds = agreed_rounds(run_on_all_or_raise(plan), held[rank].sources)
        self.count = len(self._rounds)
        """Of times that every rank calls `fill`: as often as the rank with most buckets."""
        storages = (tensor.untyped_storage() for one in sources for tensor in one.behind)
        self._storages = {one._cdata: (one, one.nbytes()) for one in storages}
        """Each piece of memory behind the shards once, and how large it is now."""

    def check(self) -> None:
        """Raise UserError when weights are not on the device."""
        for storage, nbytes in self._storages.values():
            if storage.nbytes() != nbytes:
                raise UserError("weights are offloaded: they must be on the device to be handed to a rollout")

    def fill(self, number: int, memory: Tensor | None) -> None:
        """Fill this rank's bucket of that number in `memory`, bytes; None where it has none. Collective."""
        if memory is None:
            self._gather(number)
            return
        mine = self._mine[number]
        beside = torch.empty(aligned(mine.raw.nbytes), dtype=torch.uint8, device=self._device)
        self._gather(number, memory, beside)
        if mine.raw.entries:
            mine.finish(memory, beside)

    def _gather(self, number: int, *memory: Tensor) -> None:
        def write(t: Transfer) -> Place:
            mine = self._mine[number]
            return mine.places[t.target_index].part(mine.gathered[t.target_index].box, t.box)

        for one in self._rounds[number]:
            one.run(self._parts, write, self._device, *memory)
