"""Rounds of transfers between ranks: each rank plans what it gets, asks for it, and all agree on how much crosses at a time.

What stays on its rank is copied in place; what crosses ranks goes in rounds, an all-to-all each, so that memory for what is on its way is
bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import exchanged, most
from quintet.engine.copies import Copies, Place, strides_of
from quintet.engine.weights.shards import Shard
from quintet.models.mcore import Box, box_sizes, split, volume
from quintet.typed import Typed

Holding = tuple[str, Box]
"""Name and box of a shard, without its data."""
STAGED_ALIGNMENT = 16
"""Bytes: parts of any type begin where vectors of them may."""


@dataclass(frozen=True)
class Transfer:
    """One part on its way: `box` of `name` from rank `source` (its shard `source_index`) to rank `target`."""

    name: str
    box: Box
    source: int
    source_index: int
    target: int
    target_index: int


Asked = tuple[int, int, Box, int, int, int]
"""A part that a rank asks another for: turn, source index, box, target index; and at which byte it begins of those that cross to
the target in that turn, and how many these are."""
_ASKED: Typed[list[Asked]] = Typed(list[Asked], "what a rank is to send")
FINEST = 8
"""So often parts are halved, and rounds made more by a quarter, where a round has too much."""


class Parts:
    """Views of parts of one rank's shards, each looked for once."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.standing = all(one.standing for one in shards)
        self._views: dict[tuple[int, Box], Tensor] = {}

    def __call__(self, index: int, box: Box) -> Tensor:
        found = self._views.get((index, box))
        if found is None:
            shard = self.shards[index]
            found = shard.part(box)
            if shard.standing:
                self._views[index, box] = found
        return found


class Turns:
    """The transfers of several turns that one rank takes part in, in rounds in which none sends more than `limit` bytes, or gets more.

    getting: what the rank gets in each turn, from itself too. types: what each name travels as. Parts are halved up to FINEST
    times to fit; one that cannot be cut may be larger.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        getting: Sequence[Iterable[Transfer]],
        types: Callable[[str], torch.dtype],
        units: dict[str, tuple[int, ...]],
        limit: int,
    ) -> None:
        self._rank, self._world, self._types, self._units, self._limit = rank, world, types, units, limit
        self._own: list[list[Transfer]] = []
        self._in: list[list[_Crossing]] = []
        self._out: list[list[_Crossing]] = []
        for one in getting:
            transfers = list(one)
            self._own.append([t for t in transfers if t.source == rank])
            self._in.append(self._spread([t for t in transfers if t.source != rank]))

    def __len__(self) -> int:
        return len(self._own)

    def _spread(self, crossing: Sequence[Transfer]) -> list[_Crossing]:
        """What one turn brings, in an order that has something of every source all the time: each begins elsewhere with its parts,
        so that no source has everybody's at once."""
        sizes = [volume(t.box) * self._types(t.name).itemsize for t in crossing]
        totals: dict[int, int] = defaultdict(int)
        for t, size in zip(crossing, sizes, strict=True):
            totals[t.source] += size
        begun: dict[int, int] = defaultdict(int)
        keyed = []
        for i, (t, size) in enumerate(zip(crossing, sizes, strict=True)):
            at = begun[t.source] / totals[t.source] + (self._rank - t.source) % self._world / self._world
            begun[t.source] += size
            keyed.append((at % 1, i))
        found, first, total = [], 0, sum(sizes)
        for _, i in sorted(keyed):
            found.append((crossing[i], first, total))
            first += sizes[i]
        return found

    def ask(self) -> list[list[Asked]]:
        """Return what every rank is to send to this one."""
        asked: list[list[Asked]] = [[] for _ in range(self._world)]
        for turn, crossing in enumerate(self._in):
            for t, first, total in crossing:
                asked[t.source].append((turn, t.source_index, t.box, t.target_index, first, total))
        return asked

    def answer(self, asked: Iterable[Iterable[Asked]], count: int, sources: Sequence[Holding]) -> None:
        """Note what every rank asks of this one. count: of turns, of the rank with most. sources: what this one holds."""
        for sides in (self._own, self._in):
            sides.extend([] for _ in range(count - len(sides)))
        self._out = [[] for _ in range(count)]
        for target, wishes in enumerate(asked):
            for turn, index, box, target_index, first, total in wishes:
                t = Transfer(sources[index][0], box, self._rank, index, target, target_index)
                self._out[turn].append((t, first, total))

    def busiest(self) -> list[int]:
        """Return how many bytes the rank sends in each turn, or gets, whichever is more."""
        found = []
        for crossing, out in zip(self._in, self._out, strict=True):
            sent = sum(volume(t.box) * self._types(t.name).itemsize for t, _, _ in out)
            found.append(max(sent, crossing[0][2] if crossing else 0))
        return found

    def count(self, busiest: int, tries: int) -> int:
        """Return of how many rounds a turn is, given the bytes of the rank with most."""
        return -(-busiest * (5 + tries) // (4 * self._limit)) if busiest > self._limit else min(busiest, 1)

    def exceeds(self, turn: int, busiest: int, tries: int) -> bool:
        """Return whether in one of a turn's rounds this rank sends or gets more than the limit."""
        rounds = self.count(busiest, tries)
        if rounds < 2 or tries == FINEST:
            return False
        for side in (self._in, self._out):
            loads = [0] * rounds
            for _, number, nbytes in self._pieces(side[turn], rounds, tries):
                loads[number] += nbytes
            if max(loads) > self._limit:
                return True
        return False

    def rounds(self, turn: int, busiest: int, tries: int) -> list[Round]:
        """Return the rounds of a turn. All that stays on the rank is in the first."""
        count = self.count(busiest, tries)
        sides: list[list[dict[int, list[Transfer]]]] = []
        for side, end in ((self._out, "target"), (self._in, "source")):
            parts: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(count)]
            for t, number, _ in self._pieces(side[turn], count, tries):
                parts[number][getattr(t, end)].append(t)
            sides.append(parts)
        own = self._own[turn]
        if not count:
            return [Round(own, {}, {}, self._types, self._world, crosses=False)] if own else []
        return [
            Round([] if number else own, sending, receiving, self._types, self._world)
            for number, (sending, receiving) in enumerate(zip(*sides, strict=True))
        ]

    def _pieces(
        self, crossing: Iterable[_Crossing], rounds: int, tries: int
    ) -> Iterator[tuple[Transfer, int, int]]:
        """Parts of transfers, each with its round and its bytes: the same at both ends."""
        limit = max(self._limit >> (tries + 1), 1)
        for whole, first, total in crossing:
            size = self._types(whole.name).itemsize
            nbytes = volume(whole.box) * size
            if rounds == 1 or nbytes <= limit:
                yield whole, first * rounds // total, nbytes
                continue
            for box in split(whole.box, self._units.get(whole.name, (1,) * len(whole.box)), limit // size):
                nbytes = volume(box) * size
                yield replace(whole, box=box), first * rounds // total, nbytes
                first += nbytes


_Crossing = tuple[Transfer, int, int]
"""A transfer, and where it begins among the bytes that its target gets from others in that turn, and how many these are."""


def agreed_rounds(turns: Turns, sources: Sequence[Holding]) -> list[list[Round]]:
    """Return the rounds of every turn, as many on every rank. Collective. sources: what this rank holds."""
    asked = exchanged(_ASKED, turns.ask())
    (count,) = most([len(turns)])
    turns.answer(asked, count, sources)
    busiest = most(turns.busiest())
    tries = [0] * count
    open_turns = list(range(count))
    while open_turns:
        exceeding = most([turns.exceeds(turn, busiest[turn], tries[turn]) for turn in open_turns])
        open_turns = [turn for turn, too_much in zip(open_turns, exceeding, strict=True) if too_much]
        for turn in open_turns:
            tries[turn] += 1
    return [turns.rounds(turn, busiest[turn], tries[turn]) for turn in range(count)]


def connect(device: torch.device) -> None:
    """Have the ranks meet before their first round, and the kernel of copies compiled, which both take a GPU seconds at their first time.
    Collective."""
    sent = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent)
    copies = Copies([(arrived, Place(0, sent.dtype, tuple(sent.shape), sent.stride(), 0))])
    for _ in range(2):
        copies.run(sent.view(torch.uint8))


