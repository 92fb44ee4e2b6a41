"""The packer: lengths in, a plan out, which says which samples are computed together and by which ranks.

A plan is rounds of cells. A cell is one micro-batch: its samples, and the ranks that share its row. In each round every
rank works on one cell. With static context parallelism cells are whole blocks of `layout.cp` ranks, a block a dp rank.

Samples are spread over blocks and rounds so that every micro-batch keeps a hard token budget, every rank has the same
count of micro-batches, as few as best-fit packing of all samples together needs, and their costs are even. Cost is
tokens plus a quadratic term for attention.

Static cells are a grid: dp ranks by rounds. The time it takes is a sum along one side of the grid of maxima
along the other: Σ_k max_rank where ranks wait for each other in every micro-batch, max_rank Σ_k where they meet only at
the end. Its lanes are accordingly the k-th micro-batches of all ranks, or the micro-batches of one rank. Samples are
placed longest first, each where it adds least to that time, as in Graham's LPT rule (1969; within 4/3 of the best).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from quintet.errors import UserError
from quintet.packing.align import Alignment

PLAIN = Alignment()
ROUNDING = 1e-9
"""Of a cost: more than sums in another order differ."""
Bin = list[int]  # the samples of one cell, while cells are filled


@dataclass(frozen=True)
class Cell:
    """A micro-batch of a plan. ranks: those that share its row, of the dp·cp ranks of a pipeline stage, cp fastest."""

    samples: list[int]
    ranks: range

    @property
    def cp(self) -> int:
        """The number of parts in which the row is cut."""
        return len(self.ranks)


class RankCell(NamedTuple):
    """A cell as one of its ranks sees it. place: which of the row's `cp` parts is the rank's."""

    samples: list[int]
    cp: int = 1
    place: int = 0

    @property
    def first(self) -> bool:
        """Whether the rank speaks for the cell: what is counted once a cell is counted here."""
        return self.place == 0


def cell_sizes(cp: int) -> list[int]:
    """Return how many ranks a cell may have where blocks of `cp` ranks, a power of two, are cut: 1, 2, 4 … cp."""
    return [1 << n for n in range(cp.bit_length())]


class PlanTime(NamedTuple):
    """What a plan is modelled to take, in no unit. bound: no plan takes less. static: the plan of whole blocks does; None where samples
    do not fit it."""

    time: float
    bound: float
    static: float | None


@dataclass(frozen=True)
class Plan:
    """A plan of micro-batches: `rounds[k]` are the cells of all ranks' k-th micro-batches, in the order of their ranks: each rank
    is in one of them.

    block: ranks of a dp rank; no cell reaches beyond one. A cell may have no samples where they ran out. The costly ones
    come first, so that the largest blocks of memory are asked for first.
    """

    rounds: list[list[Cell]]
    block: int = 1
    modelled: PlanTime | None = None
    """Of a plan that was chosen by time."""

    def samples_of(self, dp_rank: int) -> list[int]:
        """Return the indices of the samples of a dp rank's ranks, round by round."""
        return [i for cells in self._of(dp_rank) for cell in cells for i in cell.samples]

    def local(self, dp_rank: int, order: Sequence[int] | None = None) -> list[list[Cell]]:
        """Return the rounds of a dp rank alone: samples as positions in `order`, its own samples (None: in `samples_of`), and
        ranks counted from its first."""
        at = {i: k for k, i in enumerate(self.samples_of(dp_rank) if order is None else order)}
        first = dp_rank * self.block
        return [
            [
                Cell([at[i] for i in cell.samples], range(cell.ranks.start - first, cell.ranks.stop - first))
                for cell in cells
            ]
            for cells in self._of(dp_rank)
        ]

    def _of(self, dp_rank: int) -> list[list[Cell]]:
        first, stop = dp_rank * self.block, (dp_rank + 1) * self.block
        return [
            cells[bisect_left(cells, first, key=_first_rank) : bisect_left(cells, stop, key=_first_rank)]
            for cells in self.rounds
        ]


def _first_rank(cell: Cell) -> int:
    return cell.ranks.start


def rank_cells(rounds: Sequence[Sequence[Cell]], rank: int) -> list[RankCell]:
    """Return what one rank works on, round by round. rank: counted as the cells' are."""
    mine = [next(cell for cell in cells if rank in cell.ranks) for cells in rounds]
    return [RankCell(cell.samples, cell.cp, rank - cell.ranks.start) for cell in mine]


