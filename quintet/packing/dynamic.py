"""Dynamic context parallelism's planner: each micro-batch gets the CP size that its samples need.

Blocks of `layout.cp` ranks are cut anew in every round, into aligned groups of 1, 2, 4 … ranks, each with a cell of its own.
A sample's size is the smallest at which it fits a rank's budget and takes no longer than a limit; which limit is best
depends on the mix, so several are tried, and the plan that a model of time likes best is taken. The static plan is one of
those compared. For each limit samples are placed in one of two ways:

nested: a rank's cells go from the largest to the smallest. The ranks of a cell have then worked on the same cells before it,
so nobody waits, and the time is the largest sum along a path of the tree of groups. Level by level, longest first, each
sample goes to the group with the least to do (Graham's LPT rule, 1969).

in steps: where ranks wait for each other in every round (experts), rounds are filled with cells that take as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush, heapreplace

from quintet.errors import UserError
from quintet.packing.align import Alignment
from quintet.packing.plan import (
    Bin,
    Cell,
    Plan,
    PlanTime,
    cell_sizes,
    fewest_cells,
    plan_microbatches,
    spread,
)
from quintet.packing.time_model import CellCosts, plan_times

PARTS = 1, 2, 4, 6, 8, 12, 16
"""The limits that are tried: of the mean of what a rank has to do, such a part."""
FEW = 16
"""Of so many samples each one's time at each size is tried as the limit."""
NEAR = 1.01
"""Of the bound: no further limit is tried once a plan takes no longer."""
MORE_ROUNDS = 2
"""How often rounds are added to what the tightest packing needs, before samples are placed by that."""


@dataclass(frozen=True)
class _Level:
    """Cells of one size. tokens, cost: of each sample in one, longest first: padded, and its part of the cell's time.
    first: the first of the samples that fits."""

    size: int
    room: int
    tokens: list[int]
    cost: list[float]
    first: int

    def packed(self, samples: list[int]) -> list[Bin]:
        """Return the fewest cells that hold samples, longest first."""
        return fewest_cells(samples, self.tokens, self.room)

    def sized(self, cell: Bin) -> _Sized:
        """Return a cell of these samples that has no ranks yet."""
        return sum(self.cost[at] for at in cell), self.size, cell


_Class = tuple[_Level, list[int]]
"""The samples, longest first, that go into cells of one size."""
_Row = list[tuple[range, Bin]]
"""The cells with samples of a round, in the order of their ranks."""
_Sized = tuple[float, int, Bin]
"""A cell that has no ranks yet: its cost, their number, its samples."""


def plan_cells(
    lengths: Sequence[int],
    *,
    dp: int,
    cp: int,
    budget: int,
    alignment: Callable[[int], Alignment],
    costs: CellCosts,
    multiple: int = 1,
    coupled: int = 1,
    fill: float = 0.0,
    key: str = "layout",
    names: Sequence[int] | None = None,
) -> Plan:
    """Assign samples to cells of 1, 2, 4 … cp ranks, as is modelled to take least time.

    lengths: tokens of each sample. dp: blocks of cp ranks, cp a power of two. budget: most tokens of a micro-batch on one rank,
    padding included. alignment: of a row, by the number of ranks that share it. multiple: the count of rounds is a multiple
    of it. coupled, fill: as in `plan_times`. key: the layout's in the recipe. names: numbers that errors call the samples by, if not
    by their places.

    Raises UserError naming a sample that does not fit a whole block, and the smallest settings that it fits.
    """
    alignment = cache(alignment)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    levels = _levels([lengths[i] for i in order], cp, budget, alignment, costs)
    unfit = min(level.first for level in levels)
    if unfit:
        name = (names or range(len(lengths)))[order[0]]
        raise UserError(_too_long(name, lengths[order[0]], dp * cp, cp, budget, alignment, key))
    bound = _bound(levels, lengths, dp * cp, budget, costs.fixed, multiple, fill)

    def add(plan: Plan) -> float:
        times = plan_times(plan, lengths, costs, alignment, coupled=coupled, fill=fill)
        found.append((times, plan))
        return times[0]

    found: list[tuple[tuple[float, float], Plan]] = []
    static = None
    if levels[-1].first == 0:
        blocks = plan_microbatches(
            [lengths[i] for i in order],
            dp=dp,
            budget=budget,
            alignment=alignment(cp),
            cp=cp,
            quadratic=costs.quadratic,
            multiple=multiple,
            lockstep=coupled > cp,
            key=key,
        )
        static = add(
            Plan([[_cell(one.samples, one.ranks, order) for one in row] for row in blocks.rounds], cp)
        )
    for classes in _choices(levels, (bound - costs.fixed) or 1.0):
        if any(time <= NEAR * bound for (time, _), _ in found[static is not None :]):
            break
        work = sum(level.size * sum(level.cost[at] for at in samples) for level, samples in classes)
        if found and work / (dp * cp) > min(time for (time, _), _ in found):
            continue  # evenly spread it would take longer than a plan that was found
        for table in _tables(classes, dp * cp, multiple, coupled):
            add(Plan([_cells(row, order, dp * cp) for row in table], cp))
    (time, _), best = min(found, key=lambda one: one[0])  # of two as fast, the one with less work
    return replace(best, modelled=PlanTime(time, bound, static))


