"""Move weights from one layout to another, straight from shard to shard.

Both sides describe what they hold as boxes of full tensors (`quintet.engine.shards`). Where a source box and a
destination box meet, that part travels from one owner of the source box to the destination. Everything is
planned once, from the boxes of all ranks; a transfer is then one all-to-all a bucket, and parts that stay on
their rank are copied in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.shards import Shard
from quintet.models.mcore import Box, meet, volume

Holding = tuple[str, Box]
"""Name and box of a shard, without its data."""


@dataclass(frozen=True)
class Transfer:
    """One part on its way: `box` of `name` from rank `source` (its shard `source_index`) to rank `target`."""

    name: str
    box: Box
    source: int
    source_index: int
    target: int
    target_index: int


def plan_transfers(
    sources: Sequence[Sequence[Holding]], targets: Sequence[Sequence[Holding]]
) -> list[Transfer]:
    """Transfers that fill every target box, ordered by target index so that buckets follow the model.

    A part comes from its own rank where that rank holds it; otherwise the owners of a box share the work.

    Raises ValueError naming a box that no source covers.
    """
    owners: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, holdings in enumerate(sources):
        for index, (name, box) in enumerate(holdings):
            owners[name][box].append((rank, index))
    transfers = []
    for target, holdings in enumerate(targets):
        for target_index, (name, box) in enumerate(holdings):
            missing = volume(box)
            for source_box, holders in owners[name].items():
                part = meet(box, source_box)
                if part is None:
                    continue
                local = [h for h in holders if h[0] == target]
                source, source_index = local[0] if local else holders[target % len(holders)]
                transfers.append(Transfer(name, part, source, source_index, target, target_index))
                missing -= volume(part)
            if missing:
                raise ValueError(f"{name}: {missing} elements of {box} on rank {target} have no source")
    return sorted(transfers, key=lambda t: (t.target_index, t.target, t.source, t.box))


@dataclass(frozen=True)
class Holdings:
    """What one rank brings to a plan and takes from it. buffers: names among them that are no parameters."""

    sources: list[Holding]
    targets: list[Holding]
    buffers: set[str]


def gather_holdings(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Holdings]:
    """Every rank's, in rank order. Collective."""
    mine = Holdings(
        [(one.name, one.box) for one in sources],
        [(one.name, one.box) for one in targets],
        {one.name for one in [*sources, *targets] if not one.trained},
    )
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return held


class Resharder:
    """A standing plan between two sets of shards over the same ranks. Weights travel as `dtype`, buffers in fp32.

    Collective to build and to run: every rank of the default group takes part, also one without shards. holdings: what
    every rank holds, where that is known already; building is then no collective.
    """

    def __init__(
        self,
        sources: list[Shard],
        targets: list[Shard],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_mib: int = 256,
        holdings: Sequence[Holdings] | None = None,
    ) -> None:
        self.sources, self.targets = sources, targets
        self._device = device
        held = gather_holdings(sources, targets) if holdings is None else holdings
        buffers = set[str]().union(*(one.buffers for one in held))
        transfers = plan_transfers([one.sources for one in held], [one.targets for one in held])
        transfers.sort(key=lambda t: t.name in buffers)  # not back and forth between types
        self.buckets: list[tuple[torch.dtype, list[Transfer]]] = []
        room = 0
        for transfer in transfers:  # the same cuts on every rank: they follow from the plan alone
            kind = torch.float32 if transfer.name in buffers else dtype
            if not self.buckets or room < volume(transfer.box) or self.buckets[-1][0] != kind:
                self.buckets.append((kind, []))
                room = (bucket_mib << 20) // kind.itemsize
            self.buckets[-1][1].append(transfer)
            room -= volume(transfer.box)

    def run(self) -> None:
        """Copy every target's content from the sources."""
        with torch.no_grad():
            for dtype, bucket in self.buckets:
                self._run(dtype, bucket)

    def _run(self, dtype: torch.dtype, bucket: list[Transfer]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        sending: list[list[Tensor]] = [[] for _ in range(world)]
        receiving: list[list[Tensor]] = [[] for _ in range(world)]
        for t in bucket:
            if t.source == rank == t.target:
                source, target = self._source(t), self._target(t)
                target.copy_(source.reshape(target.shape))
            elif t.source == rank:
                sending[t.target].append(self._source(t))
            elif t.target == rank:
                receiving[t.source].append(self._target(t))
        if all(t.source == t.target for t in bucket):
            return
        sizes_out = [sum(p.numel() for p in parts) for parts in sending]
        sizes_in = [sum(p.numel() for p in parts) for parts in receiving]
        outgoing = [p.reshape(-1).to(dtype) for parts in sending for p in parts]
        out = torch.cat(outgoing) if outgoing else self._empty(0, dtype)
        arrived = self._empty(sum(sizes_in), dtype)
        dist.all_to_all_single(arrived, out, sizes_in, sizes_out)
        start = 0
        for parts in receiving:
            for part in parts:
                part.copy_(arrived[start : start + part.numel()].view(part.shape))
                start += part.numel()

    def _source(self, t: Transfer) -> Tensor:
        return self.sources[t.source_index].part(t.box)

    def _target(self, t: Transfer) -> Tensor:
        return self.targets[t.target_index].part(t.box)

    def _empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self._device)