def plan_microbatches(
    lengths: Sequence[int],
    *,
    dp: int,
    budget: int,
    alignment: Alignment = PLAIN,
    cp: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
    lockstep: bool = True,
    key: str = "layout",
    names: Sequence[int] | None = None,
) -> Plan:
    """Assign samples to ranks and micro-batches.

    lengths: tokens of each sample. dp: data-parallel ranks. budget: most tokens of a micro-batch on one
    rank, padding included. cp: ranks that share a row, all of a block. alignment: of a row on so many. quadratic: cost of attention
    relative to the rest, per token of length (cost of a sample = n + quadratic * n^2). multiple: the count of
    micro-batches is a multiple of it (interleaved pipelines need one of pp); empty ones fill up. lockstep: whether
    ranks wait for each other in every micro-batch, as with experts spread over them; without it long samples are
    balanced better over ranks, and worse over the k-th micro-batches. key: the layout's in the recipe. names: numbers that errors call
    the samples by, if not by their places.

    Raises UserError naming a sample that does not fit the budget on its own.
    """
    room = alignment.room(budget * cp)
    for name, n in zip(names or range(len(lengths)), lengths, strict=True):
        if alignment.row([n]) > room:
            raise UserError(
                f"sample {name} has {n} tokens, {alignment.row([n]) // cp} on each rank with alignment: more than "
                f"engine.tokens_per_microbatch_per_rank={budget}. Raise the budget, shorten "
                f"rollout.max_response_tokens or data.max_prompt_tokens, or raise {key}.cp"
            )
    tokens = [alignment.padded(n) for n in lengths]
    cost = [n + quadratic * n * n for n in tokens]
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    tight = fewest_cells(order, tokens, room)
    count = max(-(-len(tight) // (dp * multiple)), 1) * multiple

    if not lockstep or dp == 1:
        ranks = spread(order, tokens, cost, room, [count] * dp)
        if ranks is not None:
            return _plan([_costly_first(rank, cost) for rank in ranks], cp)
    for peak_weight in (1.0, 0.0) if dp > 1 else ():
        steps = spread(order, tokens, cost, room, [dp] * count, peak_weight)
        if steps is not None:
            return _plan(_deal(steps, cost), cp)
    # So little room is left that only the tightest packing is sure to fit.
    cells = _costly_first(tight + [[] for _ in range(dp * count - len(tight))], cost)
    return _plan(_deal([cells[k * dp : (k + 1) * dp] for k in range(count)], cost), cp)


def _plan(grid: list[list[Bin]], cp: int) -> Plan:
    """grid: [dp rank][k]; each dp rank is a block of cp ranks."""
    rounds = [
        [Cell(sorted(found), range(d * cp, (d + 1) * cp)) for d, found in enumerate(cells)]
        for cells in zip(*grid, strict=True)
    ]
    return Plan(rounds, cp)


def _costly_first(cells: list[Bin], cost: list[float]) -> list[Bin]:
    return sorted(cells, key=lambda cell: -sum(cost[i] for i in cell))


def fewest_cells(order: list[int], tokens: list[int], room: int) -> list[Bin]:
    """Best-fit decreasing: each sample into the fullest cell it fits (within 11/9 of the fewest; Johnson 1974)."""
    cells: list[Bin] = []
    free: list[tuple[int, int]] = []  # (tokens left, cell), ascending
    for i in order:
        at = bisect_left(free, (tokens[i], -1))
        if at == len(free):
            cells.append([])
            left, cell = room, len(cells) - 1
        else:
            left, cell = free.pop(at)
        cells[cell].append(i)
        insort(free, (left - tokens[i], cell))
    return cells


def spread(
    order: list[int],
    tokens: Sequence[int],
    cost: Sequence[float],
    room: int,
    widths: Sequence[int],
    peak_weight: float | None = None,
    begin: Sequence[float] = (),
) -> list[list[Bin]] | None:
    """Place samples in `order`, longest first, into lanes of so many cells; None when one finds no room.

    Within a lane the cheapest cell with room is taken. The lane is the one with the least total cost, or, with a
    `peak_weight`, where least is added to the sum of the lanes' costliest cells plus that weight times the costliest
    of all: a pipeline runs at the pace of its slowest micro-batch, and memory must hold it. begin: by lane what this is before.
    """
    cells: list[list[Bin]] = [[[] for _ in range(width)] for width in widths]
    # Of each width (cost, cell, tokens), cheapest first.
    waiting = [[(0.0, at, 0) for at in range(width)] for width in widths]
    level = list(begin) or [0.0] * len(widths)
    peak, least = max(level, default=0.0), tokens[order[-1]] if order else 0
    first = [0] * len(widths)  # which of those waiting is taken next
    key: dict[int, float] = {}  # of a lane with room: less what it adds, but for c and the peak's part
    ready: list[tuple[float, int]] = []  # (key, lane), ascending
    later: list[tuple[int, int]] = []  # (-tokens, lane): for a sample of so many the lane has another cell

    def look(lane: int, n: int) -> None:
        if lane in key:
            del ready[bisect_left(ready, (key.pop(lane), lane))]
        most = 0
        for place, (load, _, used) in enumerate(waiting[lane]):
            if used + n <= room:
                first[lane], key[lane] = place, level[lane] if peak_weight is None else load - level[lane]
                insort(ready, (key[lane], lane))
                break
            most = max(most, room - used)
        if most >= least:
            heappush(later, (-most, lane))

    opened = len(widths) if begin else 1  # of lanes that are the same the first is taken
    for lane in range(opened):
        look(lane, tokens[order[0]] if order else 0)
    for i in order:
        n, c = tokens[i], cost[i]
        while later and -later[0][0] >= n:
            look(heappop(later)[1], n)
        best: tuple[float, float, int] | None = None
        most_key = math.inf
        for least_key, lane in ready:
            if least_key > most_key:
                break
            load = waiting[lane][first[lane]][0]
            adds = level[lane]
            if peak_weight is not None:
                after = load + c
                adds = after - adds if after > adds else 0.0
                if after > peak:
                    adds += peak_weight * (after - peak)
            if best is None or (adds, load, lane) < best:
                best = adds, load, lane
                most_key = adds if peak_weight is None else adds - c + ROUNDING * (peak + c)
        if best is None:
            return None
        _, load, lane = best
        _, at, used = waiting[lane].pop(first[lane])
        cells[lane][at].append(i)
        if used + n + least <= room:  # a full one need not be looked at again
            insort(waiting[lane], (load + c, at, used + n))
        level[lane] = level[lane] + c if peak_weight is None else max(level[lane], load + c)
        peak = max(peak, load + c)
        look(lane, n)
        if lane == opened - 1 and opened < len(widths):
            look(opened, n)
            opened += 1
    return cells


def _deal(steps: list[list[Bin]], cost: list[float]) -> list[list[Bin]]:
    """Give each step's cells to the ranks, the costliest to the rank with least so far; costly steps first.

    Two ranks then differ by no more than two cells of one step do, whatever the steps.
    """
    loads = [sorted(((sum(cost[i] for i in cell), cell) for cell in step), reverse=True) for step in steps]
    loads.sort(key=lambda step: -step[0][0])
    total = [0.0] * len(steps[0])
    ranks: list[list[Bin]] = [[[] for _ in steps] for _ in total]
    for k in sorted(range(len(loads)), key=lambda k: (loads[k][-1][0] - loads[k][0][0], k)):
        free = sorted(range(len(total)), key=lambda rank: (total[rank], rank))
        for (load, cell), rank in zip(loads[k], free, strict=True):
            ranks[rank][k] = cell
            total[rank] += load
    return ranks


def split_evenly(count: int, parts: int) -> list[range]:
    """Split `count` items into `parts` consecutive ranges whose sizes differ by at most one."""
    bounds = [count * k // parts for k in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def target_counts(lengths: Sequence[int], prompts: Sequence[int], ahead: Sequence[int] = (1,)) -> list[int]:
    """Return how many tokens of all samples each head is trained on, which its loss is divided by: response tokens that
    have a token so far before them as the head predicts ahead. lengths, prompts: tokens of each sample, and of its prompt.
    """
    sizes = list(zip(lengths, prompts, strict=True))
    return [sum(max(n - max(prompt, distance), 0) for n, prompt in sizes) for distance in ahead]
