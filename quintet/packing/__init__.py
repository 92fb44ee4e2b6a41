"""Planning in plain Python: which samples go into which micro-batch, and how they are aligned."""

from quintet.packing.align import FP8_TOKENS, Alignment, alignment, alignment_of, row_buckets
from quintet.packing.buckets import length_buckets
from quintet.packing.plan import (
    Cell,
    Plan,
    RankCell,
    plan_microbatches,
    rank_cells,
    split_evenly,
    target_counts,
)

__all__ = [
    "FP8_TOKENS",
    "Alignment",
    "Cell",
    "Plan",
    "RankCell",
    "alignment",
    "alignment_of",
    "length_buckets",
    "plan_microbatches",
    "rank_cells",
    "row_buckets",
    "split_evenly",
    "target_counts",
]
