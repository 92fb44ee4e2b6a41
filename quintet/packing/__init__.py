"""Planning in plain Python: which samples go into which micro-batch, and how they are aligned."""

from quintet.packing.align import FP8_TOKENS, Alignment, alignment, alignment_of, row_buckets
from quintet.packing.buckets import length_buckets
from quintet.packing.dynamic import plan_cells, smallest_fits
from quintet.packing.measured import costs_of, fitting
from quintet.packing.plan import (
    Cell,
    Plan,
    PlanTime,
    RankCell,
    cell_sizes,
    plan_microbatches,
    rank_cells,
    split_evenly,
    target_counts,
)
from quintet.packing.time_model import CellCosts, plan_times

__all__ = [
    "FP8_TOKENS",
    "Alignment",
    "Cell",
    "CellCosts",
    "Plan",
    "PlanTime",
    "RankCell",
    "alignment",
    "alignment_of",
    "cell_sizes",
    "costs_of",
    "fitting",
    "length_buckets",
    "plan_cells",
    "plan_microbatches",
    "plan_times",
    "rank_cells",
    "row_buckets",
    "smallest_fits",
    "split_evenly",
    "target_counts",
]
