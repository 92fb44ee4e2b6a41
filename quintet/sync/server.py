"""The trainer's side of weight sync: one `WeightServer` in each rank that trains.

    server = WeightServer(engine.shard_map, shape, dtype, device)
    tickets = server.plan(specs)            # whenever receivers join, leave or start anew
    served = server.serve()                 # beside it, each rollout takes ChannelSource(tickets).batches(number)

All ranks fill bucket after bucket together, straight from their shards, each for the receivers it serves; while a bucket is
loaded, the next is filled. Two are in memory at most, and only while serving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.copies import without_collections
from quintet.engine.weights.fp8 import quantized_names
from quintet.engine.weights.hf import planned_tensors
from quintet.engine.weights.reshard import Owners, all_units, gather_holdings
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.mcore import whole_box
from quintet.rollout.base import WANTED, Wanted
from quintet.sync.buckets import Entry, in_buckets, slots
from quintet.sync.export import Export, PackedBucket, made
from quintet.sync.rendezvous import Rendezvous
from quintet.sync.senders import ProcessGroupSender, SharedMemorySender, Store
from quintet.sync.shared_memory import SharedBuffer
from quintet.sync.wire import Answer, Ticket, ended

PATIENCE = 4
"""A receiver waits so many times as long as the trainer: it must outlast others that the trainer waits for in vain."""
STAGED_SHARE = 4
"""What crosses ranks at a time is this part of a bucket."""


@dataclass(frozen=True)
class ReceiverSpec:
    """A receiver of weights: `id` names it in messages, `wanted` is what `Rollout.receivers` says, `colocated` whether it is on
    the device of the trainer rank that serves it. Packed (`WANTED`), what is wanted passes through the controller as it is: of
    a large model it is ten thousands of boxes a receiver."""

    id: str
    wanted: list[Wanted] | bytes | None
    colocated: bool

    @cached_property
    def parts(self) -> list[Wanted] | None:
        """What it wants, unpacked."""
        return WANTED.load(self.wanted, self.id) if isinstance(self.wanted, bytes) else self.wanted


@dataclass
class Served:
    """What one sync came to on one rank: bytes and buckets handed out, and receivers that went away: id → why."""

    bytes: int = 0
    buckets: int = 0
    lost: dict[str, str] = field(default_factory=dict)


class WeightServer:
    """The server of one trainer rank's weights. `plan` and `serve` are collective over the default process group, whose ranks are
    the trainer's.

    engine_shards: what this rank holds, asked for at each plan (adapters merged, or alone, as receivers want it). shape: the
    model's. dtype: what parameters travel as; buffers are fp32. quantization: of the matrices of whole tensors, see
    `quintet.engine.weights.fp8`. host: this node's address that receivers on other nodes reach, the only one that is listened on. timeout_s:
    how long one side waits for the other to come, or to take a bucket; less than a collective's time limit, for other ranks wait
    meanwhile.
    """

    def __init__(
        self,
        engine_shards: Callable[[], list[Shard]],
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        bucket_mib: float = 256,
        *,
        quantization: Literal["fp8"] | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ) -> None:
        self._engine_shards, self._shape, self._dtype, self._device = engine_shards, shape, dtype, device
        self._bucket_bytes, self._timeout_s = int(bucket_mib * (1 << 20)), timeout_s
        self._quantized = quantized_names(shape) if quantization == "fp8" else set[str]()
        self._reception, self._store = Rendezvous(host, timeout_s), Store(host, timeout_s)
        self._export: Export | None = None
        self._outlets: list[SharedMemorySender] = []
        self._sequence: list[tuple[SharedMemorySender, int]] = []
        self._looked_at: list[tuple[list[SharedBuffer], list[Connection]]] = []

    @without_collections()
    def plan(self, specs: Sequence[ReceiverSpec]) -> list[Ticket]:
        """Plan for the receivers that this rank serves; tickets for them, in order. Earlier tickets are void. Collective.

        Raises UserError, on every rank, naming a receiver that wants what the engine does not hold.
        """
        shards = run_on_all_or_raise(self._engine_shards)
        held = gather_holdings(shards, [])
        owners, units = Owners([one.sources for one in held]), all_units(held)
        buffers = set[str]().union(*(one.buffers for one in held))

        def type_of(name: str) -> torch.dtype:
            return torch.float32 if name in buffers else self._dtype

        sets = run_on_all_or_raise(lambda: self._sets(specs, owners, type_of, units))
        in_turn = _in_turn([buckets for _, buckets in sets])
        self._export = Export(
            shards,
            held,
            owners,
            [bucket for _, _, bucket in in_turn],
            type_of,
            staging_bytes=self._bucket_bytes // STAGED_SHARE,
            device=self._device,
        )
        for outlet in self._outlets:
            outlet.leave()
        self._give_back()
        self._outlets = [self._outlet(alike, buckets) for alike, buckets in sets]
        self._sequence = [(self._outlets[which], n) for which, n, _ in in_turn]
        plan = self._reception.expect(spec.id for spec in specs)
        door, wait_s = self._reception, PATIENCE * self._timeout_s
        return [Ticket(one.id, door.address, plan, door.key, wait_s) for one in specs]

    def _outlet(self, specs: Sequence[ReceiverSpec], buckets: Sequence[PackedBucket]) -> SharedMemorySender:
        ids, sent = [one.id for one in specs], [one.sent for one in buckets]
        if specs[0].colocated:
            return SharedMemorySender(ids, sent, self._timeout_s)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return ProcessGroupSender(ids, sent, self._timeout_s, self._store, backend)

    def _names(self, owners: Owners) -> list[str]:
        """The tensors that the ranks hold parts of, in the family's order, adapters last."""
        held = dict.fromkeys(owners.names())
        planned = [one.name for one in planned_tensors(self._shape, self._dtype) if one.name in held]
        return list(dict.fromkeys([*planned, *held]))

    def _sets(
        self,
        specs: Sequence[ReceiverSpec],
        owners: Owners,
        type_of: Callable[[str], torch.dtype],
        units: dict[str, tuple[int, ...]],
    ) -> list[tuple[list[ReceiverSpec], list[PackedBucket]]]:
        """This rank's receivers, those together that want the same in the same way, and the buckets of each set."""
        alike: dict[Any, list[ReceiverSpec]] = defaultdict(list)
        for spec in specs:
            alike[spec.colocated, None if spec.parts is None else tuple(spec.parts)].append(spec)
        found = []
        for together in alike.values():
            first, wanted = together[0], together[0].parts
            cut: dict[str, tuple[int, ...]] | None = units
            if wanted is None:
                wanted = [Wanted(name, whole_box(owners.shape(name))) for name in self._names(owners)]
                cut = None
            elif self._quantized:
                raise UserError(
                    f"receiver {first.id} wants parts of tensors: with rollout.quantization=fp8 they go whole"
                )
            entries = [_entry(first, one, owners, type_of(one.name)) for one in wanted]
            buckets = in_buckets(entries, self._bucket_bytes, cut)
            found.append((together, [made(one, self._quantized) for one in buckets]))
        return found

    @without_collections()
    def serve(self) -> Served:
        """Hand out the present weights to this rank's receivers. Collective.

        A receiver that goes away does not stop the others, nor other ranks; it is `lost`. Raises UserError on every rank when
        weights are offloaded.
        """
        export = self._export
        assert export is not None, "plan comes before serve"
        self._give_back()
        here, missing = self._reception.meet()
        for outlet in self._outlets:
            outlet.meet(here, missing)
        sizes = [outlet.buckets[number].nbytes for outlet, number in self._sequence]
        place, room = slots(sizes, self._bucket_bytes)
        memory: list[SharedBuffer] = []

        def prepare() -> None:
            export.check()
            if self._outlets:  # also for receivers that want nothing: they look for what is announced
                memory.extend(SharedBuffer(nbytes, self._device) for nbytes in room)

        try:
            run_on_all_or_raise(prepare)
            shown = tuple((one.handle, one.nbytes) for one in memory)
            answer = Answer(memory=shown, bucket_bytes=self._bucket_bytes, device=self._device.type)
            for outlet in self._outlets:
                outlet.open(answer)
            self._hand_out(export, place, memory)
            for outlet in self._outlets:
                outlet.finish()
        finally:
            self._looked_at.append((memory, [one for outlet in self._outlets for one in outlet.close()]))
            self._give_back()
        lost = {receiver: why for outlet in self._outlets for receiver, why in outlet.lost.items()}
        return Served(sum(sizes), len(sizes), lost)

    def _hand_out(self, export: Export, place: Sequence[int], memory: Sequence[SharedBuffer]) -> None:
        """Every bucket in turn. Its memory is free once the bucket that was there before has been taken."""
        busy: dict[int, tuple[SharedMemorySender, int]] = {}
        for turn in range(export.count):
            if turn >= len(self._sequence):
                export.fill(turn, None)
                continue
            (outlet, number), slot = self._sequence[turn], place[turn]
            if slot in busy:
                former, before = busy.pop(slot)
                former.wait(before)
            export.fill(turn, memory[slot].bytes)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            outlet.offer(number, slot, memory[slot].bytes)
            busy[slot] = outlet, number
        for outlet, number in busy.values():
            outlet.wait(number)

    def _give_back(self) -> None:
        """The memory of past syncs that nobody looks at any more."""
        looked_at = []
        for memory, mapped_readers in self._looked_at:
            staying = [one for one in mapped_readers if not ended(one, drop=True)]
            if staying:
                looked_at.append((memory, staying))
            else:
                for shared in memory:
                    shared.close()
        self._looked_at = looked_at

    def close(self) -> None:
        """Void all tickets and let nobody in any more. Memory that somebody still looks at stays until the process ends."""
        self._reception.close()
        for outlet in self._outlets:
            outlet.leave()
        self._give_back()
        self._export, self._outlets, self._sequence = None, [], []


def _entry(spec: ReceiverSpec, wanted: Wanted, owners: Owners, dtype: torch.dtype) -> Entry:
    """What a receiver wants of a tensor."""
    try:
        return Entry(wanted.name, owners.shape(wanted.name), wanted.box, dtype)
    except KeyError:
        raise UserError(
            f"receiver {spec.id} wants {wanted.name}, which the engine does not hand out"
        ) from None


def _in_turn(sets: Sequence[Sequence[PackedBucket]]) -> list[tuple[int, int, PackedBucket]]:
    """Set, number and bucket of all buckets, the first of each set, then the second of each, so that all receivers have work."""
    each = ((which, n, bucket) for which, one in enumerate(sets) for n, bucket in enumerate(one))
    return sorted(each, key=lambda one: (one[1], one[0]))
