"""Planning in plain Python: which samples go into which micro-batch, and how they are aligned."""

from quintet.packing.align import Alignment, alignment
from quintet.packing.buckets import length_buckets
from quintet.packing.plan import Plan, plan_microbatches, split_evenly

__all__ = ["Alignment", "Plan", "alignment", "length_buckets", "plan_microbatches", "split_evenly"]
