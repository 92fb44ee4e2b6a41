"""How long a plan takes, as far as choosing one needs to know it.

The unit of time is what one rank takes for one token of a long row, attention aside. What is compared is plans of the same
samples on the same ranks: what they all pay, as the gradients' reduction, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quintet.packing.align import Alignment
from quintet.packing.plan import Cell, Plan


@dataclass(frozen=True)
class CellCosts:
    """What a micro-batch takes. The defaults are of an 8B model on GPUs of one node.

    fixed: of any micro-batch, however short: kernels are launched, weights are read. quadratic: attention of n tokens to each
    other takes quadratic · n². exchange: of one token that a rank has from the others of its cell, by the size of the cell: 2,
    4, 8 and so on; the last is that of all larger ones. 0.02 is an 8B layer's keys and values over NVLink: 0.3 ms for three
    quarters of a row of 32,768 tokens, which four ranks compute in 5.3 ms.
    """

    fixed: float = 256.0
    quadratic: float = 0.0
    exchange: tuple[float, ...] = (0.02,)

    def share(self, tokens: int, squares: int, cp: int) -> float:
        """Return the time for a part of a row on each of its `cp` ranks. tokens: of the part, padded; squares: the sum of its
        sequences' squared tokens."""
        if cp == 1:
            return tokens + self.quadratic * squares
        each = self.exchange[min(cp.bit_length() - 2, len(self.exchange) - 1)]
        return (tokens + self.quadratic * squares + each * tokens * (cp - 1)) / cp

    def cell(self, lengths: Sequence[int], cp: int, alignment: Alignment) -> float:
        """Return the time of a cell of samples of these lengths, aligned as one on `cp` ranks."""
        squares = sum(alignment.padded(n) ** 2 for n in lengths)
        return self.fixed + self.share(alignment.row(lengths), squares, cp)


def plan_times(
    plan: Plan,
    lengths: Sequence[int],
    costs: CellCosts,
    alignment: Callable[[int], Alignment],
    *,
    coupled: int = 1,
    fill: float = 0.0,
) -> tuple[float, float]:
    """Return the modelled time of a plan, that of the rank which is done last, and the sum of what all ranks work in it.

    A rank begins a cell once all ranks of the cell have come to it. alignment: of a row, by the size of its cell. coupled: so many
    neighbouring ranks wait for each other in every micro-batch, as those with experts of the same layer do. fill: the
    share of the costliest micro-batch that a pipeline stands still for, (pp - 1) / vpp.
    """
    ranks = plan.rounds[0][-1].ranks.stop
    clock, costliest, work = [0.0] * ranks, 0.0, 0.0
    for cells in plan.rounds:
        for ranks_together, together in _together(cells, coupled, ranks):
            times = [
                costs.cell([lengths[i] for i in cell.samples], cell.cp, alignment(cell.cp))
                for cell in together
            ]
            slowest = max(times)
            work += sum(one * cell.cp for one, cell in zip(times, together, strict=True))
            done = max(clock[rank] for rank in ranks_together) + slowest
            for rank in ranks_together:
                clock[rank] = done
            costliest = max(costliest, slowest)
    return max(clock) + fill * costliest, work


def _together(cells: Sequence[Cell], coupled: int, ranks: int) -> list[tuple[range, list[Cell]]]:
    """The cells of a round by who waits for whom: ranks, and the cells on them."""
    found: list[tuple[range, list[Cell]]] = []
    for cell in cells:
        start = cell.ranks.start // coupled * coupled
        stop = min(-(-cell.ranks.stop // coupled) * coupled, ranks)
        if found and start < found[-1][0].stop:
            before, others = found.pop()
            found.append((range(before.start, max(stop, before.stop)), [*others, cell]))
        else:
            found.append((range(start, stop), [cell]))
    return found
