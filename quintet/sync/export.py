"""Fill buckets from the shards of all trainer ranks, whatever their layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.reshard import Holdings, Parts, Round, Transfer, all_units, in_rounds, plan_transfers
from quintet.engine.shards import Shard
from quintet.errors import UserError
from quintet.models.mcore import Box
from quintet.sync.buckets import Bucket


class Export:
    """The standing plan by which every rank's buckets are filled. No collective to build; `fill` is one.

    sources: this rank's shards. held: every rank's. sequences: every rank's buckets in their order. staging_bytes: of what
    crosses ranks, a rank sends at most this much at a time, and gets as much.
    """

    def __init__(
        self,
        sources: list[Shard],
        held: Sequence[Holdings],
        sequences: Sequence[Sequence[Bucket]],
        *,
        staging_bytes: int,
        device: torch.device,
    ) -> None:
        self.count = max(len(one) for one in sequences)
        """Of times that every rank calls `fill`: as often as the rank with most buckets."""
        self._device, self._sources, self._parts = device, sources, Parts(sources)
        rank, world = dist.get_rank(), dist.get_world_size()
        self._mine = list(sequences[rank])
        numbers = [
            [(n, i) for n, one in enumerate(buckets) for i in range(len(one.entries))]
            for buckets in sequences
        ]
        self._places = numbers[rank]
        wanted = [[(e.name, e.box) for one in buckets for e in one.entries] for buckets in sequences]
        types = {e.name: e.dtype for buckets in sequences for one in buckets for e in one.entries}
        transfers: list[list[Transfer]] = [[] for _ in range(self.count)]
        for t in plan_transfers([one.sources for one in held], wanted):
            transfers[numbers[t.target][t.target_index][0]].append(t)
        units = all_units(held)
        self._rounds = [
            [
                Round(one, types.__getitem__, rank, world)
                for one in in_rounds(ts, types.__getitem__, units, staging_bytes)
            ]
            for ts in transfers
        ]
        self._storages = _storages(sources)

    def check(self) -> None:
        """Raises UserError when weights are not on the device."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                raise UserError("weights are offloaded: they must be on the device to be handed to a rollout")

    def fill(self, number: int, memory: Tensor | None) -> None:
        """Fill this rank's bucket of that number in `memory`, bytes; None where it has none. Collective."""
        views = self._mine[number].views(memory) if memory is not None else []

        def write(t: Transfer) -> Tensor:
            bucket, index = self._places[t.target_index]
            return _part(views[index], self._mine[bucket].entries[index].box, t.box)

        for one in self._rounds[number]:
            one.run(lambda t: self._parts(t.source_index, t.box), write, self._device)


def _part(view: Tensor, held: Box, box: Box) -> Tensor:
    """The view of `box` in that of `held`."""
    if box == held:
        return view
    for dim, ((start, stop), (first, _)) in enumerate(zip(box, held, strict=True)):
        view = view.narrow(dim, start - first, stop - start)
    return view


def _storages(shards: Sequence[Shard]) -> list[tuple[torch.UntypedStorage, int]]:
    """Each piece of memory behind the shards once, and how large it is now."""
    found = {}
    for shard in shards:
        for tensor in shard.behind:
            storage = tensor.untyped_storage()
            found[storage._cdata] = (storage, storage.nbytes())
    return list(found.values())
