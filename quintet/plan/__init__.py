"""What a run will need: memory of a rank by part, room on the disk. Pure Python: it answers before anything is built."""

from quintet.plan.memory import Memory, rank_memory
from quintet.plan.saves import checkpoint_bytes, export_bytes, weights_bytes
from quintet.plan.setup import Place, Setup

__all__ = ["Memory", "Place", "Setup", "checkpoint_bytes", "export_bytes", "rank_memory", "weights_bytes"]