def _levels(
    lengths: list[int], cp: int, budget: int, alignment: Callable[[int], Alignment], costs: CellCosts
) -> list[_Level]:
    """Cells of every size, 1 first."""
    found = []
    for size in cell_sizes(cp):
        align = alignment(size)
        room = align.room(budget * size)
        padded = {n: align.padded(n) for n in set(lengths)}
        time = {n: costs.share(p, p * p, size) for n, p in padded.items()}
        tokens = [padded[n] for n in lengths]
        first = bisect_left(tokens, -room, key=lambda n: -n)
        found.append(_Level(size, room, tokens, [time[n] for n in lengths], first))
    return found


def smallest_fits(
    tokens: int, cp: int, budget: int, alignment: Callable[[int], Alignment], *, dynamic: bool
) -> tuple[int, int | None]:
    """Return the smallest budget of a rank that a sample fits with cp ranks, and the smallest cp, by doubling, that it fits with this
    budget; None where more ranks only pad more. dynamic: whether fewer than cp ranks may share a row."""

    def needed(cp: int) -> int:
        return min(alignment(size).row([tokens]) // size for size in (cell_sizes(cp) if dynamic else [cp]))

    size = cp
    while needed(size) > budget and size < tokens:
        size *= 2
    return needed(cp), size if needed(size) <= budget else None


def _too_long(
    name: int, tokens: int, ranks: int, cp: int, budget: int, alignment: Callable[[int], Alignment], key: str
) -> str:
    needed, size = smallest_fits(tokens, cp, budget, alignment, dynamic=True)
    larger = "" if size is None or ranks % size else f", or {key}.cp={size}"
    return (
        f"sample {name} has {tokens} tokens, {alignment(cp).row([tokens]) // cp} on each rank of the largest group with "
        f"alignment: more than engine.tokens_per_microbatch_per_rank={budget}. It fits with "
        f"engine.tokens_per_microbatch_per_rank={needed}{larger}; or shorten rollout.max_response_tokens or "
        "data.max_prompt_tokens"
    )


def _bound(
    levels: list[_Level],
    lengths: Sequence[int],
    ranks: int,
    budget: int,
    fixed: float,
    multiple: int,
    fill: float,
) -> float:
    """A time that no plan can take less than: all work spread evenly, or the one sample that takes longest on its best ranks."""
    rounds = max(-(-sum(lengths) // (budget * ranks * multiple)), 1) * multiple
    work = longest = 0.0
    for at in range(len(lengths)):
        fit = [level for level in levels if at >= level.first]
        work += min(level.cost[at] * level.size for level in fit)
        longest = max(longest, min(level.cost[at] for level in fit))
    return rounds * fixed + max(work / ranks, longest) + fill * (fixed + longest)


def _choices(levels: list[_Level], mean: float) -> Iterator[list[_Class]]:
    """Yield for each limit the samples by the size of their cells, the largest cells first, each choice once."""
    samples, seen = len(levels[0].tokens), set()
    limits = [mean / n for n in PARTS]
    if samples <= FEW:
        limits = sorted({one for level in levels for one in level.cost}, reverse=True)
    for limit in (math.inf, *limits, 0.0):
        bounds, left = [], samples
        for level in levels:
            begin = max(level.first, bisect_left(level.cost, -limit, key=lambda cost: -cost))
            bounds.append((min(begin, left), left))
            left = min(begin, left)
        if tuple(bounds) in seen:
            continue
        seen.add(tuple(bounds))
        classes = []
        for level, (begin, end) in zip(reversed(levels), reversed(bounds), strict=True):
            slow = range(level.first, left)  # over the limit anywhere: the largest cells that hold them
            left = min(level.first, left)
            if slow or begin < end:
                classes.append((level, [*slow, *range(begin, end)]))
        yield classes


def _tables(classes: list[_Class], ranks: int, multiple: int, coupled: int) -> Iterator[list[_Row]]:
    """Yield rounds of cells in which each sample has its class's size."""
    slots = sum(level.size * len(level.packed(samples)) for level, samples in classes)
    count = max(-(-slots // (ranks * multiple)), 1) * multiple
    ways = ([_nested] if coupled < ranks else []) + ([_in_steps] if coupled > 1 else [])
    none = True
    for way in ways:
        for more in range(MORE_ROUNDS):
            table = way(classes, ranks, count + more * multiple)
            if table is not None:
                none = False
                yield table
                break
    if none:  # so little room is left that only the tightest packing is sure to fit
        yield _tight(classes, ranks, count)


def _nested(classes: list[_Class], ranks: int, count: int) -> list[_Row] | None:
    """Rounds in which no rank has a larger cell after a smaller one, with even sums; None where a sample finds no room."""
    table: list[_Row] = [[] for _ in range(count)]
    groups, load, used = 1, [0.0], [0]
    for level, samples in classes:
        parts = ranks // level.size // groups
        groups *= parts
        load, used = [one for one in load for _ in range(parts)], [one for one in used for _ in range(parts)]
        free = [count - one for one in used]
        placed = _fill(level, samples, load, free, spread=level is classes[-1][0])
        if placed is None:
            return None
        for group, cells in enumerate(placed):
            where = range(group * level.size, (group + 1) * level.size)
            for _, _, cell in sorted(map(level.sized, cells), reverse=True):
                table[used[group]].append((where, cell))
                used[group] += 1
    return [sorted(row, key=lambda cell: cell[0].start) for row in table]


def _fill(
    level: _Level, samples: list[int], load: list[float], free: list[int], *, spread: bool
) -> list[list[Bin]] | None:
    """Place samples, longest first, each with the group that has the least to do and room for it; None where none has.

    load: what each group has to do, which is added to. free: the most cells of each. spread: over all of these; otherwise a
    cell is begun where the others have no room.
    """
    cells: list[list[Bin]] = [[] for _ in load]
    queues: list[list[tuple[float, int, int]]] = [[] for _ in load]  # (which first, tokens left, cell)
    ready = [(one, group) for group, one in enumerate(load) if free[group]]
    heapify(ready)
    full: list[tuple[int, int]] = []  # groups without room, by (-most tokens left in a cell)
    least = level.tokens[samples[-1]]
    for sample in samples:
        n, cost = level.tokens[sample], level.cost[sample]
        while full and -full[0][0] >= n:
            group = heappop(full)[1]
            heappush(ready, (load[group], group))
        while ready:
            group = ready[0][1]
            queue, mine = queues[group], cells[group]
            begin = len(mine) < free[group]
            at = None
            if not (spread and begin):
                for k, (_, left, _) in enumerate(queue):
                    if left >= n:
                        at = k
                        break
            if at is not None or begin:
                break
            heappop(ready)
            most = max((left for _, left, _ in queue), default=0)
            if most >= least:
                heappush(full, (-most, group))
        else:
            return None
        if at is None:
            before, left, cell = 0.0, level.room, len(mine)
            mine.append([])
        else:
            before, left, cell = queue.pop(at)
        mine[cell].append(sample)
        if left - n >= least:
            # The cheapest cell first, or the fullest.
            insort(queue, (before + cost if spread else left - n, left - n, cell))
        load[group] += cost
        heapreplace(ready, (load[group], group))
    return cells


def _in_steps(classes: list[_Class], ranks: int, count: int) -> list[_Row] | None:
    """Rounds whose cells take as long; None where a sample finds no room.

    All but the smallest cells are packed tightly, the costliest in the first rounds. The samples of the smallest go where
    they add least to the time of a round.
    """
    if not classes:
        return [[] for _ in range(count)]
    *larger, (level, samples) = classes
    rounds = _by_cost(larger, ranks, count, lambda cost, size: (-cost, -size))
    if rounds is None:
        return None
    heights = [max((cost for cost, _, _ in one), default=0.0) for one in rounds]
    slots = [(ranks - sum(size for _, size, _ in one)) // level.size for one in rounds]
    cells = spread(samples, level.tokens, level.cost, level.room, slots, 0.0, heights if larger else ())
    if cells is None:
        return None
    found = [
        one + [level.sized(cell) for cell in new if cell] for one, new in zip(rounds, cells, strict=True)
    ]
    return _beside(found)


def _tight(classes: list[_Class], ranks: int, count: int) -> list[_Row]:
    """The fewest rounds: cells packed tightly, the largest first, so that a round is full before the next begins."""
    rounds = _by_cost(classes, ranks, count, lambda cost, size: (-size, -cost))
    assert rounds is not None
    return _beside(rounds)


def _by_cost(
    classes: list[_Class], ranks: int, count: int, first: Callable[[float, int], tuple[float, float]]
) -> list[list[_Sized]] | None:
    """Tightly packed cells in the order that `first` of cost and size says, each in the earliest round with ranks left for it;
    None where a cell finds none."""
    cells = [level.sized(cell) for level, samples in classes for cell in level.packed(samples)]
    left, rounds, begin = [ranks] * count, [list[_Sized]() for _ in range(count)], 0
    for cell in sorted(cells, key=lambda one: (*first(one[0], one[1]), one[2])):
        while begin < count and not left[begin]:
            begin += 1
        number = next((k for k in range(begin, count) if left[k] >= cell[1]), None)
        if number is None:
            return None
        left[number] -= cell[1]
        rounds[number].append(cell)
    return rounds


def _beside(rounds: list[list[_Sized]]) -> list[_Row]:
    """Give cells their ranks, the largest first: each then begins at a multiple of its size. The costly rounds come first."""
    found = []
    for cells in sorted(rounds, key=lambda one: -max((cell[0] for cell in one), default=0.0)):
        row, begin = [], 0
        for _, size, cell in sorted(cells, key=lambda one: (-one[1], -one[0], one[2])):
            row.append((range(begin, begin + size), cell))
            begin += size
        found.append(row)
    return found


def _cells(row: _Row, order: list[int], ranks: int) -> list[Cell]:
    """A round of a plan: ranks that no sample was left for get a cell without any each."""
    cells, begin = [], 0
    for where, samples in [*row, (range(ranks, ranks), [])]:
        cells += [Cell([], range(rank, rank + 1)) for rank in range(begin, where.start)]
        if where:
            cells.append(_cell(samples, where, order))
        begin = where.stop
    return cells


def _cell(samples: Bin, where: range, order: list[int]) -> Cell:
    return Cell(sorted(order[at] for at in samples), where)