class Round:
    """Transfers that are made together, seen from one rank. own: what stays there. sending: by target, receiving: by source. types: what
    each name travels as. crosses: whether any rank's part crosses, the same on all."""

    def __init__(
        self,
        own: list[Transfer],
        sending: Mapping[int, Sequence[Transfer]],
        receiving: Mapping[int, Sequence[Transfer]],
        types: Callable[[str], torch.dtype],
        world: int,
        *,
        crosses: bool = True,
    ) -> None:
        self.own, self.crosses = own, crosses
        self.sending, self.sizes_out = _staged(sending, types, world)
        self.receiving, self.sizes_in = _staged(receiving, types, world)
        self._copies: tuple[Copies, Copies, Copies] | None = None

    def run(
        self,
        sources: Parts,
        write: Callable[[Transfer], Tensor | Place],
        device: torch.device,
        *memory: Tensor,
    ) -> None:
        """Make the round's transfers. Collective where any rank's part crosses. sources: what the rank holds. write: where a transfer's part
        goes, the same each time; it may be a place in `memory`."""
        if self._copies is None or not sources.standing:
            self._copies = (
                Copies((write(t), sources(t.source_index, t.box)) for t in self.own),
                Copies((place, sources(t.source_index, t.box)) for t, place in self.sending),
                Copies((write(t), place) for t, place in self.receiving),
            )
        own, sending, receiving = self._copies
        own.run(*memory)
        if not self.crosses:
            return
        out = torch.empty(sum(self.sizes_out), dtype=torch.uint8, device=device)
        arrived = torch.empty(sum(self.sizes_in), dtype=torch.uint8, device=device)
        sending.run(out)
        dist.all_to_all_single(arrived, out, self.sizes_in, self.sizes_out)
        receiving.run(*memory, arrived)


_Staged = tuple[Transfer, Place]
"""A transfer, and its place among the bytes that leave or arrive, the last memory of those that copies are run with."""


def _staged(
    by_rank: Mapping[int, Sequence[Transfer]], types: Callable[[str], torch.dtype], world: int
) -> tuple[list[_Staged], list[int]]:
    """The places of all transfers, and how many bytes are each rank's."""
    found, sizes, at = [], [0] * world, 0
    for rank in sorted(by_rank):
        start = at
        for t in by_rank[rank]:
            dtype, shape = types(t.name), box_sizes(t.box)
            found.append((t, Place(-1, dtype, shape, strides_of(shape), at // dtype.itemsize)))
            nbytes = volume(t.box) * dtype.itemsize
            at += -(-nbytes // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        sizes[rank] = at - start
    return found, sizes
